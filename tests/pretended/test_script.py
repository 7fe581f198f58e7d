"""The script for a borrowed GPU, and what it has to carry there, on the CPU: its figures mean nothing here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import until

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900.0  # seconds
STAGES = {"facts", "tests", "engines", "curve", "memory", "save", "waits", "loader", "profile"}
STAGES |= {"packed", "speed_b32", "speed_l14", "speed_h14", "loss", "peer"}


def dry_run(folder: Path, *arguments: str) -> tuple[str, list[dict]]:
    """What it prints, and the rows of all files that it has written."""
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", "--out", str(folder), *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    files = sorted(folder.glob("*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return done.stdout + done.stderr, rows


@pytest.mark.full
def test_every_stage_runs_and_every_check_passes(tmp_path):
    out, rows = dry_run(tmp_path, "--ranks", "1")
    assert "all checks passed" in out, out[-6000:]
    assert {row["stage"] for row in rows} == STAGES
    assert sum("ok" in row for row in rows) >= 12 and all(row.get("ok", True) for row in rows)
    out, rows = dry_run(tmp_path, "facts", "engines", "memory", "--ranks", "2")
    assert "all checks passed" in out, out[-6000:]
    assert sum(row["ranks"] == 2 for row in rows) >= 8


def test_a_stage_that_takes_too_long_ends_and_the_next_runs(tmp_path):
    """The first one's limit is over before it has a row."""
    out, rows = dry_run(tmp_path, "loss", "--ranks", "1")
    assert "all checks passed" in out, out
    assert [row["stage"] for row in rows] == ["loss", "loss"] and rows[0]["ok"]
    out, rows = dry_run(tmp_path, "curve", "loss", "--ranks", "1", "--seconds", "0.2")
    assert rows == [] and out.count("ended after 0 s") == 2, out
    assert "FAILED: curve: curve" in out and "2 checks failed" in out


def test_the_rows_of_a_stage_that_is_killed_remain(tmp_path):
    line = [sys.executable, "benchmarks/gpu.py", "--dry-run", "engines", "--ranks", "1"]
    script = subprocess.Popen(
        [*line, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    file = tmp_path / "engines-1.json"
    assert script.stdout is not None
    first = json.loads(next(line for line in script.stdout if line.startswith("{")))
    assert until(file.exists)
    (stage,) = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
    os.kill(int(stage), signal.SIGSTOP)  # it may have begun another row
    rows = json.loads(file.read_text())["rows"]
    os.kill(int(stage), signal.SIGKILL)
    out, _ = script.communicate(timeout=PATIENCE)
    assert script.returncode == 1 and "status -9" in out and "FAILED: engines: engines" in out, out
    assert json.loads(file.read_text())["rows"] == rows and rows[0] == first


def test_what_a_borrowed_machine_lacks_is_named():
    environ = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", "scripts/gpu_wheels.sh", "--dry-run"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    named = [line.partition("==")[0] for line in done.stdout.splitlines()]
    assert {"deepspeed", "pydantic", "obstore", "webdataset", "simplejpeg"} <= set(named)
    assert all(
        "==" in line for line in done.stdout.splitlines() if not line.startswith("open_clip")
    )
