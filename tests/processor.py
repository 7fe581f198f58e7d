"""What the processor can compute in is DeepSpeed's question; tests answer it, so that they run on any machine."""

from __future__ import annotations

import os

import torch

ANSWER_NO = "CLIP_TRAIN_TESTS_ANSWER_NO"  # fp16, bf16 or both with a comma: the tests run as if it were missing here
# Of each process that tests start or are: the cores belong to several, and OpenMP's threads spin.
THREADS = int(os.environ.get("CLIP_TRAIN_TEST_THREADS", "1"))


def answer_no() -> None:
    """In this process, what the environment names is missing. For the start of each process that tests start."""
    missing = [name for name in os.environ.get(ANSWER_NO, "").split(",") if name]
    if missing:
        answer(False, *missing)


def answer(supported: bool, *precisions: str) -> None:
    """In this process, DeepSpeed takes the processor to compute in these precisions, or not to."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    for precision in precisions:
        setattr(accelerator, f"is_{precision}_supported", lambda: supported)
    asked = (
        (torch.bfloat16, accelerator.is_bf16_supported),
        (torch.float16, accelerator.is_fp16_supported),
    )
    dtypes = [torch.float, *(dtype for dtype, is_supported in asked if is_supported())]
    accelerator.supported_dtypes = lambda: dtypes
