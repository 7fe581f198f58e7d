"""The shard index: made once, it must see every change of a shard, and count what the loader delivers."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import resource
import subprocess
import sys
import tarfile
import tracemalloc
from array import array
from pathlib import Path

import fsspec
import pytest
import yaml

from clip_tools.shards.index import (
    BLOCK_BYTES,
    cannot_index,
    check_keys,
    differences,
    index_shard,
    index_shards,
    run_index,
    write_indexes,
)
from clip_train.data.config import DataConfig, check_source
from clip_train.data.index import (
    INDEX_NAME,
    ShardEntry,
    ShardIndex,
    entry_of,
    index_of,
    look_up,
    parse,
    to_bytes,
)
from clip_train.data.loader import TrainLoader
from clip_train.data.reader import Files
from clip_train.data.validation import ValLoader
from clip_train.errors import DataError, UserError
from clip_train.recipe.recipe import load_config, with_samples
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import MissingError
from launcher.cli.main import main
from tests.data.shards import counted, sample, shards_open_as, tar_bytes, write_dataset, write_shard
from tests.documents import ROOT

BLOCK = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dataset(tmp_path, [12, 9, 15])
    return tmp_path


def make(folder: Path, **settings) -> None:
    write_indexes(
        index_shards(
            [str(p) for p in sorted(folder.glob("*.tar"))], block_bytes=BLOCK, workers=1, **settings
        )
    )


def known(*urls: str) -> ShardIndex:
    return look_up([list(urls)], "auto", StorageConfig())


def entries_in(index: ShardIndex) -> dict[str, ShardEntry | None]:
    shards = map(index.shard, range(len(index.shards)))
    return {shard.url: shard.entry for shard in shards}


def entries_of(data: bytes) -> dict[str, ShardEntry]:
    return {name: entry_of(known.line) for name, known in parse(data).items()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_the_entry_says_what_hashlib_and_tarfile_say(folder: Path) -> None:
    path = folder / "001.tar"
    data, entry = path.read_bytes(), index_shard(str(path), block_bytes=BLOCK).entry
    assert entry.sha256 == hashlib.sha256(data).hexdigest()
    assert entry.checksums.size == len(data)
    blocks = [data[i : i + BLOCK] for i in range(0, len(data), BLOCK)]
    assert entry.checksums.sums == "".join(hashlib.sha256(b).hexdigest()[:16] for b in blocks)
    with tarfile.open(path) as tar:
        assert entry.samples == len(tar.getnames()) // 2 == 9
    assert (entry.places, entry.damage) == (9, None)
    assert index_shard(str(path)).entry.checksums.block_bytes == BLOCK_BYTES


def test_an_index_grows(folder: Path) -> None:
    first = index_shards([str(folder / "000.tar")], workers=1)
    write_indexes(first)
    write_indexes(index_shards([str(folder / "001.tar"), str(folder / "002.tar")], workers=2))
    known = entries_of((folder / INDEX_NAME).read_bytes())
    assert {name: entry.places for name, entry in known.items()} == {
        "000.tar": 12,
        "001.tar": 9,
        "002.tar": 15,
    }
    assert known["000.tar"] == first[str(folder / "000.tar")].entry
    assert to_bytes(known) == (folder / INDEX_NAME).read_bytes()


def test_the_sum_of_an_index_is_that_of_its_json(folder: Path) -> None:
    write_shard(folder / "offsets", sample("a", 0))  # a name that a field has
    write_shard(folder / 'd\u00e9 "j".tar', [m for i in range(130) for m in sample(f"k{i}", i)])
    urls = [str(path) for path in sorted(folder.iterdir())]
    entries = index_shards(urls, workers=1)
    written = json.loads(Path(*write_indexes(entries)).read_text())
    assert (
        written["sha256"]
        == hashlib.sha256(json.dumps(written["shards"], sort_keys=True).encode()).hexdigest()
    )
    assert len(written["shards"]['d\u00e9 "j".tar']["offsets"]) == 2
    assert entries_in(known(*urls)) == {url: each.entry for url, each in entries.items()}


def test_an_index_takes_little_memory_in_trainer_and_workers() -> None:
    """20,000 shards of 10,000 samples have three million."""
    offsets = [10_000_000_000 + 70_000 * k for k in range(1500)]
    entry = ShardEntry(64 * 1500, "0" * 64, Checksums(8, 8, "0" * 16), None, array("Q", offsets))
    data = to_bytes({f"{number:05}.tar": entry for number in range(200)})
    tracemalloc.start()
    known = entries_of(data)
    kept = tracemalloc.get_traced_memory()[0]
    found = ShardIndex.of(list(known), known)
    files = Files.of(found, StorageConfig())
    before = tracemalloc.get_traced_memory()[0]
    copy = pickle.loads(pickle.dumps(files))
    copied = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert copy.shared[199] == ("00199.tar", entry, None) and known["00199.tar"] == entry
    assert kept < 9 * 1500 * 200
    assert copied < 16 * 200 + 4096  # of 2.4 MB


def test_an_index_counts_all_samples_whatever_their_captions(tmp_path: Path) -> None:
    """What cannot be used has a place in an epoch too; which it is depends on data.caption_key."""
    members = [
        *sample("a", 0),
        ("b.txt", b"no image"),
        ("c.jpg", b"x"),
        ("c.json", b'{"title": "c"}'),
    ]
    write_shard(tmp_path / "0.tar", members)
    plain, titled = (index_shard(str(tmp_path / "0.tar"), key) for key in (None, "title"))
    assert plain.entry == titled.entry and plain.entry.samples == 3
    assert plain.invalid == {"no image": 1, "no caption": 1} and titled.invalid == {
        "no caption": 1,
        "no image": 1,
    }
    make(tmp_path)
    assert index_of(str(tmp_path / "*.tar"), "auto", StorageConfig()).num_samples == 3


@pytest.mark.parametrize("at", [0, BLOCK * 3 + 77, -1])
def test_any_flipped_byte_of_a_remote_shard_stops_the_run(folder: Path, at: int) -> None:
    """Local ones are verified before training, by `clip-train index --check`."""
    make(folder)
    flip(folder / "001.tar", at % (folder / "001.tar").stat().st_size)
    remote = fsspec.filesystem("memory")
    name = f"/{folder.name}-{at}"
    remote.put(str(folder) + "/", name, recursive=True)
    train = f"memory:/{name}/*.tar"
    block = at % (folder / "001.tar").stat().st_size // BLOCK
    config = DataConfig(train=train, workers=0, lanes=2, shuffle_block=4)
    at_once = StorageConfig().model_copy(update={"backoff_seconds": 0})
    reason = rf"001\.tar: bytes {block * BLOCK}-\d+, .*since the index was made"
    with (
        TrainLoader(
            config, image_size=16, context_length=8, global_size=4, seed=1, storage=at_once
        ) as loader,
        pytest.raises(DataError, match=reason),
    ):
        for _ in range(18):
            next(loader)
    with pytest.raises(DataError, match=reason):
        found = counted(train, at_once)
        list(ValLoader(found, image_size=16, context_length=8, batch_size=4, storage=at_once))
    unheld = config.model_copy(update={"verify": "off", "bad_sample_limit": 1.0})
    with TrainLoader(unheld, image_size=16, context_length=8, global_size=4, seed=1) as loader:
        assert len(next(loader)) == 4
    remote.rm(name, recursive=True)


def test_a_damaged_index_is_an_error_and_no_index_is_told(folder: Path) -> None:
    config = DataConfig(train=str(folder / "*.tar"))
    assert "3 of 3 shards have no index" in check_source(config).index.describe()
    make(folder)
    assert check_source(config).index.describe() == (
        "3 shards, all indexed, 36 samples in an epoch"
    )
    whole = (folder / INDEX_NAME).read_bytes()
    (folder / INDEX_NAME).write_bytes(
        whole.replace(b'"samples": 12', b'"samples": 13')
    )  # still JSON, and plausible
    with pytest.raises(
        UserError, match=r"index\.json is damaged.*remove it, and run `clip-train index` again"
    ):
        check_source(config)
    summary = check_source(config.model_copy(update={"verify": "off"}))
    assert len(summary.index.shards) == 3


def test_lines_of_an_index_say_what_its_entries_say(folder: Path) -> None:
    (folder / "cut.tar").write_bytes((folder / "000.tar").read_bytes()[:9000])
    urls = [str(path) for path in sorted(folder.iterdir())]
    entries = {url: each.entry for url, each in index_shards(urls, workers=1).items()}
    assert entries[str(folder / "cut.tar")].damage is not None
    text = to_bytes({Path(url).name: entry for url, entry in entries.items()})
    lines = text.splitlines(keepends=True)
    (folder / INDEX_NAME).write_bytes(text)
    found = known(*urls, str(folder / "new.tar"))
    assert found.places == [*(entry.places for entry in entries.values()), None]
    digits = [entry.sha256[:16] for entry in entries.values()]
    assert [row[1] for row in found.rows()] == [*digits, ""]
    assert entries_in(found) == entries | {str(folder / "new.tar"): None}
    (folder / INDEX_NAME).write_bytes(to_bytes({}))
    assert not any(known(*urls).digits)
    for damaged in (
        lines[:2] + lines[3:],
        lines[:2] + lines[1:],
        lines[:-1],
        [text.upper()],
        [text[:-900]],
    ):
        (folder / INDEX_NAME).write_bytes(b"".join(damaged))
        with pytest.raises(UserError, match="is damaged"):
            known(*urls)


def test_an_index_that_cannot_be_read_is_not_no_index(folder: Path) -> None:
    (folder / INDEX_NAME).mkdir()
    with pytest.raises(
        UserError, match=r"cannot look for an index.*IsADirectoryError.*data\.verify=off"
    ):
        known(str(folder / "000.tar"))


def test_an_unknown_protocol_is_no_damaged_index() -> None:
    with pytest.raises(UserError, match=r"not a URL that fsspec can open .* correct it$"):
        look_up([["gopher://host/a.tar"]], "auto", StorageConfig())


def test_epochs_need_no_number_where_there_is_an_index(folder: Path, tmp_path_factory) -> None:
    recipe = tmp_path_factory.mktemp("recipe") / "r.yaml"
    data = {"train": str(folder / "*.tar")}
    sections = {
        "run": {"epochs": 3},
        "data": data,
        "batch": {"global_size": 4},
        "schedule": {"warmup_steps": 1},
    }
    recipe.write_text(yaml.safe_dump(sections))
    with pytest.raises(UserError, match=r"data\.num_samples.*clip-train index"):
        with_samples(load_config(str(recipe)))
    make(folder)
    config = with_samples(load_config(str(recipe)))
    assert (config.steps, config.data.num_samples) == (27, 36)
    assert load_config(str(recipe), ["data.num_samples=40"]).steps == 30


def test_the_command(folder: Path, capsys) -> None:
    train = str(folder / "{000..002}.tar")
    assert main(["index", train, "--workers", "1"]) == 0
    assert "3 shards, 36 samples" in capsys.readouterr().out
    assert main(["index", train, "--check", "--workers", "1"]) == 0
    flip(folder / "001.tar", 700)
    write_shard(folder / "002.tar", sample("new", 1))
    assert main(["index", train, "--check", "--workers", "1"]) == 1
    told = capsys.readouterr().err
    assert (
        "2 of 3 shards" in told
        and "001.tar: differs in 1 blocks" in told
        and "002.tar: has 10240 bytes" in told
    )
    assert main(["index", str(folder / "{000..007}.tar")]) == 2
    assert "5 of 8 shards do not exist" in capsys.readouterr().err


def test_a_damaged_shard_is_named_and_its_index_says_so(folder: Path, capsys) -> None:
    whole = tar_bytes([member for i in range(6) for member in sample(f"k{i}", i)])
    (folder / "cut.tar").write_bytes(whole[: len(whole) // 2])
    assert main(["index", str(folder / "*.tar"), "--workers", "1"]) == 1
    assert "cut.tar: truncated shard: no end mark at byte 10240" in capsys.readouterr().err
    entry = entries_of((folder / INDEX_NAME).read_bytes())["cut.tar"]
    assert entry.samples < 6 and "truncated" in (entry.damage or "")
    assert differences(entry, index_shard(str(folder / "cut.tar")).entry) is None
    assert main(["index", str(folder / "*.tar"), "--workers", "1", "--check"]) == 1
    out, err = capsys.readouterr()
    assert "cut.tar: truncated shard" in err and "all match" not in out


def test_a_first_shard_without_columns_says_why(tmp_path: Path, capsys) -> None:
    """Not that the samples lack the key, if the shard cannot be opened or is damaged."""
    shard = tmp_path / "0.tar"
    line = ["index", str(shard), "--workers", "1", "--columns", "json.width"]
    shard.write_bytes(b"not a tar at all" * 100)
    assert main(line) == 1
    err = capsys.readouterr().err
    assert "0.tar: " in err and "are damaged" in err and "take it out" not in err
    shard.unlink()
    with pytest.raises(DataError, match=r"cannot index .*0\.tar: FileNotFoundError"):
        check_keys(str(shard), ["width"])


def test_a_worker_that_starts_after_its_loader_has_ended_ends_quietly() -> None:
    program = """
import pickle, sys
from clip_train.data.index import SharedList
sys.stdout.buffer.write(pickle.dumps(SharedList.of(["a"], None)))
"""
    line = [sys.executable, "-c", program]
    pickled = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with pytest.raises(SystemExit):
        pickle.loads(pickled)


def test_a_shard_that_is_not_in_the_store_has_a_remedy() -> None:
    error = MissingError("s3://bucket/0.tar: its size: HTTP 404 NoSuchKey")
    assert str(cannot_index("s3://bucket/0.tar", error)) == (
        "cannot index s3://bucket/0.tar: its size: HTTP 404 NoSuchKey; correct the URL, or its range"
    )


def test_the_command_learns_before_it_reads_that_it_cannot_write(folder: Path, capsys) -> None:
    """A damaged index it would have to add to; a disk that takes nothing. Reading shows its progress."""
    line = ["index", str(folder / "*.tar"), "--workers", "1"]
    (folder / INDEX_NAME).write_text('{"format": "another\'s"}')
    assert main(line) == 2
    told = capsys.readouterr().err
    assert "damaged" in told and "remove it" in told and "indexing" not in told
    (folder / INDEX_NAME).unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # bytes
    try:
        assert main(line) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capsys.readouterr().err
    assert (
        "cannot be written beside the shards (OSError: [Errno 27" in told and "indexing" not in told
    )
    assert sorted(path.name for path in folder.iterdir()) == ["000.tar", "001.tar", "002.tar"]
    assert main(line) == 0
    assert "indexing" in capsys.readouterr().err


def test_no_usable_sample_is_an_error_that_names_what_is_there(tmp_path: Path, capsys) -> None:
    """They are counted all the same: the index holds for any caption key."""
    meta = json.dumps({"alt": "a cat", "url": "x"}).encode()
    write_shard(
        tmp_path / "0.tar", [m for i in range(7) for m in ((f"{i}.jpg", b"x"), (f"{i}.json", meta))]
    )
    assert main(["index", str(tmp_path / "*.tar"), "--workers", "1"]) == 1
    out, err = capsys.readouterr()
    assert (
        "1 shards, 7 samples" in out
        and "7 of 7 samples cannot be used as they are: 7 no caption" in out
    )
    assert "no sample of 1 shards can be used; the first has jpg, json, json.alt, json.url" in err
    assert "--caption-key NAME" in err and "data.caption_key=NAME" in err
    assert entries_of((tmp_path / INDEX_NAME).read_bytes())["0.tar"].places == 7
    for names in ("alt", "json.alt", "txt,alt"):
        assert (
            main(["index", str(tmp_path / "*.tar"), "--workers", "1", "--caption-key", names]) == 0
        )
        assert "cannot be used" not in capsys.readouterr().out


def test_an_empty_shard_is_no_data_set(tmp_path: Path, capsys) -> None:
    write_shard(tmp_path / "0.tar", [])
    assert main(["index", str(tmp_path / "*.tar"), "--workers", "1"]) == 1
    assert "no sample of 1 shards can be used; the first has nothing" in capsys.readouterr().err


def test_members_out_of_order_are_called_that(tmp_path: Path, capsys) -> None:
    p = sample("a", 0)[0][1]
    members = [("a.jpg", p), ("b.jpg", p), ("a.txt", b"x"), ("b.txt", b"y"), *sample("c", 1)]
    write_shard(tmp_path / "0.tar", members)
    assert main(["index", str(tmp_path / "*.tar"), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 members out of order" in out and "tar --sort=name" in out


class Stopped(io.BytesIO):
    """Ctrl-C while a shard is read."""

    def read(self, *_: object) -> bytes:
        raise KeyboardInterrupt


def test_a_command_that_is_stopped_leaves_what_was_known(folder: Path, monkeypatch) -> None:
    shards = [str(folder / "*.tar")]
    with monkeypatch.context() as patched:
        shards_open_as(patched, Stopped)
        with pytest.raises(KeyboardInterrupt):
            run_index(shards, caption_key=None, workers=1, check=False, quiet=True)
    assert known(str(folder / "000.tar")).unindexed == [str(folder / "000.tar")]
    make(folder)
    before = (folder / INDEX_NAME).read_bytes()
    with monkeypatch.context() as patched:
        shards_open_as(patched, Stopped)
        with pytest.raises(KeyboardInterrupt):
            run_index(shards, caption_key=None, workers=1, check=False, quiet=True)
    assert (folder / INDEX_NAME).read_bytes() == before
