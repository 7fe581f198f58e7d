"""Weights in and out: those a run starts from, the same at every ZeRO stage and number of ranks, and OpenCLIP's layout.

Nothing is ever unpickled but tensors.
"""

from __future__ import annotations

import json
import os
import pickle
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clip_train.errors import CheckpointError, UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, ModelConfig
from clip_train.protocols import Wanted

WEIGHTS_NAMES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # the first is what an export writes
CONFIG_NAME = "open_clip_config.json"
_SCALARS = ("logit_scale", "logit_bias")  # [1] here, 0-d in OpenCLIP


class WholeState:
    """A FragmentSource over whole parameters in memory: initial weights, or those of an export."""

    def __init__(self, state: Mapping[str, Tensor]):
        self._state = state

    def slots(self) -> set[str]:
        return {"param"}

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """It is all in memory."""

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        if name not in self._state or slot != "param":
            raise CheckpointError(f"these weights hold no {slot} of {name}")
        return self._state[name].flatten()[start : start + numel]


def initial_weights(config: ModelConfig, seed: int) -> WholeState:
    """What `model.init_from` holds, else OpenCLIP's initialisation drawn on the CPU from `seed`.

    Drawn in float32 and on the CPU for every precision, device and ZeRO stage, so that none of them changes
    where a run starts. It holds the whole model in memory until it is dropped.
    """
    if config.init_from is not None:
        return WholeState(load_openclip(config.init_from, config.architecture()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return WholeState(CLIP(config.architecture()).state_dict())


def load_teacher(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> CLIP | None:
    """`model.teacher`, frozen and in eval mode; None where the recipe names none. UserError, CheckpointError."""
    architecture = config.teacher_architecture()
    if config.teacher is None or architecture is None:
        return None
    state = load_openclip(config.teacher, architecture)
    teacher = CLIP(architecture, patch_dropout=0.0)
    teacher.load_state_dict(state)
    teacher.to(device, dtype)
    teacher.logit_scale.data = state["logit_scale"].to(device)  # rounded to bf16 the factor would be off by up to 1.6%
    return teacher.eval().requires_grad_(False)


def check_state(state: dict[str, Tensor], architecture: Architecture, source: str) -> None:
    """CheckpointError, in torch's words, where `state` is not the state of such a model."""
    with torch.device("meta"):
        model = CLIP(architecture)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as e:
        reasons = textwrap.shorten(str(e), 1000)
        raise CheckpointError(
            f"{source} does not fit the model (model.name, model.init_logit_bias): {reasons}"
        ) from None


def export_openclip(state: dict[str, Tensor], architecture: Architecture, folder: str | os.PathLike) -> Path:
    """Write `state` where `open_clip.create_model_and_transforms("local-dir:FOLDER")` finds it.

    Args:
        state: the model's whole state dict, names as in `CLIP`, on any device and in any precision.
        folder: made if need be; a reader sees a file of it whole or not at all.

    Returns:
        The folder.

    Raises:
        CheckpointError: `state` does not fit `architecture`.
    """
    check_state(state, architecture, "the state to export")
    out = {
        # a copy of its own: safetensors refuses tensors that share memory
        name: tensor.detach()
        .to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        .reshape(() if name in _SCALARS else tensor.shape)
        for name, tensor in state.items()
    }
    config = {"model_cfg": architecture.model_cfg(), "preprocess_cfg": architecture.preprocess_cfg()}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights, description = (path / f"{name}.part" for name in (WEIGHTS_NAMES[0], CONFIG_NAME))
    description.write_text(json.dumps(config, indent=2) + "\n")
    save_file(out, weights, metadata={"format": "pt"})
    weights.chmod(description.stat().st_mode)  # as any new file: safetensors makes them for their owner alone
    for part in (weights, description):
        part.replace(part.with_suffix(""))
    return path


def load_openclip(path: str | os.PathLike, architecture: Architecture) -> dict[str, Tensor]:
    """Weights in OpenCLIP's layout -> the state dict for `CLIP(architecture)`, float32 on the CPU.

    Args:
        path: an export folder; a .safetensors; or a .pt / .bin of tensors, OpenCLIP's training checkpoints
            (`{"state_dict": {"module.visual...": ...}}`) included.

    Raises:
        UserError: there is nothing at `path`.
        CheckpointError: the file is damaged, or does not fit the architecture.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = next((each for name in WEIGHTS_NAMES if (each := file / name).is_file()), file)
    if not file.is_file():
        raise UserError(
            f"model.init_from: {path} is no file, nor a folder with {' or '.join(WEIGHTS_NAMES)}; correct the path"
        )
    state = _read(file)
    check_state(state, architecture, str(file))
    return state


def _read(file: Path) -> dict[str, Tensor]:
    try:
        content = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as e:
        raise CheckpointError(
            f"{file} cannot be read as weights (a file that needs code to unpickle is refused): {e}"
        ) from e
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not a state dict")
    state = {}
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{file} is no state dict: {key!r} is a {type(value).__name__}")
        name = key.removeprefix("module.").removeprefix("_orig_mod.")  # DistributedDataParallel, torch.compile
        tensor = value.float().contiguous() if value.is_floating_point() else value
        state[name] = tensor.reshape(1) if name in _SCALARS and tensor.numel() == 1 else tensor
    return state
