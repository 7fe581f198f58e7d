"""A run of a small model that has saved, without training it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture
from clip_train.task import Fragment


def save_run(
    folder: Path, architecture: Architecture, steps: tuple[int, ...] = (1, 2), **config: Any
) -> dict[int, dict[str, Tensor]]:
    """Checkpoints in `folder`/checkpoints, and what model each holds, by step. Moments are NaN: nobody reads them."""
    config = {"grace_seconds": 240.0, "keep_last": 9, **config}
    manager = CheckpointManager(CheckpointConfig(**config), folder / "checkpoints", log=print)
    manager.begin()
    saved = {}
    for step in steps:
        torch.manual_seed(step)
        saved[step] = {
            name: p.detach().clone() for name, p in CLIP(architecture).named_parameters()
        }
        fragments = [
            Fragment(
                name,
                tuple(p.shape),
                0,
                {"param": p.flatten(), "exp_avg": torch.full_like(p.flatten(), torch.nan)},
            )
            for name, p in saved[step].items()
        ]
        state = {"step": step, "architecture": architecture.model_dump(mode="json"), "recipe": {}}
        saved_as = manager.save(step, fragments, {"rng": torch.zeros(1)}, state, wait=True)
        assert saved_as is Saved.COMMITTED
    manager.close()
    return saved
