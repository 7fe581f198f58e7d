"""SIGKILL at any moment of a save to a store: what was committed is there, whole, and the next life goes on from it.

benchmarks/checkpoint_storm.py kills whole trainings.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clip_train.storage.object_store import clients
from tests.s3.kills import kill_again_and_again
from tests.s3.places import missing, place


@pytest.mark.full
@pytest.mark.parametrize("store", ["az", "gs", "sftp"])
def test_kills_in_the_middle_of_saving(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := missing(store):
        pytest.skip(why)
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "60")
    before = dict(os.environ)
    try:
        with place(store, tmp_path) as at:
            result = kill_again_and_again(at.bucket, tmp_path, 4, "0")
    finally:
        os.environ.clear()
        os.environ.update(before)
        clients.clear()
    assert result.wrong == [] and result.kills == 4
