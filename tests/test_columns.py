"""A value that the decoder gives each sample, and its way to the loss."""

import pytest
import torch

from clip_train import dist
from clip_train.columns import Columns
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.step import train_step
from tests.toy import ToyCLIP, toy_batch

N = 20
SAMPLES = [
    {"keys": f"k{i}", "weights": i / 2, "numbers": 2**62 + i, "rows": torch.full((2, 3), i)}
    for i in range(N)
]


def test_values_become_columns_by_their_types():
    columns = Columns.stacked(SAMPLES)
    assert len(columns) == N and [*columns.by_name] == [*SAMPLES[0]]
    assert columns["keys"] == [f"k{i}" for i in range(N)]
    assert columns["weights"].dtype == torch.float32
    assert columns["weights"].tolist() == [i / 2 for i in range(N)]
    assert columns["numbers"].tolist() == [2**62 + i for i in range(N)]
    assert columns["rows"].shape == (N, 2, 3)
    assert len(Columns.stacked([])) == 0


@pytest.mark.parametrize("order", [[*range(3, 9)], [7, 0, 0, 13]])
def test_samples_keep_all_their_values(order):
    """Cut or taken, and in parts that are joined again."""
    columns = Columns.cat([Columns.stacked(SAMPLES[:6]), Columns.stacked(SAMPLES[6:])])
    taken = columns.take(order, torch.tensor(order))
    if order == sorted({*order}):
        cut = columns.cut(order[0], order[-1] + 1)
        assert cut["keys"] == taken["keys"] and torch.equal(cut["rows"], taken["rows"])
    expected = Columns.stacked([SAMPLES[i] for i in order])
    assert taken["keys"] == expected["keys"]
    for name in ("weights", "numbers", "rows"):
        assert torch.equal(taken[name], expected[name])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"weights": 1},
            r"column weights are (float and int|torch.float32 \[\] and torch.int64 \[\]):",
        ),
        ({"weights": None}, "column weights are NoneType and (float|torch.float32)"),
        (
            {"rows": torch.zeros(3, 3, dtype=torch.int64)},
            r"rows are torch.int64 \[2, 3\] and torch",
        ),
        ({"groups": 1}, "and another one has .*groups"),
    ],
)
def test_samples_that_differ_are_named(change, message):
    samples = [SAMPLES[0], SAMPLES[1] | change]
    with pytest.raises(ValueError, match=message):
        Columns.stacked(samples)
    with pytest.raises(ValueError, match=message):
        Columns.cat([Columns.stacked([sample]) for sample in samples])


def test_a_missing_column_is_named():
    with pytest.raises(KeyError, match=r"no column weight, only .*'keys', 'weights'"):
        Columns.stacked(SAMPLES)["weight"]
    with pytest.raises(ValueError, match="'keys': 1, 'ids': 2"):
        Columns(keys=["a"], ids=torch.zeros(2))


class Weighted(InfoNCE):
    """Reads a column that nothing between the batch and it knows."""

    def prepare(self, micro_batch):
        weights = micro_batch.columns["weights"]
        assert len(weights) == len(micro_batch.images)
        assert weights.tolist() == [int(key[2:]) / 4 for key in micro_batch.columns["keys"]]
        return {"weights": weights[:, None]}

    def __call__(self, features, context):
        weights = context.columns["weights"]
        assert torch.equal(context.prepared["weights"][:, 0], weights)
        output = super().__call__(features, context)
        output.metrics["weights"] = dist.all_reduce_sum(weights.sum())
        return output


@pytest.mark.parametrize("micro_size", [N, 7])
def test_a_new_column_reaches_the_loss(micro_size):
    """In the order of the batch, although micro-batches go from short to long texts."""
    batch = toy_batch(N)  # with the keys 0-0, 0-1, ...
    batch.columns = batch.columns.plus(
        weights=torch.arange(N) / 4, text_lengths=[1 + 5 * i % 6 for i in range(N)]
    )
    model = ToyCLIP()
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=0.0), None)
    result = train_step(engine, batch, Weighted(), micro_size=micro_size, kept_graphs=1, lr=0.0)
    assert result.metrics["weights"] == sum(i / 4 for i in range(N))
