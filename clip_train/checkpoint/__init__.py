"""Checkpoints that are either whole or do not exist, and that any number of ranks can resume from.

Start reading at `manager.py`, which is what the trainer calls; `manifest.py` names every file. What runs in the
checkpoint writer's process (`writer.py` and what it imports) does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clip_train.checkpoint.config import CheckpointConfig
    from clip_train.checkpoint.manager import CheckpointManager
    from clip_train.checkpoint.restore import Resumed
    from clip_train.checkpoint.snapshot import FragmentReader
    from clip_train.checkpoint.status import LastGood

__all__ = ["CheckpointConfig", "CheckpointManager", "FragmentReader", "LastGood", "Resumed"]

_HOME = {"CheckpointConfig": "config", "FragmentReader": "snapshot", "LastGood": "status", "Resumed": "restore"}


def __getattr__(name: str) -> Any:
    """On demand, so that the checkpoint writer starts in a tenth of a second and stays small."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'manager')}"), name)
