"""What a resume costs: bytes from the bucket by rank, counted at the proxy, on shared disks and on each rank's own."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.task import Fragment, StateRange
from tests.ranks import run_ranks
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy

pytestmark = [pytest.mark.distributed, pytest.mark.full]

# nine matrices and vectors, 31 MB: with two moments 93 MB, of two ranks three blocks of 16 MiB each
SHAPES = {
    f"blocks.{i}.{name}": shape
    for i in range(9)
    for name, shape in (("w", (840, 1024)), ("b", (1031,)))
}
SLOTS = ("param", "exp_avg", "exp_avg_sq")
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
TOTAL = 4 * len(SLOTS) * NUMEL  # bytes
BLOCK = 16 << 20

Slice = tuple[str, int, int]  # name, start, numel


def value(name: str, slot: str) -> Tensor:
    """Flat fp32 of one parameter's slot; no two are alike."""
    numel = torch.Size(SHAPES[name]).numel()
    return (
        torch.arange(numel, dtype=torch.float32)
        + zlib.crc32(f"{name}.{slot}".encode()) % 1000 / 1024
    )


def slices(stage: int, rank: int, world_size: int) -> Iterator[Slice]:
    """What a rank owns: at stage 3 a part of every parameter, below that a part of all of them end to end."""
    begin = 0
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        if stage == 3:
            each = -(-numel // world_size)
            first, last = min(rank * each, numel), min((rank + 1) * each, numel)
        else:
            first = min(max(NUMEL * rank // world_size - begin, 0), numel)
            last = min(max(NUMEL * (rank + 1) // world_size - begin, 0), numel)
        if first < last:
            yield name, first, last - first
        begin += numel


def wanted(stage: int, rank: int, world_size: int) -> list[StateRange]:
    """Its slices of all slots, and below stage 3 all weights."""
    own = [
        StateRange(name, slot, start, n)
        for name, start, n in slices(stage, rank, world_size)
        for slot in SLOTS
    ]
    whole = [
        StateRange(name, "param", 0, torch.Size(shape).numel()) for name, shape in SHAPES.items()
    ]
    return own + (whole if stage < 3 else [])


def folder_of(root: Path, shared: bool) -> Path:
    # who asks for what is told at the proxy by the credentials
    os.environ["AWS_ACCESS_KEY_ID"] = f"rank{dist.rank()}"
    return root / ("disk" if shared else f"disk{dist.rank()}")


def save(root: Path, url: str, stage: int, shared: bool = False) -> bool:
    manager = CheckpointManager(
        CheckpointConfig(remote=url, grace_seconds=120.0), folder_of(root, shared)
    )
    rank, world_size = dist.rank(), dist.world_size()
    fragments = [
        Fragment(
            name,
            SHAPES[name],
            start,
            {slot: value(name, slot)[start : start + n] for slot in SLOTS},
        )
        for name, start, n in slices(stage, rank, world_size)
    ]
    rng = {"rng": torch.tensor([rank, 7], dtype=torch.uint8)}
    bank = {"bank": torch.arange(8.0)}
    saved = manager.save(1, fragments, rng, {"step": 1}, bank, wait=True) is Saved.COMMITTED
    manager.close()
    return saved


def load(root: Path, url: str, stage: int, shared: bool = False) -> dict[str, Any]:
    said: list[str] = []
    manager = CheckpointManager(
        CheckpointConfig(remote=url, resume="must"), folder_of(root, shared), log=said.append
    )
    resumed = manager.resume()
    assert resumed is not None
    wants = wanted(stage, dist.rank(), dist.world_size())
    resumed.reader.prepare(wants)
    right = all(
        torch.equal(
            resumed.reader.read(*each),
            value(each.name, each.slot)[each.start : each.start + each.numel],
        )
        for each in wants
    )
    right &= resumed.reader.tensors()["bank"].tolist() == list(range(8))
    rng = resumed.rank_tensors
    same_world = resumed.world_size == dist.world_size()
    right &= (rng is not None) == same_world and (
        rng is None or rng["rng"].tolist() == [dist.rank(), 7]
    )
    return {"right": right, "said": said, "told": resumed.describe()}


@pytest.fixture
def view(bucket: str, server: Any, proxy: FaultyProxy) -> Bucket:
    for rank in range(4):
        server.add_key(f"rank{rank}", server.secret_key)
    return Bucket(server, bucket)


def bytes_by_rank(proxy: FaultyProxy) -> Counter[str]:
    """Of the checkpoint's large files; each request names a range of a block at most."""
    out: Counter[str] = Counter()
    for answer in proxy.answers:
        if answer.request.startswith("GET") and ".safetensors" in answer.request:
            asked = re.search(r" bytes=(\d+)-(\d+)$", answer.request)
            assert asked is not None and int(asked[2]) - int(asked[1]) < BLOCK, answer.request
            out[answer.access_key] += answer.num_bytes
    return out


def check_load(
    proxy: FaultyProxy, root: Path, url: str, world_size: int, stage: int, *, shared: bool
) -> None:
    proxy.answers.clear()
    for seen in run_ranks(load, world_size, root, url, stage, shared):
        assert seen["right"] and "MB fetched" in seen["told"], seen
    by_rank = bytes_by_rank(proxy)
    assert set(by_rank) == {f"rank{rank}" for rank in range(world_size)}
    if shared:
        assert TOTAL <= sum(by_rank.values()) < TOTAL + 100_000, by_rank  # once: and the headers
        assert max(by_rank.values()) <= TOTAL / world_size + BLOCK + 50_000, by_rank
    else:  # a share, so that all is verified; and what it needs: a part of all, below stage 3 all weights
        needs = TOTAL / world_size + (TOTAL / len(SLOTS) if stage < 3 else 0)
        assert all(count <= TOTAL / world_size + needs + 4 * BLOCK for count in by_rank.values()), (
            by_rank
        )


def test_a_byte_comes_from_the_bucket_once(
    tmp_path: Path, view: Bucket, proxy: FaultyProxy
) -> None:
    url = f"{view.url}/run"
    assert all(run_ranks(save, 2, tmp_path / "a", url, 1))
    proxy.faults = [Fault("slow", key="", method="GET|HEAD")]
    check_load(proxy, tmp_path / "same", url, 2, 1, shared=False)
    check_load(proxy, tmp_path / "b", url, 4, 3, shared=False)
    check_load(proxy, tmp_path / "c", url, 3, 1, shared=True)
    assert len(list((tmp_path / "c").rglob("rank*.safetensors"))) == 2 and not list(
        (tmp_path / "c").rglob("*.part")
    )
