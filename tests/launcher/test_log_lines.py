"""Lines of the log: a run's have a time and a rank, those of a tool alone have neither."""

from __future__ import annotations

import re

import pytest

from launcher.cli.main import main
from tests.data.shards import jpeg, write_shard

TIMED = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[rank \d+\] ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "nowhere.yaml"),
        ("shards", "nowhere.csv", "out"),
        ("evaluate", "nowhere"),
        ("train", "nowhere.yaml", "--dry-run"),
    ],
)
def test_a_tool_writes_neither_rank_nor_time(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("error: ") for line in lines)
    assert not any("[rank" in line or TIMED.match(line) for line in lines)


def test_a_run_writes_both(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "nowhere.yaml"]) == 2
    (line, *_) = capsys.readouterr().err.splitlines()
    assert TIMED.match(line) and "error: " in line


def test_ranks_of_a_tool_write_both(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launcher.runtime.outcome.CONNECT_SECONDS", 0.1)  # there is no rank 0
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", "nowhere.yaml"]) == 2
    assert "[rank 1] error: " in capsys.readouterr().err


def test_captions_that_are_far_too_long_get_a_note(tmp_path, capsys):
    members = []
    for i in range(8):
        members += [(f"{i}.jpg", jpeg(i)), (f"{i}.txt", b"a man walks along the shore " * 30)]
    write_shard(tmp_path / "0.tar", members)
    (tmp_path / "my.yaml").write_text("run: {name: x}\n")
    keys = ("model.name=tiny", "batch.global_size=4", "run.steps=2", "schedule.warmup_steps=0")
    line = ["train", str(tmp_path / "my.yaml"), f"data.train={tmp_path}/0.tar", *keys, "--dry-run"]
    assert main(line) == 0
    printed = "".join(capsys.readouterr())
    assert "the captions of data.train have 840 characters" in printed
    assert "raise model.context_length, or shorten the captions" in printed
    members = [(name, b"a man" if name.endswith("txt") else data) for name, data in members]
    write_shard(tmp_path / "0.tar", members)
    assert main(line) == 0
    assert "characters" not in "".join(capsys.readouterr())
