"""`contrastive_step` with known copies, unequal ranks, more than two towers, and nested widths."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clip_train.library import contrastive_step, token_chunks
from clip_train.losses.views import matryoshka, over_pairs
from tests.ranks import RankFailedError, run_ranks
from tests.test_library import (
    Towers,
    assert_same_gradients,
    one_direction,
    part,
    samples,
    textbook,
)

# of 2 documents for each of 8 queries: copies among positives, of a hard negative, of an own one
IDS = torch.tensor([3, 20, 4, 21, 3, 22, 5, 4, 6, 6, -1, -1, -1, 23, 7, 24])


def masked(query: Tensor, document: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """InfoNCE with the first of m documents as the positive, copies of it left out."""
    m, logits = len(document) // len(query), scale * query @ document.T
    own = m * torch.arange(len(query))
    copies = (ids[own, None] == ids[None]) & (ids >= 0)
    copies[torch.arange(len(query)), own] = False
    logits = logits.masked_fill(copies, -torch.inf)
    back = logits[:, own].T  # copies are copies in both directions
    there = F.cross_entropy(logits, own)
    return (there + F.cross_entropy(back, torch.arange(len(query)))) / 2


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("micro_size, kept", [(3, 1), (8, 1)])
def test_copies_are_no_negatives(m, micro_size, kept):
    model, reference, ids = Towers(), Towers(), IDS[: 8 * m]
    inputs = samples(8)[0], samples(8 * m)[1]
    expected = masked(*reference(*inputs), ids)
    expected.backward()
    told = contrastive_step(model, *inputs, micro_size=micro_size, kept_graphs=kept, ids=ids)
    assert told.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(model, reference)


def test_a_query_whose_negatives_are_all_copies_adds_nothing():
    model = Towers()
    told = contrastive_step(model, *samples(4), micro_size=4, ids=[1, 1, 1, 1])
    assert told.item() == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


def on_unequal_ranks(shares: list[int], micro_size: int, loss: object, ids: Tensor | None):
    rank = torch_dist.get_rank()
    own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    documents = slice(2 * own.start, 2 * own.stop)
    inputs = samples(8)[0][own], part(samples(16), documents)[1]
    towers = Towers()
    told = contrastive_step(
        DistributedDataParallel(towers),
        *inputs,
        micro_size=micro_size,
        kept_graphs=2,
        loss=loss,
        shares=shares,
        ids=None if ids is None else ids[documents],
    )
    return told.item(), [p.grad for p in towers.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "shares, micro_size, loss",
    [([5, 3], 2, None), ([2, 5, 1], 2, None), ([3, 5], 2, one_direction)],
)
def test_ranks_may_hold_unequal_shares_and_find_copies_on_all(shares, micro_size, loss):
    reference, ids = Towers(), IDS if loss is None else None
    features = reference(samples(8)[0], samples(16)[1])
    expected = masked(*features, IDS) if loss is None else loss(*features, None, slice(0, 8))
    expected.backward()
    for told, gradients in run_ranks(on_unequal_ranks, len(shares), shares, micro_size, loss, ids):
        assert told == pytest.approx(expected.item(), rel=1e-12)
        for ours, p in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, p.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.distributed
def test_unfitting_shares_are_refused_on_the_rank_that_sees_them():
    with pytest.raises(RankFailedError) as e:
        run_ranks(on_unequal_ranks, 2, [9, 3], 2, None, None)
    assert "and 8 for rank 0" in e.value.errors[0][1]


class ThreeTowers(nn.Module):
    """Two captions for each image and sound, the first its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.towers = nn.ModuleDict(
            {name: nn.Linear(10, 8) for name in ("image", "sound", "caption")}
        ).double()
        self.logit_scale = nn.Parameter(torch.tensor(1.2).double())

    def forward(self, **inputs):
        out = {name: F.normalize(self.towers[name](x), dim=1) for name, x in inputs.items()}
        return {**out, "logit_scale": self.logit_scale.exp()}


def nested(query: Tensor, document: Tensor, scale: Tensor) -> Tensor:
    return sum(
        weight
        * textbook(F.normalize(query[:, :w], dim=1), F.normalize(document[:, :w], dim=1), scale)
        for w, weight in {8: 1.0, 3: 0.5}.items()
    )


@pytest.mark.parametrize("micro_size, kept", [(2, 1), (6, 1)])
@pytest.mark.parametrize("inner", [None, one_direction, matryoshka({8: 1.0, 3: 0.5})])
def test_three_towers_with_the_pairs_that_the_loss_names(inner, micro_size, kept):
    model, reference = ThreeTowers(), ThreeTowers()
    inputs = {name: samples(6)[0] + i for i, name in enumerate(("image", "sound", "caption"))}
    out = reference(**inputs)
    of_pair = {None: textbook, one_direction: lambda q, d, s: one_direction(q, d, s, None, None)}
    each, scale = of_pair.get(inner, nested), out["logit_scale"]
    expected = each(out["image"], out["caption"], scale)
    expected = expected + 0.25 * each(out["image"], out["sound"], scale)
    expected.backward()
    loss = over_pairs({("image", "caption"): 1.0, ("image", "sound"): 0.25}, inner)
    told = contrastive_step(model, **inputs, micro_size=micro_size, kept_graphs=kept, loss=loss)
    assert told.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(model, reference)


def test_documents_may_outnumber_queries_in_one_pair_alone():
    model, reference = ThreeTowers(), ThreeTowers()
    g = torch.Generator().manual_seed(4)
    inputs = {
        name: torch.randn(n, 10, generator=g, dtype=torch.float64)
        for name, n in {"image": 6, "sound": 6, "caption": 12}.items()
    }
    out = reference(**inputs)
    nobody = torch.full((12,), -1)
    expected = masked(out["image"], out["caption"], out["logit_scale"], nobody)
    expected = expected + textbook(out["image"], out["sound"], out["logit_scale"])
    expected.backward()
    loss = over_pairs({("image", "caption"): 1, ("image", "sound"): 1})
    told = contrastive_step(model, **inputs, micro_size=4, loss=loss)
    assert told.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("ids", [None, IDS[:8]])
def test_nested_widths(ids):
    model, reference, inputs = Towers(), Towers(), samples(8)
    image, text, scale = reference(*inputs)
    expected = torch.zeros(())
    for width, weight in {6: 1.0, 2: 0.5}.items():
        cut = [F.normalize(x[:, :width], dim=1) for x in (image, text)]
        known = torch.full((8,), -1) if ids is None else ids
        expected = expected + weight * masked(*cut, scale, known)
    expected.backward()
    loss = matryoshka({6: 1.0, 2: 0.5})
    told = contrastive_step(model, *inputs, micro_size=3, loss=loss, ids=ids)
    assert told.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize(
    "num_tokens, most, k, sizes",
    [
        ([3, 3, 4, 9, 1, 1], 10, 1, [3, 2, 1]),
        ([30, 3, 30, 3], 10, 1, [1, 1, 1, 1]),
        ([1] * 5, 10, 3, [2, 1, 2]),
        ([1, 1], 10, 4, [1, 1]),
    ],
)
def test_chunks_by_tokens(num_tokens, most, k, sizes):
    assert token_chunks(num_tokens, most, k) == sizes


@pytest.mark.parametrize("micro_size", [[5, 1, 2], (8,)])
def test_a_list_of_sizes_cuts_the_batch(micro_size):
    model, reference, inputs = Towers(), Towers(), samples(8)
    textbook(*reference(*inputs)).backward()
    contrastive_step(model, *inputs, micro_size=micro_size)
    assert model.forwards == 2 * len(micro_size) - 1
    assert_same_gradients(model, reference)


def test_mistakes_are_explained():
    images, texts = samples(6)
    for sizes in ([4, 1], [6, 0], [7, -1]):
        with pytest.raises(ValueError, match="a list of such numbers whose sum is 6"):
            contrastive_step(Towers(), images, texts, micro_size=sizes)
    ids = torch.arange(6)
    with pytest.raises(ValueError, match="ids, and loss is FunctionLoss: it takes none"):
        contrastive_step(Towers(), images, texts, micro_size=2, loss=one_direction, ids=ids)
    with pytest.raises(ValueError, match=r"ids are \[5\]: give one for each of 6 texts"):
        contrastive_step(Towers(), images, texts, micro_size=2, ids=ids[:5])
    with pytest.raises(ValueError, match=r"shares \(\[3, 3\]\) must have a number for each of 1"):
        contrastive_step(Towers(), images, texts, micro_size=2, shares=[3, 3])
    with pytest.raises(ValueError, match="widths: 7 must be between 1 and the features' 6"):
        contrastive_step(Towers(), images, texts, micro_size=2, loss=matryoshka({7: 1.0}))
    inputs = dict.fromkeys(("image", "sound", "caption"), images)
    with pytest.raises(ValueError, match=r"no features \['video'\], only \['caption', 'image', "):
        loss = over_pairs({("image", "video"): 1.0})
        contrastive_step(ThreeTowers(), **inputs, micro_size=2, loss=loss)
    with pytest.raises(ValueError, match="the model must return"):
        contrastive_step(ThreeTowers(), **inputs, micro_size=2)
