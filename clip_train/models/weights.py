"""The weights that a run starts with, and exports in OpenCLIP's layout.

A run starts from the same weights at every ZeRO stage and number of ranks. Files are read by
`clip_train.models.loading`.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clip_train.models.clip import build_model, parse_saved
from clip_train.models.config import AnyArchitecture, ModelConfig
from clip_train.models.drawing import Drawn
from clip_train.models.files import CONFIG_NAME, WEIGHTS_NAMES, sha256_of
from clip_train.models.layouts import State
from clip_train.models.loading import (
    Log,
    check_state,
    file_at,
    load_openclip,
    resized_as,
    silent,
    trained_with,
)
from clip_train.models.openclip.config import OpenCLIPArchitecture
from clip_train.resizing import AS_CLIP, RESIZED, Resize
from clip_train.storage.local import LocalStorage
from clip_train.storage.tensors import lay_out
from clip_train.task import IMAGE_TEXT, StateRange

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


def initial_weights(config: ModelConfig, seed: int, log: Log = silent) -> WholeState:
    """Load `model.init_from`, `init_image_from` and `init_text_from`; draw the rest from `seed`.

    OpenCLIP's initialization is always drawn in float32 on the CPU, so precision, device and ZeRO
    stage do not change the initial weights. Files are mapped into memory, and each tensor is drawn
    by itself: a rank holds the parts that it has prepared.
    """
    architecture, state = config.architecture(), {}
    base = architecture.model_copy(update={"lora": None})
    if config.init_from is not None:
        state = load_openclip(
            config.init_from, base, log, keep_positions=config.keep_positions, seed=seed
        )
    for tower, place in (("image", config.init_image_from), ("text", config.init_text_from)):
        if place is not None:
            state |= load_openclip(place, base, log, tower, config.keep_positions, seed=seed)
    if config.init_from is not None and architecture.lora is None:
        return WholeState(state)
    return DrawnState(state, Drawn(partial(build_model, architecture), seed))


def resize_of(config: ModelConfig, log: Log = silent) -> dict[str, Any]:
    """How the weights that the image tower starts from were trained; {}: they do not say."""
    place = config.init_image_from or config.init_from
    return {} if place is None else resized_as(file_at(place, "model.init_from"), log)


def base_digest(config: ModelConfig, seed: int) -> str | None:
    """The digest of the files that `initial_weights` reads; None for a model without adapters."""
    if config.lora is None:
        return None
    places = config.model_dump(
        include={"init_from", "init_image_from", "init_text_from"}, exclude_none=True
    )
    read = [sha256_of(file_at(place, f"model.{key}")) for key, place in places.items()]
    return hashlib.sha256(f"{[seed]} {read}".encode()).hexdigest()[:16]


def teacher_state(config: ModelConfig, file: Path) -> tuple[AnyArchitecture, State]:
    """The only teacher's architecture, as its file describes it, and its weights. UserError,
    CheckpointError."""
    architecture = config.teacher_architecture()
    architecture = architecture.model_copy(update=trained_with(file))
    return architecture, load_openclip(file, architecture, name_key="model.teacher_name")


def load_teacher(
    config: ModelConfig, place: str, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, str]:
    """Load the only `model.teacher`, which is at `place` on this node, frozen and in eval mode.

    Returns it with a digest of its weights and description. UserError, CheckpointError.
    """
    file = file_at(place, "model.teacher")
    architecture, state = teacher_state(config, file)
    teacher = build_model(architecture, patch_dropout=0.0)
    teacher.load_state_dict(state)
    teacher.to(device, dtype)
    # rounded to bf16 the factor would be off by up to 1.6%
    teacher.logit_scale.data = state["logit_scale"].to(device, torch.float32)
    ignored = {"open_clip", "image_tokens"}
    if not isinstance(architecture, OpenCLIPArchitecture):
        ignored |= RESIZED.keys()  # as in the checkpoints of earlier versions
    named = f"{sha256_of(file)} {architecture.model_dump_json(exclude=ignored)}"
    return teacher.eval().requires_grad_(False), hashlib.sha256(named.encode()).hexdigest()[:16]


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
    if isinstance(architecture, OpenCLIPArchitecture):
        from clip_train.models.openclip.model import exported_cfg

        own_keys, model_cfg = architecture.own_keys(), exported_cfg(architecture)
    else:
        own_keys, model_cfg = {}, architecture.model_cfg()
    description = {
        "model_cfg": model_cfg,
        "preprocess_cfg": {
            "mean": list(architecture.image_mean),
            "std": list(architecture.image_std),
            "interpolation": architecture.interpolation,
            **resized_keys(architecture.resize),
        },
        # ours, which OpenCLIP does not read
        **({"clip_train": own_keys} if own_keys else {}),
        # whoever fetches it from a URL compares
        "sha256": {WEIGHTS_NAMES[0]: sha256_of(weights)},
    }
    save_json(path, CONFIG_NAME, description)
    return path


def resized_keys(resize: Resize) -> dict[str, Any]:
    """`preprocess_cfg` of the squares that OpenCLIP makes, and at native resolution our own key
    "image_tokens", which it does not read."""
    if resize.image_tokens is None:
        return {"resize_mode": resize.resize_mode}
    return {"resize_mode": AS_CLIP.resize_mode, "image_tokens": resize.image_tokens}


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
