"""Indexed shards, and shards that are not the same in two runs or on two nodes, through the real command."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from clip_tools.shards.index import index_shards, write_indexes
from clip_train import dist
from clip_train.data.shards import expand
from clip_train.data.shared import shared_index
from clip_train.storage.config import StorageConfig
from launcher.cli.main import main
from launcher.runtime.verdict import read_verdict
from tests.launcher.conftest import RECIPE, finish, free_port, kill, metrics, run, start
from tests.ranks import run_ranks

pytestmark = pytest.mark.engine


def test_changed_shards_are_noticed_at_resume(tmp_path: Path, data, model, capsys) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in expand(data.train)[0]:
        shutil.copy(path, shards)
    first = sorted(shards.iterdir())[0]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=tmp_path / "run", train=shards / "*.tar", model=model))
    write_indexes(index_shards([str(path) for path in shards.glob("*.tar")], workers=1))
    lanes = "data.lanes=64"  # a step, of 32 samples, reaches half of them

    status, out = run(recipe, lanes, "run.steps=8")
    assert status == 0, out
    assert "all indexed, " in out and "samples in an epoch" in out
    shutil.copy(first, shards / "extra.tar")
    assert main(["index", str(shards / "extra.tar"), "--workers", "1"]) == 0
    status, out = run(recipe, lanes, "run.steps=12")
    assert status == 2, out
    assert out.count("1 added (extra.tar)") == 1 and "data.allow_changed_shards=true" in out
    assert metrics(tmp_path / "run")[-1]["step"] == 8
    for steps in (9, 12):
        status, out = run(recipe, lanes, f"run.steps={steps}", "data.allow_changed_shards=true")
        assert status == 0, out
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))


def seen_by_a_rank(folder: Path) -> list[str]:
    os.chdir(folder / f"rank{dist.rank()}")  # where a pattern matches something else
    return shared_index("data.train", "*.tar", "auto", StorageConfig()).shards


@pytest.mark.distributed
def test_one_rank_of_a_node_lists_the_shards_for_all(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / f"{rank}.tar").touch()
    assert run_ranks(seen_by_a_rank, 3, tmp_path) == [["0.tar"]] * 3


@pytest.mark.parametrize("on_the_second", [0, 1], ids=["no shard", "another shard"])
def test_a_node_without_the_validation_set_skips_evaluation(
    tmp_path: Path, recipe: Path, data, on_the_second: int
) -> None:
    """Two nodes: a relative path, of which each rank sees what its own folder has."""
    shards = expand(data.val)[0]
    nodes = []
    port = free_port()
    for rank in range(2):
        seen = tmp_path / f"node{rank}" / "val"
        seen.mkdir(parents=True)
        for number in range(1 if rank == 0 else on_the_second):
            shutil.copy(shards[0], seen / f"{rank}{number}.tar")
        environ = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        environ |= {"SLURM_STEP_NUM_TASKS": "1", "SLURMD_NODENAME": f"n{rank}"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        line = "run.steps=6", "data.val=val/*.tar"
        nodes.append(start(recipe, *line, cwd=seen.parent, environ=environ))
    try:
        told = [finish(node) for node in nodes]
    finally:
        for node in nodes:
            kill(node)
    assert [status for status, _ in told] == [0, 0], told
    reason = (
        "is not the same list of shards on all nodes: " if on_the_second else "matches no shard"
    )
    assert f"data.val (val/*.tar) {reason}" in told[0][1]
    assert sum(out.count("] error: ") for _, out in told) == 0, told
    word, line = read_verdict(tmp_path / "run")
    assert word == "DONE" and reason in line["skipped"][0]
    assert metrics(tmp_path / "run")[-1]["step"] == 6
