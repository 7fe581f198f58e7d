"""Runs random recipes in random layouts, and compares the losses, which must not depend on the layout.

A recipe draws from each part of the library: loss, model, texts of an image, order and mixture of the data,
resolution, augmentation, optimizer, sizes of batches. It is run on one rank as one whole batch, which is the reference,
and in other ways: other ranks, engine, sharding, micro-batches, retained graphs, checkpointing, exchange of features,
workers. The last run is killed in the middle and resumed in yet another way. Each must have the same batches, losses
and norms, and the same scores at the end. A recipe that is refused must be refused in all ways, with exit status 2.

Everything goes through `clip-train train`, and is read from metrics.jsonl and eval.jsonl. `--seed N` draws others.
"""

from __future__ import annotations

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
    "loss": "of each step, within 2e-5 of the reference's (relative); under Muon 1e-3",
    "norm": "of each step's gradient, within 2e-4 of the reference's (relative); under Muon 1e-2",
    "scores": "at the end: losses within 1e-4 (relative), ranks within 2, accuracies within 2 samples",
    "refused": "in all ways, or in none",
}
LOSS, NORM = 2e-5, 2e-4
MUON = 50  # times as much: it amplifies rounding (docs/numerics.md)
VAL = 32  # samples to evaluate
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
WORDS = ["red", "blue", "large", "small", "flat", "dog", "cat", "tree", "house", "sky", "north"]
Options = dict[str, Any]
Draw = Callable[[random.Random], Options]


# -- data


def write_shards(folder: Path, name: str, count: int, per_shard: int, seed: int) -> str:
    """Images of several shapes, with captions of which some are equal, a list of other captions, hard negatives, a
    score and a group. Returns the URL."""
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
            caption = rng.choice(texts) if rng.random() < 0.1 else texts[i]
            members += [
                (f"{name}{i:05d}.jpg", image.getvalue()),
                (f"{name}{i:05d}.txt", caption.encode()),
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
    return [
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
               {"data.train": one, "data.resampled": True}, {**mixed, "data.resampled": True}),
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
               {"model.lock_text": True, "model.lock_text_unlocked_layers": 1}),
        # Adam divides small gradients by themselves, so a large eps keeps rounding errors small
        one_of({"optim.name": "sgd", "optim.lr": 0.1}, {"optim.lr": 1e-3, "optim.eps": 1e-2},
               {"optim.name": "sgd", "optim.lr": 0.1, "optim.layer_decay": 0.7},
               {"optim.name": "sgd", "optim.lr": 0.1, "optim.momentum": 0.9},
               {"optim.name": "muon", "optim.lr": 1e-3, "optim.eps": 1e-2}),
        one_of({}, {"optim.ema_decay": 0.7}, {"optim.grad_clip_norm": 0.3},
               {"optim.lr_multipliers": {"visual.*": 0.3}}),
        one_of({"batch.global_size": 24}, {"batch.global_size": 23, "data.lanes": 4},
               {"batch.global_size": 30, "batch.schedule": [{"until_step": 2, "global_size": 12}]}),
        one_of({}, {"data.shuffle_block": 8, "data.lanes": 3}),
        one_of({}, {}, {"model.init_from": lab.teacher}, {"model.teacher": lab.teacher},
               {"model.teacher": [lab.teacher, lab.teacher], "loss.teacher_scales": [20, 50]},
               reinforced, {**reinforced, "loss.distill_weights": [0, 1], "data.texts_per_image": 1}),
    ]  # fmt: skip


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
    kind, stage = rng.choice(
        [("plain", 0)]
        + [("fsdp", stage) for stage in (0, 2, 3)]
        + [("deepspeed", stage) for stage in (0, 1, 2, 3)]
    )
    options: Options = {
        "engine.kind": kind,
        "engine.zero_stage": stage,
        "batch.micro_size": rng.choice([2, 3, 5, 7, 30]),
        "batch.kept_graphs": rng.choice([1, 2, "all"]),
        "engine.activation_checkpointing": rng.choice([False, True, "pointwise"]),
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
        (folder / "model.json").write_text(json.dumps(MODEL))
        self.one = write_shards(folder, "one", 96, 24, 1)
        self.two = write_shards(folder, "two", 48, 24, 2)
        self.val = write_shards(folder, "val", VAL, VAL, 3)
        recipe = {"data.train": self.two, "batch.global_size": 24, "optim.lr": 1e-3}
        assert self.run("teacher", recipe, reference()) == 0, self.end_of_log("teacher")
        self.teacher = str(folder / "teacher")
        self.reinforced = f"{folder}/reinforced/{Path(self.one).name}"
        options = ["--teacher", self.teacher, "--synthetic-key", "json.alt", "--augmentations", "3"]
        clip_train("reinforce", self.one, "--to", f"{folder}/reinforced", *options)
        clip_train("index", self.reinforced, "--columns", "json.score")

    def command(self, name: str, recipe: Options, chosen: Way) -> list[str]:
        fixed = {
            "run.name": "combinations",
            "run.dir": str(self.folder / name),
            "run.steps": STEPS,
            "run.seed": 5,
            "model.name": str(self.folder / "model.json"),
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
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
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
    return loss, norm, wrong + scores_that_differ(lab, name, whole)


def scores_that_differ(lab: Lab, name: str, whole: str) -> list[str]:
    """Two ranks of features that are nearly equal may change places."""
    (found,), (expected,) = (
        list(lab.lines(each, "eval.jsonl").values())[-1:] for each in (name, whole)
    )
    if found.keys() != expected.keys():
        return [f"scores {sorted(found.keys() ^ expected.keys())} on one side"]
    wrong = []
    for key, b in expected.items():
        if not isinstance(b, float) or key.endswith(("seconds", "per_second")):
            continue
        allowed = 2.5 / VAL
        if "loss" in key:
            allowed = 1e-4 * abs(b)
        elif "rank" in key:
            allowed = 2.0
        if abs(found[key] - b) > allowed:
            wrong.append(f"{key} is {found[key]}, the reference's {b}")
    return wrong


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
    allowed = MUON if recipe.get("optim.name") == "muon" else 1
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
            "what": json.dumps(given),
            "how": ", killed, then ".join(ran),
            "loss": "",
            "norm": "",
        }
        wrong = []
        if ended != status:
            wrong = [f"exit status {ended} instead of {status}: {lab.end_of_log(name)}"]
        elif ended == 0:
            row["loss"], row["norm"], wrong = differences(lab, name, whole, allowed)
        else:
            row["loss"] = "refused"
        print(f"{told}\n  {row['how']}: {wrong or 'the same'}", flush=True)
        missed += [f"{told}: {row['how']}: {each}" for each in wrong]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
