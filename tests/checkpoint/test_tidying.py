"""Two of the saver's threads remove what is old: one after its commit on the disk, one after its upload."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from clip_train.checkpoint import pipeline as pipelines
from clip_train.checkpoint.order import Settings
from clip_train.checkpoint.pipeline import Pipeline
from clip_train.checkpoint.retention import Policy
from clip_train.storage import Storage


def test_one_at_a_time_tidies_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one finds folders gone that the other has removed, and says that it could not."""
    told: list[dict[str, Any]] = []
    places = str(tmp_path / "local"), str(tmp_path / "store")
    pipeline = Pipeline(Settings(*places, True, 60.0, Policy(keep_last=1)), told.append)
    inside, go_on = threading.Semaphore(0), threading.Event()
    entered: list[str] = []

    def tidy(store: Storage, *_: Any) -> None:
        entered.append(store.url)
        inside.release()
        assert go_on.wait(240)

    monkeypatch.setattr(pipelines, "apply_retention", tidy)
    stores = [pipeline.local, pipeline.local, pipeline.remote]
    threads = [threading.Thread(target=pipeline._retain, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for _ in places:
        assert inside.acquire(timeout=240)
    assert not inside.acquire(timeout=0.3) and sorted(entered) == sorted(places)  # and not the disk's second one
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(entered) == 3 and told == []
