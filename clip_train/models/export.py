"""Weights out, as other libraries read them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from clip_train.models.config import Architecture
from clip_train.models.weights import CONFIG_NAME, SCALARS, WEIGHTS_NAMES, check_state, sha256_of


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
        .reshape(() if name in SCALARS else tensor.shape)
        for name, tensor in state.items()
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights, description = (path / f"{name}.part" for name in (WEIGHTS_NAMES[0], CONFIG_NAME))
    save_file(out, weights, metadata={"format": "pt"})
    config = {
        "model_cfg": architecture.model_cfg(),
        "preprocess_cfg": architecture.preprocess_cfg(),
        "sha256": {WEIGHTS_NAMES[0]: sha256_of(weights)},  # ours: whoever fetches it from a URL compares
    }
    description.write_text(json.dumps(config, indent=2) + "\n")
    weights.chmod(description.stat().st_mode)  # as any new file: safetensors makes them for their owner alone
    for part in (weights, description):
        part.replace(part.with_suffix(""))
    return path
