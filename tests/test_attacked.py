"""The cheap cases of scripts/attack: one of each kind that has found a defect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.engine]


def test_the_cheap_attacks_end_well():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.attack", "--cheap"],
        cwd=Path(__file__).parents[1],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
