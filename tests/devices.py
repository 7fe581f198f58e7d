"""The device of the ranks that tests start, by CLIP_TRAIN_TEST_DEVICE. Read before torch is imported.

cpu (default): every rank computes on the CPU, over gloo.
cuda: each rank has a GPU, over NCCL. Tests for more ranks than GPUs are skipped.
cuda-shared: all ranks share GPU 0, over gloo, because NCCL rejects two ranks on one GPU.
"""

from __future__ import annotations

import os

SWITCH = "CLIP_TRAIN_TEST_DEVICE"
# what `init_process_group` gets
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "cuda-shared": "cpu:gloo,cuda:gloo"}


def chosen() -> str:
    """Read at every call: a program may change it between two worlds of ranks."""
    name = os.environ.get(SWITCH, "cpu")
    if name not in BACKENDS:
        raise ValueError(f"{SWITCH} ({name}) must be one of {', '.join(BACKENDS)}")
    return name


def accelerator() -> str:
    """For DS_ACCELERATOR, which DeepSpeed reads when it is imported."""
    return "cpu" if chosen() == "cpu" else "cuda"
