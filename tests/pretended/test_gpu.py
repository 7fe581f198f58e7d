"""Whole steps on the pretended GPU: no mixture of devices, one read by the host, few kernels, no large float64."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.pretended.gpu_cases import CASES, FULL, PLANTED

PATIENCE = 600.0  # seconds
# Collectives in which gloo copies CUDA tensors through the host. In others it takes their addresses for the host's.
BY_GLOO = {
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allreduce_",
    "alltoall_base_",
    "broadcast_",
}
EACH = tuple(name for name in (*CASES, *PLANTED) if name not in FULL)


@pytest.fixture(scope="session")
def traced(tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """What was counted in a case; of several processes of tests the first counts for all."""
    if torch.backends.cuda.is_built():
        pytest.skip(f"the pretended GPU needs torch's CPU build, this is {torch.__version__}")
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    @functools.cache
    def counted(names: tuple[str, ...]) -> dict[str, Any]:
        with (shared / f"traced-{len(names)}").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = file.read()
            if not known:
                known = trace(names)
                file.write(known)
                file.flush()
        return json.loads(known)

    return lambda name: counted(FULL if name in FULL else EACH)[name]


def trace(names: tuple[str, ...]) -> str:
    """In a process of its own: the pretence comes before torch."""
    environ = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretended.trace", *names],
        env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in CASES]
)
def test_a_step(traced, name):
    found, (reads, kernels, wide) = traced(name), CASES[name]
    assert "error" not in found, found["error"]
    waits = sum(found["reads"].values())
    assert waits <= reads, found["reads"]
    if name.startswith("deepspeed 3"):  # its own, one for each block and micro-batch among them
        assert waits == reads, found["reads"]
    assert found["kernels"] <= kernels, found["top"]
    assert len(found["wide"]) <= wide, found["wide"]
    assert not found["foreign"], found["foreign"]
    assert not name.endswith("2 ranks") or found["sent"] > 0
    if "one GPU" in name:
        assert found["collectives"].keys() <= BY_GLOO


def test_a_planted_mixture_of_devices_is_found(traced):
    assert "device" in traced(PLANTED[0])["error"]


def test_a_tensor_that_its_group_does_not_serve_is_found(traced):
    assert [*traced(PLANTED[2])["foreign"].values()] == [1]


def test_a_planted_read_is_found(traced):
    reads = traced(PLANTED[1])["reads"]
    assert sum(reads.values()) == 2
