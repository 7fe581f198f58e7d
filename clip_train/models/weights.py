"""Read and write weights in OpenCLIP's layout: initial weights of a run, and exports.

A run starts from the same weights at every ZeRO stage and number of ranks. Only tensors are ever
unpickled.
"""

import hashlib
import json
import math
import mmap
import os
import textwrap
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from clip_train.errors import CheckpointError, UserError, missing
from clip_train.models.clip import build_model, parameter_sizes, parse_saved
from clip_train.models.config import AnyArchitecture, Architecture, ModelConfig, OwnModel
from clip_train.models.drawing import Drawn
from clip_train.models.openclip.config import RESIZED, described
from clip_train.storage.local import LocalStorage
from clip_train.storage.tensors import lay_out
from clip_train.task import IMAGE_TEXT, StateRange

WEIGHTS_NAMES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)  # the first is what an export writes
CONFIG_NAME = "open_clip_config.json"
Log = Callable[[str], None]
Read = Callable[[str], Tensor]


class WholeState:
    """A FragmentSource over whole parameters in memory: initial weights, or those of an export."""

    def __init__(self, state: Mapping[str, Tensor]):
        self._state = state

    def slots(self, name: str) -> set[str]:
        return {"param"}

    def whole(self) -> Mapping[str, Tensor]:
        return self._state

    def prepare(self, ranges: Iterable[StateRange]) -> None:
        """It is all in memory."""

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        return self._state[name].flatten()[start : start + numel]


class DrawnState(WholeState):
    """A FragmentSource over a loaded state. Names that it lacks are drawn."""

    def __init__(self, state: Mapping[str, Tensor], drawn: Drawn):
        super().__init__(state)
        self._drawn = drawn
        self._parts: dict[StateRange, Tensor] = {}

    def whole(self) -> Mapping[str, Tensor]:
        return {**self._drawn.whole(), **self._state}

    def prepare(self, ranges: Iterable[StateRange]) -> None:
        """Draw, and keep these parts until they are read."""
        to_draw = [each for each in ranges if each.name not in self._state]

        def take(name: str, tensor: Tensor) -> None:
            for each in to_draw:
                if each.name == name:
                    part = tensor.flatten()[each.start : each.start + each.numel]
                    # pages of its own, free as soon as it is read: the engine's part fills then
                    pages = mmap.mmap(-1, part.nbytes, flags=mmap.MAP_PRIVATE)
                    self._parts[each] = torch.frombuffer(pages, dtype=part.dtype).copy_(part)

        if to_draw and not self._drawn.draw(take):
            self._parts.clear()

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        part = self._parts.pop(StateRange(name, slot, start, numel), None)
        if part is None and name not in self._state:  # not prepared
            self._state = self.whole()
        return super().read(name, slot, start, numel) if part is None else part


def silent(text: str) -> None:
    """A `Log` for ranks that need not repeat rank 0's messages."""


def initial_weights(config: ModelConfig, seed: int, log: Log = silent) -> WholeState:
    """Load `model.init_from`, `init_image_from` and `init_text_from`; draw the rest from `seed`.

    OpenCLIP's initialization is always drawn in float32 on the CPU, so precision, device and ZeRO
    stage do not change the initial weights. Files are mapped into memory, and each tensor is drawn
    by itself: a rank holds the parts that it has prepared.
    """
    architecture, state = config.architecture(), {}
    base = architecture.model_copy(update={"lora": None})
    if config.init_from is not None:
        state = load_openclip(config.init_from, base, log, keep_positions=config.keep_positions)
    for tower, place in (("image", config.init_image_from), ("text", config.init_text_from)):
        if place is not None:
            state |= load_openclip(place, base, log, tower, config.keep_positions)
    if config.init_from is not None and architecture.lora is None:
        return WholeState(state)
    return DrawnState(state, Drawn(partial(build_model, architecture), seed))


def base_digest(config: ModelConfig, seed: int) -> str | None:
    """The digest of the files that `initial_weights` reads; None for a model without adapters."""
    if config.lora is None:
        return None
    places = config.model_dump(
        include={"init_from", "init_image_from", "init_text_from"}, exclude_none=True
    )
    read = [sha256_of(file_at(place, f"model.{key}")) for key, place in places.items()]
    return hashlib.sha256(f"{[seed]} {read}".encode()).hexdigest()[:16]


def load_teacher(
    config: ModelConfig, place: str, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, str]:
    """Load the only `model.teacher`, which is at `place` on this node, frozen and in eval mode.

    Returns it with a digest of its weights and description. UserError, CheckpointError.
    """
    file = file_at(place, "model.teacher")
    architecture = config.teacher_architecture()
    architecture = architecture.model_copy(update=trained_with(file))
    state = load_openclip(file, architecture)
    teacher = build_model(architecture, patch_dropout=0.0)
    teacher.load_state_dict(state)
    teacher.to(device, dtype)
    # rounded to bf16 the factor would be off by up to 1.6%
    teacher.logit_scale.data = state["logit_scale"].to(device, torch.float32)
    named = f"{sha256_of(file)} {architecture.model_dump_json(exclude={'open_clip'})}"
    return teacher.eval().requires_grad_(False), hashlib.sha256(named.encode()).hexdigest()[:16]


def check_state(state: dict[str, Tensor], architecture: AnyArchitecture, source: str) -> None:
    """CheckpointError with torch's message if `state` does not fit such a model."""
    with torch.device("meta"):
        model = build_model(architecture)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as e:
        reasons = textwrap.shorten(str(e), 1000)
        raise CheckpointError(
            f"{source} does not fit the model (model.name, model.init_logit_bias; of a teacher "
            f"model.teacher_name): {reasons}"
        ) from None


def resize_positions(
    state: dict[str, Tensor], architecture: AnyArchitecture, log: Log, keep: int = 0
) -> None:
    """Interpolate positional embeddings of another image size or context in place.

    As OpenCLIP does: the image's grid bicubic with antialias (the class token stays), the text's
    linear. `check_state` rejects what cannot be interpolated, and images of models that OpenCLIP
    builds. keep: as `model.keep_positions`.
    """
    if isinstance(architecture, OwnModel):
        return
    lines = []
    if isinstance(architecture, Architecture):
        lines += resize_grid(state, architecture)
    for name in ("positional_embedding", "text.positional_embedding"):
        old, size = state.get(name), parameter_sizes(architecture).get(name, 0)
        if old is None or old.ndim != 2 or not old.numel() or size % old.shape[1]:
            continue
        context = size // old.shape[1]  # the model may add a token of its own
        if context not in (0, len(old)):
            state[name] = stretched(old.float(), context, keep)
            kept = f", the first {keep} as they are" if keep else ""
            lines.append(f"the text's from {len(old)} to {context} tokens{kept}")
    if lines:
        log(f"positional embeddings interpolated: {', '.join(lines)}")


def stretched(old: Tensor, context: int, keep: int) -> Tensor:
    """[L, width] -> [context, width]. UserError if L is too small to keep this many.

    With `keep` as Long-CLIP does (arXiv 2403.15378): position `keep + j` is at `keep + j (L - keep)
    / (context - keep)` of the old ones, and the last ones follow the line through the last two.
    """
    if keep == 0:
        row = F.interpolate(old.T[None], size=context, mode="linear", align_corners=False)
        return row[0].T.contiguous()
    if keep > len(old) - 2:
        raise UserError(
            f"model.keep_positions ({keep}) must be at most {len(old) - 2}: the weights have "
            f"{len(old)} positions, and two are needed to interpolate; lower it"
        )
    ratio = (len(old) - keep) / (context - keep)
    places = keep + ratio * torch.arange(context - keep, dtype=torch.float64)
    left = places.long().clamp(max=len(old) - 2)
    rest = old[left].lerp(old[left + 1], (places - left).to(old.dtype)[:, None])
    return torch.cat([old[:keep], rest])


def resize_grid(state: dict[str, Tensor], architecture: Architecture) -> list[str]:
    """The image's part of `resize_positions`. Returns what was done."""
    side = architecture.vision_cfg.image_size // architecture.vision_cfg.patch_size
    name = "visual.positional_embedding"
    old = state.get(name)  # [1 + T, width]
    if old is not None and old.ndim == 2 and len(old) > 1 and len(old) != 1 + side**2:
        was = math.isqrt(len(old) - 1)
        if was**2 == len(old) - 1:
            grid = (
                old[1:].float().unflatten(0, (was, was)).permute(2, 0, 1)[None]
            )  # [1, width, was, was]
            grid = F.interpolate(
                grid, size=(side, side), mode="bicubic", antialias=True, align_corners=False
            )
            state[name] = torch.cat([old[:1].float(), grid[0].flatten(1).T])
            return [f"the image's from {was} x {was} to {side} x {side} patches"]
    return []


def load_openclip(
    path: str | os.PathLike,
    architecture: AnyArchitecture,
    log: Log = silent,
    tower: str | None = None,
    keep_positions: int = 0,
) -> dict[str, Tensor]:
    """Load weights in OpenCLIP's layout for `build_model(architecture)`, in the file's precision.

    The file is mapped into memory: parts that nobody reads take none.

    Args:
        path: an export folder; a .safetensors; a .pt / .bin of tensors, also OpenCLIP's training
            checkpoints (`{"state_dict": {"module.visual...": ...}}`).
        log: takes a line where another image size or context is made to fit.
        tower: "image" or "text": only that tower's part of the state. The weights may be such a
            tower alone, with or without `visual.` or `text.` before their names.
        keep_positions: as `model.keep_positions`.

    Raises:
        UserError: `path` does not exist, or its weights have too few positions for
            `keep_positions`.
        CheckpointError: the file is damaged, or does not fit the architecture.
    """
    file = file_at(path, "model.init_from" if tower is None else f"model.init_{tower}_from")
    state = _read(file, architecture, silent if tower == "text" else log)
    source, rest = str(file), {}
    if tower is not None:
        source = f"the {tower} tower of {file}"
        if tower == "image" and not any(name.startswith("visual.") for name in state):
            state = {f"visual.{name}": tensor for name, tensor in state.items()}
        prefix = "text." if not getattr(architecture, "custom_text", False) else ""
        state = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if IMAGE_TEXT.group(name) == tower
        }
        with torch.device("meta"):
            rest = build_model(architecture).state_dict()
        rest = {name: t for name, t in rest.items() if IMAGE_TEXT.group(name) != tower}
    resize_positions(state, architecture, log, keep_positions)
    check_state(rest | state, architecture, source)
    return state


def file_at(path: str | os.PathLike, key: str) -> Path:
    """The weights file at `path`, which is a file or a folder. UserError."""
    file = Path(path).expanduser()
    if file.is_dir():
        names = [name for name in WEIGHTS_NAMES if (file / name).is_file()]
        file = file / names[0] if names else file
    if not file.is_file():
        what = f"{key}: {path} is neither a file nor a folder with {' or '.join(WEIGHTS_NAMES)}"
        raise missing(file, what, "correct the path")
    return file


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        for data in iter(lambda: f.read(1 << 22), b""):
            digest.update(data)
    return digest.hexdigest()


def _read(file: Path, architecture: AnyArchitecture, log: Log) -> dict[str, Tensor]:
    """Return tensors by OpenCLIP's names. CheckpointError; UserError: see below."""
    try:
        safe = file.suffix == ".safetensors"
        mapped = zipfile.is_zipfile(file)  # unlike torch's format of before 1.6
        content = (
            load_file(file) if safe else torch.load(file, "cpu", weights_only=True, mmap=mapped)
        )
    except Exception as e:  # a damaged file may raise anything
        raise CheckpointError(
            f"{file} cannot be read as weights (a file that needs code to unpickle is refused; "
            "where you trust it, save its state_dict alone; OpenAI's TorchScript archives are on "
            f"the hub: model.init_from=open_clip:ViT-B-32-quickgelu/openai): {e}"
        ) from e
    if isinstance(content, dict):
        content = content.get("state_dict", content)
    named = content if isinstance(content, dict) else {"its content": content}
    state = {}
    for key, value in named.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{file} is not a state dict: {key!r} is a {type(value).__name__}; "
                "save the model's state_dict alone"
            )
        # DistributedDataParallel's and torch.compile's
        name = key.removeprefix("module.").removeprefix("_orig_mod.")
        tensor = value.contiguous()
        if name in IMAGE_TEXT.scalars and tensor.numel() == 1:
            tensor = tensor.reshape(1)
        state[name] = tensor
    _check_description(file, architecture, log)
    return state


def trained_with(file: Path) -> dict[str, Any]:
    """`quick_gelu`, `image_mean` and `image_std` from the description beside the weights; {}
    without one. Names and shapes of the weights do not reveal these.
    """
    try:
        keys = described(json.loads(file.with_name(CONFIG_NAME).read_text()))
        pixels: dict[str, Any] = {
            key: tuple(map(float, np.broadcast_to(keys[key], 3)))
            for key in ("image_mean", "image_std")
            if key in keys
        }
        return {"quick_gelu": bool(keys.get("quick_gelu", False)), **pixels}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _check_description(file: Path, architecture: AnyArchitecture, log: Log) -> None:
    """UserError for another activation function: names and shapes would match, but the model would
    be worse.

    Other pixels are only logged: `model.name` may be a JSON with the right ones.
    """
    facts = trained_with(file)
    quick_gelu = facts.get("quick_gelu", architecture.quick_gelu)
    if quick_gelu != architecture.quick_gelu:
        raise UserError(
            f"{file} was trained with {'QuickGELU' if quick_gelu else 'GELU'}, the recipe's model "
            f"has the other: set model.name to the preset {'with' if quick_gelu else 'without'} "
            f'-quickgelu in its name, or to a JSON with "quick_gelu": {json.dumps(quick_gelu)}; of '
            "a teacher model.teacher_name"
        )
    if architecture.model_copy(update=facts) != architecture:
        log(
            f"note: {file} was trained with {facts}, the model's pixels are of mean "
            f"{architecture.image_mean} and deviation {architecture.image_std}; a JSON as "
            "model.name can have the former"
        )


# -- out


def export_openclip(
    state: dict[str, Tensor],
    architecture: AnyArchitecture,
    folder: str | os.PathLike,
    read: Read | None = None,
) -> Path:
    """Write `state` where `open_clip.create_model_and_transforms("local-dir:FOLDER")` finds it.

    Args:
        state: the model's whole state dict, names as in `CLIP`, on any device and in any precision.
        folder: made if need be; a reader sees a file of it whole or not at all.
        read: gives a tensor when it is written; `state` then needs shapes and types alone.

    Returns:
        The folder.

    Raises:
        CheckpointError: `state` does not fit `architecture`.
    """
    check_state(state, architecture, "the state to export")
    out = {
        name: t.reshape(() if name in IMAGE_TEXT.scalars else t.shape) for name, t in state.items()
    }
    path = Path(folder)
    weights = save_weights(out, path, WEIGHTS_NAMES[0], read)
    description = {
        "model_cfg": architecture.model_cfg(),
        "preprocess_cfg": {  # as images are resized here
            "mean": list(architecture.image_mean),
            "std": list(architecture.image_std),
            "interpolation": RESIZED[0],
            "resize_mode": RESIZED[1],
        },
        # ours: whoever fetches it from a URL compares
        "sha256": {WEIGHTS_NAMES[0]: sha256_of(weights)},
    }
    save_json(path, CONFIG_NAME, description)
    return path


def export_saved(
    state: dict[str, Tensor],
    description: Mapping[str, Any],
    folder: str | os.PathLike,
    read: Read | None = None,
) -> Path:
    """`export_openclip` of the model that a checkpoint describes; of one of the user's own, whose
    code is not imported, the state dict alone, under the same name."""
    if description.get("own") is None:
        return export_openclip(state, parse_saved(description), folder, read)
    return save_weights(state, Path(folder), WEIGHTS_NAMES[0], read).parent


def as_stored(tensor: Tensor, device: str = "cpu") -> Tensor:
    """The tensor on that device: a float as fp32, an integer as it is."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device, dtype).contiguous()


def save_weights(
    state: dict[str, Tensor], folder: Path, name: str, read: Read | None = None
) -> Path:
    """A .safetensors: floats as fp32, integers as they are. The folder is made if need be. `read`:
    see `export_openclip`."""
    read, target = read or state.__getitem__, LocalStorage(folder)
    plan = lay_out({key: as_stored(t, "meta") for key, t in state.items()}, {"format": "pt"})
    with target.writing(name) as part, part.open("wb") as file:
        file.write(plan.head)
        for key in plan.fragments["tensors"]:  # in the file's order
            file.write(as_stored(read(key)).numpy().data)
    return target.path(name)


def save_json(folder: Path, name: str, content: Any) -> None:
    LocalStorage(folder).put_bytes(name, (json.dumps(content, indent=2) + "\n").encode())
