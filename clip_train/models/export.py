"""Weights out, as other libraries read them."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from clip_train.models.config import AnyArchitecture
from clip_train.models.weights import CONFIG_NAME, WEIGHTS_NAMES, check_state, sha256_of
from clip_train.task import IMAGE_TEXT


def export_openclip(
    state: dict[str, Tensor], architecture: AnyArchitecture, folder: str | os.PathLike
) -> Path:
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
        name: own_copy(t).reshape(() if name in IMAGE_TEXT.scalars else t.shape)
        for name, t in state.items()
    }
    path = Path(folder)
    weights = save_weights(out, path, WEIGHTS_NAMES[0])
    config = {
        "model_cfg": architecture.model_cfg(),
        "preprocess_cfg": architecture.preprocess_cfg(),
        # ours: whoever fetches it from a URL compares
        "sha256": {WEIGHTS_NAMES[0]: sha256_of(weights)},
    }
    save_texts({CONFIG_NAME: as_json(config)}, path)
    return path


def own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, fp32 where it is no counter: safetensors refuses tensors that share memory."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def save_weights(state: dict[str, Tensor], folder: Path, name: str) -> Path:
    """A .safetensors; the folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.part"
    part.touch()
    mode = part.stat().st_mode  # of any new file: safetensors makes them for their owner alone
    save_file(state, part, metadata={"format": "pt"})
    part.chmod(mode)
    return part.replace(folder / name)


def save_texts(texts: dict[str, str], folder: Path) -> None:
    for name, text in texts.items():
        part = folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)


def as_json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"
