"""`export` and `evaluate` never take an older checkpoint without being asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_train.models.config import parse_architecture
from tests.launcher.conftest import MODEL, run
from tests.launcher.saved import save_run


def newest(run_dir: Path) -> Path:
    """The file of rank 0 in the newest checkpoint."""
    marker = max((run_dir / "checkpoints" / "commit").glob("*.json"))
    prefix = json.loads(marker.read_text())["prefix"]
    return run_dir / "checkpoints" / prefix / "rank00000.safetensors"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def swapped(file: Path) -> None:
    older = min(file.parents[2].glob("*/*/rank00000.safetensors"))
    file.write_bytes(older.read_bytes() + b"more")


@pytest.mark.parametrize("damage", [cut, Path.unlink, swapped], ids=["cut", "missing", "swapped"])
def test_a_damaged_newest_checkpoint_is_refused(tmp_path, data, damage):
    save_run(tmp_path / "run", parse_architecture(MODEL, "test"), steps=(1, 2))
    file = newest(tmp_path / "run")
    damage(file)
    place, out = tmp_path / "run" / "checkpoints", f"--output={tmp_path / 'out'}"
    for verb, more in (("export", out), ("evaluate", f"data.val={data.val}")):
        status, printed = run(place, more, verb=verb)
        assert status == 2, printed
        for part in ("step 2", file.name, "by --step", "step 1, which is older"):
            assert part in printed
    assert not (tmp_path / "out").exists()

    status, printed = run(place, out, "--step=2", verb="export")
    assert status == 2 and file.name in printed, printed
    status, printed = run(place, out, "--step=1", verb="export")
    assert status == 0 and "step 1 of" in printed, printed
