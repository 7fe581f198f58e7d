"""A store that answers no more while a run reads its shards: the run's message says who waits for it, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.runtime.verdict import read_verdict
from tests.launcher.conftest import ENDLESS, MODEL, RECIPE, finish, start, wait_for_step
from tests.s3.epochs import make_shards, upload
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.full]


def test_a_stopped_store_is_what_the_ranks_wait_for(
    tmp_path: Path, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    """Its connections stay open. The run would try again for minutes."""
    make_shards(tmp_path / "set")
    model = tmp_path / "small.json"
    model.write_text(json.dumps(MODEL))
    train = upload(server, tmp_path / "set", bucket)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=tmp_path / "run", train=train, model=model))
    limits = ("launch.hang_seconds=15", "data.workers=1", "storage.patience_seconds=100")
    process = start(recipe, *ENDLESS, *limits, ranks=2)
    wait_for_step(tmp_path / "run", 5, process)
    proxy.faults = [Fault("hang", key="", method="GET|HEAD")]
    status, out = finish(process)
    word, why = read_verdict(tmp_path / "run")
    assert status == 1 and word == "FAILED", out
    assert (
        "no progress for" in why["reason"] and "waiting for data: loader worker " in why["reason"]
    )
    assert " in storage/" in why["reason"], why["reason"]
