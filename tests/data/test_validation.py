"""Every validation sample comes once, on one rank, and no other rank reads it."""

import io
import json

import pytest
import torch

from clip_train.data.validation import ValLoader
from clip_train.errors import DataError, UserError
from tests.data.shards import jpeg, keys_in, sample, shards_open_as, write_dataset, write_shard


def load(train, rank=0, world_size=1, **arguments):
    defaults = {"image_size": 16, "context_length": 8, "batch_size": 4}
    return ValLoader(str(train), rank=rank, world_size=world_size, **{**defaults, **arguments})


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_no_repeat_no_drop(tmp_path, world_size):
    val = write_dataset(tmp_path, [5, 1, 8])
    order = [key for batch in load(val) for key in batch.keys]
    assert len(order) == 14 and set(order) == keys_in(tmp_path)
    shares = [[]] * world_size
    for rank in range(world_size):
        shares[rank] = [key for batch in load(val, rank, world_size) for key in batch.keys]
    assert [key for share in shares for key in share] == order
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_reads_its_own_share_alone(tmp_path, monkeypatch):
    """Of the shards that lie before it not a byte, of the one that it shares no more than headers."""
    val = write_dataset(tmp_path, [30] * 8)
    loaders = [load(val, rank, 4) for rank in range(4)]
    size = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    read = []

    class Metered(io.BytesIO):
        def read(self, n=-1):
            data = super().read(n)
            read.append(len(data))
            return data

    shards_open_as(monkeypatch, Metered)
    for loader in loaders:
        read.clear()
        assert sum(map(len, loader)) == 60
        assert sum(read) < 0.3 * size


def test_batches_and_repetition(tmp_path):
    loader = load(write_dataset(tmp_path, [10]))
    first, second = list(loader), list(loader)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, second, strict=True))
    assert first[0].images.shape == (4, 3, 16, 16) and first[0].images.dtype == torch.uint8
    assert first[0].texts.shape == (4, 8)
    assert first[0].captions == [f"caption {i}" for i in range(4)]


def test_threads_change_nothing(tmp_path):
    val = write_dataset(tmp_path, [9])
    one, many = list(load(val, workers=0)), list(load(val, workers=3))
    assert all(torch.equal(a.images, b.images) and a.keys == b.keys for a, b in zip(one, many, strict=True))


def test_metadata_and_bad_samples(tmp_path):
    members = [*sample("a", 0), ("a.json", json.dumps({"classname": "cat"}).encode())]
    members += [("b.jpg", jpeg(0)[:100]), ("b.txt", b"x"), ("c.jpg", jpeg(1)), *sample("d", 2)]
    loader = load(write_shard(tmp_path / "a.tar", members))
    (batch,) = list(loader)
    assert batch.keys == ["a", "d"]
    assert batch.metadata == [{"classname": "cat"}, {}]
    assert len(loader.invalid) == 2
    assert {each.reason for each in loader.invalid} == {"image does not decode", "no caption"}


def test_a_cls_member_is_the_label(tmp_path):
    members = [*sample("a", 0), ("a.cls", b"7\n"), *sample("b", 1), ("b.json", b'{"cls": 1}'), ("b.cls", b"2")]
    (batch,) = list(load(write_shard(tmp_path / "a.tar", members)))
    assert batch.metadata == [{"cls": "7"}, {"cls": "2"}]


def test_errors(tmp_path):
    with pytest.raises(UserError, match=r"data\.val"):
        load(tmp_path / "*.tar")
    write_shard(tmp_path / "a.tar", [("a.jpg", b"x")])
    with pytest.raises(DataError, match=r"data\.val.*\n(.*\n)*.*no caption"):
        list(load(tmp_path / "a.tar"))
