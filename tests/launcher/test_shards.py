"""Indexed shards, and shards that change between two runs, through the real command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clip_train.data.indexing import index_shards, write_indexes
from clip_train.data.sources import expand
from launcher.cli import main
from tests.launcher.conftest import RECIPE, metrics, run

pytestmark = pytest.mark.engine


def test_changed_shards_are_noticed_at_resume(tmp_path: Path, data, model, capsys) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in expand(data.train):
        shutil.copy(path, shards)
    first = sorted(shards.iterdir())[0]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=tmp_path / "run", train=shards / "*.tar", model=model))
    write_indexes(index_shards([str(path) for path in shards.glob("*.tar")], workers=1))

    status, out = run(recipe, "run.steps=8")
    assert status == 0, out
    assert "all indexed: every block is verified, " in out and "samples in an epoch" in out
    shutil.copy(first, shards / "extra.tar")
    assert main(["index", str(shards / "extra.tar"), "--workers", "1"]) == 0
    status, out = run(recipe, "run.steps=12")
    assert status == 2, out
    assert out.count("1 added (extra.tar)") == 1 and "data.allow_changed_shards=true" in out
    assert metrics(tmp_path / "run")[-1]["step"] == 8
    status, out = run(recipe, "run.steps=12", "data.allow_changed_shards=true")
    assert status == 0, out
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))
