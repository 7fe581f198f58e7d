"""Checkpoints from any layout into any other: ranks x ZeRO stage, through the real files.

A small CLIP trains three AdamW steps in fp32 on each layout, saves, and goes on for five. Every checkpoint is then
resumed on every layout. What must be equal to the last bit: every parameter, moment, step count and group setting.
What must be near: the next five losses.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import finish, parser, small_clip

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager
from clip_train.contrastive import InfoNCE
from clip_train.models import CLIP
from clip_train.optim import OptimConfig, build_optimizer
from clip_train.protocols import Batch
from clip_train.step import train_step
from launcher.ds_config import EngineConfig, build_ds_config
from tests.ranks import run_ranks

TARGETS = {
    "state": "parameters, moments, step counts and groups equal exactly (fp32)",
    "losses": "the next 5 within 1e-6 of those of the run that saved",
}
LAYOUTS = [(world_size, stage) for world_size in (1, 2) for stage in (0, 1, 2, 3)]
N, LR, BEFORE, AFTER = 32, 1e-3, 3, 5
CPU = torch.device("cpu")


def make(stage: int) -> Any:
    from launcher.engine import build_engine

    torch.manual_seed(5)
    ds_config = build_ds_config(
        EngineConfig(zero_stage=stage), micro_size=8, world_size=dist.world_size(), grad_clip_norm=1.0
    )
    config = OptimConfig(lr=LR, weight_decay=0.1)
    engine = build_engine(
        lambda: CLIP(small_clip()), lambda named: build_optimizer(config, named), ds_config, device=CPU
    )
    engine.set_grad_clip(1.0)
    return engine


def share(step: int) -> Batch:
    """This rank's share of a fixed global batch."""
    g = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8, generator=g)
    texts = torch.randint(1, 64, (N, 12), generator=g)
    n = N // dist.world_size()
    own = slice(dist.rank() * n, (dist.rank() + 1) * n)
    return Batch(images[own], texts[own], torch.arange(N)[own])


def train(engine: Any, first: int, last: int) -> list[float]:
    return [
        train_step(engine, share(step), InfoNCE(), micro_size=8, kept_graphs=1, lr=LR / (step + 1)).loss
        for step in range(first, last)
    ]


def state(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every parameter and moment whole, from all ranks' pieces; step counts and groups."""
    pieces = [
        (f.name, slot, f.start, value.clone(), torch.Size(f.shape).numel())
        for f in engine.state_fragments()
        for slot, value in f.tensors.items()
    ]
    whole: dict[str, torch.Tensor] = {}
    for name, slot, start, value, numel in (piece for rank in dist.gather_objects(pieces) for piece in rank):
        whole.setdefault(f"{name}|{slot}", torch.full((numel,), torch.nan))[start : start + len(value)] = value
    # of each group what is not given anew to every step, as the learning rate is
    groups = [
        {key: value for key, value in group.items() if isinstance(value, (bool, int, float, tuple)) and key != "lr"}
        for group in engine.optimizer.param_groups
    ]
    counts = {float(of_one["step"]) for of_one in engine.optimizer.state.values()}
    steps = set().union(*dist.gather_objects(counts))
    return whole, {"extra": engine.extra_state(), "groups": groups, "steps": steps}


def save(stage: int, folder: str) -> Any:
    engine = make(stage)
    train(engine, 0, BEFORE)
    found = state(engine)
    manager = CheckpointManager(CheckpointConfig(), folder)
    manager.resume()
    told = {"engine": engine.extra_state(), "step": BEFORE}
    assert manager.save(BEFORE, engine.state_fragments(), {}, told, wait=True)
    manager.close()
    losses = train(engine, BEFORE, BEFORE + AFTER)
    engine.close()
    return found, losses


def resume(stage: int, folders: list[str]) -> Any:
    """From each of the folders in turn: the state as loaded, and the losses that follow."""
    out = []
    for folder in folders:
        engine = make(stage)
        resumed = CheckpointManager(CheckpointConfig(resume="must"), folder).resume()
        assert resumed is not None
        engine.load_fragments(resumed.reader, resumed.state["engine"])
        out.append((state(engine), train(engine, BEFORE, BEFORE + AFTER)))
        engine.close()
    return out


def differences(saved: Any, found: Any) -> list[str]:
    (tensors, told), (again, told_again) = saved, found
    wrong = [name for name in tensors if name not in again or not torch.equal(tensors[name], again[name])]
    return wrong + [key for key in told if told[key] != told_again[key]]


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    layouts = LAYOUTS[::3] if args.quick else LAYOUTS
    table, missed = [], []
    with tempfile.TemporaryDirectory() as root:
        folders = [str(Path(root) / f"{world_size}x{stage}") for world_size, stage in layouts]
        saved = [run_ranks(save, W, stage, folder)[0] for (W, stage), folder in zip(layouts, folders, strict=True)]
        for W, stage in layouts:
            row: dict[str, Any] = {"resumed at": f"{W} ranks, ZeRO {stage}"}
            found = run_ranks(resume, W, stage, folders)[0]
            for (from_W, from_stage), (then, losses), (now, again) in zip(layouts, saved, found, strict=True):
                wrong = differences(then, now)
                off = max(abs(a - b) for a, b in zip(losses, again, strict=True))
                row[f"{from_W} x {from_stage}"] = off if not wrong else f"{len(wrong)} differ"
                where = f"saved at {from_W} ranks, ZeRO {from_stage}, resumed at {W} ranks, ZeRO {stage}"
                if wrong:
                    missed.append(f"{where}: {', '.join(wrong[:4])} are not equal")
                if off > 1e-6:
                    missed.append(f"{where}: the losses differ by {off:.2g}")
            table.append(row)
    print(
        "each cell: state equal to the last bit, and how far the next 5 losses are off; columns: saved at ranks x ZeRO"
    )
    return finish("layouts", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
