"""Checkpoints that are either whole or do not exist, and that any number of ranks can resume from.

Start reading at `manager.py`, which the trainer calls; `manifest.py` names every file. The
checkpoint writer's process (`writer.py` and its imports) does not import torch.
"""
