"""What rank 0 logs of a run: what it is, when it starts; what has become of it, when it is done."""

from __future__ import annotations

from pathlib import Path

import torch

from clip_train.checkpoint.restore import Resumed
from launcher import engines
from launcher.config.recipe import RunConfig
from launcher.config.validate import Checked, pays_twice
from launcher.runtime.log import log


def describe_start(
    config: RunConfig, checked: Checked, device: torch.device, resumed: Resumed | None, notes: list[str]
) -> None:
    plan, sizes = checked.plan, config.batch.sizes
    varying = f"{sizes}; the largest, " if config.batch.schedule else ""
    log(
        f"{config.model.name}: global batch {varying}{plan.global_size} = {plan.world_size} ranks x {plan.accum_steps} "
        f"micro-batches of {plan.micro_size}, {plan.kept_graphs} graphs kept; "
        f"{engines.describe(config.engine)}, "
        f"{config.engine.precision}, {device.type}; {checked.streams} streams; "
        f"{config.steps} steps into {config.run_dir}"
    )
    if checked.source is not None:
        log(f"data.train: {checked.source.index.describe()}")
    if checked.engine.activation_checkpointing and plan.kept_graphs < plan.accum_steps:
        log(pays_twice(plan))
    if resumed is not None:
        log("\n".join([resumed.describe(), *notes]))


def log_done(run_dir: Path, evaluated: dict[str, float]) -> None:
    for name, value in evaluated.items():
        log(f"{name}: {value:.4g}")
    log(f"done. Run directory: {run_dir}; plot: {run_dir / 'loss.png'}; report: {run_dir / 'report.html'}")
    log(f"next: clip-train export {run_dir / 'recipe.yaml'}")
