"""Checkpoints that are either whole or do not exist, and that any number of ranks can resume from.

Start reading at `manager.py`, which is what the trainer calls; `manifest.py` names every file. What
runs in the checkpoint writer's process (`writer.py` and what it imports) does not import torch.
"""
