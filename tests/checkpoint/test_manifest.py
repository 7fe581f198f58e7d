import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clip_train.checkpoint.commit import DamagedError, read_checkpoint, read_commit
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import (
    Commit,
    CommitRef,
    FileEntry,
    FormatError,
    Manifest,
    add_checksum,
    attempt_prefix,
    check_format,
    parse_checked,
    parse_prefix,
    sha256_of,
)
from clip_train.storage.local import LocalStorage


def parse_manifest(data: bytes) -> Manifest:
    return Manifest(**check_format(json.loads(data)))


def parse_commit(data: bytes) -> Commit:
    return Commit(**parse_checked(data))


def test_names() -> None:
    assert CommitRef(0, 1200).name == "commit/e000000-s0000001200.json"
    assert CommitRef.parse("commit/e000007-s0000001200.json") == CommitRef(7, 1200)
    assert CommitRef.parse("commit/.e000007-s0000001200.json.part") is None
    assert parse_prefix(attempt_prefix(7, 1200)) == CommitRef(7, 1200)
    assert attempt_prefix(7, 1200) == attempt_prefix(7, 1200) != attempt_prefix(7, 1200, 2)
    assert parse_prefix(attempt_prefix(7, 1200, 12)) == CommitRef(7, 1200)
    assert CommitRef(1, 10) > CommitRef(0, 99)


def test_manifest_and_commit_come_back() -> None:
    manifest = Manifest(
        3,
        0,
        1,
        [FileEntry("rank00000.safetensors", 7, ["ab"])],
        "cd",
        {"cursors": {"0": 1}},
        "now",
    )
    assert parse_manifest(add_checksum(asdict(manifest))) == manifest
    commit = Commit(0, 3, attempt_prefix(0, 3), "ff", "token")
    assert parse_commit(add_checksum(asdict(commit))) == commit


def test_a_number_as_a_key_comes_back_as_text() -> None:
    """In the order of texts: 1024 before 512."""
    assert parse_checked(add_checksum({"widths": {512: 1, 1024: 2}}))["widths"] == {
        "1024": 2,
        "512": 1,
    }


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"[]", b"{}", b'{"format": 3}', b'{"format": 3, "files": [{}]}']
)
@pytest.mark.parametrize("parse", [parse_manifest, parse_commit])
def test_rubbish_is_a_value_error(data: bytes, parse: Callable[[bytes], Any]) -> None:
    with pytest.raises(ValueError):
        parse(data)


@pytest.mark.parametrize(
    "version, remedy", [(1, "the clip-train that wrote it"), (2, "export"), (4, "update")]
)
def test_another_versions_format_is_not_rubbish(version: int, remedy: str) -> None:
    for parse in (parse_manifest, parse_commit):
        with pytest.raises(FormatError, match=f"format {version}.*{remedy}"):
            parse(b'{"format": %d}' % version)


def test_a_bit_that_flips_on_the_way_is_seen() -> None:
    data = add_checksum(asdict(Commit(0, 3, attempt_prefix(0, 3), "ff", "token")))
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((ValueError, FormatError)):
            parse_commit(flipped)


PREFIX = attempt_prefix(0, 3)
WHOLE = {
    "step": 3,
    "epoch": 0,
    "world_size": 1,
    "files": [{"name": "rank00000.safetensors", "size": 9, "blocks": ["a"], "rank": 0}],
    "layout_sha256": "",
    "state": {},
}


def committed(folder: Path, body: dict[str, Any], prefix: str = PREFIX) -> LocalStorage:
    """A commit, with right sums, of such a manifest."""
    storage, data = LocalStorage(folder), add_checksum(body)
    storage.put_bytes(f"{PREFIX}/_MANIFEST.json", data)
    marker = Commit(0, 3, prefix, sha256_of(data))
    storage.put_bytes(CommitRef(0, 3).name, add_checksum(asdict(marker)))
    return storage


def test_a_commit_marker_cannot_point_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="names the folder"):
        read_commit(committed(tmp_path, WHOLE, "../ckpt"), CommitRef(0, 3))


@pytest.mark.parametrize(
    "wrong", [{"world_size": 2}, {"world_size": "1"}, {"step": -1}, {"state": "x"}, {"files": {}}]
)
def test_a_manifest_that_makes_no_sense_is_damage(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(DamagedError, match="is not readable"):
        read_checkpoint(committed(tmp_path, WHOLE | wrong), CommitRef(0, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 3},
        {"name": "../../etc/passwd"},
        {"name": "a\n"},
        {"size": "9"},
        {"size": 9, "blocks": ["a", "b"]},
        {"size": 1 << 40},
    ],
)
def test_a_manifest_with_a_wrong_file_is_damage(tmp_path: Path, wrong: dict) -> None:
    (entry,) = WHOLE["files"]  # type: ignore[misc]
    storage = committed(tmp_path, WHOLE | {"files": [entry | wrong]})
    with pytest.raises(DamagedError, match="is not readable"):
        read_checkpoint(storage, CommitRef(0, 3))


def test_config_checks_itself() -> None:
    config = CheckpointConfig()
    assert (config.every_steps, config.every_minutes, config.keep_last, config.resume) == (
        1000,
        None,
        3,
        "auto",
    )
    for wrong in (
        {"keep_last": 0},
        {"every_steps": 0},
        {"every_minutes": 0},
        {"remote": ""},
        {"unknown": 1},
    ):
        with pytest.raises(ValueError):
            CheckpointConfig(**wrong)
