"""Checkpoints that are either whole or do not exist, and that any number of ranks can resume from.

Start reading at `manager.py`, which is what the trainer calls; `layout.py` names every file.
"""

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, LastGood, Resumed
from clip_train.checkpoint.reader import FragmentReader

__all__ = ["CheckpointConfig", "CheckpointManager", "FragmentReader", "LastGood", "Resumed"]
