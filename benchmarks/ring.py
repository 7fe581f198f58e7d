"""InfoNCE and the sigmoid loss on a ring beside gathered features: memory and bytes of a rank, and seconds.

Memory: one loss and its gradient under torch's fake process group and on the meta device: all tensors that live at
once are counted, those of the features included. Nothing is computed. Sent: what a rank sends in it.

Seconds: real ranks over gloo, both ways in turn, 5 rounds; the least of each.

--openclip FOLDER: a checkout of OpenCLIP's main branch, whose forms of the sigmoid loss are measured beside these.

Target: on 64 ranks the ring's memory is at most a tenth of the gather's.
"""

from __future__ import annotations

import importlib.util
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
SIGMOID = (2**15, 2**18)  # samples
OPENCLIP = ("bidir", "shift", "reduce", "gather", "bidir, chunks of 1,024")
TARGETS = {"memory": "on 64 ranks at most a tenth of the gather's"}
WAYS = ("gather", "ring")


class Living(TorchDispatchMode):
    """Bytes of all tensors that live, and the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[int] = Counter()  # by storage
        self.now = self.most = 0
        self.sent = 0  # bytes

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
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sent += sent_by(func._schema.name, args)
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


def sent_by(name: str, args: Any) -> int:
    """Bytes that a rank sends in a collective, with the usual ring algorithms."""
    W = torch_dist.get_world_size()
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    largest = max((t.nbytes for t in tensors), default=0)
    namespace, _, kind = name.partition("::")
    kind = kind.replace("_", "")
    if kind == "send":
        return largest
    if "allreduce" in kind:
        return 2 * largest * (W - 1) // W
    if "allgather" in kind:
        # the functional one has the input only
        whole = W * largest if namespace == "_c10d_functional" else largest
        return whole * (W - 1) // W
    if "reducescatter" in kind:
        return largest * (W - 1) // W
    return 0


def sigmoid(W: int, samples: int, way: str, openclip: Any = None) -> dict[str, Any]:
    """A row for the sigmoid loss: this project's, or a form of OpenCLIP's."""
    torch_dist.init_process_group("fake_meta", rank=0, world_size=W, store=FakeStore())
    with torch.device("meta"), Living() as living:
        image, text = torch.empty(samples // W, D), torch.empty(samples // W, D)
        scale, bias = torch.ones(1), torch.zeros(1)
        if openclip is None:
            loss = LossConfig(kind="sigmoid", exchange=way, tile=TILE).build()  # type: ignore[arg-type]
            loss(named_features(image, text, scale, bias), Context(deferred=True))
        else:
            form, _, chunked = way.partition(", ")
            theirs = openclip.SigLipLoss(
                rank=0, world_size=W, dist_impl=form, chunk_size=1024 if chunked else 0
            )
            leaves = [x.requires_grad_() for x in (image, text, scale, bias)]
            theirs(*leaves).backward()
    torch_dist.destroy_process_group()
    whose = "OpenCLIP" if openclip else "clip-train"
    row = {"measured": "sigmoid", "ranks": W, "samples": samples, "whose": whose, "way": way}
    return row | {
        "memory": f"{living.most / 2**30:.2f} GiB",
        "sent": f"{living.sent / 2**20:.0f} MiB",
    }


def sigmoid_rows(openclip: Any) -> list[dict[str, Any]]:
    rows = []
    for samples in SIGMOID:
        for W in (1, 8, 64):
            rows += [sigmoid(W, samples, way) for way in (WAYS if W > 1 else ("gather",))]
            if openclip is not None:
                forms = OPENCLIP if W > 1 else (OPENCLIP[0], OPENCLIP[-1])
                rows += [sigmoid(W, samples, form, openclip) for form in forms]
    return rows


def module_at(folder: str) -> Any:
    """OpenCLIP's losses, without the package, which needs torchvision."""
    spec = importlib.util.spec_from_file_location("theirs", f"{folder}/src/open_clip/loss.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    p = parser(__doc__ or "")
    p.add_argument("--openclip", metavar="FOLDER", help="a checkout of its main branch")
    args = p.parse_args()
    rows: list[dict[str, Any]] = []
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
    openclip = None if args.openclip is None else module_at(args.openclip)
    of_sigmoid = sigmoid_rows(openclip)
    missed = [f"{row}" for row in rows[1:2] if row["ring / gather"] > 0.1]
    return finish(f"losses of features of {D} numbers", [*rows, *of_sigmoid], TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
