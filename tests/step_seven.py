"""A curve on several ranks, the last of which runs out of memory at step 7, in a given part of the step."""

from __future__ import annotations

from typing import Any

import torch

from clip_train import dist
from clip_train.batch import BatchPlan
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.recovery import recovering_step
from tests.test_recovery import PLACES, FailingCLIP, fail
from tests.toy import share, toy_batch

__all__ = ["PLACES", "curve", "curves"]


def curve(steps: int, place: str | None) -> dict[str, Any]:
    """Losses and micro-batch sizes of `steps` steps; no dropout, so that nothing depends on the cut."""
    torch.manual_seed(5)
    model = FailingCLIP()
    engine = PlainEngine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    plan = BatchPlan(48, dist.world_size(), 6, 2)
    losses, sizes = [], []
    for step in range(1, steps + 1):
        if step == 7 and place is not None and dist.rank() == dist.world_size() - 1:
            fail(model, place, plan.accum_steps)
        batch = share(toy_batch(48, seed=step), dist.rank(), dist.world_size())
        result, plan = recovering_step(engine, batch, InfoNCE(), plan, lr=0.01, log=lambda _: None)
        losses.append(result.loss)
        sizes.append(plan.micro_size)
    return {"losses": losses, "sizes": sizes, "kept": plan.kept_graphs}


def curves(steps: int) -> list[dict[str, Any]]:
    """Undisturbed, then with the failure in each of `PLACES`."""
    return [curve(steps, place) for place in (None, *PLACES)]
