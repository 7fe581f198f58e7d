"""Weights in and out, in OpenCLIP's layout. Nothing is ever unpickled but tensors."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clip_train.errors import CheckpointError, UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, parse_architecture

WEIGHTS_NAME = "open_clip_model.safetensors"
CONFIG_NAME = "open_clip_config.json"
_SCALARS = ("logit_scale", "logit_bias")  # [1] here, 0-d in OpenCLIP


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every name in the model's state dict, with its shape."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in CLIP(architecture).state_dict().items()}


def check_state(state: dict[str, Tensor], architecture: Architecture, source: str) -> None:
    """CheckpointError, naming a few keys, where `state` is not the state of such a model."""
    expected = expected_shapes(architecture)
    problems = [
        _list_some("missing", sorted(expected.keys() - state.keys())),
        _list_some("unexpected", sorted(state.keys() - expected.keys())),
        _list_some(
            "of another shape",
            [
                f"{name} {list(state[name].shape)} instead of {list(shape)}"
                for name, shape in expected.items()
                if name in state and tuple(state[name].shape) != shape
            ],
        ),
    ]
    if any(problems):
        raise CheckpointError(
            f"{source} does not fit the model (model.name, model.init_logit_bias): "
            + "; ".join(p for p in problems if p)
        )


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
        name: tensor.detach().to("cpu", torch.float32, copy=True).reshape(() if name in _SCALARS else tensor.shape)
        for name, tensor in state.items()
    }
    config = {"model_cfg": architecture.model_cfg(), "preprocess_cfg": architecture.preprocess_cfg()}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    part = path / (WEIGHTS_NAME + ".part")
    save_file(out, part, metadata={"format": "pt"})
    os.umask(mask := os.umask(0))
    part.chmod(0o666 & ~mask)  # as any new file: safetensors makes them for their owner alone
    os.replace(part, path / WEIGHTS_NAME)
    part = path / (CONFIG_NAME + ".part")
    part.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(part, path / CONFIG_NAME)
    return path


def load_openclip(
    path: str | os.PathLike, architecture: Architecture | None = None
) -> tuple[dict[str, Tensor], Architecture | None]:
    """Weights in OpenCLIP's layout -> (state dict for `CLIP`, float32 on the CPU; architecture if known).

    Args:
        path: an export folder; a .safetensors; or a .pt / .bin of tensors, OpenCLIP's training checkpoints
            (`{"state_dict": {"module.visual...": ...}}`) included.
        architecture: the model that they are for; without it, a folder's own is checked.

    Raises:
        UserError: there is nothing at `path`, or its config asks for what this model does not implement.
        CheckpointError: the file is damaged, or does not fit the architecture.
    """
    source = Path(path).expanduser()
    found = None
    weights = source
    if source.is_dir():
        names = (WEIGHTS_NAME, "open_clip_pytorch_model.bin")
        candidates = [source / name for name in names if (source / name).is_file()]
        if not candidates:
            raise UserError(f"model.init_from: {path} holds neither {names[0]} nor {names[1]}")
        weights = candidates[0]
        if (source / CONFIG_NAME).is_file():
            try:
                content = json.loads((source / CONFIG_NAME).read_text())
            except ValueError as e:
                raise CheckpointError(f"{source / CONFIG_NAME} is not JSON: {e}") from e
            found = parse_architecture(content, str(source / CONFIG_NAME))
    elif not source.is_file():
        raise UserError(f"model.init_from: there is no file or folder {path}")
    state = _rename(_read(weights), str(weights))
    target = architecture or found
    if target is not None:
        check_state(state, target, str(weights))
    return state, found


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as e:
        raise CheckpointError(
            f"{file} cannot be read as weights (a file that needs code to unpickle is refused): {e}"
        ) from e
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not a state dict")
    return content


def _rename(content: dict[str, Any], source: str) -> dict[str, Tensor]:
    state = {}
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{source} is no state dict: {key!r} is a {type(value).__name__}")
        name = key
        for wrapper in ("module.", "_orig_mod."):  # DistributedDataParallel, torch.compile
            name = name.removeprefix(wrapper)
        tensor = value.float().contiguous() if value.is_floating_point() else value
        state[name] = tensor.reshape(1) if name in _SCALARS and tensor.numel() == 1 else tensor
    return state


def _list_some(what: str, names: list[str], most: int = 4) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} {what}: {', '.join(names[:most])}{more}"
