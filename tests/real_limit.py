"""A process whose address space ends: `python -m tests.real_limit plain|"zero 1" [MiB to spare]` prints its curve.

The limit is set once everything is built and a step is taken, to what the process has then and a little.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import torch

from clip_train.batch import BatchPlan
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.recovery import recovering_step
from clip_train.task import Batch
from tests.toy import columns_of

N, STEPS, LR = 256, 5, 0.1
ARCHITECTURE = Architecture.model_validate(
    {
        "embed_dim": 32,
        "vision_cfg": {
            "image_size": 64,
            "layers": 3,
            "width": 96,
            "head_width": 32,
            "patch_size": 8,
        },
        "text_cfg": {"context_length": 12, "vocab_size": 64, "width": 48, "heads": 2, "layers": 2},
    }
)


def make(kind: str):
    def model() -> CLIP:
        torch.manual_seed(7)
        return CLIP(ARCHITECTURE, dropout=0.1, patch_dropout=0.25)

    optim = OptimConfig(name="sgd", lr=LR)
    if kind == "plain":
        built = model()
        return PlainEngine(built, build_optimizer(optim, built.named_parameters()))
    from tests.engine.layouts import engine_at

    return engine_at(kind, model, optim)


def batch(step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (N, 3, 64, 64), generator=g, dtype=torch.uint8)
    return Batch(
        columns_of(
            images, torch.randint(1, 64, (N, 12), generator=g), torch.arange(N) + 1000 * step
        )
    )


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def curve(kind: str, spare_mib: int | None, steps: int = STEPS) -> dict[str, Any]:
    """Losses, micro-batch sizes and what was said of them; the limit stays."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = (
        False  # it takes address space for each new shape, and does not stand its end
    )
    engine = make(kind)
    plan = BatchPlan(N, 1, 4, 1)  # the first step is small: libraries load what they need
    losses, sizes, log = [], [], []
    for step in range(steps):
        if step == 1:
            plan = BatchPlan(N, 1, N, 1)
            if spare_mib is not None:
                limit = address_space() + spare_mib * 2**20
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        result, plan = recovering_step(
            engine, batch(step), InfoNCE(tile=128), plan, lr=LR, log=log.append
        )
        losses.append(result.loss)
        sizes.append(plan.micro_size)
    return {"losses": losses, "sizes": sizes, "log": log}


def main(kind: str, spare_mib: int | None) -> None:
    print(json.dumps(curve(kind, spare_mib)), flush=True)
    os._exit(0)  # no room for a teardown


if __name__ == "__main__":
    # torchrun's variables, for DeepSpeed's own process group
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu"
    )
    if sys.argv[1] != "plain":
        # the group is there already: no port that another process may have taken by then
        os.environ["MASTER_PORT"] = "0"
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
