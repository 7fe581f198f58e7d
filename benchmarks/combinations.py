"""Runs random recipes in random layouts, and compares the losses, which must not depend on the layout.

A recipe draws from each part of the library: loss, model, texts of an image, order and mixture of the data, broken
samples, resolution, augmentation, optimizer, precision, sizes of batches; with open_clip in the environment (`make
peers`) also of OpenCLIP's models, a CoCa among them. It is run on one rank as one whole batch, which is the reference,
and in other ways: other ranks, engine, sharding, micro-batches, retained graphs, checkpointing, exchange of features,
workers. The last run is killed in the middle and resumed in yet another way. Each must have the same batches, losses
and norms, and the same scores at the end. A recipe that is refused must be refused in all ways, with exit status 2.

Everything goes through `clip-train train`, and is read from metrics.jsonl and eval.jsonl. `--seed N` draws others.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, finish, output_of, parser
from PIL import Image

from tests.data.shards import write_shard
from tests.processes import kill_tree

STEPS, KILLED_AFTER = 6, 3
WAYS = 2  # beside the reference
TARGETS = {
    "batches": "the digest of each step's batch is the reference's",
    "loss": "of each step, within 2e-5 of the reference's (relative); under Muon 1e-3, in bf16 1e-2",
    "norm": "of each step's gradient, within 2e-4 of the reference's (relative); under Muon 1e-2, in bf16 1e-1",
    "scores": "at the end: losses within 1e-4 (relative; under Muon 5e-4, in bf16 5e-3), ranks within 2, "
    "accuracies within 2 samples",
    "refused": "in all ways, or in none",
}
LOSS, NORM = 2e-5, 2e-4
# By what rounds in a recipe, times as much: Muon amplifies rounding (docs/numerics.md), bf16 rounds to 8 bits.
ALLOWED = {"fp32": 1, "Muon": 50, "bf16": 500}
VAL = 32  # samples to evaluate
Options = dict[str, Any]
MODEL: Options = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
TEXT = MODEL["text_cfg"]
OPENCLIP_MODELS: dict[str, Options] = {
    "resnet": {
        **MODEL,
        "vision_cfg": {
            "image_size": 32,
            "layers": [1, 1, 1, 1],
            "width": 16,
            "head_width": 32,
            "norm": "group",  # a batch norm sees a micro-batch (docs/models.md)
        },
    },
    "siglip": {
        **MODEL,
        "custom_text": True,
        "vision_cfg": {**MODEL["vision_cfg"], "pool_type": "avg", "no_ln_pre": True},
        "text_cfg": {**TEXT, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
    },
    "pooled": {
        **MODEL,
        "custom_text": True,
        "vision_cfg": {**MODEL["vision_cfg"], "attentional_pool": True, "attn_pooler_heads": 2},
        "text_cfg": {**TEXT, "ls_init_value": 0.1},
    },
    "timm": {
        **MODEL,
        "custom_text": True,
        "vision_cfg": {
            "image_size": 32,
            "timm_model_name": "vit_tiny_patch16_224",
            "timm_pool": "map",
            "timm_proj": None,
        },
    },
    "coca": {
        **MODEL,
        "custom_text": True,
        "vision_cfg": {
            **MODEL["vision_cfg"],
            "attentional_pool": True,
            "attn_pooler_heads": 2,
            "output_tokens": True,
        },
        "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {**TEXT, "layers": 1, "attn_pooler_heads": 2},
    },
}
# OpenCLIP imports torchvision, whose operators a CPU build of torch does not find.
SHIM = "import tests.peers.torchvision_shim"
WORDS = ["red", "blue", "large", "small", "flat", "dog", "cat", "tree", "house", "sky", "north"]
Draw = Callable[[random.Random], Options]


# -- data


def write_shards(
    folder: Path, name: str, count: int, per_shard: int, seed: int, broken: int = 0
) -> str:
    """Images of several shapes, with captions of which some are equal, a list of other captions, hard negatives, a
    score and a group. The first `broken` samples have, in turn, a truncated image or a caption that is not UTF-8.
    Returns the URL."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(count)]
    for shard in range(count // per_shard):
        members: list[tuple[str, bytes]] = []
        for i in range(shard * per_shard, (shard + 1) * per_shard):
            side = (rng.choice([24, 40, 64]), rng.choice([24, 40, 64]))
            image = io.BytesIO()
            Image.effect_noise(side, rng.uniform(10, 90)).convert("RGB").save(image, "JPEG")
            others = rng.sample(texts, 3)
            more = {
                "alt": others[:2],
                "negatives": [others[2], "not " + texts[i]],
                "score": round(rng.random(), 3),
                "group": rng.randrange(count // 2),
            }
            caption = (rng.choice(texts) if rng.random() < 0.1 else texts[i]).encode()
            picture = image.getvalue()
            if i < broken and i % 2:
                caption = b"\xff\xfe\xfd"
            elif i < broken:
                picture = picture[: len(picture) // 2]
            members += [
                (f"{name}{i:05d}.jpg", picture),
                (f"{name}{i:05d}.txt", caption),
                (f"{name}{i:05d}.json", json.dumps(more).encode()),
            ]
        write_shard(folder / f"{name}-{shard:02d}.tar", members)
    last = count // per_shard - 1
    url = f"{folder}/{name}-{{00..{last:02d}}}.tar"
    clip_train("index", url, "--columns", "json.score")
    return url


def clip_train(*words: str) -> None:
    output_of("-m", "launcher", *words)


# -- recipes


def one_of(*choices: Options) -> Draw:
    """The first is the usual one, and comes half of the time."""
    return lambda rng: choices[0] if rng.random() < 0.5 else rng.choice(choices[1:])


def parts(lab: Lab) -> list[Draw]:
    """Each draws a part of a recipe. A later part wins; null is a key's default."""
    one, two = lab.one, lab.two
    reinforced: Options = {
        "data.train": lab.reinforced,
        "data.reinforced": [32],
        "data.resize": "auto",
    }
    reinforced |= dict.fromkeys(
        ["data.train_weights", "data.train_weights_schedule", "data.tokens", "data.tokens_schedule"]
    )
    mixed = {"data.train": f"{one}::{two}", "data.train_weights": [2, 1]}
    schedule = [{"until_step": 3, "train_weights": [1, 3]}]
    models = [{"model.name": file} for file in lab.models]
    return [
        one_of({}, *models),
        one_of(
            {"loss.kind": "info_nce"},
            {"loss.groups": "caption"},
            {"loss.groups": "json.group", "loss.group_role": "positives"},
            {"loss.kind": "sigmoid", "model.init_logit_bias": -10},
            {
                "loss.kind": "sigmoid",
                "model.init_logit_bias": -10,
                "loss.groups": "caption",
                "loss.group_role": "positives",
            },
            {"loss.kind": "memory_bank", "loss.bank_size": 60, "loss.bank_warmup_steps": 2},
            {
                "loss.kind": "memory_bank",
                "loss.bank_size": 60,
                "loss.bank_warmup_steps": 2,
                "loss.bank_mode": "contaccum",
            },
        ),
        one_of({}, {"loss.widths": {32: 1, 16: 0.5}}),
        one_of(
            {},
            {"data.texts_per_image": 2, "data.caption_key": ["txt", "json.alt"]},
            {"data.negative_texts": {"json.negatives": 2}},
            {"data.caption_key": {"txt": 0.3, "json.alt": 0.7}},
            {
                "data.texts_per_image": 3,
                "data.caption_key": ["txt", "json.alt"],
                "data.negative_texts": {"json.negatives": 1},
            },
        ),
        one_of({"data.train": one}, {"data.train": f"{one}::{two}"}, mixed,
               {**mixed, "data.train_weights_schedule": schedule},
               {"data.train": one, "data.resampled": True}, {**mixed, "data.resampled": True},
               {"data.train": f"{one}::{lab.broken}", "data.bad_sample_limit": 0.5},
               {"data.train": lab.broken, "data.bad_sample_limit": 0.5, "data.resampled": True}),
        one_of({}, {"data.keep": "score > 0.3"}, {"data.keep": "score < 0.8 and score > 0.1"}),
        one_of(
            {},
            {"data.resize": "native", "data.tokens": 16},
            {"data.resize": "native", "data.tokens": {6: 1, 16: 2, 30: 1}},
            {
                "data.resize": "native",
                "data.tokens": {9: 1, 20: 1},
                "data.tokens_schedule": [{"until_step": 3, "tokens": 6}],
            },
        ),
        one_of({}, {"data.aug_flip_prob": 0.5, "data.aug_erase_prob": 0.3},
               {"data.aug_color_jitter": [0.4, 0.4, 0.4, 0.1], "data.aug_gray_scale_prob": 0.3},
               {"data.resize": "squash", "data.aug_relative_ratio": True, "data.aug_scale": [0.5, 1]}),
        one_of({}, {"model.dropout": 0.1}, {"model.patch_dropout": 0.5},
               {"model.dropout": 0.2, "model.patch_dropout": 0.25}),
        one_of({}, {"model.lora": {"rank": 4, "alpha": 8, "dropout": 0.1}}, {"model.lock_image": True},
               {"model.freeze": ["visual.conv1.*", "token_embedding.*"]},
               {"model.lock_text": True, "model.lock_text_unlocked_layers": 1}, {"model.image_size": 48},
               {"model.context_length": 12}, {"model.init_logit_scale": 3.9}),
        # Adam divides small gradients by themselves, so a large eps keeps rounding errors small
        one_of({"optim.name": "sgd", "optim.lr": 0.1}, {"optim.lr": 1e-3, "optim.eps": 1e-2},
               {"optim.name": "sgd", "optim.lr": 0.1, "optim.layer_decay": 0.7},
               {"optim.name": "sgd", "optim.lr": 0.1, "optim.momentum": 0.9},
               {"optim.name": "muon", "optim.lr": 1e-3, "optim.eps": 1e-2},
               {"optim.name": "torch.optim.RMSprop", "optim.lr": 1e-3, "optim.options": {"eps": 1e-2}}),
        one_of({}, {"optim.ema_decay": 0.7}, {"optim.grad_clip_norm": 0.3},
               {"optim.lr_multipliers": {"visual.*": 0.3}}, {"optim.ema_decay": 0.9, "optim.ema_warmup": True},
               {"optim.no_decay": ["*embedding*"], "schedule.name": "constant-with-cooldown",
                "schedule.cooldown_steps": 2}),
        one_of({}, {}, {"engine.precision": "bf16"}, {"evaluate.every_steps": 2}),
        one_of({"batch.global_size": 24}, {"batch.global_size": 23, "data.lanes": 4},
               {"batch.global_size": 30, "batch.schedule": [{"until_step": 2, "global_size": 12}]}),
        one_of({}, {"data.shuffle_block": 8, "data.lanes": 3}),
        one_of({}, {}, {"model.init_from": lab.teacher}, {"model.teacher": lab.teacher},
               {"model.init_image_from": lab.teacher},
               {"model.teacher": [lab.teacher, lab.teacher], "loss.teacher_scales": [20, 50]},
               reinforced, {**reinforced, "loss.distill_weights": [0, 1], "data.texts_per_image": 1}),
    ]  # fmt: skip


def without_conflicts(recipe: Options, lab: Lab) -> Options:
    """Leaves out what would be refused beside the rest."""
    kept = dict(recipe)

    def leave_out(*keys: str) -> None:
        for key in keys:
            kept.pop(key, None)

    model = kept.get("model.name", "")
    if kept.get("data.reinforced"):  # it brings its own augmentations
        kept["loss.teacher_scales"] = [60]
        leave_out(*(key for key in recipe if key.startswith("data.aug_")))
    if isinstance(kept.get("model.teacher"), list):
        kept["model.teacher_name"] = [lab.model, lab.model]
    elif "model.teacher" in kept:
        kept["model.teacher_name"] = lab.model
    if "model.lora" in kept and kept.get("optim.name") == "muon":
        leave_out("model.lora")
    if model:
        leave_out("model.init_from", "model.init_image_from")
    if model.startswith("open_clip:"):
        leave_out("model.dropout", "model.patch_dropout", "model.freeze", "model.lora")
        leave_out("model.lock_text_unlocked_layers", "data.tokens", "data.tokens_schedule")
        if kept.get("data.resize") == "native":
            leave_out("data.resize")
    if "resnet" in model:
        leave_out("optim.layer_decay")
    if "coca" in model:
        leave_out("model.context_length", "data.texts_per_image", "data.negative_texts")
    has_teachers = "model.teacher" in kept or kept.get("data.reinforced") is not None
    if has_teachers and kept.get("loss.kind", "info_nce") != "info_nce":
        leave_out("loss.kind", "model.init_logit_bias")
        leave_out("loss.bank_size", "loss.bank_warmup_steps", "loss.bank_mode")
    if kept.get("loss.kind") == "memory_bank":
        leave_out("loss.widths", "data.texts_per_image", "data.negative_texts", "batch.schedule")
        leave_out("data.caption_key")
    if kept.get("data.caption_key") == ["txt", "json.alt"]:
        kept.setdefault("data.texts_per_image", 2)
    if has_teachers or kept.get("loss.kind", "info_nce") != "info_nce":
        leave_out("data.negative_texts")
    if has_teachers or kept.get("data.texts_per_image", 1) > 1 or "data.negative_texts" in kept:
        leave_out("loss.groups", "loss.group_role")
    if has_teachers:
        leave_out("loss.widths")
    if "model.teacher" in kept:  # teacher and student see the same samples
        leave_out("model.context_length", "model.image_size", "data.resize")
    if kept.get("data.resize") == "native":
        leave_out("model.patch_dropout")
    else:
        leave_out("data.tokens", "data.tokens_schedule")
    return kept


# -- layouts


@dataclass(frozen=True)
class Way:
    ranks: int
    options: Options

    def __str__(self) -> str:
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in self.options.items())
        return f"{self.ranks} ranks {given}"


def way(rng: random.Random, recipe: Options) -> Way:
    ranks = rng.choice([1, 2, 2, 3])
    least = 1 if recipe.get("engine.precision") == "bf16" else 0  # of DeepSpeed's stages
    kind, stage = rng.choice(
        [("plain", 0)]
        + [("fsdp", stage) for stage in (0, 2, 3)]
        + [("deepspeed", stage) for stage in range(least, 4)]
    )
    checkpointing: list[bool | str] = [False, True]
    if not recipe.get("model.name", "").startswith("open_clip:"):
        checkpointing.append("pointwise")
    options: Options = {
        "engine.kind": kind,
        "engine.zero_stage": stage,
        "batch.micro_size": rng.choice([2, 3, 5, 7, 30]),
        "batch.kept_graphs": rng.choice([1, 2, "all"]),
        "engine.activation_checkpointing": rng.choice(checkpointing),
        "data.workers": rng.choice([0, 1, 2]),
        "loss.tile": rng.choice(["auto", 5]),
    }
    if recipe.get("data.resize") == "native" and rng.random() < 0.7:
        del options["batch.micro_size"]
        options["batch.micro_tokens"] = rng.choice([30, 64, 200])
    if may_take_the_ring(recipe) and rng.random() < 0.4:
        options["loss.exchange"] = "ring"
    if stage >= 2:
        options["engine.reduce_gradients"] = rng.choice(["once", "each_backward"])
    if kind == "fsdp" and stage and rng.random() < 0.3:
        ranks, options["engine.shard_ranks"] = 4, 2
    if kind == "deepspeed" and stage and rng.random() < 0.2:
        options["engine.offload"] = "optimizer"
    if rng.random() < 0.3:
        options["engine.pack_texts"] = False
    return Way(ranks, options)


def may_take_the_ring(recipe: Options) -> bool:
    """The ring has no features of other ranks to add up, and no teachers."""
    kind = recipe.get("loss.kind", "info_nce")
    others = ("data.negative_texts", "model.teacher", "data.reinforced")
    if kind == "memory_bank" or any(key in recipe for key in others):
        return False
    return kind == "sigmoid" or recipe.get("loss.group_role") != "positives"


def reference() -> Way:
    options = {"engine.kind": "plain", "engine.zero_stage": 0, "batch.micro_size": 64}
    return Way(1, {**options, "batch.kept_graphs": "all", "data.workers": 0})


# -- a run


class Lab:
    """Shards, a teacher, and the runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = f"{folder}:{ROOT}"
        self.models = self.write_models()
        self.model = str(folder / "model.json")
        Path(self.model).write_text(json.dumps(MODEL))
        self.one = write_shards(folder, "one", 96, 24, 1)
        self.two = write_shards(folder, "two", 48, 24, 2)
        self.broken = write_shards(folder, "broken", 48, 24, 4, broken=5)
        self.val = write_shards(folder, "val", VAL, VAL, 3)
        recipe = {"data.train": self.two, "batch.global_size": 24, "optim.lr": 1e-3}
        assert self.run("teacher", recipe, reference()) == 0, self.end_of_log("teacher")
        self.teacher = str(folder / "teacher")
        self.reinforced = f"{folder}/reinforced/{Path(self.one).name}"
        options = ["--teacher", self.teacher, "--synthetic-key", "json.alt", "--augmentations", "3"]
        clip_train("reinforce", self.one, "--to", f"{folder}/reinforced", *options)
        clip_train("index", self.reinforced, "--columns", "json.score")

    def write_models(self) -> list[str]:
        """Other models' descriptions; those of OpenCLIP only if it is there."""
        quick = self.folder / "quick.json"
        quick.write_text(json.dumps({**MODEL, "quick_gelu": True}))
        names = [str(quick)]
        if importlib.util.find_spec("open_clip") is not None:
            (self.folder / "sitecustomize.py").write_text(SHIM)  # which Python imports first
            for name, model in OPENCLIP_MODELS.items():
                file = self.folder / f"{name}.json"
                file.write_text(json.dumps(model))
                names.append(f"open_clip:{file}")
        return names

    def command(self, name: str, recipe: Options, chosen: Way) -> list[str]:
        fixed = {
            "run.name": "combinations",
            "run.dir": str(self.folder / name),
            "run.steps": STEPS,
            "run.seed": 5,
            "model.name": self.model,
            "schedule.warmup_steps": 1,
            "checkpoint.every_steps": KILLED_AFTER,
            "log.batch_digest": True,
            "log.tensorboard": False,
        }
        file = self.folder / f"{name}.yaml"
        sections: dict[str, Options] = {}
        for key, value in {**fixed, **recipe, **chosen.options}.items():
            section, _, own = key.partition(".")
            sections.setdefault(section, {})[own] = value
        file.write_text(json.dumps(sections))  # JSON is YAML
        return [sys.executable, "-m", "launcher", "train", str(file), "--ranks", str(chosen.ranks)]

    def run(self, name: str, recipe: Options, chosen: Way, until_saved: bool = False) -> int:
        """The exit status. until_saved: killed once it has a checkpoint."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(name, recipe, chosen),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": self.paths, "OMP_NUM_THREADS": "1"},
            )
            markers = self.folder / name / "checkpoints" / "commit"
            while until_saved and process.poll() is None and not any(markers.glob("*.json")):
                time.sleep(0.01)
            if until_saved:
                kill_tree(process)
            return process.wait(600)

    def lines(self, name: str, file: str) -> dict[int, Options]:
        """By step. A killed run's later lines are those of the run that went on."""
        text = (self.folder / name / file).read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        return {row["step"]: row for row in rows}

    def end_of_log(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text().strip()
        return text.splitlines()[-1] if text else ""


def differences(lab: Lab, name: str, whole: str, allowed: float) -> tuple[float, float, list[str]]:
    """The largest relative differences of losses and norms, and all that is wrong. allowed: times
    the usual differences."""
    found, expected = lab.lines(name, "metrics.jsonl"), lab.lines(whole, "metrics.jsonl")
    if found.keys() != expected.keys():
        return 0.0, 0.0, [f"steps {sorted(found)} instead of {sorted(expected)}"]
    wrong = [
        f"another batch in step {step}"
        for step in expected
        if found[step]["batch_digest"] != expected[step]["batch_digest"]
    ]
    loss = max(relative(found[step]["loss"], expected[step]["loss"]) for step in expected)
    norm = max(relative(found[step]["grad_norm"], expected[step]["grad_norm"]) for step in expected)
    if loss > allowed * LOSS:
        wrong.append(f"a loss differs by {loss:.1e}")
    if norm > allowed * NORM:
        wrong.append(f"a norm differs by {norm:.1e}")
    return loss, norm, wrong + scores_that_differ(lab, name, whole, allowed)


def scores_that_differ(lab: Lab, name: str, whole: str, allowed: float) -> list[str]:
    """Two ranks of features that are nearly equal may change places. allowed: as of `differences`."""
    (found,), (expected,) = (
        list(lab.lines(each, "eval.jsonl").values())[-1:] for each in (name, whole)
    )
    if found.keys() != expected.keys():
        return [f"scores {sorted(found.keys() ^ expected.keys())} on one side"]
    wrong = []
    for key, b in expected.items():
        if not isinstance(b, float) or key.endswith(("seconds", "per_second")):
            continue
        most = 2.5 / VAL
        if "loss" in key:
            most = 1e-4 * max(1.0, allowed / 10) * abs(b)
        elif "rank" in key:
            most = 2.0
        if abs(found[key] - b) > most:
            wrong.append(f"{key} is {found[key]}, the reference's {b}")
    return wrong


def rounding(recipe: Options) -> str:
    """A key of `ALLOWED`."""
    if recipe.get("engine.precision") == "bf16":
        return "bf16"
    return "Muon" if recipe.get("optim.name") == "muon" else "fp32"


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12)


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--recipes", type=int, default=40, help="default: 40")
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args()
    rows: list[Options] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        lab = Lab(Path(temporary))
        wanted = 3 if args.quick else args.recipes
        for number in range(5 * wanted):  # of which some are refused
            rng = random.Random(f"{args.seed} {number}")
            recipe: Options = {"data.val": lab.val}
            for part in parts(lab):
                recipe |= part(rng)
            if rng.random() < 0.9:
                recipe = without_conflicts(recipe, lab)
            rows += try_recipe(lab, recipe, number, rng, missed)
            if len({row["recipe"] for row in rows if isinstance(row["loss"], float)}) == wanted:
                break
    return finish("combinations", rows, TARGETS, missed, args)


def try_recipe(
    lab: Lab, recipe: Options, number: int, rng: random.Random, missed: list[str]
) -> list[Options]:
    whole = f"{number}-whole"
    status = lab.run(whole, recipe, reference())
    given = {key: value for key, value in recipe.items() if key not in ("data.val", "data.train")}
    told = f"recipe {number} {json.dumps(given)}"
    if status not in (0, 2):
        missed.append(f"{told}: the reference ended with {status}: {lab.end_of_log(whole)}")
        return []
    rounds = rounding(recipe)
    rows = []
    for count in range(WAYS):
        chosen, name = way(rng, recipe), f"{number}-{count}"
        killed = count == WAYS - 1
        ran = [str(chosen)]
        if killed and status == 0:
            lab.run(name, recipe, chosen, until_saved=True)
            chosen = way(rng, recipe)
            ran.append(str(chosen))
        ended = lab.run(name, recipe, chosen)
        row: Options = {
            "recipe": number,
            "rounding": rounds,
            "what": json.dumps(given),
            "how": ", killed, then ".join(ran),
            "loss": "",
            "norm": "",
        }
        wrong = []
        if ended != status:
            wrong = [f"exit status {ended} instead of {status}: {lab.end_of_log(name)}"]
        elif ended == 0:
            row["loss"], row["norm"], wrong = differences(lab, name, whole, ALLOWED[rounds])
        else:
            row["loss"] = "refused"
        expected = f"refused: {lab.end_of_log(name)}" if ended == 2 else "the same"
        print(f"{told}\n  {row['how']}: {wrong or expected}", flush=True)
        missed += [f"{told}: {row['how']}: {each}" for each in wrong]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
