"""A run that is gone on with reads the shards that it was begun with, or says what has changed."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from clip_train.data import DataConfig, TrainLoader, merge_cursors
from clip_train.data.index import ShardIndex, find_index
from clip_train.data.indexing import index_shards, write_indexes
from clip_train.data.shard_list import ShardList
from clip_train.errors import UserError
from clip_train.storage import StorageConfig
from tests.data.shards import keys_in, sample, write_dataset, write_shard

LANES = 2


def loader_of(folder: Path, **arguments) -> TrainLoader:
    settings = {"workers": 0, "lanes": LANES, "shuffle_block": 4, **arguments.pop("settings", {})}
    config = DataConfig(**{"train": str(folder / "*.tar"), **settings})
    return TrainLoader(config, image_size=16, context_length=8, global_size=4, seed=1, **arguments)


def index(folder: Path) -> None:
    write_indexes(index_shards([str(p) for p in sorted(folder.glob("*.tar"))], workers=1))


def checkpoint(folder: Path, steps: int = 5) -> dict:
    """What a checkpoint keeps of the loader, and what it had delivered."""
    with loader_of(folder) as loader:
        batches = [next(loader) for _ in range(steps)]
        return {"cursors": batches[-1].cursors, "shards_then": loader.shard_list}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dataset(tmp_path, [12, 9, 15])
    return tmp_path


def add(folder: Path) -> None:
    write_shard(folder / "003.tar", [m for i in range(6) for m in sample(f"new{i}", 900 + i)])


def change(folder: Path) -> None:
    write_shard(folder / "001.tar", [m for i in range(9) for m in sample(f"s1n{i}", 700 + i)])


CHANGES = {
    "added": (add, r"1 added \(003\.tar\)\."),
    "removed": (lambda folder: (folder / "000.tar").unlink(), r"1 removed \(000\.tar\)\."),
    "renamed": (lambda folder: (folder / "000.tar").rename(folder / "009.tar"), r"1 added \(009.*1 removed \(000"),
    "changed": (change, r"1 changed in content \(001\.tar\)\."),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_refused_unless_allowed(folder: Path, name: str) -> None:
    index(folder)
    state = checkpoint(folder)
    action, told = CHANGES[name]
    action(folder)
    index(folder)
    with pytest.raises(UserError, match=told) as caught:
        loader_of(folder, **state)
    assert "data.allow_changed_shards=true" in str(caught.value)
    with loader_of(folder, **state, settings={"allow_changed_shards": True}) as loader:
        per_lane = len(keys_in(folder))  # one step takes two samples of each lane
        keys = [key for _ in range(per_lane) for key in next(loader).keys]
    assert set(keys) == keys_in(folder)


def test_going_on_with_new_shards_begins_an_epoch_and_repeats_no_seed(folder: Path) -> None:
    with loader_of(folder) as loader:
        before = [next(loader) for _ in range(5)]
    state = {"cursors": before[-1].cursors, "shards_then": loader.shard_list}
    (folder / "000.tar").unlink()
    with loader_of(folder, **state, settings={"allow_changed_shards": True}) as loader:
        after = [next(loader) for _ in range(4)]
    seeds = [seed for batch in before + after for seed in batch.sample_seeds.tolist()]
    assert len(set(seeds)) == len(seeds)
    counts = collections.Counter(key for batch in after for key in batch.keys)
    assert len(counts) == 16 and max(counts.values()) == 1  # lanes of 9 and 15 samples, of each two for each step
    began = max(cursor["epoch"] for cursor in before[-1].cursors.values())
    assert {cursor["epoch"] for cursor in after[0].cursors.values()} == {began + 1}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_soon_after_a_change_can_be_gone_on_from(folder: Path, steps: int) -> None:
    """Before any batch, and where a batch has reached only some of the lanes."""
    settings = {"lanes": 8, "allow_changed_shards": True}
    with loader_of(folder, settings=settings) as loader:
        batches = [next(loader) for _ in range(4)]
    state = {"cursors": merge_cursors(batch.cursors for batch in batches), "shards_then": loader.shard_list}
    add(folder)
    with loader_of(folder, **state, settings=settings) as loader:
        position = merge_cursors([loader.cursors, *(next(loader).cursors for _ in range(steps))])
        expected = [next(loader).keys for _ in range(6)]
    state = {"cursors": json.loads(json.dumps(position)), "shards_then": loader.shard_list}
    with loader_of(folder, **state, settings=settings) as loader:
        assert loader.step == 4 + steps
        assert [next(loader).keys for _ in range(6)] == expected


def test_without_an_index_the_names_are_compared(folder: Path) -> None:
    state = checkpoint(folder)
    change(folder)
    with loader_of(folder, **state) as loader:
        next(loader)
    add(folder)
    with pytest.raises(UserError, match=r"1 added \(003\.tar\)"):
        loader_of(folder, **state)


def test_an_index_made_since_changes_nothing(folder: Path) -> None:
    with loader_of(folder) as loader:
        whole = [next(loader).keys for _ in range(9)]
    state = checkpoint(folder)
    index(folder)
    with loader_of(folder, **state) as loader:
        assert [next(loader).keys for _ in range(4)] == whole[5:]


@pytest.mark.parametrize("first", [0, 1], ids=["a", "b"])
def test_an_index_made_since_of_one_source_of_two_changes_nothing(tmp_path: Path, first: int) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_dataset(folder, [12, 9])
    settings = {"train": "::".join(f"{folder}/*.tar" for folder in folders), "train_weights": [1, 1]}
    index(folders[first])
    with loader_of(tmp_path, settings=settings) as loader:
        batches = [next(loader) for _ in range(9)]
    state = {"cursors": batches[4].cursors, "shards_then": loader.shard_list}
    index(folders[1 - first])
    for _ in range(2):  # also from a checkpoint that was written since
        with loader_of(tmp_path, **state, settings=settings) as loader:
            assert [next(loader).keys for _ in range(4)] == [batch.keys for batch in batches[5:]]
        state["shards_then"] = loader.shard_list


SOURCES: dict[str, tuple[list[str], list[str]]] = {  # then, now
    "one more": (["a", "b"], ["a", "b", "c"]),
    "one less": (["a", "b", "c"], ["a", "b"]),
    "a mixture since": (["a"], ["a", "b"]),
    "no mixture any more": (["a", "b"], ["a"]),
}


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("change", SOURCES)
def test_another_number_of_sources_is_refused_with_what_helps(tmp_path: Path, change: str, allowed: bool) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / f"{name}.tar", [m for i in range(9) for m in sample(f"{name}{i}", i)])

    def settings(names: list[str]) -> dict:
        weights = [1] * len(names) if len(names) > 1 else None
        train = "::".join(f"{tmp_path / name}/*.tar" for name in names)
        return {"train": train, "train_weights": weights, "allow_changed_shards": allowed}

    then, now = SOURCES[change]
    with loader_of(tmp_path, settings=settings(then)) as loader:
        state = {"cursors": next(loader).cursors, "shards_then": loader.shard_list}
    with pytest.raises(UserError, match=r"another number of sources.*1 (added|removed) \(") as caught:
        loader_of(tmp_path, **state, settings=settings(now))
    assert "checkpoint.allow_changed_recipe=true" in str(caught.value)
    assert "allow_changed_shards" not in str(caught.value)


def test_another_order_of_the_same_shards(folder: Path) -> None:
    names = [str(folder / f"00{i}.tar") for i in range(3)]
    first, second = (ShardList.of(ShardIndex(shards)) for shards in (names, names[::-1]))
    assert second.changes_since(first) == "the same shards are in another order"
    assert first.changes_since(first) == ""
    moved = ShardList.of(ShardIndex([name.replace(str(folder), "s3://elsewhere") for name in names]))
    assert moved.changes_since(first) == ""
    twice = ShardList.of(ShardIndex([*names, names[0]]))
    assert twice.changes_since(first) == "1 added (000.tar)" and first.changes_since(twice) == "1 removed (000.tar)"


def test_it_stays_small(folder: Path) -> None:
    index(folder)
    found = find_index([str(folder / "000.tar")], StorageConfig())
    shard_list = ShardList.of(found)
    assert ShardList.unpack(shard_list.pack()) == shard_list and len(shard_list.rows[0][1]) == 16
    many = ShardList(tuple((f"{i:05d}.tar", "") for i in range(10_000)))
    assert len(many.pack()) < 50_000
