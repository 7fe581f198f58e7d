"""The only loader of weights: a file of any known layout becomes a state dict for a model.

    file -> state dict -> wrappers removed -> layout recognised -> repaired -> compared -> resized

Repairs are those of OpenCLIP's `load_checkpoint`; each is logged. Only tensors are ever unpickled.
Where files come from: `clip_train.models.hub`, `clip_train.recipe.weights`.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from clip_train.errors import CheckpointError, UserError, missing
from clip_train.models import layouts
from clip_train.models.clip import state_shapes
from clip_train.models.config import AnyArchitecture, KeepPositions, OwnModel
from clip_train.models.files import CONFIG_NAME, FOLDER_NAMES, read_object
from clip_train.models.layouts import State
from clip_train.models.openclip.config import described
from clip_train.models.positions import IMAGE_POSITIONS, TEXT_POSITIONS, resize_positions
from clip_train.models.transformers import preprocess_cfg, preprocessor
from clip_train.resizing import RESIZED
from clip_train.settings import clipped
from clip_train.task import IMAGE_TEXT

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz", ".npy")
SHOWN = 3  # names of each kind in a message
Log = Callable[[str], None]
Shapes = Mapping[str, tuple[int, ...]]

# Folders that hold weights in a form that is not read: a file in them, the form, and the remedy.
# "{place}" is the folder.
OTHER_FOLDERS = (
    (
        ".metadata",
        "a sharded checkpoint of torch.distributed.checkpoint, such as OpenCLIP's --fsdp-checkpoint "
        "sharded writes",
        "its description is a pickle: where you trust it, make one file of it, python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch {place} weights.pt, and give "
        "weights.pt",
    ),
    (
        "zero_to_fp32.py",
        "a DeepSpeed checkpoint",
        "make one file of it, python {place}/zero_to_fp32.py {place} weights, and give the file in "
        "that folder",
    ),
    (
        "model.safetensors.index.json",
        "a model of transformers in several files",
        "save it in one: model.save_pretrained(..., max_shard_size='100GB')",
    ),
    (
        "adapter_config.json",
        "a folder of peft adapters",
        "merge them into their model (merge_and_unload), and give that",
    ),
)  # fmt: skip
# What to do with layouts that are recognised and not loaded.
REMEDIES = {
    layouts.TRANSFORMERS_SIGLIP: (
        "give its whole folder, whose config.json names the model, or OpenCLIP's name of it{same}"
    ),
    layouts.TRANSFORMERS_CHINESE: (
        "give its whole folder as model.init_from, whose config.json names the model, and leave "
        "model.name out"
    ),
    layouts.MOBILE_CLIP: "give OpenCLIP's file of the same model: hf-hub:apple/MobileCLIP-...",
    layouts.OWN_PIECE: "give the run's folder, or that of the checkpoint",
    layouts.PEFT: "merge the adapters into their model, and give that",
    layouts.UNKNOWN: "give a state dict with OpenCLIP's names (docs/weights.md)",
}


def silent(text: str) -> None:
    """A `Log` for ranks that need not repeat rank 0's messages."""


def load_openclip(
    path: str | os.PathLike,
    architecture: AnyArchitecture,
    log: Log = silent,
    tower: str | None = None,
    keep_positions: KeepPositions = 0,
    name_key: str = "model.name",
    seed: int = 0,
) -> State:
    """Load weights for `build_model(architecture)`, in the file's precision.

    The file is mapped into memory: parts that nobody reads take none.

    Args:
        path: an export folder, of OpenCLIP or transformers; a .safetensors; a .pt / .bin of
            tensors, also training checkpoints (`{"state_dict": {"module.visual...": ...}}`).
        log: takes a line for each repair.
        tower: "image" or "text": only that tower's part of the state. The weights may be such a
            tower alone, with or without `visual.` or `text.` before their names.
        keep_positions: as `model.keep_positions`.
        name_key: the key that names the architecture, for messages.
        seed: of positions that `keep_positions` draws.

    Raises:
        UserError: `path` does not exist; its weights do not fit the architecture, or have too few
            or too many positions for `keep_positions`.
        CheckpointError: the file is damaged, or holds no weights.
    """
    file = file_at(path, "model.init_from" if tower is None else f"model.init_{tower}_from")
    stored = read_state_dict(file)
    check_description(file, architecture, silent if tower == "text" else log, name_key)
    source = str(file) if tower is None else f"the {tower} tower of {file}"
    adapted = adapt(
        stored.state,
        architecture,
        source,
        tower=tower,
        keep_positions=keep_positions,
        name_key=name_key,
        seed=seed,
    )
    notes = [*stored.notes, *adapted.repairs]
    openai = adapted.layout == layouts.OPENAI
    if openai and not architecture.quick_gelu and not trained_with(file):
        notes.append(
            "note: OpenAI's models use QuickGELU, and this model uses GELU: if these are OpenAI's "
            f"weights, set {name_key} to the preset with -quickgelu in its name"
        )
    for note in notes:
        log(f"{source} ({adapted.layout}): {note}")
    return adapted.state


# -- files


def file_at(path: str | os.PathLike, key: str) -> Path:
    """The weights file at `path`, which is a file or a folder. UserError."""
    file = Path(path).expanduser()
    if file.is_dir():
        names = [name for name in FOLDER_NAMES if (file / name).is_file()]
        if not names:
            other = other_folder(lambda name: (file / name).exists(), str(path))
            if other is not None:
                raise UserError(f"{key} ({path}) is {other}")
        file = file / names[0] if names else file
    if not file.is_file():
        what = (
            f"{key}: {path} is neither a file nor a folder with {', '.join(FOLDER_NAMES[:-1])} or "
            f"{FOLDER_NAMES[-1]}"
        )
        raise missing(file, what, "correct the path")
    return file


def other_folder(exists: Callable[[str], bool], place: str) -> str | None:
    """What a folder is that holds weights in a form that is not read, with the remedy; or None.

    exists: whether the folder has a file of this name.
    """
    for name, what, remedy in OTHER_FOLDERS:
        if exists(name):
            return f"{what} ({name}); {remedy.format(place=place)}"
    return None


@dataclass(frozen=True)
class Stored:
    """The state dict of a file, with the file's names."""

    state: State
    notes: list[str]  # for the log


def read_state_dict(file: Path) -> Stored:
    """CheckpointError if the file cannot be read, or holds something else than tensors."""
    if file.suffix in (".npz", ".npy"):
        raise CheckpointError(
            f"{file} cannot be read as weights: it has big_vision's layout (numpy); OpenCLIP's file "
            "of the same model can: model.init_from=hf-hub:timm/..."
        )
    try:
        mapped = zipfile.is_zipfile(file)  # unlike torch's format of before 1.6
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read as weights: {e}") from e
    if mapped and _is_torchscript(file):
        raise CheckpointError(
            f"{file} cannot be read as weights: it is a TorchScript archive, which holds code. "
            "OpenAI's are on the hub: model.init_from=open_clip:ViT-B-32-quickgelu/openai"
        )
    try:
        if file.suffix == ".safetensors":
            content = load_file(file)
        else:
            content = torch.load(file, "cpu", weights_only=True, mmap=mapped)
    except Exception as e:  # a damaged file may raise anything
        raise CheckpointError(
            f"{file} cannot be read as weights (a file that needs code to unpickle is refused; "
            f"where you trust it, save its state_dict alone): {e}"
        ) from e
    notes: list[str] = []
    content = _without_containers(content, notes)
    named = content if isinstance(content, Mapping) else {"its content": content}
    for key, value in named.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{file} is not a state dict: {clipped(repr(key))} is a {type(value).__name__}; "
                "save the model's state_dict alone"
            )
    if not named:
        raise CheckpointError(f"{file} holds no tensors; save the model's state_dict")
    return Stored({str(key): tensor.contiguous() for key, tensor in named.items()}, notes)


def _is_torchscript(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False  # `torch.load` says what is wrong


def _without_containers(content: Any, notes: list[str]) -> Any:
    """The state dict inside `{"state_dict": ...}` and the like."""
    while isinstance(content, Mapping):
        inner = next(
            (key for key in layouts.CONTAINERS if isinstance(content.get(key), Mapping)), None
        )
        if inner is None:
            break
        if inner != "state_dict":
            notes.append(f"took the state dict under {inner!r}")
        for key in layouts.AVERAGED:
            if content.get(key) is not None:
                notes.append(f"the moving average beside it ({key!r}) is not used")
        content = content[inner]
    return content


# -- descriptions beside the weights


def trained_with(file: Path) -> dict[str, Any]:
    """`quick_gelu`, `image_mean` and `image_std` from the description beside the weights; {}
    without one. Names and shapes of the weights do not reveal these.
    """
    try:
        if (file.parent / CONFIG_NAME).is_file():
            keys = described(json.loads(file.with_name(CONFIG_NAME).read_text()))
            quick_gelu = bool(keys.get("quick_gelu", False))
        else:
            config, keys = read_object(file.with_name("config.json")), preprocessor(file.parent)
            if config.get("model_type") not in ("clip", "siglip", "siglip2", "chinese_clip"):
                return {}
            # the default of CLIPModel and ChineseCLIPModel is "quick_gelu"
            activation = (config.get("vision_config") or {}).get("hidden_act", "quick_gelu")
            quick_gelu = (
                config["model_type"] in ("clip", "chinese_clip") and activation == "quick_gelu"
            )
        pixels: dict[str, Any] = {
            key: tuple(map(float, np.broadcast_to(keys[key], 3)))
            for key in ("image_mean", "image_std")
            if key in keys
        }
        return {"quick_gelu": quick_gelu, **pixels}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def resized_as(file: Path, log: Log = silent) -> dict[str, Any]:
    """`resize_mode` and `interpolation` from the description beside the weights; {} without, and,
    with a line in the log, where it says what is not computed here."""
    try:
        if (file.parent / CONFIG_NAME).is_file():
            keys = described(json.loads(file.with_name(CONFIG_NAME).read_text()))
        else:
            keys = preprocess_cfg(preprocessor(file.parent), str(file.parent))
        return {key: keys[key] for key in RESIZED if key in keys}
    except UserError as e:
        reason = str(e).removeprefix("model.name: ")
        log(
            f"note: {file} cannot say how images are resized, model.name or data.resize does: {reason}"
        )
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    return {}


def check_description(
    file: Path, architecture: AnyArchitecture, log: Log, name_key: str = "model.name"
) -> None:
    """UserError for another activation function: names and shapes would match, but the model would
    be worse.

    Other pixels are only logged: `model.name` may be a JSON with the right ones.
    """
    if isinstance(architecture, OwnModel):  # whose activations are its own
        return
    facts = trained_with(file)
    quick_gelu = facts.get("quick_gelu", architecture.quick_gelu)
    if quick_gelu != architecture.quick_gelu:
        raise UserError(
            f"{file} was trained with {'QuickGELU' if quick_gelu else 'GELU'}, the recipe's model "
            f"has the other: set {name_key} to the preset {'with' if quick_gelu else 'without'} "
            f'-quickgelu in its name, or to a JSON with "quick_gelu": {json.dumps(quick_gelu)}'
        )
    if architecture.model_copy(update=facts) != architecture:
        log(
            f"note: {file} was trained with {facts}, the model's pixels are of mean "
            f"{architecture.image_mean} and deviation {architecture.image_std}; a JSON as "
            f"{name_key} can have the former"
        )


# -- repairs


@dataclass
class Fitted:
    """A state dict with the model's names, as far as they are known."""

    state: State
    layout: str
    repairs: list[str] = field(default_factory=list)


def adapt(
    state: State,
    architecture: AnyArchitecture,
    source: str,
    tower: str | None = None,
    keep_positions: KeepPositions = 0,
    name_key: str = "model.name",
    seed: int = 0,
) -> Fitted:
    """Rename, repair and resize a state dict until it fits the model. Tensors may be on `meta`.

    source: for messages; the other arguments are those of `load_openclip`. UserError if it does not
    fit.
    """
    expected: Shapes = state_shapes(architecture)
    fitted = fit(state, expected, tower)
    if tower is not None:
        expected = {n: shape for n, shape in expected.items() if IMAGE_TEXT.group(n) == tower}
    differences = compare(fitted.state, expected)
    # positions are resized only if everything else fits: else another model is the cause
    if differences.only_positions:
        fitted.repairs += resize_positions(
            fitted.state, architecture, expected, keep_positions, seed
        )
        differences = compare(fitted.state, expected)
    if differences:
        raise UserError(describe_misfit(source, fitted, state, differences, name_key))
    return fitted


def fit(state: State, expected: Shapes, tower: str | None) -> Fitted:
    """Rename and repair a state dict for a model with these names. Shapes are not compared.

    tower: take only this tower's parameters.
    """
    renamed = layouts.without_wrappers(state, expected)
    fitted = Fitted(renamed.state, layouts.recognise(renamed.state))
    if renamed.wrappers:
        fitted.repairs.append(f"removed {', '.join(renamed.wrappers)} from the names")
    if fitted.state.keys() != expected.keys():
        _rename(fitted, expected, tower)
        _drop_computed_buffers(fitted, expected)
    for name in IMAGE_TEXT.scalars:  # [] elsewhere, [1] here
        if name in fitted.state and fitted.state[name].numel() == 1:
            fitted.state[name] = fitted.state[name].reshape(1)
    if tower is not None:
        fitted.state = {n: t for n, t in fitted.state.items() if IMAGE_TEXT.group(n) == tower}
        return fitted
    _repair_bias(fitted, expected)
    counters = [n for n in expected if n.endswith("num_batches_tracked") and n not in fitted.state]
    if counters:
        fitted.state |= {name: torch.zeros((), dtype=torch.int64) for name in counters}
        fitted.repairs.append(f"set {len(counters)} missing num_batches_tracked to 0")
    return fitted


def _rename(fitted: Fitted, expected: Shapes, tower: str | None) -> None:
    """To OpenCLIP's names, with the text tower where the model has it."""
    if fitted.layout == layouts.TRANSFORMERS_CLIP and not _has_own(expected):
        fitted.state = layouts.from_transformers(fitted.state)
        fitted.repairs.append("renamed parameters of transformers' CLIPModel to OpenCLIP's names")
    if fitted.layout == layouts.TRANSFORMERS_SIGLIP and any(
        name.startswith("visual.trunk.attn_pool.") for name in expected
    ):
        fitted.state = layouts.siglip_from_transformers(fitted.state)
        fitted.repairs.append("renamed parameters of transformers' SiglipModel to OpenCLIP's names")
    has_squares = f"{layouts.TRUNK}patch_embed.proj.weight" in fitted.state
    if has_squares and f"{layouts.TRUNK}embeds.proj.weight" in expected:
        fitted.state = layouts.to_naflex(fitted.state)
        fitted.repairs.append("renamed the image tower's patches and positions to NaFlexVit's")
    if fitted.layout == layouts.TRANSFORMERS_CHINESE and not _has_own(expected):
        fitted.state = layouts.chinese_from_transformers(fitted.state)
        fitted.repairs.append(
            "renamed parameters of transformers' ChineseCLIPModel to OpenCLIP's names"
        )
    if fitted.layout == layouts.LONG_CLIP:
        _join_long_clip(fitted)
    if tower == "image" and not any(name.startswith("visual.") for name in fitted.state):
        fitted.state = {
            f"{_image_prefix(fitted.state, expected)}{name}": tensor
            for name, tensor in fitted.state.items()
        }
    fitted.state, moved = layouts.with_text_tower_at(fitted.state, expected)
    if moved is not None and tower != "image":
        fitted.repairs.append(moved)


def _has_own(expected: Shapes) -> bool:
    """Whether the model itself has transformers' names: one of the user's own."""
    return any(name.startswith(("vision_model.", "text_model.")) for name in expected)


def _image_prefix(state: State, expected: Shapes) -> str:
    """What the model has before the names of an image tower alone."""
    trunk = "visual.trunk."
    return trunk if any(f"{trunk}{name}" in expected for name in state) else "visual."


def _join_long_clip(fitted: Fitted) -> None:
    """Long-CLIP reads its first positions from one parameter, and the rest from another."""
    kept, rest = fitted.state["positional_embedding"], fitted.state[layouts.LONG_CLIP_POSITIONS]
    if kept.shape != rest.shape:
        return
    del fitted.state[layouts.LONG_CLIP_POSITIONS]
    first = layouts.LONG_CLIP_KEPT
    fitted.state["positional_embedding"] = torch.cat([kept[:first], rest[first:]])
    fitted.repairs.append(
        f"took positions from {first} on from {layouts.LONG_CLIP_POSITIONS}, as Long-CLIP does"
    )


def _drop_computed_buffers(fitted: Fitted, expected: Shapes) -> None:
    computed = [
        name
        for name in fitted.state
        if name not in expected
        and (name in layouts.OPENAI_BUFFERS or name.rpartition(".")[2] in layouts.COMPUTED_BUFFERS)
    ]
    if computed:
        fitted.state = {name: t for name, t in fitted.state.items() if name not in computed}
        fitted.repairs.append(f"dropped {', '.join(computed)}, which the model computes itself")


def _repair_bias(fitted: Fitted, expected: Shapes) -> None:
    """The bias of the logits, which models for the sigmoid loss have, and others do not."""
    name, state = "logit_bias", fitted.state
    if name in expected and name not in state and "logit_scale" in state:
        state[name] = torch.zeros_like(state["logit_scale"])
        fitted.repairs.append(
            "the weights have no logit_bias: it starts at 0, as in OpenCLIP "
            "(model.init_logit_bias is for random weights)"
        )
    elif name in state and name not in expected:
        value = state.pop(name)
        known = value.numel() == 1 and not value.is_meta
        shown = f" ({value.item():.4g})" if known else ""
        fitted.repairs.append(
            f"dropped logit_bias{shown}: the model has none (model.init_logit_bias is null), and "
            "only the sigmoid loss uses one"
        )


# -- comparing with the model


@dataclass(frozen=True)
class Differences:
    """Between a state dict and the model's names and shapes."""

    shapes: dict[str, tuple[list[int], list[int]]]  # of the weights, of the model
    missing: list[str]
    unexpected: list[str]

    def __bool__(self) -> bool:
        return bool(self.shapes or self.missing or self.unexpected)

    @property
    def only_positions(self) -> bool:
        """Positional embeddings alone differ, and may be interpolated."""
        positions = all(name in (*IMAGE_POSITIONS, *TEXT_POSITIONS) for name in self.shapes)
        return positions and not self.missing and not self.unexpected

    def __str__(self) -> str:
        parts = []
        if self.shapes:
            lines = [
                f"{name}: {found}, the model's {wanted}"
                for name, (found, wanted) in self.shapes.items()
            ]
            parts.append(f"shapes differ ({first_of(lines, '; ')})")
        if self.missing:
            parts.append(f"missing: {first_of(self.missing)}")
        if self.unexpected:
            parts.append(f"not in the model: {first_of(self.unexpected)}")
        return "; ".join(parts)


def first_of(lines: list[str], separator: str = ", ") -> str:
    more = f" and {len(lines) - SHOWN:,} more" if len(lines) > SHOWN else ""
    return separator.join(map(clipped, lines[:SHOWN])) + more


def compare(state: Mapping[str, Tensor], expected: Shapes) -> Differences:
    return Differences(
        {
            name: (list(tensor.shape), list(expected[name]))
            for name, tensor in state.items()
            if name in expected and tuple(tensor.shape) != tuple(expected[name])
        },
        [name for name in expected if name not in state],
        [name for name in state if name not in expected],
    )


def check_state(state: Mapping[str, Tensor], architecture: AnyArchitecture, source: str) -> None:
    """CheckpointError if `state` does not fit such a model by every name and shape."""
    differences = compare(state, state_shapes(architecture))
    if differences:
        raise CheckpointError(f"{source} does not fit the model: {differences}")


def describe_misfit(
    source: str,
    fitted: Fitted,
    stored: State,
    differences: Differences,
    name_key: str,
) -> str:
    """The message: the recognised layout, what differs, and the model that would fit."""
    layout = fitted.layout
    names = layouts.fitting_names(layouts.without_wrappers(stored, ()).state)
    text = f"{source} ({layout}) does not fit the model ({name_key}): {differences}"
    if layout in REMEDIES:
        same = f", and {name_key}={names[0]}" if names else ""
        return f"{text}; {REMEDIES[layout].format(same=same)}"
    if names:
        return f"{text}. Its sizes are those of {' or '.join(names)}; set {name_key}={names[0]}"
    sizes = layouts.sizes_of(fitted.state)
    if sizes and differences.shapes:
        shown = ", ".join(f"{key} {size}" for key, size in sizes.items())
        return (
            f"{text}. No preset has its sizes ({shown}); set {name_key} to a JSON that has them, such "
            f"as the {CONFIG_NAME} beside an export"
        )
    return f"{text}; give weights of this model, or set {name_key} to the weights' own"


def non_finite(state: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that hold NaN or infinity. Reads them all."""
    return [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]


def names_of_models(file: Path) -> list[str]:
    """The values of `model.name` that fit the sizes, and the description, of a file of weights."""
    state = layouts.without_wrappers(read_state_dict(file).state, ()).state
    return layouts.fitting_names(state, trained_with(file).get("quick_gelu"))
