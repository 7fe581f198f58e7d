"""How far a sum over ranks may be from the sum in float64, in the type that each default puts on the wire.

A ring adds the ranks' parts one after another, in the type that is sent: of all orders that a library may
choose it is the one whose error grows most. `test_wire` records that gradients are sent in this type.
"""

from __future__ import annotations

import pytest
import torch

from clip_train.engines.config import EngineConfig

ELEMENTS = 65_536
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parts(world_size: int):
    """Each rank's share of a gradient: a common part, and a rank's own noise, larger."""
    generator = torch.Generator().manual_seed(world_size)
    common = torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)
    for _ in range(world_size):
        own = torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)
        yield (common + 2 * own).float()


def ring(world_size: int, dtype: torch.dtype, groups: int = 1) -> float:
    """Relative error of the sum: within each of `groups`, then over the groups."""
    exact = torch.zeros(ELEMENTS, dtype=torch.float64)
    of_group = [torch.zeros(ELEMENTS, dtype=dtype) for _ in range(groups)]
    for rank, part in enumerate(parts(world_size)):
        exact += part.double()
        of_group[rank * groups // world_size] += part.to(dtype)
    total = of_group[0]
    for each in of_group[1:]:
        total = total + each
    return ((total.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("world_size", [8, 64, 512])
@pytest.mark.parametrize("kind", ["deepspeed", "fsdp"])
def test_the_default_is_within_a_millionth(kind, world_size):
    default = EngineConfig(kind=kind).on(bf16=True, gpus=world_size)
    groups = {1, world_size // (default.shard_ranks or world_size), world_size // 8}
    for count in groups:
        assert ring(world_size, TYPES[default.reduce_dtype], count) <= 1e-6


def test_bf16_makes_the_number_of_ranks_visible():
    """Why it is not the default."""
    errors = [ring(world_size, torch.bfloat16) for world_size in (8, 64, 512)]
    assert errors == sorted(errors) and errors[0] > 1e-3 and errors[-1] > 1e-2
