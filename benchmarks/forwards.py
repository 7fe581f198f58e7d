"""How often a sample goes forward in one step, counted by hooks on the first block of each tower.

Recomputation by activation checkpointing counts as well: it is a forward like any other.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

import torch
from common import finish, parser, small_clip

from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.toy import columns_of

SMALL_CLIP = small_clip()
N = 64
TARGETS = {
    "two passes": "2 - m/k forwards per sample",
    "activation checkpointing": "2 where all graphs are kept; one more than without it elsewhere, and never 3",
}
# k micro-batches, m retained graphs, activation checkpointing
CASES = [
    (1, 1, False), (4, 1, False), (4, 2, False), (4, 4, False), (8, 1, False), (8, 4, False), (8, 8, False),
    (32, 1, False), (1, 1, True), (4, 4, True), (8, 8, True), (32, 32, True), (8, 4, True), (8, 1, True),
]  # fmt: skip


def forwards_per_sample(k: int, m: int, checkpointing: bool) -> float:
    """Of the vision tower, which must agree with the text tower's."""
    torch.manual_seed(7)
    model = CLIP(SMALL_CLIP, activation_checkpointing=checkpointing)
    seen: Counter[str] = Counter()
    for name, tower in (("image", model.visual.transformer), ("text", model.transformer)):

        def hook(module: Any, args: tuple, name: str = name) -> None:
            seen[name] += len(args[0])

        tower.resblocks[0].register_forward_pre_hook(hook)
    engine = PlainEngine(
        model, build_optimizer(OptimConfig(name="sgd", lr=0.1), model.named_parameters())
    )
    images = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8)
    batch = Batch(columns_of(images, torch.randint(1, 64, (N, 12)), torch.arange(N)))
    train_step(engine, batch, InfoNCE(), micro_size=math.ceil(N / k), kept_graphs=m, lr=0.1)
    assert seen["image"] == seen["text"]
    return seen["image"] / N


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    table, missed = [], []
    for k, m, checkpointing in CASES:
        counted, expected = forwards_per_sample(k, m, checkpointing), 2 - m / k + checkpointing
        where = f"k = {k}, m = {m}, activation checkpointing {'on' if checkpointing else 'off'}"
        if counted != expected or counted >= 3:
            missed.append(f"{where}: {counted} forwards per sample, not {expected}")
        table.append(
            {
                "k": k,
                "retained graphs": m,
                "activation checkpointing": "on" if checkpointing else "off",
                "forwards per sample": counted,
                "": "pays for both: keep all graphs instead" if counted > 2 else "",
            }
        )
    return finish("forwards", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
