"""How many samples each shard has: from an index, or counted once by all ranks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.data.index import index_of
from clip_train.data.reader import count_missing
from clip_train.errors import DataError
from clip_train.storage.config import StorageConfig
from tests.data.hostile import kinds, write_hostile
from tests.data.shards import shards_open_as, write_counts, write_dataset
from tests.ranks import run_ranks

STORAGE = StorageConfig()
SIZES = [12, 0, 9, 15, 1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "set", SIZES)
    return tmp_path / "set"


def known(folder: Path, verify: str = "off") -> list[int | None]:
    found = index_of(f"{folder}/*.tar", verify, STORAGE)
    return list(found.places)


def counted(folder: Path, **arguments) -> list[int | None]:
    found = count_missing(index_of(f"{folder}/*.tar", "auto", STORAGE), STORAGE, **arguments)
    return list(found.places)


def test_an_index_has_the_counts(folder: Path) -> None:
    assert known(folder, "auto") == [None] * 5 and counted(folder) == SIZES
    write_indexes(index_shards([str(path) for path in folder.glob("*.tar")], workers=1))
    assert known(folder, "auto") == SIZES and known(folder) == [None] * 5


def test_damage_has_a_place_in_every_count(tmp_path: Path) -> None:
    write_hostile(tmp_path, kinds())
    expected = [
        len(kind.usable) + sum(kind.bad.values())
        for kind in sorted(kinds(), key=lambda kind: f"{kind.name}.tar")
    ]
    assert counted(tmp_path) == expected
    write_indexes(index_shards([str(path) for path in tmp_path.glob("*.tar")], workers=2))
    assert known(tmp_path, "auto") == expected


def test_only_what_nobody_has_counted_is_read(folder: Path) -> None:
    write_counts(folder, {"000.tar": 10, "003.tar": 16})  # wrong, but said
    assert counted(folder) == [10, 0, 9, 16, 1]


def by_a_rank(folder: Path) -> tuple[list[int | None], list[int]]:
    read: list[int] = []

    def note(data: bytes) -> io.BytesIO:
        read.append(len(data))
        return io.BytesIO(data)

    with pytest.MonkeyPatch.context() as patched:
        shards_open_as(patched, note)
        return counted(folder), read


@pytest.mark.distributed
def test_ranks_count_side_by_side(folder: Path) -> None:
    """Each counts some; all know all."""
    (counts, read), (same, others) = run_ranks(by_a_rank, 2, folder)
    assert counts == same == SIZES
    assert sorted(read + others) == sorted(path.stat().st_size for path in folder.iterdir())
    assert len(read) == 3 and len(others) == 2  # and nothing is written beside the shards


def failing_rank(folder: Path) -> str:
    found = index_of(f"{folder}/{{000..004}}.tar", "auto", STORAGE)
    try:
        count_missing(found, STORAGE)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "it went on"


@pytest.mark.distributed
def test_a_shard_that_one_rank_cannot_read_ends_all(folder: Path) -> None:
    (folder / "001.tar").unlink()
    first, second = run_ranks(failing_rank, 2, folder)
    assert "cannot read shard" in first and "001.tar" in first
    assert "cannot read shard" in second and {first.split(":")[0], second.split(":")[0]} == {
        "DataError",
        "RemoteRankError",
    }


def test_a_shard_that_cannot_be_read_is_an_error(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    found = index_of(f"{folder}/*.tar", "auto", STORAGE)
    (folder / "003.tar").unlink()
    with pytest.raises(DataError, match=r"cannot read shard .*003\.tar"):
        count_missing(found, STORAGE)
