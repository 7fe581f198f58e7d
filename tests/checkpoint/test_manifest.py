import json
import math

import pytest

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import (
    Commit,
    CommitRef,
    FileEntry,
    FormatError,
    Manifest,
    attempt_prefix,
    encode_state,
    parse_prefix,
)


def test_names() -> None:
    assert CommitRef(0, 1200).name == "commit/e000000-s0000001200.json"
    assert CommitRef.parse("commit/e000007-s0000001200.json") == CommitRef(7, 1200)
    assert CommitRef.parse("commit/.e000007-s0000001200.json.part") is None
    assert parse_prefix(attempt_prefix(7, 1200)) == CommitRef(7, 1200)
    assert attempt_prefix(7, 1200) == attempt_prefix(7, 1200) != attempt_prefix(7, 1200, 2)
    assert parse_prefix(attempt_prefix(7, 1200, 12)) == CommitRef(7, 1200)
    assert CommitRef(1, 10) > CommitRef(0, 99)


@pytest.mark.parametrize(
    "state",
    [
        {"cursors": {"0": {"block": 3}, "12": {"block": 4}}, "samples": 10**15},
        {"loss": 0.1 + 0.2, "best": math.inf, "none": None, "flag": True, "list": [1, [2.5, "é"]]},
        {"empty": {}, "digits are a string": {"0": 1}},
    ],
)
def test_state_comes_back(state: dict) -> None:
    back = json.loads(json.dumps(encode_state(state)))
    assert back == state
    assert [type(v) for v in back.values()] == [type(v) for v in state.values()]


@pytest.mark.parametrize(
    "value", [{1: 0, "a": 0}, {1: 0}, {(1,): 0}, {"x": object()}, {"x": {1, 2}}, {True: 1}]
)
def test_state_that_json_cannot_hold(value: object) -> None:
    with pytest.raises(TypeError, match="state"):
        encode_state(value)


def test_manifest_and_commit_come_back() -> None:
    manifest = Manifest(
        3,
        0,
        1,
        [FileEntry("rank00000.safetensors", 7, ["ab"], 0)],
        "cd",
        {"cursors": {"0": 1}},
        "now",
    )
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    commit = Commit(0, 3, attempt_prefix(0, 3), "ff", "token")
    assert Commit.from_bytes(commit.to_bytes()) == commit


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"[]", b"{}", b'{"format": 3}', b'{"format": 3, "files": [{}]}']
)
def test_rubbish_is_a_value_error(data: bytes) -> None:
    for kind in (Manifest, Commit):
        with pytest.raises(ValueError):
            kind.from_bytes(data)


@pytest.mark.parametrize(
    "version, remedy", [(1, "the clip-train that wrote it"), (2, "export"), (4, "update")]
)
def test_another_versions_format_is_not_rubbish(version: int, remedy: str) -> None:
    for kind in (Manifest, Commit):
        with pytest.raises(FormatError, match=f"format {version}.*{remedy}"):
            kind.from_bytes(b'{"format": %d}' % version)


def test_a_bit_that_flips_on_the_way_is_seen() -> None:
    data = Commit(0, 3, attempt_prefix(0, 3), "ff", "token").to_bytes()
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((ValueError, FormatError)):
            Commit.from_bytes(flipped)


def test_a_manifest_cannot_point_elsewhere() -> None:
    with pytest.raises(ValueError, match="1 files, not 2"):
        Manifest.from_bytes(Manifest(3, 0, 2, [FileEntry("a", 7, ["ab"], 0)], "", {}).to_bytes())
    evil = Manifest(3, 0, 1, [FileEntry("../../etc/passwd", 7, ["ab"], 0)], "", {})
    with pytest.raises(ValueError, match="not a file name"):
        Manifest.from_bytes(evil.to_bytes())
    with pytest.raises(ValueError, match="names the folder"):
        Commit.from_bytes(Commit(0, 3, "../ckpt", "ff").to_bytes())


@pytest.mark.parametrize(
    "wrong", [{"name": 3}, {"size": "9"}, {"size": 9, "blocks": ["a", "b"]}, {"size": 1 << 40}]
)
def test_a_manifest_with_a_wrong_file_is_stepped_over(wrong: dict) -> None:
    entry = {"name": "rank00000.safetensors", "size": 9, "blocks": ["a"], "rank": 0} | wrong
    body = json.loads(Manifest(1, 0, 1, [FileEntry(**entry)], "", {}).to_bytes())
    with pytest.raises(ValueError, match=r"not a file name|blocks"):
        Manifest.from_bytes(json.dumps(body).encode())


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
