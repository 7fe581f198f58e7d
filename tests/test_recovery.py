"""Memory that ends on one rank, in any part of a step: the same batch again, smaller, and the same result."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from clip_train.batch import BatchPlan
from clip_train.engines.base import PlainEngine
from clip_train.errors import OutOfMemoryError
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.memory_bank import MemoryBank
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.recovery import halved, is_out_of_memory, recovering_step
from clip_train.step import train_step
from tests.engine.layouts import engine_at
from tests.ranks import RankFailedError, run_ranks
from tests.toy import ToyCLIP, share, toy_batch

pytestmark = pytest.mark.filterwarnings("ignore")
N, LR, STEPS, FAILING_STEP = 24, 0.3, 4, 2
BEFORE, AFTER = (3, 2), (2, 1)  # micro-batch size and retained graphs, before and after
PLACES = ["first forward", "kept forward", "replayed forward", "kept backward", "replayed backward"]


class FailingCLIP(ToyCLIP):
    """Runs out of memory once: `fail_at` forwards from now, in it or in its backward."""

    fail_at: int | None = None
    in_backward = False

    def forward(self, images, texts, sample_seeds=None):
        out = super().forward(images, texts, sample_seeds)
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                if not self.in_backward:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
                # the text tower's gradients are there by then or not, the image tower's last layer's are
                out[0].grad_fn.next_functions[0][0].register_hook(_no_memory)
        return out


def _no_memory(*_):
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 99"
    )


def fail(model: FailingCLIP, place: str, k: int) -> None:
    """At 0: the first forward of pass 1; k - 1: a kept one; k: the first of pass 2."""
    model.in_backward = place.endswith("backward")
    model.fail_at = {"first": 0, "kept": k - 1, "replayed": k}[place.split(maxsplit=1)[0]]


def make(kind: str, precision: str = "fp32"):
    torch.manual_seed(5)
    model = FailingCLIP(dropout=0.5)
    optim = OptimConfig(name="adamw", lr=LR, weight_decay=0.1)
    if kind == "plain":
        return PlainEngine(model, build_optimizer(optim, model.named_parameters()), 0.7), model
    layout, once, _ = kind.partition(" once")
    built = []

    def make_model():
        torch.manual_seed(5)
        built.append(FailingCLIP(dropout=0.5))
        return built[-1]

    reduction = "once" if once else "each_backward"
    engine = engine_at(
        layout, make_model, optim, clip=0.7, precision=precision, reduce_gradients=reduction
    )
    return engine, built[0]


FIRST_PASS = PLACES[:2]  # in which a rank repeats alone what failed
ALONE, ALL = "undisturbed: smaller on one rank, then on all", "undisturbed: smaller on all ranks"


def run(kind: str, place: str, bad_rank: int, precision: str = "fp32"):
    """Losses, norms, the plan at the end, what was logged, and all of this rank's weights and moments."""
    torch.manual_seed(100 + dist.rank())
    engine, model = make(kind, precision)
    torch.manual_seed(100 + dist.rank())
    W, log, told = dist.world_size(), [], []
    plan = BatchPlan(N, W, *BEFORE)
    for s in range(STEPS):
        batch = share(toy_batch(N, seed=s), dist.rank(), W)
        mine = place == ALL or dist.rank() == bad_rank
        if place in (ALONE, ALL):
            if s > FAILING_STEP or (s == FAILING_STEP and mine):
                plan = BatchPlan(N, W, *AFTER)
        elif s == FAILING_STEP and mine:
            fail(model, place, plan.accum_steps)
        if place in (ALONE, ALL):
            result = train_step(
                engine,
                batch,
                InfoNCE(),
                micro_size=plan.micro_size,
                kept_graphs=plan.kept_graphs,
                lr=0.01,
            )
        else:
            result, plan = recovering_step(engine, batch, InfoNCE(), plan, lr=0.01, log=log.append)
        told.append((result.loss, result.grad_norm))
    assert model.fail_at is None
    state = torch.cat(
        [t.flatten().double() for f in engine.state_fragments() for t in f.tensors.values()]
    )
    if kind != "plain":
        engine.close()
    return told, plan, log, state


def run_all(kind: str, precision: str, places: list[str]):
    bad_rank = dist.world_size() - 1
    return [run(kind, place, bad_rank, precision) for place in [ALONE, ALL, *places]]


@pytest.mark.parametrize(
    "kind, precision, places",
    [
        ("plain", "fp32", PLACES), ("zero 0", "fp32", PLACES), ("zero 1", "fp32", PLACES), ("zero 1", "bf16", PLACES),
        ("zero 2 once", "fp32", PLACES), ("zero 2 once", "bf16", PLACES[:2]),
    ],
)  # fmt: skip
def test_one_of_two_ranks_runs_out_of_memory(kind, precision, places):
    for alone, together, *others in run_ranks(run_all, 2, kind, precision, places):
        for place, (told, plan, log, state) in zip(places, others, strict=True):
            assert (plan.micro_size, plan.kept_graphs) == AFTER, place
            assert len(log) == 1 and "batch.micro_size is 2 instead of 3" in log[0], place
            expected = alone if place in FIRST_PASS else together
            assert told == expected[0], place
            torch.testing.assert_close(state, expected[3], rtol=1e-6, atol=1e-9, msg=place)


@pytest.mark.parametrize(
    "kind, precision",
    [
        ("plain", "fp32"), ("zero 1", "fp32"), ("zero 2", "fp32"),
        ("fsdp 0", "fp32"), ("fsdp 0", "bf16"), ("fsdp 2", "fp32"), ("fsdp 3", "fp32"),
    ],
)  # fmt: skip
def test_a_single_rank_recovers_anywhere(kind, precision):
    ((_, expected, *others),) = run_ranks(run_all, 1, kind, precision, PLACES)
    for place, (told, _, _, state) in zip(PLACES, others, strict=True):
        assert told == expected[0], place
        torch.testing.assert_close(state, expected[3], rtol=1e-6, atol=1e-9, msg=place)


@pytest.mark.parametrize(
    "kind, place, remedy",
    [
        ("zero 2", PLACES[0], "reduce_gradients=once"),
        ("zero 2", PLACES[4], "reduce_gradients=once"),
        ("zero 3", PLACES[0], "micro_size"),
        ("fsdp 0", PLACES[4], "micro_size"),
        ("fsdp 3", PLACES[0], "micro_size"),
    ],
)
def test_where_others_wait_the_run_ends_with_a_remedy(kind, place, remedy):
    with pytest.raises(RankFailedError) as e:
        run_ranks(run, 2, kind, place, 1)
    name, message = e.value.errors[1]
    assert name == "OutOfMemoryError" and "rank 1" in message and remedy in message


def test_one_sample_that_does_not_fit_ends_the_run_with_a_remedy():
    engine, model = make("plain")
    model.register_forward_pre_hook(_no_memory)
    with pytest.raises(OutOfMemoryError, match=r"one sample at a time.*zero_stage"):
        recovering_step(
            engine, toy_batch(8), InfoNCE(), BatchPlan(8, 1, 8, 1), lr=0.1, log=lambda _: None
        )


def test_another_error_is_not_taken_for_it():
    engine, model = make("plain")
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recovering_step(
            engine, toy_batch(8), InfoNCE(), BatchPlan(8, 1, 8, 1), lr=0.1, log=lambda _: None
        )
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(
        RuntimeError("shapes do not fit")
    )


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "could not create a primitive",
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation after trying 12 plans.",
    ],
)
def test_the_libraries_words_for_it(message):
    assert is_out_of_memory(RuntimeError(message))


def test_a_memory_bank_takes_a_repeated_batch_once():
    engine, model = make("plain")
    bank = MemoryBank(100)
    fail(model, "replayed backward", 8)
    recovering_step(
        engine, toy_batch(N), bank, BatchPlan(N, 1, *BEFORE), lr=0.1, log=lambda _: None
    )
    assert model.fail_at is None and bank.steps == 1 and len(bank.past["ids"]) == N


def test_halving_ends_at_one_sample():
    plan, seen = BatchPlan(40, 1, 13, 3), []
    while plan is not None:
        kept = plan.micro_size * plan.kept_graphs
        seen.append(kept)
        plan = halved(plan)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == len(seen) and seen[-1] == 1
