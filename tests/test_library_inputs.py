"""`contrastive_step` with ragged inputs, and towers that are cut by themselves."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from clip_train.cutting import Inputs
from clip_train.library import contrastive_step
from clip_train.losses.maxsim import MaxSim
from clip_train.losses.ranking import Ranking
from clip_train.losses.views import over_pairs
from tests.ranks import run_ranks

N = 6
IMAGES = [1, 2, 1, 1, 3, 1]  # of each document
GRIDS = [
    [1, 2, 2],
    [1, 1, 3],
    [1, 2, 1],
    [2, 1, 1],
    [1, 3, 1],
    [1, 1, 1],
    [1, 2, 2],
    [1, 1, 1],
    [1, 4, 1],
]
WORDS = [2, 3, 1, 4, 2, 2]  # of each query


class PagesAndQuestions(nn.Module):
    """Documents are images of any size, several each, as flattened patches; queries are packed
    tokens. As in transformers' vision-language models, nothing has a row for each sample but counts.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.patches = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.tokens = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.logit_scale = nn.Parameter(torch.tensor([1.3]))
        self.to(dtype)

    def forward(self, document=None, query=None):
        out = {"logit_scale": self.logit_scale.exp()}
        if document is not None:
            images = document["images"].tolist()
            patches = document["grid_thw"].prod(1)
            assert len(document["grid_thw"]) == sum(images)
            assert len(document["pixel_values"]) == patches.sum()
            of_image = torch.arange(len(patches)).repeat_interleave(patches)
            of_document = torch.arange(len(images)).repeat_interleave(document["images"])[of_image]
            values = self.patches(document["pixel_values"])
            pooled = values.new_zeros(len(images), 4).index_add(0, of_document, values)
            out["document"] = F.normalize(pooled, dim=-1)
        if query is not None:
            ends = query["cu_seqlens"]
            assert ends[0] == 0 and ends[-1] == len(query["token_values"])
            of_query = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
            values = self.tokens(query["token_values"])
            pooled = values.new_zeros(len(ends) - 1, 4).index_add(0, of_query, values)
            out["query"] = F.normalize(pooled, dim=-1)
        return out


SPLIT_BY = {"pixel_values": "grid_thw", "grid_thw": "images", "token_values": "cu_seqlens"}


def inputs(start: int = 0, stop: int = N) -> dict[str, dict[str, Tensor]]:
    """The samples [start, stop), cut here by hand."""
    g = torch.Generator().manual_seed(0)
    pixels = torch.randn(sum(t * h * w for t, h, w in GRIDS), 5, generator=g).double()
    tokens = torch.randn(sum(WORDS), 3, generator=g).double()
    first, end = sum(IMAGES[:start]), sum(IMAGES[:stop])
    patches = [t * h * w for t, h, w in GRIDS]
    words = WORDS[start:stop]
    return {
        "document": {
            "pixel_values": pixels[sum(patches[:first]) : sum(patches[:end])],
            "grid_thw": torch.tensor(GRIDS[first:end]),
            "images": torch.tensor(IMAGES[start:stop]),
        },
        "query": {
            "token_values": tokens[sum(WORDS[:start]) : sum(WORDS[:stop])],
            "cu_seqlens": torch.tensor([0, *words]).cumsum(0),
        },
    }


def expected() -> tuple[float, list[Tensor]]:
    reference = PagesAndQuestions()
    out = reference(**inputs())
    loss = F.cross_entropy(out["logit_scale"] * out["query"] @ out["document"].T, torch.arange(N))
    loss.backward()
    return loss.item(), [p.grad for p in reference.parameters()]


def assert_alike(told: float, gradients: list[Tensor], rtol: float = 1e-9) -> None:
    loss, wanted = expected()
    assert told == pytest.approx(loss, rel=rtol)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize(
    "micro_size",
    [1, 4, N, [1, 3, 2], {"query": 2, "document": 1}, {"document": [1, 5], "query": 6}],
)
def test_ragged_inputs_and_towers_of_their_own_size(micro_size, kept):
    model = PagesAndQuestions()
    told = contrastive_step(
        model,
        **inputs(),
        micro_size=micro_size,
        kept_graphs=kept,
        loss=Ranking(),
        split_by=SPLIT_BY,
    )
    assert_alike(told.item(), [p.grad for p in model.parameters()])


def test_counts_may_be_numbers_and_inputs_beside_each_other():
    """Flat keywords, as a processor returns them."""

    class Flat(PagesAndQuestions):
        def forward(self, pixel_values, grid_thw, token_values, cu_seqlens):
            images = torch.ones(len(grid_thw), dtype=torch.int64)
            document = {"pixel_values": pixel_values, "grid_thw": grid_thw, "images": images}
            query = {"token_values": token_values, "cu_seqlens": cu_seqlens}
            return super().forward(document, query)

    both = inputs()
    grids = torch.tensor(GRIDS[:N])
    patches = grids.prod(1).tolist()
    named = {
        "pixel_values": both["document"]["pixel_values"][: sum(patches)],
        "grid_thw": grids,
        **both["query"],
    }
    whole, cut = Flat(), Flat()
    contrastive_step(whole, **named, micro_size=N, loss=Ranking(), split_by={
        "pixel_values": "grid_thw", "token_values": "cu_seqlens",
    })  # fmt: skip
    for split_by in (
        {"pixel_values": "grid_thw", "token_values": "cu_seqlens"},
        {"pixel_values": patches, "token_values": "cu_seqlens"},
        {"pixel_values": torch.tensor(patches), "token_values": "cu_seqlens"},
    ):
        cut.zero_grad()
        contrastive_step(cut, **named, micro_size=2, loss=Ranking(), split_by=split_by)
        for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_ends_of_parts_may_be_a_list():
    tokens = torch.arange(7)
    for ends in ([0, 3, 3, 7], torch.tensor([0, 3, 3, 7])):
        inputs = Inputs({"x": tokens, "cu_seqlens": ends}, {"x": "cu_seqlens"})
        assert inputs.sizes == {"x": 3, "cu_seqlens": 3}
        part = inputs.cut(slice(1, 3), 3, ["x", "cu_seqlens"])
        assert part["x"].tolist() == [3, 4, 5, 6] and [*part["cu_seqlens"]] == [0, 0, 4]


def test_an_input_is_ragged_if_a_part_of_it_is_at_any_depth():
    nested = {"q": {"view": {"pixels": torch.zeros(5), "n": [2, 3]}, "flag": [0, 1]}}
    inputs = Inputs({**nested, "x": torch.zeros(4)}, {"pixels": "n"})
    assert inputs.is_ragged("q") and not inputs.is_ragged("x")


def on_ranks(kind: str, stage: int, shares: list[int], micro_size: Any, steps: int = 2):
    rank = torch_dist.get_rank()
    own = inputs(sum(shares[:rank]), sum(shares[: rank + 1]))
    model = PagesAndQuestions(torch.float32 if kind == "zero" else torch.float64)
    more = {"loss": Ranking(), "split_by": SPLIT_BY, "shares": shares, "micro_size": micro_size}
    losses, gradients = [], []
    if kind == "ddp":
        net: Any = DistributedDataParallel(model)
    elif kind == "fsdp":
        for tower in (model.patches, model.tokens):
            fully_shard(tower, reshard_after_forward=stage == 3)
        net = fully_shard(model, reshard_after_forward=stage == 3)
    else:
        import deepspeed
        import deepspeed.comm.torch
        from deepspeed.utils import logger, safe_get_full_grad

        logger.setLevel("ERROR")
        deepspeed.comm.torch.build_shm_op = lambda: None  # which takes a minute to compile
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with contextlib.redirect_stdout(io.StringIO()):
            net = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        floats = {
            "document": {
                **own["document"],
                "pixel_values": own["document"]["pixel_values"].float(),
            },
            "query": {**own["query"], "token_values": own["query"]["token_values"].float()},
        }
        own = floats
    for _ in range(steps):
        net.zero_grad()
        losses.append(contrastive_step(net, **own, **more).item())
        if kind == "zero":
            read = [p.grad if stage == 0 else safe_get_full_grad(p) for p in model.parameters()]
            gradients.append([gradient.clone() for gradient in read])
            net.step()
        else:
            grads = [p.grad for p in model.parameters()]
            gradients.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads])
            gradients[-1] = [g.clone() for g in gradients[-1]]
    return losses, gradients


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind, stage, shares, micro_size",
    [
        ("ddp", 0, [3, 3], 2),
        ("ddp", 0, [4, 2], {"query": 2, "document": 1}),
        ("fsdp", 3, [3, 3], {"query": 3, "document": 1}),
        ("fsdp", 2, [2, 4], {"document": 1, "query": 2}),
        ("zero", 0, [3, 3], {"query": 2, "document": 1}),
        ("zero", 2, [4, 2], {"query": 2, "document": 1}),
        ("zero", 3, [3, 3], {"document": 1, "query": 3}),
        ("zero", 3, [2, 1, 3], 1),
    ],
)
def test_ragged_towers_on_ranks(kind, stage, shares, micro_size):
    for losses, gradients in run_ranks(on_ranks, len(shares), kind, stage, shares, micro_size):
        for loss, of_step in zip(losses, gradients, strict=True):
            assert_alike(loss, of_step, rtol=1e-5 if kind == "zero" else 1e-9)


def test_two_towers_of_pairs_by_the_names_of_their_inputs():
    """Any loss of pairs takes towers that are cut by themselves."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.towers = nn.ModuleDict({"photo": nn.Linear(4, 3), "caption": nn.Linear(5, 3)})
            self.double()

        def forward(self, **one_or_two):
            out = {n: F.normalize(self.towers[n](x), dim=1) for n, x in one_or_two.items()}
            return out | {"logit_scale": torch.tensor(3.0).double()}

    g = torch.Generator().manual_seed(1)
    both = {"photo": torch.randn(5, 4, generator=g), "caption": torch.randn(5, 5, generator=g)}
    both = {name: x.double() for name, x in both.items()}
    whole, cut = Pairs(), Pairs()
    expected = contrastive_step(whole, **both, micro_size=5)
    for loss in (None, over_pairs({("photo", "caption"): 1.0})):
        cut.zero_grad()
        sizes = {"photo": 2, "caption": 5}
        told = contrastive_step(cut, **both, micro_size=sizes, loss=loss)
        assert told.item() == pytest.approx(expected.item(), rel=1e-12)
        for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_names_that_the_step_has_itself_go_through():
    class Swallowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(3, 3)

        def forward(self, ids, loss):
            pair = (F.normalize(self.tower(x), dim=1) for x in (ids, loss))
            return (*pair, torch.tensor(2.0))

    model, values = Swallowing(), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"Give the model's in arguments=\{'loss'"):
        contrastive_step(model, values, loss=Ranking(), micro_size=2)
    loss = contrastive_step(
        model, arguments={"ids": values, "loss": values.flip(1)}, ids=[1, 2, 3, 4], micro_size=2
    )
    assert loss.isfinite()


def test_inputs_in_arguments_say_where_the_step_runs(monkeypatch):
    """A function has no parameters: whose random numbers are replayed follows from its inputs."""
    devices = []

    def noted(device):
        devices.append(device.type)
        return {"rng.cpu": torch.get_rng_state()}

    monkeypatch.setattr("clip_train.step.rng_state", noted)

    def function(ids, loss):
        return ids, loss, torch.ones(1, device="meta")

    def product(image, text, scale, bias, rows):
        return scale.sum() * (image * text).sum()

    values = {
        name: torch.empty(4, 3, device="meta", requires_grad=True) for name in ("ids", "loss")
    }
    contrastive_step(function, arguments=values, micro_size=4, loss=product)
    assert {*devices} == {"meta"}


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"split_by": {"pixels": "grid_thw"}},
            r"split_by names \['pixels'\], which are not inputs",
        ),
        (
            {"split_by": SPLIT_BY | {"grid_thw": "pages"}},
            r"counted by .*'pages'.* not inputs beside",
        ),
        ({"split_by": SPLIT_BY | {"grid_thw": [1] * N}}, r"grid_thw has 9 rows, .* counts 6"),
        ({"split_by": SPLIT_BY | {"grid_thw": 2.5}}, "counted by a float"),
        ({"split_by": SPLIT_BY | {"grid_thw": "grid_thw"}}, "not inputs beside them"),
        ({"split_by": None}, "all values need the same first dimension.* rows of ragged ones"),
        ({"split_by": SPLIT_BY | {"query.images": "x"}}, r"split_by names \['query.images'\]"),
        ({"micro_size": {"query": 2}}, "give each a size"),
        ({"micro_size": {"query": 2, "document": 0}}, r"micro_size of document \(0\)"),
    ],
)
def test_what_cannot_be_cut_is_explained(change, message):
    options = {"micro_size": 2, "split_by": SPLIT_BY, "loss": Ranking(), **change}
    with pytest.raises(ValueError, match=message):
        contrastive_step(PagesAndQuestions(), **inputs(), **options)


def test_a_tower_without_its_features_is_explained():
    class Silent(PagesAndQuestions):
        def forward(self, document=None, query=None):
            return {"logit_scale": self.logit_scale.exp()}

    options = {"micro_size": {"query": 2, "document": 1}, "split_by": SPLIT_BY}
    with pytest.raises(ValueError, match="was called with query alone, and must return a dict"):
        contrastive_step(Silent(), **inputs(), **options, loss=MaxSim())


def test_an_entry_may_be_for_one_tower():
    """Both have `input_ids`; only those of the query are packed."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(20, 4).double()

        def forward(self, query, document):
            ends = query["cu_seqlens"]
            of_query = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
            rows = self.words(query["input_ids"])
            pooled = rows.new_zeros(len(ends) - 1, 4).index_add(0, of_query, rows)
            return {
                "query": F.normalize(pooled, dim=1),
                "document": F.normalize(self.words(document["input_ids"]).mean(1), dim=1),
            }

    g = torch.Generator().manual_seed(1)
    named = {
        "query": {
            "input_ids": torch.randint(20, (sum(WORDS),), generator=g),
            "cu_seqlens": torch.tensor([0, *WORDS]).cumsum(0),
        },
        "document": {"input_ids": torch.randint(20, (N, 5), generator=g)},
    }
    split_by = {"query.input_ids": "cu_seqlens"}
    whole, cut = Words(), Words()
    for model, size in ((whole, N), (cut, 2)):
        contrastive_step(model, **named, micro_size=size, split_by=split_by, loss=Ranking(scale=9))
    torch.testing.assert_close(cut.words.weight.grad, whole.words.weight.grad)
    named["query"]["cu_seqlens"] = named["query"]["cu_seqlens"][1:]
    with pytest.raises(ValueError, match="begins with 2: it must begin with 0"):
        contrastive_step(cut, **named, micro_size=2, split_by=split_by, loss=Ranking(scale=9))
