"""The real command, from a bucket: the same run as from the local disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.conftest import MODEL, RECIPE, finish, metrics, start
from tests.s3.epochs import SIZES, N, make_shards, upload
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server

pytestmark = pytest.mark.engine


def test_training_from_s3_is_training_from_disk(
    tmp_path: Path, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    make_shards(tmp_path / "set")
    model = tmp_path / "small.json"
    model.write_text(json.dumps(MODEL))
    train = {
        "disk": str(tmp_path / "set" / "*.tar"),
        "s3": upload(server, tmp_path / "set", bucket),
    }
    proxy.faults = [Fault("cut", every=6), Fault("flip", every=6), Fault("short", every=6)]
    proxy.faults += [Fault("status", every=6, method="GET|HEAD")]
    lines = {}
    for where, shards in train.items():
        recipe = tmp_path / f"{where}.yaml"
        recipe.write_text(RECIPE.format(run_dir=tmp_path / where, train=shards, model=model))
        length = (
            "run.steps=null",
            "run.epochs=1",
            f"batch.global_size={N}",
            "data.workers=2",
        )  # counted by the index
        patient = "storage.patience_seconds=120"
        status, out = finish(start(recipe, *length, patient), timeout=900)
        assert status == 0, out
        assert f"6 shards, all indexed, {sum(SIZES)} samples in an epoch" in out
        lines[where] = [
            [line[key] for key in ("step", "batch_digest", "loss")]
            for line in metrics(tmp_path / where)
        ]
    assert len(lines["disk"]) == sum(SIZES) // N
    assert lines["s3"] == lines["disk"]
    assert proxy.fired > 5
