"""`clip-train import-args`: an OpenCLIP command line, or its `params.txt`, as a recipe, and what means something else.

Every flag of it is known (`launcher.config.openclip`); nothing of OpenCLIP is imported.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import shlex
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from clip_train.errors import UserError
from clip_train.models.config import preset_names
from launcher.config.openclip import DEFAULTS, FLAGS, LISTS, NOTES, SAME, SWITCHES
from launcher.config.recipe import check_config

ALWAYS = (
    "batch.global_size is what one optimizer step sees over all ranks; OpenCLIP's --batch-size is of one GPU",
    "a sample without a caption, or with an empty one, is invalid here and replaced; OpenCLIP trains on empty captions",
    "every epoch visits each sample once; OpenCLIP rounds an epoch to whole batches of each worker",
)


def run(args: argparse.Namespace) -> int:
    file = Path(args.command)
    if args.command == "-":
        flags, ranks = read_command(sys.stdin.read())
    elif file.suffix in (".sh", ".sbatch", ".txt"):
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as e:
            raise UserError(f"cannot read {file}: {e.strerror}; correct the path") from None
        flags, ranks = read_params(text) if file.suffix == ".txt" else read_command(text)
    else:
        flags, ranks = read_command(args.command)
    world_size = args.world_size or ranks
    keys, notes = translate(flags, world_size or 1)
    if world_size is None:
        notes.insert(0, ("--world-size", "how many GPUs is not in this command: 1 is assumed; say --world-size N"))
    check_config(nested(keys), "the recipe made of this command")
    print(as_recipe(keys, notes), end="")
    return 0


def read_command(text: str) -> tuple[dict[str, Any], int | None]:
    """Flags with their values, and how many ranks torchrun or a batch script's head start, where one does. UserError.

    text: a command, or the script that it stands in.
    """
    lines = text.replace("\\\n", " ").splitlines()
    command = next((line for line in lines if re.search(r"\bmain(\.py)?\s", line) and not line.startswith("#")), text)
    try:
        words = shlex.split(command)
    except ValueError as e:
        raise UserError(f"this is no command line: {e}; quote it as one argument, or give - and pipe it in") from None
    start = next((i + 1 for i, word in enumerate(words) if re.search(r"(^|[./])main(\.py)?$", word)), 0)
    launcher = " ".join([*(line for line in lines if line.startswith("#SBATCH")), *words[:start]])
    names = ("(?:nproc[-_]per[-_]node|ntasks-per-node)", "(?:nnodes|nodes)")
    per_node, nodes = (re.search(rf"--{name}[= ](\d+)", launcher) for name in names)
    ranks = int(per_node[1]) * int(nodes[1] if nodes else 1) if per_node else None
    flags: dict[str, Any] = {}
    rest = words[start:]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        flag = name.removeprefix("--").replace("_", "-")
        if not name.startswith("--"):
            raise UserError(f"{name!r} is no flag of OpenCLIP; a value with spaces needs quotes")
        check_flag(flag)
        if flag in LISTS:
            values = [value] if equals else []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            flags[flag] = values
        elif flag in SWITCHES:
            flags[flag] = True
        elif equals or rest:
            flags[flag] = value if equals else rest.pop(0)
        else:
            raise UserError(f"--{flag} has no value; is the command cut?")
    return flags, ranks


def read_params(text: str) -> tuple[dict[str, Any], int | None]:
    """OpenCLIP's `params.txt`: `name: value` lines, those at which it did what it does without them left out."""
    parts = (line.partition(":") for line in text.splitlines())
    found = {name.strip().replace("_", "-"): value.strip() for name, _, value in parts}
    ranks = found.get("world-size", "")
    kept = {k: v for k, v in found.items() if k in FLAGS and v not in ("None", "False", "", "{}", "[]")}
    flags = {k: True if k in SWITCHES else _listed(v) if k in LISTS else v for k, v in kept.items()}
    return flags, int(ranks) if ranks.isdigit() else None


def _listed(text: str) -> list[str]:
    """Of a list or a dict as Python prints it."""
    value = _literal(text)
    return [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else re.findall(r"[\w.=]+", text)


def _literal(text: str) -> Any:
    """As OpenCLIP takes a value of `--aug-cfg`: what Python does not read is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_flag(flag: str) -> None:
    if flag not in FLAGS:
        near = get_close_matches(flag, FLAGS, n=1)
        raise UserError(
            f"--{flag} is no flag of OpenCLIP 3.3.0{f'; did you mean --{near[0]}?' if near else '; leave it out'}"
        )


def translate(flags: dict[str, Any], world_size: int) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Keys of the recipe, and what to know about each flag: it is another's meaning, or not needed here."""
    keys: dict[str, Any] = {}
    notes = [(f"--{flag}", NOTES[flag]) for flag in flags if flag in NOTES]
    given = {**DEFAULTS, **flags}
    per_rank, cut = int(given["batch-size"]), int(given["accum-freq"])
    keys["batch.global_size"] = per_rank * cut * world_size
    keys["batch.micro_size"] = per_rank
    if cut > 1:
        notes.append(("--accum-freq", f"{cut} micro-batches; batch.kept_graphs=all is faster where memory allows it"))
    for flag, key in SAME.items():
        if flag in given:
            keys[key] = given[flag] if given[flag] is True else as_value(str(given[flag]))
    if "imagenet-val" in flags:
        keys["evaluate.zero_shot_classes"] = "imagenet"
    for key in ("data.train", "data.val"):
        if "pipe:" in str(keys.get(key)):
            keys[key] = re.sub(r"pipe:\s*(?:aws s3 cp|cat|gsutil cp) (\S+)(?: -)?", r"\1", keys[key])
            notes.append((f"--{key.replace('data.', '')}-data", "no shell between: the URL is read as it is"))
    if "train-data-upsampling-factors" in flags:
        keys["data.train_weights"] = [float(x) for x in flags["train-data-upsampling-factors"].split("::")]
        notes.append(("--train-data-upsampling-factors", "shares of the stream, whatever the sources' sizes"))
    if given.get("dataset-type") == "synthetic":
        keys["data.kind"] = "synthetic"
        keys.pop("data.train", None)
    elif "data.train" not in keys:
        keys["data.train"] = "REPLACE/{00000..00099}.tar"
        notes.append(("--train-data", "is not given: set data.train"))
    model = str(given["model"])
    keys["model.name"] = model_name(model, quick_gelu="force-quick-gelu" in flags)
    if "vit" not in model.lower():  # OpenCLIP's defaults depend on the name
        for key, value in (("optim.beta2", 0.999), ("optim.eps", 1e-8)):
            keys.setdefault(key, value)
    _precision(keys, notes, str(given["precision"]))
    keys["optim.grad_clip_norm"] = float(flags["grad-clip-norm"]) if "grad-clip-norm" in flags else None
    _schedule(keys, notes, given)
    _rest(keys, notes, flags)
    return keys, notes


def as_value(text: str) -> Any:
    """`4e8` is a whole number where OpenCLIP wants one."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text else number


def model_name(name: str, quick_gelu: bool) -> str:
    name = name.replace("/", "-")
    name += "-quickgelu" if quick_gelu and not name.endswith("-quickgelu") else ""
    return name if name in preset_names() else f"open_clip:{name}"


def _precision(keys: dict[str, Any], notes: list[tuple[str, str]], precision: str) -> None:
    keys["engine.precision"] = "fp32" if precision == "fp32" else "fp16" if "fp16" in precision else "bf16"
    if precision == "amp":
        notes.append(("--precision amp", "fp16 autocast there; bf16 here, with fp32 master weights and loss"))
    elif precision.startswith("pure"):
        notes.append((f"--precision {precision}", "master weights are fp32 here"))


def _schedule(keys: dict[str, Any], notes: list[tuple[str, str]], given: dict[str, Any]) -> None:
    samples = keys.get("data.num_samples")
    epoch = math.ceil(samples / keys["batch.global_size"]) if samples else None
    names = {"cosine": "cosine", "const": "constant", "const-cooldown": "constant-with-cooldown"}
    keys["schedule.name"] = names[given["lr-scheduler"]]
    if given.get("skip-scheduler"):
        keys |= {"schedule.name": "constant", "schedule.warmup_steps": 0}
    if "epochs-cooldown" in given:
        if epoch is None:
            raise UserError("--epochs-cooldown needs --train-num-samples here: give it, or count the shards first")
        keys["schedule.cooldown_steps"] = int(given["epochs-cooldown"]) * epoch
    warmup, steps = keys["schedule.warmup_steps"], int(keys["run.epochs"]) * epoch if epoch else None
    if steps is not None and warmup >= steps:
        keys["schedule.warmup_steps"] = steps // 10
        notes.append(("--warmup", f"{warmup} is more than the {steps} steps of this run: {steps // 10} instead"))
    if epoch is None:
        notes.append(("--train-num-samples", "is not given: run.epochs needs shards with an index (clip-train index)"))
        notes.append(("--save-frequency", "set checkpoint.every_steps; it is in steps here"))
        return
    keys["checkpoint.every_steps"] = max(1, int(given["save-frequency"]) * epoch)
    if keys.keys() & {"data.val", "evaluate.zero_shot_data"}:
        keys["evaluate.every_steps"] = max(1, int(given["val-frequency"]) * epoch)


def _rest(keys: dict[str, Any], notes: list[tuple[str, str]], flags: dict[str, Any]) -> None:
    if "name" in flags:
        keys["run.name"] = re.sub(r"[^A-Za-z0-9._-]", "-", str(flags["name"])).lstrip("._-") or "clip"
    if "logs" in flags:
        keys["run.dir"] = f"{str(flags['logs']).rstrip('/')}/{keys.get('run.name', 'clip')}"
    if "pretrained" in flags:
        tag = str(flags["pretrained"])
        keys["model.init_from"] = tag if "/" in tag or "." in tag else f"open_clip:{keys['model.name']}/{tag}"
    for flag in (flag for flag in flags if flag.startswith("lock-") and flag not in NOTES):
        if flag != "lock-image-freeze-bn-stats" or "lock-image" in flags:
            keys[f"model.{flag.replace('-', '_')}"] = True if flag in SWITCHES else int(flags[flag])
    if "force-image-size" in flags:
        keys["model.image_size"] = int(flags["force-image-size"][0])  # squares alone
    if "remote-sync" in flags:
        keys["checkpoint.remote"] = f"{str(flags['remote-sync']).rstrip('/')}/{keys.get('run.name', 'clip')}"
    if "report-to" in flags:
        keys |= {"log.wandb": "wandb" in flags["report-to"], "log.tensorboard": "tensorboard" in flags["report-to"]}
    if "delete-previous-checkpoint" in flags:
        keys["checkpoint.keep_last"] = 1
    if "opt" in flags:
        keys["optim.name"] = str(flags["opt"]).removeprefix("timm/")
    _loss(keys, notes, flags)
    _augmentation(keys, notes, dict(setting.split("=", 1) for setting in flags.get("aug-cfg", []) if "=" in setting))


def _augmentation(keys: dict[str, Any], notes: list[tuple[str, str]], settings: dict[str, str]) -> None:
    """`--aug-cfg`, as OpenCLIP acts on it: what does nothing there is left out."""
    given = {name: _literal(value) for name, value in settings.items()}
    timm = given.pop("use_timm", False)
    idle = dict.fromkeys(("color_jitter_prob", "gray_scale_prob"), "with") if timm else {"ratio": "without"}
    if not timm and not given.get("color_jitter_prob"):
        idle["color_jitter"] = "without color_jitter_prob or"
    for name, value in given.items():
        key = f"data.aug_{name}"
        if name not in ("scale", "ratio", "color_jitter", "color_jitter_prob", "gray_scale_prob"):
            notes.append((f"--aug-cfg {name}", "has no counterpart"))
        elif name in idle:
            notes.append((f"--aug-cfg {name}", f"does nothing there {idle[name]} use_timm; {key} would here"))
        elif name == "color_jitter":  # timm's: one number for three, or three without hue
            values = [value] * 3 if isinstance(value, int | float) else list(value)
            keys[key] = [*values, 0.0][:4]
        else:
            keys[key] = list(value) if isinstance(value, tuple) else value


def _loss(keys: dict[str, Any], notes: list[tuple[str, str]], flags: dict[str, Any]) -> None:
    if "siglip" in flags:
        keys |= {"loss.kind": "sigmoid", "model.init_logit_bias": -10.0, "model.init_logit_scale": math.log(10)}
        keys["loss.exchange"] = "gather" if flags.get("loss-dist-impl") == "gather" else "ring"
    elif "loss-dist-impl" in flags:
        notes.append(("--loss-dist-impl", "for --siglip only"))


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        out.setdefault(section, {})[name] = value
    return out


def as_recipe(keys: dict[str, Any], notes: list[tuple[str, str]]) -> str:
    """YAML, with the notes in comments above."""
    order = ("run", "model", "data", "batch", "loss", "engine", "optim", "schedule", "checkpoint", "evaluate", "log")
    sections = nested(keys)
    text = [f"# {line}" for line in ("From an OpenCLIP command line. What is another's meaning here:", *ALWAYS)]
    text += [f"# {flag}: {note}" for flag, note in notes]
    text += [yaml.safe_dump({name: sections[name]}, sort_keys=False).rstrip() for name in order if name in sections]
    return "\n".join(text) + "\n"
