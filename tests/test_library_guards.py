"""`contrastive_step` where micro-batches do not use all towers, or inputs cannot be cut evenly: exact, or an error."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from clip_train.library import contrastive_step
from clip_train.losses.views import over_pairs
from tests.ranks import RankFailedError, run_ranks
from tests.test_library import Towers, samples, textbook

ALIKE = [1, 1, 0, 0, 1, 1] * 2  # which documents have an image, of the samples of two ranks
DIFFERENT = [1, 1, 0, 0, 1, 1] + [1] * 6
FIRST_ALONE = [0, 0, 1, 1, 1, 1] * 2


class Documents(nn.Module):
    """A document may have an image, for a tower that is not called if no document has one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.query = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 6)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Linear(2, 2)
        self.double()

    def forward(self, queries, documents, pictured):
        if pictured.any():
            seen = torch.tanh(self.image(documents))
            documents = torch.where(pictured[:, None], seen, documents)
        query = F.normalize(self.query(queries), dim=1)
        return query, F.normalize(self.text(documents), dim=1), self.logit_scale.exp()


def documents(pictured: list[int]) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    queries, texts = torch.randn(2, 12, 8, generator=g, dtype=torch.float64)
    return [queries, texts, torch.tensor(pictured, dtype=torch.bool)]


def with_unused_towers(kind: str, pictured: list[int], kept: int):
    model = Documents()
    net: nn.Module = model
    if kind == "apart":
        for name in ("image", "text", "query"):
            setattr(model, name, DistributedDataParallel(getattr(model, name)))
    elif kind.startswith("sharded"):
        for tower in (model.image, model.text, model.query):
            fully_shard(tower, reshard_after_forward=kind == "sharded, stage 3")
    else:
        net = DistributedDataParallel(model, find_unused_parameters=kind == "finds unused")
    if kind == "hooked":
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient * 1.0)
    own = slice(6 * torch_dist.get_rank(), 6 * torch_dist.get_rank() + 6)
    steps = []
    for _ in range(2):
        net.zero_grad()
        inputs = [x[own] for x in documents(pictured)]
        loss = contrastive_step(net, *inputs, micro_size=2, kept_graphs=kept)
        grads = [p.grad for name, p in model.named_parameters() if not name.startswith("never")]
        steps.append([g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads])
    return loss.item(), steps, [p.grad for p in model.never.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind, pictured, kept",
    [
        # without kept graphs, the second of three micro-batches is the last to go backward
        ("together", ALIKE, 1),
        ("together", DIFFERENT, 1),
        ("together", FIRST_ALONE, 2),  # now it is the first
        ("finds unused", DIFFERENT, 1),
        ("hooked", ALIKE, 1),
        ("apart", ALIKE, 1),
        ("apart", FIRST_ALONE, 2),
        ("sharded, stage 2", ALIKE, 1),
        ("sharded, stage 3", ALIKE, 1),
        ("sharded, stage 3", FIRST_ALONE, 3),
    ],
)
def test_a_tower_unused_in_some_micro_batches_has_its_gradient(kind, pictured, kept):
    reference = Documents()
    expected = textbook(*reference(*documents(pictured)))
    expected.backward()
    wanted = [p.grad for p in reference.parameters() if p.grad is not None]
    for loss, steps, unused in run_ranks(with_unused_towers, 2, kind, pictured, kept):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for gradients in steps:
            for ours, theirs in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-14)
        assert all(g is None or not g.any() for g in unused)


class Checkpointed(nn.Module):
    """One tower for both sides, or one for each, in reentrant activation checkpoints."""

    def __init__(self, shared: bool, reentrant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2 - shared)
        )
        self.reentrant = reentrant
        self.double()

    def forward(self, queries, documents):
        out = []
        towers = self.towers[0], self.towers[-1]
        for tower, inputs in zip(towers, (queries, documents), strict=True):
            # a reentrant checkpoint needs an input with a gradient
            x = inputs.detach().requires_grad_()
            y = checkpoint(lambda x, t=tower: t(x), x, use_reentrant=self.reentrant)
            out.append(F.normalize(y, dim=1))
        return (*out, torch.tensor(4.0).double())


def checkpointed(shared: bool, reentrant: bool, micro_size: int, stage: int = 1, kept: int = 1):
    """stage: 1 is DDP, 2 and 3 are `fully_shard`, whose units are in the checkpoints."""
    model = Checkpointed(shared, reentrant)
    own = slice(6 * torch_dist.get_rank(), 6 * torch_dist.get_rank() + 6)
    if stage == 1:
        net: nn.Module = DistributedDataParallel(model)
    else:
        for tower in model.towers:
            fully_shard(tower, reshard_after_forward=stage == 3)
        net = fully_shard(model, reshard_after_forward=stage == 3)
    for _ in range(2):
        net.zero_grad()
        inputs = [x[own] for x in documents(ALIKE)[:2]]
        contrastive_step(net, *inputs, micro_size=micro_size, kept_graphs=kept)
    gradients = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


@pytest.mark.distributed
@pytest.mark.parametrize("micro_size", [2, 6])
@pytest.mark.parametrize("shared, reentrant", [(False, True), (True, False)])
def test_activation_checkpoints_under_ddp(shared, reentrant, micro_size):
    reference = Checkpointed(shared)
    textbook(*reference(*documents(ALIKE)[:2])).backward()
    for gradients in run_ranks(checkpointed, 2, shared, reentrant, micro_size):
        for ours, p in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, p.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.distributed
@pytest.mark.parametrize("stage, kept", [(2, 1), (2, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("shared, reentrant", [(False, True), (False, False), (True, False)])
def test_activation_checkpoints_under_fully_shard(shared, reentrant, stage, kept):
    reference = Checkpointed(shared)
    textbook(*reference(*documents(ALIKE)[:2])).backward()
    for gradients in run_ranks(checkpointed, 2, shared, reentrant, 2, stage, kept):
        for ours, p in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, p.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.distributed
@pytest.mark.parametrize("micro_size", [2, 6])
def test_reentrant_checkpoints_of_a_shared_tower_fail_under_ddp(micro_size):
    with pytest.raises(RankFailedError) as e:
        run_ranks(checkpointed, 2, True, True, micro_size)
    assert len(e.value.errors) == 2
    for name, message in e.value.errors.values():
        assert name == "ValueError" and "set use_reentrant=False" in message


class Patches(nn.Module):
    """Images are flattened patches, with the number of patches of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Linear(8, 6).double()

    def forward(self, patches, counts, texts):
        place = torch.arange(len(counts)).repeat_interleave(counts)[: len(patches)]
        images = patches.new_zeros(len(counts), 8).index_add(0, place, patches[: len(place)])
        pair = (self.tower(x) for x in (images, texts))
        return (*(F.normalize(x, dim=1) for x in pair), torch.tensor(4.0).double())


def test_flattened_patches_are_not_cut_evenly():
    patches, texts, counts = documents(ALIKE)[0][:8], documents(ALIKE)[1][:4], [3, 3, 1, 1]
    inputs = patches, torch.tensor(counts), texts
    model, reference = Patches(), Patches()
    with pytest.raises(ValueError, match=r"inputs \[0\] have \[2\] rows .* cannot be cut evenly"):
        contrastive_step(model, *inputs, micro_size=2)
    assert all(p.grad is None for p in model.parameters())
    loss = contrastive_step(model, *inputs, micro_size=4)  # nothing is cut
    expected = textbook(*reference(*inputs))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(model.tower.weight.grad, reference.tower.weight.grad)


class Videos(Towers):
    """A video is 4 frames, with one feature."""

    def forward(self, frames, texts):
        return super().forward(frames.unflatten(0, (-1, 4)).mean(1), texts)


def test_frames_of_videos_are_cut_evenly():
    frames, texts = samples(32)[0], samples(8)[1]
    model, reference = Videos(), Videos()
    model.double(), reference.double()
    loss = contrastive_step(model, frames, texts, micro_size=2)
    with pytest.raises(ValueError, match="cannot be cut evenly"):
        contrastive_step(model, frames, {**texts, "frames": [3, 5] * 4}, micro_size=2)
    expected = textbook(*reference(frames, texts))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for p, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad)


def test_packed_tokens_are_not_cut():
    def model(tokens, ends):
        """Sequences of 3 tokens, whatever `ends` has."""
        pooled = torch.stack([x.mean(0) for x in tokens.split(3)])
        return pooled, pooled, torch.ones(1)

    with pytest.raises(ValueError, match=r"inputs \[0\] have \[3\] rows .* cannot be cut evenly"):
        contrastive_step(model, torch.randn(12, 4), torch.arange(4), micro_size=2)
    with pytest.raises(ValueError, match=r"for a micro-batch of 2 samples: return equally many"):
        contrastive_step(model, torch.randn(12, 4), torch.arange(12), micro_size=2)


def test_features_have_one_row_for_each_sample_or_text():
    with pytest.raises(ValueError, match=r"image features are \[2, 5, 3\]: return \[b, D\]"):
        contrastive_step(lambda i, t: (i, t, torch.ones(1)), *torch.randn(2, 4, 5, 3), micro_size=2)


def test_features_that_no_pair_reads_may_have_any_shape():
    def model(queries, documents):
        tokens = queries[:, None].expand(-1, 3, -1)
        scale = torch.ones(1)
        return {"query": queries, "text": documents, "tokens": tokens, "logit_scale": scale}

    pair = torch.randn(2, 4, 6, requires_grad=True)
    loss = over_pairs({("query", "text"): 1.0})
    got = contrastive_step(model, *pair, micro_size=2, loss=loss)
    assert got.item() == pytest.approx(textbook(*pair, torch.ones(1)).item(), rel=1e-5)


class Identified(Towers):
    def forward(self, images, texts, ids=None):
        return super().forward(images, texts)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")])
def test_an_argument_of_the_model_is_not_swallowed(wrap):
    with pytest.raises(ValueError, match=r"\['ids'\] are arguments of contrastive_step and of"):
        contrastive_step(wrap(Identified()), *samples(4), ids=torch.arange(4), micro_size=2)


class Tokens(Towers):
    def forward(self, images, ids):
        return super().forward(images, ids)


@pytest.mark.parametrize(
    "bind", [lambda m: m, lambda m: functools.partial(Identified().forward, ids=None)]
)
def test_an_argument_that_the_model_already_has_reaches_the_loss(bind):
    """By its place, or by functools.partial."""
    equal = torch.tensor([0, 1, 0, 3])
    losses = [
        contrastive_step(model, *samples(4), ids=equal, micro_size=2)
        for model in (Towers(), bind(Tokens()))
    ]
    assert losses[0] == losses[1]


def sharded_with_an_older_torch():
    torch.__version__ = "2.7.1+cpu"
    contrastive_step(fully_shard(nn.Linear(8, 6)), torch.randn(4, 8), micro_size=2)


@pytest.mark.distributed
def test_an_older_torch_cannot_shard():
    with pytest.raises(RankFailedError) as e:
        run_ranks(sharded_with_an_older_torch, 2)
    for name, message in e.value.errors.values():
        assert name == "ValueError" and "needs 2.8 or newer with fully_shard" in message
