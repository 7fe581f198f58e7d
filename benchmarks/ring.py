"""InfoNCE on a ring beside InfoNCE with gathered features: memory and bytes of a rank, and seconds.

Memory: one loss and its gradient at 1,048,576 samples of 1,024 numbers, under torch's fake process group and on
the meta device: all tensors that live at once are counted, those of the features included. Nothing is computed.

Seconds: real ranks over gloo, both ways in turn, 5 rounds; the least of each.

Target: on 64 ranks the ring's memory is at most a tenth of the gather's.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from common import finish, parser
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clip_train import dist
from clip_train.losses.config import LossConfig
from clip_train.task import Context, named_features
from tests.ranks import run_ranks

D, N, TILE = 1024, 2**20, 4096
TARGETS = {"memory": "on 64 ranks at most a tenth of the gather's"}
WAYS = ("gather", "ring")


class Living(TorchDispatchMode):
    """Bytes of all tensors that live, and the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[int] = Counter()  # by storage
        self.now = self.most = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self.tensors[key]:
            self.now += size
            self.most = max(self.most, self.now)
        self.tensors[key] += 1
        weakref.finalize(tensor, self.remove, key, size)

    def remove(self, key: int, size: int) -> None:
        self.tensors[key] -= 1
        if not self.tensors[key]:
            self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


def memory(W: int, way: str) -> int:
    """Bytes on a rank of W at the loss's peak."""
    torch_dist.init_process_group("fake_meta", rank=0, world_size=W, store=FakeStore())
    loss = LossConfig(exchange=way, tile=TILE).build()  # type: ignore[arg-type]
    with torch.device("meta"), Living() as living:
        image, text, scale = torch.empty(N // W, D), torch.empty(N // W, D), torch.ones(1)
        loss(named_features(image, text, scale), Context(deferred=True))
    torch_dist.destroy_process_group()
    return living.most


def seconds(of_all: int) -> dict[str, float]:
    g = torch.Generator().manual_seed(dist.rank())
    n = of_all // dist.world_size()
    features = [F.normalize(torch.randn(n, D, generator=g), dim=1) for _ in range(2)]
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(5):
        for way in WAYS:
            loss = LossConfig(exchange=way).build()  # type: ignore[arg-type]
            dist.barrier()
            start = time.monotonic()
            loss(named_features(*features, torch.full((1,), 14.3)), Context(deferred=True))
            took[way].append(time.monotonic() - start)
    return {way: min(times) for way, times in took.items()}


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    rows = []
    torch_dist.Backend.register_backend(
        "fake_meta", _create_fake_pg, extended_api=True, devices=["meta"]
    )
    for W in (8, 64, 512):
        most = {way: memory(W, way) for way in WAYS}
        rows.append(
            {"measured": "memory", "ranks": W, "samples": N}
            | {f"{way}": f"{most[way] / 2**30:.2f} GiB" for way in WAYS}
            | {"ring / gather": round(most["ring"] / most["gather"], 3)}
        )
    for W in (2, 3):
        of_all = 1536 if args.quick else 6144
        of_ranks = run_ranks(seconds, W, of_all)
        most = {way: max(of_rank[way] for of_rank in of_ranks) for way in WAYS}
        rows.append(
            {"measured": "seconds", "ranks": W, "samples": of_all}
            | {f"{way}": f"{most[way]:.2f} s" for way in WAYS}
            | {"ring / gather": round(most["ring"] / most["gather"], 3)}
        )
    missed = [f"{row}" for row in rows[1:2] if row["ring / gather"] > 0.1]
    return finish(f"InfoNCE of features of {D} numbers", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
