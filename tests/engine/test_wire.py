"""What ranks send in one bf16 step at 8 and at 512 ranks: gradients in fp32 unless the recipe says bf16."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.documents import ROOT

SUMS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
WIDE = [pytest.param(world_size, marks=pytest.mark.full) for world_size in (64, 512)]


def gradients(
    kind: str, stage: int, world_size: int, *keys: str
) -> tuple[dict[str, int], int, int]:
    """Elements that were summed over ranks, by type; the model's; the same if each of its
    parameters is padded so that all ranks have equal shards."""
    line = [sys.executable, "-m", "tests.engine.wire", kind, str(stage), str(world_size), *keys]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    sums: dict[str, int] = {}
    for name, dtype, elements, times in told["calls"]:
        if name in SUMS and elements > 64:  # not flags and norms
            if dtype == "float64":  # the loss's sums over rows and columns
                continue
            sums[dtype] = sums.get(dtype, 0) + elements * times
    return sums, told["parameters"], told["padded"]


@pytest.mark.parametrize("world_size", [8, *WIDE])
@pytest.mark.parametrize(
    ("kind", "stage", "times"),
    [
        ("deepspeed", 1, 1),
        ("deepspeed", 2, 2),
        ("deepspeed", 3, 2),
        ("fsdp", 0, 1),
        ("fsdp", 1, 1),
        ("fsdp", 2, 2),
        ("fsdp", 3, 2),
    ],
)
def test_gradients_are_summed_in_fp32(kind, stage, times, world_size):
    """`times`: once per step, or with each of the two micro-batches' backwards."""
    sums, parameters, padded = gradients(kind, stage, world_size)
    assert set(sums) == {"float32"}
    slack = 1000 * world_size  # DeepSpeed's flat buffers, and what the loss sums
    assert times * parameters <= sums["float32"] <= times * padded + slack


@pytest.mark.parametrize(("kind", "stage"), [("deepspeed", 1), ("deepspeed", 3), ("fsdp", 2)])
def test_bf16_where_the_recipe_asks_for_it(kind, stage):
    sums, parameters, _ = gradients(kind, stage, 8, "reduce_dtype=bf16")
    assert sums["bfloat16"] >= parameters and "float32" not in sums
