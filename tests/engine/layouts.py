"""An engine by the name of its layout, such as `zero 1` or `fsdp 3`, through the product's own door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from clip_train.engines.config import EngineConfig
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from tests.processor import answer
from tests.ranks import device

ZERO = ["zero 0", "zero 1", "zero 2", "zero 3"]
FSDP = ["fsdp 0", "fsdp 2", "fsdp 3"]  # 1 is 2 with the reduction once
PLAIN = ["plain 0"]
ALL = [*ZERO, *FSDP, *PLAIN]


def engine_at(
    layout: str,
    make_model: Callable[[], nn.Module],
    optim: OptimConfig,
    *,
    clip: float | None = None,
    precision: str = "fp32",
    **more: Any,
) -> Any:
    """On a rank, with `make_model`'s weights. more: other keys of the `engine` section."""
    if precision != "fp32":
        answer(True, precision)  # slow on some processors, but the numbers are the same
    name, stage = layout.split()
    config = EngineConfig(
        kind={"zero": "deepspeed"}.get(name, name),
        zero_stage=int(stage),
        precision=precision,
        **more,
    )
    engine = config.build(
        make_model,
        lambda named: build_optimizer(optim, named),
        device=device(),
        grad_clip_norm=clip,
        micro_size=8,
    )
    optim.apply_to(engine)
    engine.load_fragments(WholeState(make_model().state_dict()), {})
    return engine
