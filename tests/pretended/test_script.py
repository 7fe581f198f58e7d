"""The script for a borrowed GPU, and what it has to carry there, on the CPU: its figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900.0  # seconds


@pytest.mark.full
def test_every_stage_runs_and_every_check_passes(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", "--json", str(out)]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    assert stages == [
        "facts",
        "exact",
        "engines",
        "memory",
        "save",
        "speed",
        "loss",
        "peer",
        "profile",
    ]
    assert sum("ok" in row for row in rows) >= 15 and all(row.get("ok", True) for row in rows)


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
