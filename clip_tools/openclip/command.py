"""`clip-train import-args`: an OpenCLIP command line, or its `params.txt`, as a recipe, and what means something else.

Every flag of it is known (`clip_tools.openclip.flags`); nothing of OpenCLIP is imported.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from clip_tools.openclip.flags import DEFAULTS, REASONS
from clip_tools.openclip.line import literal, read, unset
from clip_tools.openclip.model import CHECK, Keys, Notes, set_model, set_text_tower
from clip_train.data.config import SYNTHETIC_SAMPLES
from clip_train.data.shards import TABLES, expand_braces, split_sources
from clip_train.errors import UserError
from launcher.config.names import SAME
from launcher.config.recipe import RunConfig, check_config
from launcher.runtime.log import warn

ALWAYS = (
    "batch.global_size is what one optimizer step sees over all ranks; OpenCLIP's --batch-size is of one GPU",
    "a sample without a caption, or with an empty one, is invalid here and replaced; OpenCLIP trains on empty captions",
    "every epoch visits each sample once; OpenCLIP rounds an epoch to whole batches of each worker",
    "checkpoint.every_minutes saves every hour as well, so that a kill costs an hour at most",
)
PER_SHARD = 10_000  # samples that img2dataset puts into one
ASSUMED = 10_000_000  # samples, where not even the number of shards is known
OPTIMIZERS = ("adamw", "sgd", "lion", "muon")
SCHEDULES = {"cosine": "cosine", "const": "constant", "const-cooldown": "constant-with-cooldown"}
TEXTS = {"train-data", "val-data", "imagenet-val", "wandb-project-name"}
BESIDE = "-clip-train"  # behind the name of a folder: ours is beside it, as OpenCLIP's own checkpoints are in it


def run(args: argparse.Namespace) -> int:
    flags, ranks = read(args.command, sys.stdin.read() if args.command == "-" else None)
    world_size = args.world_size or ranks
    keys, notes = translate(flags, world_size or 1)
    if world_size is None:
        notes.insert(
            0,
            (
                "--world-size",
                f"{CHECK}how many GPUs is not in this command: 1 is assumed; say --world-size N",
            ),
        )
    sections: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    check_config(sections, "the recipe made of this command")
    text = [
        f"# {line}"
        for line in ("From an OpenCLIP command line. What is another's meaning here:", *ALWAYS)
    ]
    for flag, what in dict.fromkeys(notes):
        text.append(f"# {flag}: {what}")
        if what.startswith(CHECK):
            warn(f"{flag}: {what.removeprefix(CHECK)}")
    ordered = {name: sections[name] for name in RunConfig.model_fields if name in sections}
    print(*text, yaml.safe_dump(ordered, sort_keys=False), sep="\n", end="")
    return 0


def translate(flags: dict[str, Any], world_size: int) -> tuple[Keys, Notes]:
    """Keys of the recipe, and what to know about each flag: it is another's meaning, or not needed here."""
    keys: Keys = {}
    notes = [(f"--{flag}", text.replace("`", "")) for flag in flags if (text := REASONS.get(flag))]
    notes += [(f"--{flag}", f"{CHECK}{name} is not set in this text: put its value in")
              for flag, value in flags.items() if (name := unset(value))]  # fmt: skip
    given = {**DEFAULTS, **flags}
    per_rank, cut = whole(given, "batch-size"), whole(given, "accum-freq")
    keys["batch.global_size"] = per_rank * cut * world_size
    keys["batch.micro_size"] = per_rank
    if cut > 1:
        notes.append(
            (
                "--accum-freq",
                f"{cut} micro-batches; batch.kept_graphs=all is faster where memory allows it",
            )
        )
    for flag, key in SAME.items():
        if flag in given:
            keys[key] = (
                given[flag] if given[flag] is True or flag in TEXTS else as_value(str(given[flag]))
            )
    if "imagenet-val" in flags:
        keys["evaluate.zero_shot_classes"] = "imagenet"
    set_model(keys, notes, given)
    _data(keys, notes, flags)
    _engine(keys, notes, flags)
    _schedule(keys, notes, given)
    _rest(keys, notes, flags)
    _loss(keys, notes, flags)
    set_text_tower(keys, notes, flags)
    _augmentation(
        keys,
        notes,
        dict(setting.split("=", 1) for setting in flags.get("aug-cfg", []) if "=" in setting),
    )
    return keys, notes


def as_value(text: str) -> Any:
    """`4e8` is a whole number where OpenCLIP wants one."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text else number


def whole(given: Mapping[str, Any], flag: str) -> int:
    """UserError where it is no whole number."""
    value = as_value(str(given[flag]))
    if not isinstance(value, int):
        raise UserError(f"--{flag} ({given[flag]}) is no whole number; put the number in")
    return value


def _data(keys: Keys, notes: Notes, flags: Mapping[str, Any]) -> None:
    kind = str(flags.get("dataset-type", "auto"))
    if "audio" in kind:
        raise UserError(
            f"--dataset-type {kind}: images and texts alone are trained on here; leave it out"
        )
    if kind == "synthetic":
        keys["data.kind"] = "synthetic"
        keys.pop("data.train", None)
        keys.setdefault("data.num_samples", SYNTHETIC_SAMPLES)
    elif "data.train" not in keys:
        keys["data.train"] = "REPLACE/{00000..00099}.tar"
        notes.append(("--train-data", f"{CHECK}is not given: set data.train"))
    for flag in ("train-data", "val-data"):
        key = SAME[flag]
        if key in keys:
            sources = [
                _source(f"--{flag}", each, notes, flags) for each in split_sources(str(keys[key]))
            ]
            keys[key] = "::".join(sources)
    if "data.num_samples" not in keys:
        keys["data.num_samples"] = _assumed(keys["data.train"], notes)
    captions = [f"json.{each}" for each in str(flags.get("json-text-key", "")).split(";") if each]
    if weights := flags.get("json-text-key-probs"):
        shares = dict(zip(captions, map(as_value, weights), strict=False))
        keys["data.caption_key"] = {name: share for name, share in shares.items() if share}
    elif captions := captions or [
        each for each in str(flags.get("text-key", "")).split(";") if each
    ]:
        keys["data.caption_key"] = captions if len(captions) > 1 else captions[0]
    if "train-data-upsampling-factors" in flags:
        _upsampling(keys, notes, str(flags["train-data-upsampling-factors"]), flags)


def _upsampling(keys: Keys, notes: Notes, given: str, flags: Mapping[str, Any]) -> None:
    """There a factor is the weight of each shard that is drawn, here a weight is a source's share of the samples."""
    flag = "--train-data-upsampling-factors"
    factors = [as_value(each) for each in given.split("::")]
    if not all(isinstance(each, int | float) for each in factors):
        raise UserError(f"{flag} ({given}) must be numbers joined by ::, such as 1::3")
    sources = expand_braces(keys["data.train"])
    if any(unset(keys["data.train"]) or "*" in shard for source in sources for shard in source):
        keys["data.train_weights"] = factors
        notes.append((flag, f"{CHECK}this command does not say how many shards a source has: multiply each number "
                      "of data.train_weights by its source's shards, as a factor weighs each shard there"))  # fmt: skip
    else:
        counts = [len(source) for source in sources]
        weights = [count * factor for count, factor in zip(counts, factors, strict=False)]
        keys["data.train_weights"] = weights + factors[len(weights) :]
        notes.append((flag, f"a factor weighs each shard there: data.train_weights is shards x factor, with "
                      f"{', '.join(map(str, counts))} shards. If shards differ in size between the sources, write "
                      "samples x factor"))  # fmt: skip
    if "dataset-resampled" not in flags:
        notes.append((flag, f"{CHECK}OpenCLIP refuses it without --dataset-resampled"))


def _source(flag: str, source: str, notes: Notes, flags: Mapping[str, Any]) -> str:
    """Where the shards are: what a `pipe:` reads, what `clip-train shards` makes of a table."""
    if source.startswith("pipe:"):
        words = source.removeprefix("pipe:").split()
        read_by_it = [w for w in words if ".tar" in w] or [w for w in words if "://" in w]
        if not read_by_it:
            raise UserError(
                f"{flag} ({source}): no path or URL of shards in this command; give it as it is"
            )
        notes.append((flag, "no shell between: the URL is read as it is"))
        source = read_by_it[0]
    if source.lower().endswith(TABLES) or flags.get("dataset-type") == "csv":
        folder = re.sub(r"\.\w+$", "", source) + "-shards"
        named = {
            "--image-key": flags.get("csv-img-key"),
            "--caption-key": flags.get("csv-caption-key"),
        }
        columns = "".join(f" {option} {name}" for option, name in named.items() if name)
        notes.append(
            (flag, f"first make shards of it: clip-train shards {source} {folder}{columns}")
        )
        source = f"{folder}/*.tar"
    return source


def _assumed(train: str, notes: Notes) -> int:
    """Samples of an epoch that nobody has counted."""
    shards = [name for source in expand_braces(train) for name in source]
    many = len(shards) * PER_SHARD if len(shards) > 1 else ASSUMED
    guess = f"{len(shards):,} shards of {PER_SHARD:,}" if len(shards) > 1 else f"{many:,}"
    notes.append((
        "--train-num-samples", f"{CHECK}is not given: {guess} samples are ASSUMED, and steps, warm-up, saves and "
        "evaluations follow from them; add the flag to the command",
    ))  # fmt: skip
    return many


def _engine(keys: Keys, notes: Notes, flags: Mapping[str, Any]) -> None:
    precision = str(flags.get("precision", DEFAULTS["precision"]))
    keys["engine.precision"] = (
        "fp32" if precision == "fp32" else "fp16" if "fp16" in precision else "bf16"
    )
    if flags.get("precision") == "amp":
        notes.append(
            ("--precision amp", "fp16 autocast there; bf16 here, with fp32 master weights and loss")
        )
    elif precision.startswith("pure"):
        notes.append((f"--precision {precision}", "master weights are fp32 here"))
    if "fsdp" in flags:
        keys |= {
            "engine.kind": "fsdp",
            "engine.zero_stage": 2 if "fsdp-no-reshard-after-forward" in flags else 3,
        }
        keys |= {"engine.offload": "optimizer"} if "fsdp-offload-cpu" in flags else {}


def _schedule(keys: Keys, notes: Notes, given: Mapping[str, Any]) -> None:
    """Epochs and what is counted in them, in steps."""
    name = str(given["lr-scheduler"])
    if name not in SCHEDULES:
        raise UserError(f"--lr-scheduler ({name}) must be one of {', '.join(SCHEDULES)}")
    keys["schedule.name"] = SCHEDULES[name]
    if given.get("skip-scheduler"):
        keys |= {"schedule.name": "constant", "schedule.warmup_steps": 0}
    for key in ("data.num_samples", "run.epochs", "schedule.warmup_steps"):
        if not isinstance(keys[key], int):
            raise UserError(f"{key} ({keys[key]}) is no whole number; put the number in")
    epoch = math.ceil(keys["data.num_samples"] / keys["batch.global_size"])
    if "epochs-cooldown" in given:
        keys["schedule.cooldown_steps"] = whole(given, "epochs-cooldown") * epoch
    warmup = keys["schedule.warmup_steps"]
    steps = max(1, keys["run.epochs"] * keys["data.num_samples"] // keys["batch.global_size"])
    if warmup >= steps:
        keys["schedule.warmup_steps"] = steps // 10
        notes.append(
            (
                "--warmup",
                f"{warmup} is more than the {steps} steps of this run: {steps // 10} instead",
            )
        )
    keys["checkpoint.every_steps"] = whole(given, "save-frequency") * epoch or None  # 0: at the end
    keys["checkpoint.every_minutes"] = 60
    if keys["checkpoint.every_steps"] and "delete-previous-checkpoint" not in given:
        keys["checkpoint.keep_every"] = keys["checkpoint.every_steps"]
    evaluated = {"data.val": "val-frequency", "evaluate.zero_shot_data": "zeroshot-frequency"}
    every = [whole(given, flag) for key, flag in evaluated.items() if key in keys]
    if any(every):
        keys["evaluate.every_steps"] = min(filter(None, every)) * epoch


def _rest(keys: Keys, notes: Notes, flags: Mapping[str, Any]) -> None:
    if "name" in flags:
        keys["run.name"] = (
            re.sub(r"[^A-Za-z0-9._-]", "-", str(flags["name"])).strip("._-") or "clip"
        )
    if str(flags.get("logs", "none")).lower() != "none":
        keys["run.dir"] = f"{str(flags['logs']).rstrip('/')}{BESIDE}/{keys.get('run.name', 'clip')}"
    if "lock-image" not in flags:  # of no effect there
        keys.pop("model.lock_image_freeze_bn_stats", None)
    if "force-image-size" in flags:
        keys["model.image_size"] = whole(
            {"force-image-size": flags["force-image-size"][0]}, "force-image-size"
        )
    if "remote-sync" in flags:
        keys["checkpoint.remote"] = (
            f"{str(flags['remote-sync']).rstrip('/')}{BESIDE}/{keys.get('run.name', 'clip')}"
        )
    for tracker in ("wandb", "tensorboard", "trackio"):
        if "report-to" in flags and (tracker != "trackio" or tracker in flags["report-to"]):
            keys[f"log.{tracker}"] = tracker in flags["report-to"] or flags["report-to"] == "all"
    keys["optim.grad_clip_norm"] = (
        as_value(str(flags["grad-clip-norm"])) if "grad-clip-norm" in flags else None
    )
    if "delete-previous-checkpoint" in flags:
        keys["checkpoint.keep_last"] = 1
    if "opt" in flags:
        _optimizer(keys, notes, str(flags["opt"]))
    if flags.get("wd-exclude"):
        keys["optim.no_decay"] = flags["wd-exclude"]


def _optimizer(keys: Keys, notes: Notes, given: str) -> None:
    name = given.lower().removeprefix("timm/")
    if name not in OPTIMIZERS and "." not in name:
        raise UserError(
            f"--opt ({given}): take it out of the command, and set optim.name to the import path of its class, such as "
            f"timm.optim.Adafactor; by name there are {', '.join(OPTIMIZERS)}"
        )
    keys["optim.name"] = name
    if name == "muon":
        keys |= {"engine.kind": "fsdp", "engine.zero_stage": 0}
        notes.append(("--opt", "muon needs whole parameters: engine.zero_stage=0 keeps them whole"))


def _augmentation(keys: Keys, notes: Notes, settings: dict[str, str]) -> None:
    """`--aug-cfg`, as OpenCLIP acts on it: what does nothing there is left out."""
    given = {name: literal(value) for name, value in settings.items()}
    timm = given.pop("use_timm", False)
    idle = (
        dict.fromkeys(("color_jitter_prob", "gray_scale_prob"), "with")
        if timm
        else {"ratio": "without"}
    )
    if not timm and not given.get("color_jitter_prob"):
        idle["color_jitter"] = "without color_jitter_prob or"
    for name, value in given.items():
        key = f"data.aug_{name}"
        if name not in ("scale", "ratio", "color_jitter", "color_jitter_prob", "gray_scale_prob"):
            notes.append((f"--aug-cfg {name}", "has no counterpart"))
        elif name in idle:
            notes.append(
                (f"--aug-cfg {name}", f"does nothing there {idle[name]} use_timm; {key} would here")
            )
        elif name == "color_jitter":  # timm's: one number for three, or three without hue
            values = [value] * 3 if isinstance(value, int | float) else list(value)
            keys[key] = [*values, 0.0][:4]
        else:
            keys[key] = list(value) if isinstance(value, tuple) else value


def _loss(keys: Keys, notes: Notes, flags: Mapping[str, Any]) -> None:
    if "siglip" in flags:
        keys |= {
            "loss.kind": "sigmoid",
            "model.init_logit_bias": -10.0,
            "model.init_logit_scale": math.log(10),
        }
        keys["loss.exchange"] = "gather" if flags.get("loss-dist-impl") == "gather" else "ring"
    elif "loss-dist-impl" in flags:
        notes.append(("--loss-dist-impl", "for --siglip only"))
    if as_value(str(flags.get("coca-contrastive-loss-weight", 1))) == 0:
        notes.append(("--coca-contrastive-loss-weight", "0 trains the captioner ALONE, which nothing here does: this "
                      "recipe trains the towers instead"))  # fmt: skip
