"""Checkpoints that are either whole or do not exist, and that any number of ranks can resume from.

Start reading at `manager.py`, which is what the trainer calls; `layout.py` names every file. What runs in
the saver's process (`saver.py`, `pipeline.py` and what they import) does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clip_train.checkpoint.config import CheckpointConfig
    from clip_train.checkpoint.manager import CheckpointManager
    from clip_train.checkpoint.opening import Resumed
    from clip_train.checkpoint.outcomes import LastGood
    from clip_train.checkpoint.reader import FragmentReader

__all__ = ["CheckpointConfig", "CheckpointManager", "FragmentReader", "LastGood", "Resumed"]

_HOME = {"CheckpointConfig": "config", "FragmentReader": "reader", "LastGood": "outcomes", "Resumed": "opening"}


def __getattr__(name: str) -> Any:
    """On demand, so that the saver's process starts in a tenth of a second and stays small."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'manager')}"), name)
