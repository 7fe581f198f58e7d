"""Translate an OpenCLIP command line into the keys of a recipe.

`flags` lists every flag of OpenCLIP with its key, or the reason why a recipe has none. The
functions here translate the flags that need more than another name. Notes explain differences in
meaning; those that begin with `CHECK:` are warnings too.
"""

import argparse
import ast
import json
import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clip_tools.openclip.flags import (
    CHANGES,
    DEFAULTS,
    FLAGS,
    LISTS,
    MAIN_ONLY,
    OLDER_KEYS,
    REASONS,
    SWITCH_KEYS,
    SWITCHES,
)
from clip_tools.shards.convert import READERS
from clip_train.data.config import SYNTHETIC_SAMPLES
from clip_train.data.decode import IMAGE_EXTENSIONS
from clip_train.data.shards import TABLES, expand_braces, split_sources
from clip_train.errors import UserError
from clip_train.models import hub
from clip_train.models.config import Architecture, load_architecture, preset_names
from clip_train.models.openclip.config import PREFIX
from clip_train.recipe.names import SAME

CHECK = "CHECK: "  # begins a note on a key that may be wrong; such a note is also a warning
PER_SHARD = 10_000  # samples that img2dataset puts into one
# OpenCLIP's values of --precision, and ours for each.
PRECISIONS = {
    "amp": "bf16",
    "amp_bf16": "bf16",
    "amp_bfloat16": "bf16",
    "amp_fp16": "fp16",
    "bf16": "bf16",
    "fp16": "fp16",
    "pure_bf16": "bf16",
    "pure_fp16": "fp16",
    "fp32": "fp32",
}
LOW_WEIGHTS = ("fp16", "pure_fp16", "bf16", "pure_bf16")  # whose weights are not fp32 in OpenCLIP
NAFLEX = ("use-naflex", "force-naflex-vision")
# Names of models that OpenCLIP trains on something else than square images and their texts.
OTHER_MODELS = {
    "genlip": "it learns to write captions alone",
    "genlap": "it reads audio",
    "clap": "it reads audio",
    "naflex": "images of native resolution (NaFlex) change the number of samples of a step there",
}
IMAGE_SUFFIXES = {"jpg", "png", "jpeg", "webp"}  # that OpenCLIP reads unless --image-key is given
FALLBACK = 1e-9  # the weight of a caption that is read only if the sample lacks the others
TRACKERS = ("wandb", "tensorboard")
SCHEDULES = {"cosine": "cosine", "const": "constant", "const-cooldown": "constant-with-cooldown"}
TEXTS = {"train-data", "val-data", "imagenet-val", "wandb-project-name"}
UNSET_IF_EMPTY = TEXTS | {"name", "remote-sync"}  # '' there is as if the flag were not given
BESIDE = "-clip-train"  # our folder is beside OpenCLIP's, which holds checkpoints of its own
AUGMENTATIONS = ("scale", "ratio", "color_jitter", "color_jitter_prob", "gray_scale_prob")
# Models whose text tower OpenCLIP starts from pretrained weights of Hugging Face's hub.
HF_TOWER = re.compile(r"(coca_)?(xlm-)?roberta-.*|mt5-.*|nllb-.*|gte-modernbert-.*")
PROGRAM = re.compile(r"(.*/)?(legacy_)?main\.py|(open_clip_train|training)\.(legacy_)?main")
MODULE = re.compile(r"(.*\.)?(legacy_)?main")  # after -m
# Their options -n and -N count ranks and nodes; those of other programs, such as nice, do not.
LAUNCHERS = re.compile(r"(.*/)?(srun|mpirun|mpiexec|orterun|horovodrun)")
VARIABLE = re.compile(r"\$\w+|\$\{[^}]*\}")

Keys = dict[str, Any]  # of a recipe, flat
Flags = Mapping[str, Any]
Notes = list[tuple[str, str]]  # flag, what to know of it


def read_command(text: str) -> tuple[dict[str, Any], int | None]:
    """Flags with their values, and the number of ranks if the launcher's options show it.
    UserError."""
    # lines that go on: with \ in a shell of Unix, ^ in cmd.exe, ` in PowerShell
    text = re.sub(r"[\\^`][ \t]*(\r?\n|$)", " ", text)
    text = re.sub(r"\s\d(?=[<>])", " ", text)  # the 2 of 2>&1
    batch_options = " ".join(re.findall(r"^#SBATCH (.*)", text, re.M)).split()
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";<>|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as e:
        raise UserError(f"this is not a command line: {e}; quote it as one argument") from None
    launcher_words, flag_words = split_at_program(words)
    flags = _flags(flag_words)
    if not flags:
        raise UserError(
            "this command has no flag of OpenCLIP behind main.py or -m open_clip_train.main; give "
            "all of the command, as one argument in quotes"
        )
    return flags, count_ranks(launcher_words, batch_options)


def split_at_program(words: list[str]) -> tuple[list[str], list[str]]:
    """The words in front of OpenCLIP's program and those behind it, from the command with its
    flags. Without a program, all words of a command are behind it."""
    commands: list[list[str]] = [[]]
    for word in words:
        if is_operator(word):
            commands.append([])
        else:
            commands[-1].append(word)
    with_program: list[tuple[list[str], list[str]]] = []
    without_program: list[tuple[list[str], list[str]]] = []
    for command in commands:
        for number, word in enumerate(command):
            is_module = number > 0 and command[number - 1] in ("-m", "--module")
            if PROGRAM.fullmatch(word) or (is_module and MODULE.fullmatch(word)):
                with_program.append((command[:number], command[number + 1 :]))
                break
        else:
            without_program.append(([], command))
    candidates = with_program or without_program
    for launcher_words, flag_words in candidates:
        if any(word.startswith("--") for word in flag_words):
            return launcher_words, flag_words
    return candidates[0]  # for the message


def is_operator(word: str) -> bool:
    """Whether a shell ends a command here: at ; | && > and the like, or where a comment begins."""
    return word.startswith("#") or (word != "" and not word.strip(";<>|&"))


def count_ranks(words: list[str], batch_options: list[str]) -> int | None:
    """The number of ranks by the options of torchrun, srun or mpirun; None if they do not show it,
    as with a variable of a script.

    words: those in front of the program. batch_options: of `#SBATCH` lines; srun's come first.
    """
    own = batch_options
    for number, word in enumerate(words):
        if LAUNCHERS.fullmatch(word):
            own = words[number + 1 :] + batch_options
            break
    by_torchrun = option(words, "--nproc-per-node")
    nodes = option(words, "--nnodes", "--nnode")
    if nodes is None:
        nodes = option(own, "--nodes", "-N")
    total = option(own, "--ntasks", "-np", "-n")
    if by_torchrun is not None:
        factors = [by_torchrun, "1" if nodes is None else nodes]
    elif total is not None:
        factors = [total]
    else:
        factors = [option(own, "--ntasks-per-node") or "", nodes or ""]
    if not all(factor.isdecimal() for factor in factors):
        return None
    return math.prod(map(int, factors))


def option(words: list[str], *names: str) -> str | None:
    """The value of the first option with one of these names, as in `--name 8`, `--name=8` or
    `-n8`."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            if equals:
                return value
            return words[number + 1] if number + 1 < len(words) else ""
        short = re.fullmatch(r"(-\w)(\d+)", word)
        if short is not None and short[1] in names:
            return short[2]
    return None


def _flags(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for flag in FLAGS:
        if flag in SWITCHES:
            parser.add_argument(f"--{flag}", dest=flag, action="store_true")
        else:
            parser.add_argument(f"--{flag}", dest=flag, nargs="*" if flag in LISTS else None)
    hyphens = [re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word) for word in words]
    try:
        found, unknown = parser.parse_known_args(hyphens)
    except argparse.ArgumentError as e:
        if str(e.argument_name).removeprefix("--") in SWITCHES:
            raise UserError(f"{e.argument_name} takes no value; write it alone") from None
        raise UserError(f"{e.argument_name} has no value; is the command truncated?") from None
    mistakes = []
    for flag in [word for word in unknown if word.startswith("--")]:
        near = get_close_matches(flag.removeprefix("--"), FLAGS, n=1)
        remedy = f"did you mean --{near[0]}?" if near else "leave it out"
        mistakes.append(f"{flag} is not a flag of OpenCLIP; {remedy}")
    if unknown and not mistakes:
        mistakes.append(
            f"{unknown[0]!r} is not a flag of OpenCLIP; give the command itself, not a file; a "
            "value with spaces needs quotes"
        )
    if mistakes:
        raise UserError("\n".join(mistakes))
    return vars(found)


def translate(flags: Flags, world_size: int) -> tuple[Keys, Notes]:
    """The recipe's keys, and a note on each flag that has another meaning or none."""
    flags = {
        flag: value for flag, value in flags.items() if value != "" or flag not in UNSET_IF_EMPTY
    }
    _refuse_other_inputs(flags)
    notes: Notes = [
        (f"--{flag}", f"{CHECK}{name} is a variable of a script: replace it by its value")
        for flag, value in flags.items()
        for name in VARIABLE.findall(str(value))[:1]
    ]
    all_flags = {**DEFAULTS, **flags}
    if MAIN_ONLY & flags.keys():  # whose default it is
        all_flags["precision"] = flags.get("precision", "amp_bf16")
    per_rank = whole("--batch-size", all_flags["batch-size"])
    cut = whole("--accum-freq", all_flags["accum-freq"])
    keys: Keys = {"batch.global_size": per_rank * cut * world_size, "batch.micro_size": per_rank}
    for flag, key in SAME.items():
        if flag in all_flags:
            value = all_flags[flag]
            keys[key] = value if value is True or flag in TEXTS else as_value(value)
    for flag, fixed in SWITCH_KEYS.items():
        if flag in flags and ("fsdp" in flags or not flag.startswith("fsdp")):
            keys |= fixed
    _widths(keys, notes, flags)
    _model(keys, notes, all_flags)
    changes = _changes(flags, keys)
    reasons = [
        (f"--{flag}", f"{CHECK if flag in changes else ''}{REASONS[flag]}".replace("`", ""))
        for flag in flags
        if flag in REASONS
    ]
    notes = reasons + notes
    _overrides(keys, notes, flags)
    _data(keys, notes, flags)
    _schedule(keys, notes, all_flags)
    _optimizer(keys, notes, flags)
    _places(keys, notes, flags)
    _augmentation(keys, notes, flags.get("aug-cfg", []))
    _precision(keys, notes, str(all_flags["precision"]), given="precision" in flags)
    _loss(keys, notes, flags, world_size)
    if "data.val" in keys:  # OpenCLIP's val_loss is a mean over batches of this size
        keys["evaluate.batch_size"] = per_rank
    if cut > 1:
        notes.append(
            (
                "--accum-freq",
                f"{cut} micro-batches; batch.kept_graphs=all is faster where memory allows it. "
                f"OpenCLIP's gradients of logit_scale and logit_bias are {cut} times too large",
            )
        )
    return keys, notes


def _refuse_other_inputs(flags: Flags) -> None:
    """UserError for a command that trains on something else than square images and their texts."""
    kind = str(flags.get("dataset-type", "auto"))
    if "audio" in kind:
        raise UserError(
            f"--dataset-type {kind}: only images and texts can be trained on; remove it"
        )
    given = [f"--{flag}" for flag in NAFLEX if flag in flags]
    if any(re.fullmatch(r"naflex=(?!False).*", each) for each in flags.get("aug-cfg", [])):
        given.append("--aug-cfg naflex")
    if given:
        raise UserError(
            f"{given[0]}: images of native resolution (NaFlex) change the number of samples of a "
            "step there, which no recipe does. Remove it and its options, and add data.resize=native, "
            "data.tokens and batch.micro_tokens to the recipe (docs/native_resolution.md)"
        )
    for flag in ("model", "distill-model"):
        name = str(flags.get(flag, ""))
        for part, reason in OTHER_MODELS.items():
            if part in name.lower():
                raise UserError(
                    f"--{flag} {name} cannot be trained here: {reason}. Choose a model of square "
                    "images and texts"
                )


def _changes(flags: Flags, keys: Keys) -> set[str]:
    """The flags without a key that change what is trained, so that the recipe must be checked."""
    changes = set(CHANGES & flags.keys())
    named = keys["model.name"] in preset_names()
    usual_pixels: dict[str, Any] = {}
    if named:
        architecture = load_architecture(keys["model.name"])
        usual_pixels["image-mean"] = architecture.image_mean
        usual_pixels["image-std"] = architecture.image_std
    for flag in ("image-mean", "image-std"):
        if flag in flags and tuple(map(as_value, flags[flag])) != usual_pixels.get(flag):
            changes.add(flag)
    for flag, usual in (
        ("image-interpolation", "bicubic"),
        ("interpolation", "bicubic"),
        ("resume", "latest"),
    ):
        if flags.get(flag, usual) != usual:
            changes.add(flag)
    if "square-resize-only" in flags:
        changes.add("square-resize-only")
    if "length-bucketing" in flags and not named:  # of texts that vary in length
        changes.add("length-bucketing")
    if flags.keys() & {"text-layer-decay", "lock-text"}:  # poolers are in other models only
        changes |= {"text-pooler-own-group"} & flags.keys()
    if "image-key" in flags:
        suffixes = set(re.split(r"[;,]", str(flags["image-key"]).lower())) - {""}
        if not IMAGE_SUFFIXES <= suffixes <= set(IMAGE_EXTENSIONS):
            changes.add("image-key")
    return changes


def _optimizer(keys: Keys, notes: Notes, flags: Flags) -> None:
    """Its name, the rates of layers, and what does not decay."""
    given = str(flags.get("opt", "adamw")).lower()
    name = keys["optim.name"] = given.removeprefix("timm/")
    if given.startswith("timm/"):
        keys.setdefault("optim.beta2", 0.999)  # timm's defaults
        keys.setdefault("optim.eps", 1e-8)
        if name != "adamw":
            notes.append(
                (
                    f"--opt {given}",
                    f"{CHECK}optim.name={name} is not timm's: momentum, factors and weight decay "
                    "differ (docs/recipe.md)",
                )
            )
        if "lr" not in flags:
            notes.append(
                ("--lr", f"{CHECK}is not given; OpenCLIP has no default with --opt {given}")
            )
    vit = own_vit(keys["model.name"])
    _layer_decay(keys, notes, flags, vit)
    if vit is not None and MAIN_ONLY & flags.keys():
        keys["optim.no_decay"] = [
            "positional_embedding",
            "visual.positional_embedding",
            *keys.get("optim.no_decay", []),
        ]
    elif MAIN_ONLY & flags.keys():
        notes.append(
            (
                "--wd",
                f"{CHECK}OpenCLIP 4 does not let positional embeddings and the like decay; name "
                f"those of {keys['model.name']} in optim.no_decay",
            )
        )


def own_vit(name: str) -> Architecture | None:
    """The model, if its blocks and embeddings have the names of clip-train's own ViTs."""
    if name.startswith(PREFIX):
        return None
    try:
        architecture = load_architecture(name)
    except UserError:  # a JSON that does not exist yet
        return None
    return architecture if isinstance(architecture, Architecture) else None


def _layer_decay(keys: Keys, notes: Notes, flags: Flags, vit: Architecture | None) -> None:
    """The rates of layers. In OpenCLIP the norm behind the blocks has the rate of the last block;
    `optim.layer_decay` leaves it the full one.

    vit: the model; None for one whose layers are not numbered.
    """
    decays: dict[str, float] = {}  # by tower
    given: list[str] = []
    for flag, tower in (
        ("text-layer-decay", "text"),
        ("image-layer-decay", "image"),
        ("visual-layer-decay", "image"),
    ):
        decay = as_value(flags.get(flag, 1))
        if not isinstance(decay, int | float):
            raise UserError(f"--{flag} ({decay}) must be a number; put the number in")
        if decay != 1:
            decays[tower] = decay
            given.append(flag)
    if not decays:
        return
    if vit is None:
        for flag in given:
            notes.append(
                (
                    f"--{flag}",
                    f"{CHECK}is not translated for {keys['model.name']}: give the factors in "
                    "optim.lr_multipliers, by the names of its parameters",
                )
            )
        return
    image, text = decays.get("image"), decays.get("text")
    if image is not None and image == text:
        keys["optim.layer_decay"] = image
        keys["optim.lr_multipliers"] = {"visual.ln_post.*": image, "*ln_final.*": image}
        return
    multipliers: dict[str, float] = {}
    if image is not None:
        layers, blocks = vit.vision_cfg.layers, "visual.transformer.resblocks"
        multipliers["visual.ln_post.*"] = image
        multipliers |= rates_of_blocks(image, layers, blocks)
        for name in ("conv1.*", "*_embedding", "ln_pre.*"):
            multipliers[f"visual.{name}"] = round(image ** (layers + 1), 12)
    if text is not None:
        layers, blocks = vit.text_cfg.layers, "transformer.resblocks"
        multipliers["ln_final.*"] = text
        multipliers |= rates_of_blocks(text, layers, blocks)
        for name in ("token_embedding.*", "positional_embedding"):
            multipliers[name] = round(text ** (layers + 1), 12)
    keys["optim.lr_multipliers"] = multipliers


def rates_of_blocks(decay: float, layers: int, blocks: str) -> dict[str, float]:
    """The factor of each block, the last one first."""
    return {
        f"{blocks}.{layer}.*": round(decay ** (layers - layer), 12)
        for layer in reversed(range(layers))
    }


def _precision(keys: Keys, notes: Notes, precision: str, given: bool) -> None:
    if precision not in PRECISIONS:
        raise UserError(
            f"--precision ({precision}) is not a value of OpenCLIP; give one of {', '.join(PRECISIONS)}"
        )
    ours = PRECISIONS[precision]
    keys["engine.precision"] = ours
    if precision in LOW_WEIGHTS:
        text = (
            f"{CHECK}OpenCLIP's weights and moments are {ours} there; here they are fp32, and "
            f"only the arithmetic is {ours}"
        )
        notes.append((f"--precision {precision}", text))
    elif precision == "amp" and given:
        text = (
            f"{CHECK}computes in fp16 there and in bf16 here, with fp32 master weights and loss; "
            "engine.precision=fp16 computes in fp16"
        )
        notes.append(("--precision amp", text))
    elif precision == "amp":
        text = (
            "the default of OpenCLIP 3.3.0; bf16 here, as in 4.x, with fp32 master weights and loss"
        )
        notes.append(("--precision amp", text))


def _loss(keys: Keys, notes: Notes, flags: Flags, world_size: int) -> None:
    """The loss, and where OpenCLIP's gradient is another than that of the batch."""
    coca = "coca" in str(flags.get("model", "")).lower()
    distilled = "distill-model" in flags and "distill-pretrained" in flags
    if "siglip" in flags and (coca or distilled):
        raise UserError(
            f"--siglip with {'--distill-model' if distilled else flags['model']}: OpenCLIP's loss for "
            "it takes no bias; remove --siglip"
        )
    if "siglip" in flags and flags.get("loss-dist-impl") == "gather":
        keys["loss.exchange"] = "gather"
    idle = []
    if "siglip" not in flags:
        idle.append(("loss-dist-impl", "--siglip"))
    if not coca:
        idle.append(("coca-caption-loss-weight", "a CoCa"))
        idle.append(("coca-contrastive-loss-weight", "a CoCa"))
    if not distilled:
        idle.append(("distill-model", "--distill-pretrained"))
        idle.append(("distill-pretrained", "--distill-model"))
    for flag, needed in idle:
        if flag in flags:
            keys.pop(SAME.get(flag, ""), None)
            notes.append((f"--{flag}", f"does nothing there without {needed}; left out"))
    if world_size == 1 or "siglip" in flags or "gather-with-grad" in flags:
        return
    if "local-loss" in flags:
        text = "without it, --local-loss gives a gradient of another direction there"
    else:
        text = f"without it, the gradient of the towers is 1/{world_size} of the batch's there"
    check = CHECK if "grad-clip-norm" in flags else ""
    more = ", so that --grad-clip-norm clips more" if check else ""
    notes.append(("--gather-with-grad", f"{check}{text}; here it is the batch's{more}"))


def as_value(text: Any) -> Any:
    """A Python literal if it is one, else the text; `4e8` is a whole number where OpenCLIP wants
    one."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a text, a list, nothing
        return text
    is_whole = isinstance(value, float) and value.is_integer() and "." not in text
    return int(value) if is_whole else value


def whole(name: str, text: Any) -> int:
    """UserError if it is not an integer."""
    value = as_value(text)
    if not isinstance(value, int):
        raise UserError(f"{name} ({text}) must be an integer; put the number in")
    return value


def _widths(keys: Keys, notes: Notes, flags: Flags) -> None:
    """The Matryoshka loss of OpenCLIP's branch for it."""
    widths = [as_value(each) for each in str(flags.get("mrl-dim-to-consider", "")).split(",")]
    weights = [as_value(each) for each in str(flags.get("mrl-loss-weights", "")).split(",")]
    if "force-mrl-loss" in flags and "mrl-dim-to-consider" in flags:
        if "mrl-loss-weights" not in flags:
            weights = [1.0] * len(widths)
        if len(widths) != len(weights):
            raise UserError(
                f"--mrl-loss-weights ({flags['mrl-loss-weights']}) must have a weight for each of "
                f"the {len(widths)} widths of --mrl-dim-to-consider; correct one of them"
            )
        keys["loss.widths"] = dict(zip(widths, weights, strict=True))
        return
    for flag in sorted(OLDER_KEYS.keys() & flags.keys()):
        if "force-mrl-loss" in flags:
            text = f"{CHECK}--mrl-dim-to-consider is not given: set loss.widths, as {{512: 1}}"
        else:
            text = "does nothing there without --force-mrl-loss; loss.widths would here"
        notes.append((f"--{flag}", text))


@dataclass(frozen=True)
class NamedModel:
    """The model of a command."""

    name: str  # OpenCLIP's
    config_file: str | None  # the user's JSON, which OpenCLIP reads with add_model_config
    has_hub_text_tower: bool  # OpenCLIP starts its text tower from Hugging Face's hub


def _model(keys: Keys, notes: Notes, flags: Flags) -> None:
    """The model to train, its initial weights, and its teacher."""
    model = _name(keys, notes, flags)
    if "vit" not in str(flags["model"]).lower():  # OpenCLIP's defaults depend on the name
        keys.setdefault("optim.beta2", 0.999)
        keys.setdefault("optim.eps", 1e-8)
    if flags.get("pretrained"):
        _given_weights(keys, notes, flags)
    else:
        _pretrained_towers(keys, notes, flags, model)
    if model.has_hub_text_tower and "model.lock_text" in keys:
        del keys["model.lock_text"]
        keys.pop("model.lock_text_unlocked_layers", None)
        notes.append(
            (
                "--lock-text",
                f"{CHECK}OpenCLIP 3.3.0 leaves the projection of {model.name} trainable, 4.x locks it "
                "too; both leave its LayerNorms trainable unless --lock-text-freeze-layer-norm is "
                "given. Name what is frozen in model.freeze, such as text.transformer.*",
            )
        )
    if "distill-model" in flags and "distill-pretrained" in flags:
        teacher = str(flags["distill-model"])
        keys["model.teacher_name"] = model_name(teacher, flag="distill-")
        keys["model.teacher"] = weights_of(teacher, str(flags["distill-pretrained"]))
        unknown = unknown_tag(keys["model.teacher"])
        if unknown is not None:
            notes.append(("--distill-pretrained", f"{CHECK}{unknown}"))


def _name(keys: Keys, notes: Notes, flags: Flags) -> NamedModel:
    """Sets model.name: a file of the user's own, or a preset."""
    name = str(flags["model"])
    quick = "force-quick-gelu" in flags
    config_file = f"{name.removesuffix('.json')}.json"
    if name == config_file or Path(config_file).is_file():
        description = read_description(config_file)
        has_hub_text_tower = "hf_model_name" in str(description.get("text_cfg"))
        keys["model.name"] = f"{PREFIX}{config_file}" if has_hub_text_tower else config_file
        if quick and not description.get("quick_gelu"):
            text = (
                f'{CHECK}put "quick_gelu": true into {config_file}, or the model trains with GELU'
            )
            notes.append(("--force-quick-gelu", text))
        return NamedModel(Path(config_file).stem, config_file, has_hub_text_tower)
    keys["model.name"] = model_name(f"{name}-quickgelu" if quick else name)
    known = keys["model.name"].removeprefix(PREFIX)
    if quick and keys["model.name"].startswith(PREFIX):
        text = f'{CHECK}if OpenCLIP has no model {known}, give its JSON with "quick_gelu": true'
        notes.append(("--force-quick-gelu", text))
    return NamedModel(known, None, HF_TOWER.fullmatch(known) is not None)


def _given_weights(keys: Keys, notes: Notes, flags: Flags) -> None:
    """The initial weights that --pretrained names."""
    weights = weights_of(str(flags["model"]), str(flags["pretrained"]))
    keys["model.init_from"] = weights
    unknown = unknown_tag(weights)
    if unknown is not None:
        notes.append(("--pretrained", f"{CHECK}{unknown}"))
    if "train-data" not in flags:
        notes.append(
            (
                "--pretrained",
                "without --train-data, OpenCLIP only evaluates these weights. The same here: "
                f"clip-train evaluate THIS.yaml --weights {weights}",
            )
        )
    if "pretrained-image" in flags:
        notes.append(
            (
                "--pretrained-image",
                "does nothing there beside --pretrained, which has the image tower too",
            )
        )


def _pretrained_towers(keys: Keys, notes: Notes, flags: Flags, model: NamedModel) -> None:
    """The towers that OpenCLIP starts from pretrained weights of other libraries: a file with these
    weights must be made first."""
    file = f"{model.name}-start.pt"
    towers = []
    if model.has_hub_text_tower:
        towers.append("text")
    if "pretrained-image" in flags:
        towers.append("image")
    if not towers:
        return
    if model.has_hub_text_tower:
        flag, key = "--model", "model.init_from"
    else:
        flag, key = "--pretrained-image", "model.init_image_from"
    keys[key] = file
    arguments = f"'{model.name}'"
    if "pretrained-image" in flags:
        arguments += ", pretrained_image=True"
    code = "import open_clip, torch; "
    if model.config_file is not None:
        code += f"open_clip.add_model_config('{model.config_file}'); "
    code += f"torch.save(open_clip.create_model({arguments}).state_dict(), '{file}')"
    notes.append(
        (
            flag,
            f"{CHECK}OpenCLIP starts the {' and the '.join(towers)} tower of {model.name} from "
            f"pretrained weights. Make the file that {key} names, once, with the options of your "
            f'command: python -c "{code}"',
        )
    )


def _overrides(keys: Keys, notes: Notes, flags: Flags) -> None:
    """Locks that have no effect in OpenCLIP, and the size of the images."""
    for flag, lock in (
        ("lock-image-freeze-bn-stats", "lock-image"),
        ("lock-image-unlocked-groups", "lock-image"),
        ("lock-text-unlocked-layers", "lock-text"),
    ):
        if flag in flags and lock not in flags:
            keys.pop(SAME[flag], None)
            notes.append((f"--{flag}", f"does nothing there without --{lock}; left out"))
    if "force-image-size" in flags:
        sides = {whole("--force-image-size", side) for side in flags["force-image-size"]}
        if len(sides) != 1:
            raise UserError(
                f"--force-image-size {' '.join(flags['force-image-size'])}: images are square here "
                "(model.image_size); give one number"
            )
        keys["model.image_size"] = sides.pop()


def read_description(file: str) -> dict[str, Any]:
    """A model's JSON; empty for a file that does not exist or is not a JSON object."""
    try:
        content = json.loads(Path(file).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def model_name(name: str, flag: str = "") -> str:
    """Ours, or by OpenCLIP's own. UserError for a name that a recipe cannot express."""
    if name.startswith(("hf-hub:", "local-dir:")):
        raise UserError(
            f"--{flag}model {name}: a recipe has architecture and weights apart; give "
            f"--{flag}model the architecture's name, and --{flag}pretrained "
            f"{name.removeprefix('local-dir:')}"
        )
    name = name.replace("/", "-").replace("-quickgelu-quickgelu", "-quickgelu")
    return name if name in preset_names() else f"open_clip:{name}"


def weights_of(name: str, tag: str) -> str:
    """A path or URL as it is; a tag is one of OpenCLIP's for that model."""
    return tag if set("/.:") & set(tag) else f"open_clip:{name.replace('/', '-')}/{tag}"


def unknown_tag(place: object) -> str | None:
    """The reason why these weights are not found on the hub; None: they are, or are a file."""
    if not isinstance(place, str) or not hub.is_on_hub(place):
        return None
    try:
        hub.resolve(place)
    except UserError as e:
        return str(e)
    return None


def _data(keys: Keys, notes: Notes, flags: Flags) -> None:
    if flags.get("dataset-type") == "synthetic":
        keys["data.kind"] = "synthetic"
        keys.pop("data.train", None)
        keys.setdefault("data.num_samples", SYNTHETIC_SAMPLES)
    elif "data.train" not in keys:
        keys["data.train"] = "REPLACE/{00000..00099}.tar"
        notes.append(("--train-data", f"{CHECK}is not given: set data.train"))
    for flag in ("train-data", "val-data"):
        if SAME[flag] in keys:
            sources = split_sources(keys[SAME[flag]])
            keys[SAME[flag]] = "::".join(
                _source(f"--{flag}", each, notes, flags) for each in sources
            )
    _epoch(keys, notes, flags)
    _captions(keys, notes, flags)
    if "train-data-upsampling-factors" in flags and "data.train" in keys:
        factors = str(flags["train-data-upsampling-factors"]).split("::")
        # There, each shard has its factor. Too many factors stay, for the check of the recipe.
        counts = [*map(len, expand_braces(keys["data.train"])), *[1] * len(factors)]
        keys["data.train_weights"] = [
            factor * count if isinstance(factor, int | float) else factor
            for factor, count in zip(map(as_value, factors), counts, strict=False)
        ]
        if set("*$") & set(keys["data.train"]):
            notes.append(
                (
                    "--train-data-upsampling-factors",
                    f"{CHECK}OpenCLIP draws each shard with its source's factor, and how many "
                    "shards a source with * or $ has is not known here: multiply its number of "
                    "data.train_weights by that",
                )
            )


def _captions(keys: Keys, notes: Notes, flags: Flags) -> None:
    """Where the captions are, and how they are drawn."""
    for flag, prefix in (("text-key", ""), ("json-text-key", "json.")):
        if flag in flags:
            keys["data.caption_key"] = [
                prefix + name for name in str(flags[flag]).split(";") if name
            ]
    if "json-text-key-probs" not in flags:
        return
    if "json-text-key" not in flags:
        text = "does nothing there without --json-text-key; left out"
        notes.append(("--json-text-key-probs", text))
        return
    names = keys["data.caption_key"]
    given = [as_value(share) for share in flags["json-text-key-probs"]]
    if len(given) > len(names):
        raise UserError(
            f"--json-text-key-probs ({' '.join(flags['json-text-key-probs'])}) has more numbers "
            f"than --json-text-key has names ({len(names)}); remove some"
        )
    shares = given + [0] * (len(names) - len(given))
    # OpenCLIP reads a caption of weight 0 from samples that have none of the others.
    fallbacks = [name for name, share in zip(names, shares, strict=True) if not share]
    weights = {name: share for name, share in zip(names, shares, strict=True) if share}
    for rank, name in enumerate(fallbacks, start=1):
        weights[name] = FALLBACK**rank
    keys["data.caption_key"] = weights


def _epoch(keys: Keys, notes: Notes, flags: Flags) -> None:
    """The number of samples in an epoch, if it is known or can be estimated."""
    rows = count_rows(flags)
    if rows is not None:
        given = keys.get("data.num_samples", rows)
        if given != rows:
            text = f"OpenCLIP does not read it for a table, which has {rows} rows"
            notes.append(("--train-num-samples", text))
        keys["data.num_samples"] = rows
    if "data.num_samples" in keys:
        return
    shards = sum(map(len, expand_braces(keys["data.train"])))
    if shards > 1 and not set("*?") & set(keys["data.train"]):
        keys["data.num_samples"] = shards * PER_SHARD
        text = (
            f"{CHECK}is not given: {keys['data.num_samples']:,} samples are ASSUMED, and steps, "
            "warm-up, saves and evaluations follow from them; add the flag to the command"
        )
    else:
        text = (
            f"{CHECK}is not given, so keys that count epochs in steps are left out: "
            "checkpoint.every_steps, checkpoint.keep_every, evaluate.every_steps, "
            "schedule.cooldown_steps. An index of the shards (clip-train index) counts the "
            "samples for run.epochs; or add the flag to the command"
        )
    notes.append(("--train-num-samples", text))


def count_rows(flags: Flags) -> int | None:
    """The rows of the table to train on that can be read; None without a table on this machine."""
    source = Path(str(flags.get("train-data", "")))
    reader = READERS.get(source.suffix.lower())
    if reader is None or not source.is_file():
        return None
    return sum(isinstance(record, dict) for record in reader(source))


def _source(flag: str, source: str, notes: Notes, flags: Flags) -> str:
    """The shards: the files that a `pipe:` reads, or those that `clip-train shards` makes from a
    table."""
    if source.startswith("pipe:"):
        words = re.findall(r"[^\s'\"]+", source[5:])  # URLs are usually in quotes there
        urls = [word for word in words if ".tar" in word] or [
            word for word in words if "://" in word
        ]
        if not urls:
            raise UserError(
                f"{flag} ({source}): no path or URL of shards in this command; give it as it is"
            )
        notes.append((flag, "no shell between: the URL is read as it is"))
        source = urls[0]
    if source.lower().endswith(TABLES) or flags.get("dataset-type") == "csv":
        folder = re.sub(r"\.\w+$", "", source) + "-shards"
        command = f"clip-train shards {source} {folder}"
        for name in ("image", "caption"):
            column = flags.get(f"csv-{name.replace('image', 'img')}-key")
            command += f" --{name}-key {column}" if column else ""
        notes.append((flag, f"first make shards of it: {command}"))
        source = f"{folder}/*.tar"
    return source


def _schedule(keys: Keys, notes: Notes, flags: Flags) -> None:
    """The schedule, and how often checkpoints are saved and the model is evaluated."""
    name = str(flags["lr-scheduler"])
    if "skip-scheduler" not in flags:
        keys["schedule.name"] = SCHEDULES.get(name, name)
        if name == "const-cooldown" and "epochs-cooldown" not in flags:
            raise UserError("--lr-scheduler const-cooldown needs --epochs-cooldown; add it")
    if name != "const-cooldown":
        for flag in ("epochs-cooldown", "lr-cooldown-end", "lr-cooldown-power"):
            if flag in flags:
                keys.pop(SAME.get(flag, ""), None)
                notes.append(
                    (f"--{flag}", f"does nothing there with --lr-scheduler {name}; left out")
                )
    whole("--warmup", keys["schedule.warmup_steps"])
    keys["checkpoint.every_minutes"] = 60
    epochs = _epoch_counts(keys, flags)
    if epochs.save is None:
        keys["checkpoint.every_steps"] = None
    if "data.num_samples" not in keys:
        return
    _steps(keys, notes, epochs)
    if epochs.save is not None and "delete-previous-checkpoint" not in flags:
        keys["checkpoint.keep_every"] = keys["checkpoint.every_steps"]


@dataclass(frozen=True)
class EpochCounts:
    """What OpenCLIP counts in epochs."""

    run: int  # the epochs of the run
    save: int | None  # None: the only save is at the end
    evaluate: int | None  # None: never, or nothing to evaluate on
    cooldown: int | None  # None: the schedule has none


def _epoch_counts(keys: Keys, flags: Flags) -> EpochCounts:
    """UserError for a flag that is not an integer."""
    save = whole("--save-frequency", flags["save-frequency"])
    frequencies = []
    for key, flag in (
        ("data.val", "val-frequency"),
        ("evaluate.zero_shot_data", "zeroshot-frequency"),
    ):
        if key in keys:
            frequencies.append(abs(whole(f"--{flag}", flags[flag])))
    cooldown = None
    if "epochs-cooldown" in flags and flags["lr-scheduler"] == "const-cooldown":
        cooldown = whole("--epochs-cooldown", flags["epochs-cooldown"])
    return EpochCounts(
        run=whole("--epochs", flags["epochs"]),
        save=save if save > 0 else None,
        evaluate=min((each for each in frequencies if each), default=None),
        cooldown=cooldown,
    )


def _steps(keys: Keys, notes: Notes, epochs: EpochCounts) -> None:
    """The keys that count steps, from epochs of `data.num_samples`."""
    samples = whole("--train-num-samples", keys["data.num_samples"])
    size = keys["batch.global_size"]
    epoch = math.ceil(samples / size)
    if epochs.cooldown is not None:
        keys["schedule.cooldown_steps"] = epochs.cooldown * epoch
    if epochs.save is not None:
        keys["checkpoint.every_steps"] = epochs.save * epoch
    if epochs.evaluate is not None:
        keys["evaluate.every_steps"] = epochs.evaluate * epoch
    steps = max(1, epochs.run * samples // size)
    warmup = keys["schedule.warmup_steps"]
    if warmup >= steps:
        keys["schedule.warmup_steps"] = steps // 10
        notes.append(
            (
                "--warmup",
                f"{CHECK}{warmup} is more than the {steps} steps of this run: {steps // 10} "
                "instead; OpenCLIP's rate would not reach --lr",
            )
        )


def _places(keys: Keys, notes: Notes, flags: Flags) -> None:
    """The run's name, folder, store and trackers."""
    if "name" in flags:
        keys["run.name"] = re.sub(r"[^\w.-]", "-", str(flags["name"]), flags=re.A).strip("._-")
    name = keys.get("run.name") or "clip"
    logs = str(flags.get("logs", "none"))
    if os.path.basename(logs.rstrip("/")) in ("", ".", ".."):  # a folder's name follows from these
        logs = str(Path(logs).resolve())
    if logs.lower() != "none":
        keys["run.dir"] = f"{logs.rstrip('/') or '/'}{BESIDE}/{name}"
    if "remote-sync" in flags:
        keys["checkpoint.remote"] = f"{str(flags['remote-sync']).rstrip('/')}{BESIDE}/{name}"
    trackers = set(filter(None, str(flags.get("report-to", "")).split(",")))
    unknown = trackers - {*TRACKERS, "all", "none"}
    if unknown:
        notes.append(
            (
                "--report-to",
                f"{CHECK}{', '.join(sorted(unknown))} is not supported: metrics.jsonl has all "
                "values, and log.tensorboard or log.wandb sends them",
            )
        )
    if "report-to" in flags:
        for tracker in TRACKERS:
            keys[f"log.{tracker}"] = bool(trackers & {tracker, "all"})
    if unknown and not trackers & {*TRACKERS, "all"}:
        keys["log.tensorboard"] = True


def _augmentation(keys: Keys, notes: Notes, settings: list[str]) -> None:
    """`--aug-cfg` as OpenCLIP applies it, without keys that have no effect there."""
    options = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        options[name] = as_value(text)
    timm = options.pop("use_timm", False)
    idle = {}  # option -> where OpenCLIP ignores it
    if timm:
        idle["color_jitter_prob"] = idle["gray_scale_prob"] = "with use_timm"
    else:
        idle["ratio"] = "without use_timm"
        if not options.get("color_jitter_prob"):
            idle["color_jitter"] = "without color_jitter_prob"
    for name, value in options.items():
        key = f"data.aug_{name}"
        if value is None:  # so OpenCLIP and timm switch an option off
            continue
        if name in idle:
            notes.append(
                (f"--aug-cfg {name}", f"does nothing there {idle[name]}; {key} would here")
            )
        elif name == "color_jitter":
            keys[key] = color_jitter(value)
        elif name in AUGMENTATIONS:
            keys[key] = list(value) if isinstance(value, tuple) else value
        elif timm:
            text = f"{CHECK}has no counterpart: the images are not augmented by it"
            notes.append((f"--aug-cfg {name}", text))
        else:
            text = "does nothing there without use_timm; left out"
            notes.append((f"--aug-cfg {name}", text))


def color_jitter(value: Any) -> list[float]:
    """Brightness, contrast, saturation and hue: from one number for the first three, from three
    numbers, or from all four. UserError."""
    values = [value] * 3 if isinstance(value, int | float) else value
    if not isinstance(values, tuple | list) or len(values) not in (3, 4):
        raise UserError(
            f"--aug-cfg color_jitter={value} must be a number, or 3 or 4 of them; put the numbers in"
        )
    return [*values, 0.0][:4]
