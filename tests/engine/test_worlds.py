"""The same steps on one, two and four ranks have one result. Ranks are processes over gloo, or threads.

With CLIP_TRAIN_TEST_DEVICE=cuda-shared the processes share one GPU; the threads stay on the CPU.
"""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch

from clip_train import dist
from clip_train.engines.base import Engine, PlainEngine
from clip_train.engines.config import EngineConfig
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.engine.layouts import FSDP, ZERO
from tests.engine.test_engines import assemble, pieces
from tests.ranks import RankFailedError, device, run_ranks
from tests.threads import run_threads
from tests.toy import columns_of, share

pytestmark = pytest.mark.engine
STEPS, N, LR, CLIP_NORM = 3, 16, 0.02, 0.5
TOLERANCE = 1e-6  # relative to the largest weight, and of each loss and norm
ARCHITECTURE = Architecture.model_validate(
    {
        "embed_dim": 16,
        # a soft softmax: a sharp one multiplies the rounding of the weights in the next norm
        "init_logit_scale": 1.0,
        "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
    }
)  # fmt: skip
# DeepSpeed keeps its groups as globals of the process.
BY_THREADS = ["plain", *FSDP, "fsdp 2 in groups of 2", "fsdp 3 in groups of 2"]
BY_PROCESSES = [*BY_THREADS, *ZERO]


def engine_of(layout: str, weights: dict[str, torch.Tensor]) -> Engine:
    def optimizer(named):
        return build_optimizer(OptimConfig(name="sgd", lr=LR, weight_decay=0.1), named)

    model = partial(CLIP, ARCHITECTURE)
    if layout == "plain":
        module = model().to(device())
        engine = PlainEngine(module, optimizer(module.named_parameters()), CLIP_NORM)
    else:
        kind, stage, *groups = layout.split()
        config = EngineConfig(
            kind={"zero": "deepspeed"}.get(kind, kind),
            zero_stage=int(stage),
            precision="fp32",
            compile=False,
            shard_ranks=2 if groups else None,
        )
        engine = config.build(
            model, optimizer, device=device(), grad_clip_norm=CLIP_NORM, micro_size=2
        )
    engine.load_fragments(WholeState(weights), {})
    return engine


def batch_of(step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    return Batch(
        columns_of(
            torch.randint(0, 256, (N, 3, 16, 16), dtype=torch.uint8, generator=g),
            torch.randint(1, 60, (N, 8), generator=g),
            torch.arange(N),
            [f"{step}-{i}" for i in range(N)],
        )
    )


def train(layouts: list[str], weights: dict[str, torch.Tensor]):
    """For each layout, [loss, norm] of each step and this rank's fragments after the last."""
    out = []
    for layout in layouts:
        engine = engine_of(layout, weights)
        rows = []
        for step in range(STEPS):
            batch = share(batch_of(step), dist.rank(), dist.world_size())
            result = train_step(engine, batch, InfoNCE(), micro_size=2, kept_graphs=1, lr=LR)
            rows.append([result.loss, result.grad_norm])
        out.append((rows, pieces(engine)))
        engine.close()
    return out


@functools.cache
def initial_weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {name: p.detach().clone() for name, p in CLIP(ARCHITECTURE).named_parameters()}


RUN = {"threads": run_threads, "processes": run_ranks}


@functools.cache
def on_one_rank(by: str):
    """Plain torch, without a process group's sums, on the same device."""
    ((found,),) = RUN[by](train, 1, ["plain"], initial_weights())
    return found


@functools.cache
def worlds(by: str, kind: str, world_size: int):
    """All layouts of an engine in one start: {layout: results of the ranks}, or why a rank failed."""
    known = BY_THREADS if by == "threads" else BY_PROCESSES
    layouts = [layout for layout in known if layout.split()[0] == kind]
    try:
        per_rank = RUN[by](train, world_size, layouts, initial_weights())
    except RankFailedError as e:
        return e
    return dict(zip(layouts, zip(*per_rank, strict=True), strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "by, layout",
    [("threads", layout) for layout in BY_THREADS] + [("processes", layout) for layout in BY_PROCESSES],
)  # fmt: skip
def test_ranks_change_no_number(by, layout, world_size):
    rows, fragments = on_one_rank(by)
    expected = assemble([fragments])
    world = worlds(by, layout.split()[0], world_size)
    if isinstance(world, RankFailedError):
        raise world
    results = world[layout]
    for told, _ in results:
        for row, reference in zip(told, rows, strict=True):
            assert row == pytest.approx(reference, rel=TOLERANCE)
    found = assemble([fragments for _, fragments in results])
    assert found.keys() == expected.keys()
    largest = max(slots["param"].abs().max() for slots in expected.values())
    for name, slots in expected.items():
        difference = (found[name]["param"] - slots["param"]).abs().max()
        assert difference <= TOLERANCE * largest, name
        moved = (slots["param"] - initial_weights()[name].flatten()).abs().max()
        assert moved > 0, f"{name} has not been trained"
