"""InfoNCE with memory banks against autograd over explicit concatenation and a FIFO in plain Python."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from clip_train.columns import Columns
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.memory_bank import MemoryBank, sample_ids
from clip_train.task import Context, named_features
from tests.losses.oracles import banked_loss, leaves, pairs, relative
from tests.ranks import run_ranks

N, D, SCALE = 12, 16, 20.0
# Samples come back: step t sees ids (t * 12 ... t * 12 + 11) mod 30, so banks hold copies of current samples,
# and a bank of 40 holds some samples twice.
NUM_SAMPLES = 30


def stream(step: int):
    image, text = pairs(N, D, seed=step)
    return image, text, (torch.arange(N) + step * N) % NUM_SAMPLES


def named(ids) -> Context:
    """Equal names are copies of one sample."""
    return Context(columns=Columns(names=[f"sample {i}" for i in ids.tolist()]))


def objective(size=40, warmup=0, mode="negatives", tile=7) -> MemoryBank:
    return MemoryBank(size, warmup, mode, tile=tile)


def expected(steps: int, size: int, warmup: int, mode: str):
    """Loss and gradients of every step; the banks are Python lists."""
    fifo: list = []
    out = []
    for step in range(steps):
        image, text, ids = stream(step)
        I, T, s = leaves(image, text, SCALE)
        past = fifo[-size:] if step >= warmup else []
        past_I = torch.stack([p[0] for p in past]) if past else torch.zeros(0, D).double()
        past_T = torch.stack([p[1] for p in past]) if past else torch.zeros(0, D).double()
        past_ids = torch.tensor([p[2] for p in past], dtype=torch.int64)
        loss = banked_loss(I, T, s, past_I, past_T, ids, past_ids, mode)
        loss.backward()
        out.append((loss.detach(), I.grad, T.grad, s.grad, len(past)))
        fifo += [(image[i], text[i], int(ids[i])) for i in range(N)]
    return out


def run_steps(loss: MemoryBank, first: int, last: int, dtype=torch.float64):
    n = N // dist.world_size()
    own = slice(dist.rank() * n, (dist.rank() + 1) * n)
    out = []
    for step in range(first, last):
        image, text, ids = stream(step)
        scale = torch.tensor([SCALE], dtype=dtype)
        o = loss(named_features(image[own].to(dtype), text[own].to(dtype), scale), named(ids[own]))
        loss.after_step()
        out.append(
            (
                o.loss,
                o.gradients["image"],
                o.gradients["text"],
                o.gradients["logit_scale"],
                o.metrics,
            )
        )
    return out


def check(results: list, steps, tolerance: float = 1e-11):
    """`results`: of every rank, of every step."""
    for step, (loss, d_image, d_text, d_scale, entries) in enumerate(steps):
        ours = [rank[step] for rank in results]
        assert all(o[0].item() == pytest.approx(loss.item(), rel=tolerance) for o in ours)
        assert relative(torch.cat([o[1] for o in ours]), d_image) < tolerance
        assert relative(torch.cat([o[2] for o in ours]), d_text) < tolerance
        assert relative(sum(o[3] for o in ours), d_scale) < tolerance
        assert all(o[4]["bank_entries"] == entries for o in ours)


@pytest.mark.parametrize("mode", ["negatives", "contaccum"])
@pytest.mark.parametrize(
    "size, warmup, tile", [(40, 0, 7), (40, 2, 2048), (5, 0, 3), (12, 1, 4), (1, 0, 1)]
)
def test_float64_equals_autograd_over_the_concatenation(mode, size, warmup, tile):
    ours = run_steps(objective(size, warmup, mode, tile), 0, 6)
    check([ours], expected(6, size, warmup, mode))


def on_a_rank(cases):
    return [run_steps(objective(size, 1, mode), 0, 5) for mode, size in cases]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_hold_shares_of_the_gradient(world_size):
    """Also where the banks do not divide, and where a rank has no past pair of its own."""
    cases = [("negatives", 40), ("negatives", 17), ("contaccum", 41), ("contaccum", 1)]
    results = run_ranks(on_a_rank, world_size, cases)
    for i, (mode, size) in enumerate(cases):
        check([of_rank[i] for of_rank in results], expected(5, size, 1, mode))


@pytest.mark.parametrize("mode", ["negatives", "contaccum"])
def test_float32_is_exact_to_rounding(mode):
    ours = run_steps(objective(mode=mode), 0, 5, torch.float32)
    check([ours], expected(5, 40, 0, mode), 1e-5)


def test_until_it_counts_it_is_the_exact_loss_to_the_bit():
    loss = objective(warmup=2)
    for step, ours in enumerate(run_steps(loss, 0, 2, torch.float32)):
        image, text, _ = stream(step)
        exact = InfoNCE(tile=7)(named_features(image.float(), text.float(), torch.tensor([SCALE])))
        assert torch.equal(ours[1], exact.gradients["image"]) and torch.equal(ours[0], exact.loss)
        assert ours[4] == {"bank_entries": 0}


def test_the_banks_change_only_when_the_step_is_taken():
    loss = objective()
    run_steps(loss, 0, 2)
    image, text, ids = stream(2)
    once = loss(named_features(image, text, torch.tensor([SCALE]).double()), named(ids))
    again = loss(named_features(image, text, torch.tensor([SCALE]).double()), named(ids))
    assert torch.equal(once.gradients["image"], again.gradients["image"])
    assert len(loss.state_dict()["bank.image"]) == 2 * N


def test_without_ids_nothing_is_left_out():
    loss = MemoryBank(100, tile=7)
    for step in range(2):
        image, text, _ = stream(step)
        outcome = loss(named_features(image, text, torch.tensor([SCALE]).double()))
        loss.after_step()
    I, T, s = leaves(image, text, SCALE)
    past_I, past_T, _ = stream(0)
    different = torch.arange(2 * N)
    banked_loss(I, T, s, past_I, past_T, different[:N], different[N:], "negatives").backward()
    assert relative(outcome.gradients["image"], I.grad) < 1e-11


def test_ids_are_equal_on_all_ranks_and_differ_between_samples():
    ids = sample_ids(f"shard-{i % 7}/{i}" for i in range(5000))
    assert ids.dtype == torch.int64 and len(set(ids.tolist())) == 5000 and (ids >= 0).all()


@pytest.mark.parametrize("mode", ["negatives", "contaccum"])
def test_a_restored_bank_goes_on_to_the_bit(mode):
    loss = objective(mode=mode, warmup=1)
    whole = run_steps(loss, 0, 3, torch.float32)
    saved = {name: t.clone() for name, t in loss.state_dict().items()}
    rest = run_steps(loss, 3, 6, torch.float32)
    again = objective(mode=mode, warmup=1)
    again.load_state_dict(saved, torch.device("cpu"))
    resumed = run_steps(again, 3, 6, torch.float32)
    assert len(whole) == 3
    for ours, theirs in zip(rest, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[:4], theirs[:4], strict=True))


def test_from_a_checkpoint_without_banks_it_starts_empty():
    loss = objective()
    run_steps(loss, 0, 2)
    loss.load_state_dict({}, torch.device("cpu"))
    assert loss.state_dict() == {"bank.steps": torch.tensor([0])}
