"""Fake process groups that serve what real ones do, gloo's the CPU and NCCL's the GPU, and what they cannot serve.

torch's own fake group serves every device, and FakeTensorMode asks no group at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as td
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

DEVICES = {"gloo": "cpu", "nccl": "cuda"}


def start(backend: str, world_size: int) -> None:
    """Rank 0 of `world_size`. backend: what the product gives to `init_process_group`."""
    for name, device in DEVICES.items():
        td.Backend.register_backend(
            f"fake_{name}", _create_fake_pg, extended_api=True, devices=[device]
        )
        backend = backend.replace(name, f"fake_{name}")
    td.init_process_group(backend, store=FakeStore(), rank=0, world_size=world_size)


def foreign(tensors: Iterable[Tensor], group: td.ProcessGroup | None) -> list[str]:
    """The devices of those that the group does not serve. None: the group of all ranks."""
    served = {each.partition(":")[0] for each in td.get_backend_config(group).split(",")}
    return [str(x.device) for x in tensors if x.device.type not in served]
