"""Whole steps on the pretended GPU: no mixture of devices, two reads by the host, few kernels, no large float64."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.pretended.gpu_cases import CASES, PLANTED

PATIENCE = 600.0  # seconds


@functools.cache
def traced() -> dict[str, Any]:
    """In a process of its own: the pretence comes before torch."""
    environ = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretended.trace"],
        env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_a_step(name):
    found, (reads, kernels, wide) = traced()[name], CASES[name]
    assert "error" not in found, found["error"]
    assert sum(found["reads"].values()) <= reads, found["reads"]
    assert found["kernels"] <= kernels, found["top"]
    assert len(found["wide"]) <= wide, found["wide"]


def test_a_planted_mixture_of_devices_is_found():
    assert "device" in traced()[PLANTED[0]]["error"]


def test_a_planted_read_is_found():
    reads = traced()[PLANTED[1]]["reads"]
    assert sum(reads.values()) == 3
