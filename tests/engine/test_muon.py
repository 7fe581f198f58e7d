"""Muon on pieces of matrices equals torch.optim.Muon on whole ones, for the gradients that the ranks had."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from clip_train.losses.info_nce import InfoNCE
from clip_train.optim.config import OptimConfig
from clip_train.optim.muon import assign_matrices
from clip_train.step import train_step
from tests.engine.layouts import engine_at
from tests.engine.test_engines import assemble, pieces, toy
from tests.ranks import run_ranks
from tests.toy import share, toy_batch

pytestmark = pytest.mark.engine
N, LR, DECAY, STEPS = 24, 1e-2, 0.1, 3
OFFLOAD = {"offload": "optimizer"}
# each layout and precision once; the whole product: benchmarks/exactness.py
CASES = {
    3: [
        ("zero 1", "bf16", {}), ("zero 2", "fp32", OFFLOAD), ("zero 3", "bf16", {}),
        ("fsdp 1", "fp32", {}), ("fsdp 2", "bf16", {}), ("fsdp 3", "fp32", {}),
    ],
    2: [
        ("zero 0", "fp32", {}), ("zero 1", "fp16", {}), ("zero 2", "bf16", {}), ("zero 3", "fp32", {}),
        ("fsdp 0", "bf16", {}), ("fsdp 1", "bf16", {}), ("fsdp 2", "fp32", OFFLOAD), ("fsdp 3", "bf16", {}),
    ],
}  # fmt: skip


def trained(layout: str, precision: str, more: dict) -> tuple[list, list[dict]]:
    """This rank's fragments, and of each step {name: (start, clipped gradient)}."""
    optim = OptimConfig(name="muon", lr=LR, weight_decay=DECAY)
    engine = engine_at(layout, toy, optim, clip=0.5, precision=precision, **more)
    steps: list[dict] = []

    def note(optimizer, args, kwargs):
        present = {p for group in optimizer.param_groups for p in group["params"]}
        for piece in engine.pieces:
            if piece.held in present and piece.numel:
                steps[-1][piece.name] = (piece.start, piece.view(piece.held.grad).clone())

    engine.optimizer.register_step_pre_hook(note)
    while len([step for step in steps if step]) < STEPS:  # fp16 skips its first ones
        batch = share(toy_batch(N, seed=len(steps)), dist.rank(), dist.world_size())
        steps.append({})
        train_step(engine, batch, InfoNCE(), micro_size=5, kept_graphs=1, lr=LR)
    found = pieces(engine), [step for step in steps if step]
    engine.close()
    return found


def of_all(cases):
    return [trained(*case) for case in cases]


def whole(gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The weights after torch's own optimizers took them."""
    named = dict(toy().named_parameters())
    matrices = [p for name, p in named.items() if name.endswith(("into.weight", "out.weight"))]
    others = [p for p in named.values() if p.ndim < 2]
    assert len(matrices) + len(others) == len(named)
    optimizers = [
        torch.optim.Muon(matrices, LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, LR, betas=(0.9, 0.98), eps=1e-6, weight_decay=0),
    ]
    for step in gradients:
        for name, p in named.items():
            p.grad = step[name].view_as(p).clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach().flatten() for name, p in named.items()}


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_pieces_are_updated_as_whole_matrices_are(world_size):
    """To a rounding of fp32: the same gradients, and bf16 on its way as in Newton-Schulz itself."""
    cases = CASES[world_size]
    by_rank = run_ranks(of_all, world_size, cases)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        state = assemble([fragments for fragments, _ in ranks])
        gradients = [{name: torch.empty_like(slots["param"]) for name, slots in state.items()}
                     for _ in range(STEPS)]  # fmt: skip
        for _, steps in ranks:
            for step, found in zip(gradients, steps, strict=True):
                for name, (start, values) in found.items():
                    step[name][start : start + len(values)] = values
        for name, p in whole(gradients).items():
            error = (state[name]["param"] - p).norm() / p.norm()
            assert error < 2.0**-23, (case, name)


def test_a_matrix_belongs_to_the_rank_that_holds_most_of_it():
    shapes = {"a": (4, 8), "b": (8, 4), "c": (4, 4), "d": (4, 4), "e": (2, 2)}
    evenly = [dict.fromkeys(shapes, 2)] * 2
    assert assign_matrices(shapes, evenly) == [("a", "b"), ("c", "d"), ("e", "")]
    flat = [{"a": 32, "b": 20}, {"b": 12, "c": 16, "d": 16, "e": 4}]
    assert assign_matrices(shapes, flat) == [("a", "c"), ("b", "d"), ("", "e")]
    assert assign_matrices(shapes, [{}]) == [(name,) for name in "abcde"]
