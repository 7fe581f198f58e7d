"""Allocation that really fails: a process whose address space ends goes on, and its curve does not show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(kind: str, *spare_mib: str) -> dict:
    hidden = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {k: v for k, v in os.environ.items() if k not in hidden} | {"OMP_NUM_THREADS": "1"}
    # A fixed threshold: large blocks are maps of their own, which leave no holes in the address space.
    environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    done = subprocess.run(
        [sys.executable, "-m", "tests.real_limit", kind, *spare_mib],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ZeRO 1 needs 200 MB more: DeepSpeed's bucket, which is where its memory ends, in the midst of a backward
@pytest.mark.parametrize("kind, spare_mib", [("plain", "150"), ("1", "400")])
def test_a_run_goes_on_where_its_address_space_ends(kind, spare_mib):
    free, cut = run(kind), run(kind, spare_mib)
    assert free["log"] == [] and cut["log"]
    assert cut["sizes"][0] == free["sizes"][0] and cut["sizes"][-1] < free["sizes"][-1]
    assert cut["losses"] == pytest.approx(free["losses"], abs=1e-5)
