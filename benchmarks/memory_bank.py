"""What memory banks buy at a small global batch, and what the cache buys over plain accumulation.

The tiny CLIP learns the demo's coloured shapes (recipes/demo_shapes.yaml: 384 captions, 76 of them only in the
evaluation) on one rank, with the plain engine, in fp32. Zero-shot top-1 is over the 76 unseen captions (chance
1.3%), mean and spread over seeds; every row of a block sees the same samples in the same order.

- scratch: a small batch from random weights, exact and with banks on top.
- continued: the same from a model that the exact small batch has already trained.
- cut: a larger batch in 8 micro-batches: the cache against plain accumulation, at the same samples.

A bank holds other samples of the same captions, which are no true negatives; ids mask the same sample only.
Banks have no target: the last lines say whether they bought anything beyond the seeds' spread.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import finish, parser

from clip_tools.demo import SyntheticData, shapes
from clip_train.data.config import DataConfig
from clip_train.data.index import index_of
from clip_train.data.loader import TrainLoader
from clip_train.data.reader import count_missing
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.validation import ValLoader
from clip_train.engines.base import PlainEngine
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.loop import evaluate
from clip_train.losses.exchange import Pairs
from clip_train.losses.info_nce import InfoNCE, info_nce
from clip_train.losses.memory_bank import MemoryBank
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.optim.schedule import ScheduleConfig, learning_rate
from clip_train.step import train_step
from clip_train.storage.config import StorageConfig
from clip_train.task import NO_CONTEXT, Batch, Context, Features, LossOutput, Objective

SMALL, LARGE, MICRO = 32, 128, 16
ARCHITECTURE = load_architecture("tiny")
TARGETS = {
    "cached": "at the same global batch, zero-shot no lower than plain accumulation's, mean over the seeds"
}


class PlainAccumulation(Objective):
    """Each micro-batch is a contrastive batch of its own: what plain gradient accumulation learns.

    On one rank. The gradient of their mean, weighted by samples.
    """

    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        I, T, scale = features["image"], features["text"], features["logit_scale"]
        parts = [
            info_nce(Pairs(i, t, i, t), scale, MICRO, deferred=False)
            for i, t in zip(I.split(MICRO), T.split(MICRO), strict=True)
        ]
        gradients = {
            name: torch.cat([part.gradients[name] for part in parts]) / len(parts)
            for name in ("image", "text")
        }
        gradients["logit_scale"] = sum(part.gradients["logit_scale"] for part in parts) / len(parts)
        return LossOutput(torch.stack([part.loss for part in parts]).mean(), gradients)


@cache
def stream(train: str, global_size: int, steps: int, seed: int) -> list[Batch]:
    """The first `steps` global batches, decoded once for all rows."""
    config = DataConfig(train=train, workers=0, lanes=16, shuffle_block=256)
    loader = TrainLoader(
        config,
        image_size=ARCHITECTURE.vision_cfg.image_size,
        context_length=ARCHITECTURE.text_cfg.context_length,
        global_size=global_size,
        seed=seed,
    )
    batches = iter(loader)
    return [next(batches) for _ in range(steps)]


@cache
def validation(data: SyntheticData) -> list[Any]:
    loader = ValLoader(
        count_missing(index_of(data.val, "auto", StorageConfig()), StorageConfig(), together=False),
        image_size=ARCHITECTURE.vision_cfg.image_size,
        context_length=ARCHITECTURE.text_cfg.context_length,
        batch_size=256,
        rank=0,
        world_size=1,
    )
    return list(loader)


def learn(
    data: SyntheticData, batches: list[Batch], contrastive: Any, *, seed: int, lr: float, start: dict | None = None,
    micro_size: int | None = None,
) -> tuple[float, dict, dict[str, float], float]:  # fmt: skip
    """Zero-shot top-1, the weights, the last step's extra numbers, CPU seconds."""
    torch.manual_seed(seed)
    model = CLIP(ARCHITECTURE)
    if start is not None:
        model.load_state_dict(start)
    optimizer = build_optimizer(OptimConfig(lr=lr), model.named_parameters())
    engine = PlainEngine(model, optimizer, grad_clip_norm=1.0)
    schedule = ScheduleConfig(warmup_steps=min(40, len(batches) // 4))
    started = time.process_time()
    for step, batch in enumerate(batches):
        rate = learning_rate(schedule, lr, step, len(batches))
        size = micro_size or len(batch)
        result = train_step(engine, batch, contrastive, micro_size=size, kept_graphs=1, lr=rate)
    seconds = time.process_time() - started
    config = EvaluateConfig(retrieval=False, zero_shot_classes=str(data.classes))
    scores = evaluate(
        engine, validation(data), config, Tokenizer(ARCHITECTURE.text_cfg.context_length)
    )
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return scores["zero_shot_top1"], state, result.metrics, seconds


class Rows:
    """The table, and the scores behind it."""

    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        self.scores: dict[tuple[str, str], list[float]] = {}

    def add(
        self,
        block: str,
        name: str,
        steps: int,
        outcomes: list[tuple[float, dict, dict[str, float], float]],
    ) -> None:
        scores = [100 * outcome[0] for outcome in outcomes]
        self.scores[block, name] = scores
        self.table.append(
            {
                "block": block,
                "objective": name,
                "steps": steps,
                "zero-shot %": statistics.mean(scores),
                "spread": max(scores) - min(scores),
                "CPU s": statistics.mean(outcome[3] for outcome in outcomes),
            }
        )
        print(f"{block:10s} {name:32s} {scores}", flush=True)


def banks(steps: int) -> dict[str, Callable[[], Any]]:
    """What runs at the small batch: name -> a fresh objective."""
    return {
        "exact": InfoNCE,
        "negatives, 128": lambda: MemoryBank(128),
        "negatives, 512": lambda: MemoryBank(512),
        "negatives, 128, half warm-up": lambda: MemoryBank(128, steps // 2),
        "contaccum, 128": lambda: MemoryBank(128, 0, "contaccum"),
    }


def verdict(rows: Rows, block: str) -> str:
    exact = rows.scores[block, "exact"]
    rivals = {
        name: s for (where, name), s in rows.scores.items() if where == block and name != "exact"
    }
    best = max(rivals, key=lambda name: statistics.mean(rivals[name]))
    # Paired: the same seed means the same start and the same samples.
    gains = [b - a for a, b in zip(exact, rivals[best], strict=True)]
    gain = statistics.mean(gains)
    told = (
        f"{block}: the best bank ({best}) is {gain:+.1f} points from the exact loss, "
        f"{min(gains):+.1f} to {max(gains):+.1f} over the seeds"
    )
    if len(gains) == 1:
        return f"{told}: one seed, which says nothing"
    return f"{told}: " + (
        "better with every one" if min(gains) > 0 else "NOTHING GAINED beyond their spread"
    )


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    seeds = (0,) if args.quick else (0, 1, 2)
    steps, more, large_steps = (40, 20, 10) if args.quick else (200, 100, 100)
    folder = Path(tempfile.gettempdir()) / (
        "clip-train-shapes-quick" if args.quick else "clip-train-shapes"
    )
    data = shapes(folder, 4000 if args.quick else 20_000)
    rows = Rows()
    starts: dict[int, dict] = {}
    for name, make in banks(steps).items():
        outcomes = [
            learn(data, stream(data.train, SMALL, steps, s), make(), seed=s, lr=1e-3) for s in seeds
        ]
        rows.add("scratch", name, steps, outcomes)
        if name == "exact":
            starts = {s: outcome[1] for s, outcome in zip(seeds, outcomes, strict=True)}
    for name, make in banks(more).items():
        outcomes = [
            learn(
                data,
                stream(data.train, SMALL, more, 100 + s),
                make(),
                seed=s,
                lr=5e-4,
                start=starts[s],
            )
            for s in seeds
        ]
        rows.add("continued", name, more, outcomes)
    for name, make in {"cached": InfoNCE, "plain": PlainAccumulation}.items():
        outcomes = [
            learn(
                data,
                stream(data.train, LARGE, large_steps, s),
                make(),
                seed=s,
                lr=2e-3,
                micro_size=MICRO,
            )
            for s in seeds
        ]
        rows.add("cut", name, large_steps, outcomes)

    missed = []
    cached, plain = (statistics.mean(rows.scores["cut", name]) for name in ("cached", "plain"))
    if cached < plain and not args.quick:  # in so few steps neither has learned anything
        missed.append(f"cached {cached:.1f}% against plain {plain:.1f}%")
    status = finish("memory_bank", rows.table, TARGETS, missed, args)
    print(
        f"cut: a global batch of {LARGE} in micro-batches of {MICRO}: cached {cached:.1f}%, plain {plain:.1f}%"
    )
    for block in ("scratch", "continued"):
        print(verdict(rows, block))
    return status


if __name__ == "__main__":
    sys.exit(main())
