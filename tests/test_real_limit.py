"""Allocation that really fails: a process whose address space ends goes on, and its curve does not show it."""

from __future__ import annotations

import ctypes
import resource
from typing import Any

import pytest

from tests import tolerances
from tests.ranks import run_ranks
from tests.real_limit import curve

M_MMAP_THRESHOLD = -3  # of mallopt


def limited(kind: str, spare_mib: int | None) -> dict[str, Any]:
    # A fixed threshold: large blocks are maps of their own, which leave no holes in the address space.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 131_072)
    told = curve(kind, spare_mib, steps=3)
    resource.setrlimit(
        resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )  # room for a teardown
    return told


@pytest.fixture(scope="module")
def free() -> dict[str, Any]:
    (told,) = run_ranks(limited, 1, "plain", None)
    return told


# ZeRO 1 needs 230 MB more: DeepSpeed's bucket, which is where its memory ends, in the midst of a backward
@pytest.mark.parametrize("kind, spare_mib", [("plain", 150), ("zero 1", 380)])
def test_a_run_goes_on_where_its_address_space_ends(free, kind, spare_mib):
    (cut,) = run_ranks(limited, 1, kind, spare_mib)
    assert free["log"] == [] and cut["log"]
    assert cut["sizes"][0] == free["sizes"][0] and cut["sizes"][-1] < free["sizes"][-1]
    assert cut["losses"] == pytest.approx(free["losses"], rel=tolerances.loss(3))
