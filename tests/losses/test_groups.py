"""Samples of one group: not each other's negatives, or each other's positives. Against autograd in float64."""

from __future__ import annotations

import json

import pytest
import torch

from clip_train import dist
from clip_train.batch import shares
from clip_train.columns import Columns
from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.data.values import GroupId
from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.losses.config import LossConfig
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.recipe.recipe import check_config
from clip_train.step import train_step
from clip_train.task import Context, named_features
from tests.data.shards import jpeg, write_shard
from tests.losses.oracle import features
from tests.losses.oracles import grouped_loss, relative
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, toy_batch

N, SCALE, BIAS = 14, 9.0, -3.0
IDS = {
    "groups that span ranks": torch.tensor([0, 0, 1, 2, -1, 1, 0, 3, -1, 1, 4, 4, 0, 2]),
    "one group": torch.full((N,), 5),
    "no groups": -torch.ones(N, dtype=torch.int64),
}
CASES = [
    ("info_nce", "gather", "leave_out"),
    ("info_nce", "gather", "positives"),
    ("info_nce", "ring", "leave_out"),
    ("sigmoid", "gather", "leave_out"),
    ("sigmoid", "gather", "positives"),
    ("sigmoid", "ring", "leave_out"),
    ("sigmoid", "ring", "positives"),
]


def loss_of(kind, exchange, role):
    return LossConfig(
        kind=kind, exchange=exchange, groups="caption", group_role=role, tile=5
    ).build()


def scalars(kind, dtype=torch.float64):
    values = (SCALE, BIAS) if kind == "sigmoid" else (SCALE,)
    return [torch.tensor([value], dtype=dtype) for value in values]


def on_a_rank():
    """Of each case and ids: loss, gradients, metrics, and whether it is to be computed again."""
    counts = shares(N, dist.world_size())
    first = sum(counts[: dist.rank()])
    own = slice(first, first + counts[dist.rank()])
    image, text = (x[own] for x in features(N, 8, torch.float64, aligned=0.5))
    out = {}
    for case in CASES:
        given = named_features(image, text, *scalars(case[0]))
        for name, ids in IDS.items():
            for deferred in (False, True):
                context = Context(N, columns=Columns(ids=ids[own]), deferred=deferred)
                found = loss_of(*case)(given, context)
                of_it = (found.loss, found.gradients, found.metrics, bool(found.unsafe))
                out[(*case, name, deferred)] = of_it
    return out


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_float64_equals_autograd_on_any_ranks(world_size):
    results = run_ranks(on_a_rank, world_size) if world_size > 1 else [on_a_rank()]
    for (kind, exchange, role, name, deferred), (told, *_) in results[0].items():
        image, text = (x.requires_grad_() for x in features(N, 8, torch.float64, aligned=0.5))
        leaves = [x.requires_grad_() for x in scalars(kind)]
        bias = leaves[1] if kind == "sigmoid" else None
        expected = grouped_loss(image, text, leaves[0], bias, IDS[name], role)
        expected.backward()
        key = (kind, exchange, role, name, deferred)
        of_ranks = [result[key] for result in results]
        assert all(each[0] == told for each in of_ranks), key
        assert told.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-12), key
        for side, leaf in (("image", image), ("text", text)):
            ours = torch.cat([each[1][side] for each in of_ranks])
            assert (ours - leaf.grad).norm() < 1e-11 * max(leaf.grad.norm(), 1), key
        for side, leaf in zip(("logit_scale", "logit_bias"), leaves, strict=False):
            ours = sum(each[1][side] for each in of_ranks)
            assert (ours - leaf.grad).norm() < 1e-11 * max(leaf.grad.norm(), 1), key
        company = {"groups that span ranks": 11, "one group": N, "no groups": 0}[name]
        for _, _, metrics, unsafe in of_ranks:
            assert metrics["grouped_samples"] == company and not unsafe, key


@pytest.mark.parametrize("case", CASES)
def test_ids_that_are_all_different_change_no_bit(case):
    image, text = features(50, 16, torch.float32)
    given, loss = named_features(image, text, *scalars(case[0], torch.float32)), loss_of(*case)
    plain, grouped = loss(given), loss(given, Context(columns=Columns(ids=torch.randperm(50))))
    assert torch.equal(plain.loss, grouped.loss)
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, grouped.gradients[name]), name


def test_float32_keeps_its_digits():
    image, text = features(96, 16, torch.float32, aligned=2.0)
    ids = torch.arange(96) % 9
    for case in CASES:
        leaves = [x.double().requires_grad_() for x in (image, text, *scalars(case[0]))]
        expected = grouped_loss(
            *leaves[:3], leaves[3] if case[0] == "sigmoid" else None, ids, case[2]
        )
        expected.backward()
        given = named_features(image, text, *scalars(case[0], torch.float32))
        found = loss_of(*case)(given, Context(columns=Columns(ids=ids)))
        assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6), case
        for ours, leaf in zip(found.gradients.values(), leaves, strict=True):
            assert relative(ours, leaf.grad) < 3e-6, case


def test_a_batch_of_one_group_is_safe():
    """Its sums of exponentials are zero, which is no underflow: no step is computed again."""
    given = named_features(*features(6, 8, torch.float32), torch.tensor([100.0]))
    for loss in (InfoNCE(), LossConfig(exchange="ring").build()):
        found = loss(
            given, Context(columns=Columns(ids=torch.zeros(6, dtype=torch.int64)), deferred=True)
        )
        assert not found.unsafe and found.loss == 0
        assert all(not gradient.any() for gradient in found.gradients.values())


def test_a_step_takes_the_groups_of_its_batch():
    """In whatever micro-batches, and once though the batch is a single group."""
    losses = []
    for ids in (None, torch.arange(20) % 3, torch.zeros(20, dtype=torch.int64)):
        for micro_size in (20, 7):
            calls = []

            class Counted(InfoNCE):
                def __call__(self, *given, calls=calls):
                    calls.append(1)
                    return super().__call__(*given)

            torch.manual_seed(0)
            model = ToyCLIP().double()
            engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=0.0), None)
            batch = toy_batch(20)
            if ids is not None:
                batch.columns = batch.columns.plus(ids=ids)
            result = train_step(
                engine, batch, Counted(), micro_size=micro_size, kept_graphs=1, lr=0.0
            )
            losses.append(result.loss)
            assert len(calls) == 1
    assert losses[0] == pytest.approx(losses[1]) and losses[2] == pytest.approx(losses[3])
    assert losses[0] > losses[2] + 0.1 > 0.1 and losses[4] == losses[5] == 0


def test_several_texts_of_an_image_are_refused_as_positives():
    image, text = features(6, 8, torch.float32)
    with pytest.raises(ValueError, match="one text for each image"):
        InfoNCE(group_role="positives")(
            named_features(image[:3], text, torch.ones(1)),
            Context(columns=Columns(ids=torch.arange(6))),
        )
    with pytest.raises(ValueError, match="one for each of 6 texts"):
        SigmoidLoss()(
            named_features(image, text, torch.ones(1), torch.ones(1)),
            Context(columns=Columns(ids=torch.arange(3))),
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, members = tmp_path_factory.mktemp("groups"), []
    for i in range(24):
        caption = ["A dog", " a  DOG\n", "a cat", f"number {i}"][i % 4]
        meta = {"sku": [7, "7", "", None][i // 2 % 4], "half": "\ud800"}
        members += [
            (f"k{i}.jpg", jpeg(i)),
            (f"k{i}.txt", caption.encode()),
            (f"k{i}.json", json.dumps(meta).encode()),
        ]
    write_shard(folder / "0.tar", members)
    return folder


def test_the_loader_reads_the_groups(folder):
    def ids(groups):
        config = DataConfig(train=f"{folder}/*.tar", workers=0, lanes=2, shuffle_block=5)
        sizes = {"image_size": 8, "context_length": 8, "global_size": 24}
        values = {"ids": GroupId(groups)} if groups else None
        with TrainLoader(config, **sizes, seed=7, values=values) as loader:
            batch = next(loader)
        if groups is None:
            return batch.columns.get("ids")
        found = sorted(
            (int(key[1:]), each)
            for key, each in zip(batch.keys, batch.columns["ids"].tolist(), strict=True)
        )
        return [each for _, each in found]

    assert ids(None) is None
    by_caption = ids("caption")
    assert len({*by_caption[0::4], *by_caption[1::4]}) == len({*by_caption[2::4]}) == 1
    assert len({*by_caption}) == 2 + 6 and min(by_caption) >= 0
    by_key = ids("json.sku")
    assert [each < 0 for each in by_key] == [i // 2 % 4 > 1 for i in range(24)]
    assert len({*by_key}) == 2
    assert {*ids("json.nothing")} == {-1}
    assert len({*ids("json.half")}) == 1 and min(ids("json.half")) >= 0


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"loss": {"groups": "captions"}}, "loss.groups"),
        ({"loss": {"groups": "caption", "kind": "memory_bank"}}, "loss.groups=null"),
        ({"loss": {"group_role": "positives"}}, "set loss.groups=caption"),
        (
            {"loss": {"groups": "caption", "group_role": "positives", "exchange": "ring"}},
            "set loss.exchange=gather",
        ),
        ({"loss": {"groups": "caption"}, "model": {"teacher": "ViT-B-32"}}, "loss.groups=null"),
    ],
)
def test_what_knows_no_groups_refuses_them(sections, message):
    recipe = {"run": {"steps": 9}, "data": {"train": "shards/{0..3}.tar"}, **sections}
    with pytest.raises(UserError, match=message):
        check_config(recipe, "r")
