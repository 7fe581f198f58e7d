"""What a run of W ranks asks of rank 0 and of every rank: bytes held, bytes read and written, requests, files.

Nothing trains here. The parts whose cost grows with W are called as a run calls them, with synthesised input: the
fragments of ViT-bigG-14 with AdamW at ZeRO 1 (2.5 billion parameters, three slots, cut evenly), files without
content, another rank's heartbeats in a store. `held` is the most that Python has allocated meanwhile, numpy's included.

    save, rank 0      reads all ranks' manifests; writes layout, manifest and marker
    save, a rank      writes its manifest
    resume, rank 0    reads marker, manifest and layout; looks at all files' sizes; all ranks get what it has read
    resume, a rank    holds that, and opens the files that overlap its own part; here on half as many ranks
    heartbeat, ...    of one look, every three seconds
    consistency       what a rank sends before training, and gets from all others
    shards            the index of 231,349 shards (LAION-2B): read once by each node, held by every rank, whatever W is
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import finish, parser

from clip_train.checkpoint import commit, manifest
from clip_train.checkpoint.commit import SaveRequest, read_checkpoint
from clip_train.checkpoint.manifest import BLOCK_BYTES, CommitRef, FileEntry
from clip_train.checkpoint.reader import FragmentReader
from clip_train.data.index import OFFSET_EVERY, ShardEntry, ShardIndex
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.storage.blocks import Checksums
from clip_train.storage.local import LocalStorage
from clip_train.task import StateRange
from launcher.runtime.environment import RankEnv
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.rendezvous import versions

WORLDS = (64, 1024, 4096)
SLOTS = ("param", "exp_avg", "exp_avg_sq")
SHARDS, SAMPLES, SHARD_BYTES, SHARD_BLOCK = 231_349, 10_000, 400 << 20, 4 << 20
PREFIX, STEP, EPOCH = manifest.attempt_prefix(0, 1000), 1000, 0
FILE_NAME = "rank{:05d}.safetensors"
MIB = 2**20
TARGETS = {
    "held": "at most 256 MiB on rank 0 and 64 MiB on any other, at 4,096 ranks",
    "growth": "from 1,024 to 4,096 ranks nothing on one rank grows more than 4.4 times: nothing is W squared",
    "files": "a rank opens no more files than overlap its part",
    "shards": "at most 4 KiB a shard: checksums of its blocks, and where its samples begin",
}


class Counting(LocalStorage):
    """A folder that counts what is asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.counts: Counter[str] = Counter()

    def read_bytes(self, name: str) -> bytes:
        data = super().read_bytes(name)
        self.counts.update(requests=1, read=len(data))
        return data

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        self.counts.update(requests=1, written=len(data))
        return super().put_bytes(name, data, if_absent=if_absent)

    def list(self, prefix: str = "", **more: bool) -> Any:
        found = super().list(prefix, **more)
        self.counts.update(requests=-(-len(found) // 1000) or 1)  # S3 answers with 1,000 at a time
        return found

    def size(self, name: str) -> int:
        self.counts.update(requests=1)
        return super().size(name)


def measured(
    what: str, world_size: int, storage: Counting | None, action: Callable[[], Any]
) -> tuple[dict, Any]:
    """A row of the table, and what the action gave."""
    if storage is not None:
        storage.counts.clear()
    tracemalloc.start()
    result = action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counts = storage.counts if storage is not None else {}
    return row(
        what,
        world_size,
        peak,
        counts.get("read", 0),
        counts.get("written", 0),
        counts.get("requests", 0),
    ), result


def row(
    what: str, world_size: int, held: float, read: int, written: int, requests: int, files: Any = ""
) -> dict:
    return {
        "what": what, "ranks": world_size, "held, MiB": held / MIB, "read, MiB": read / MIB,
        "written, MiB": written / MIB, "requests": requests, "files": files,
    }  # fmt: skip


def shapes() -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = CLIP(load_architecture("ViT-bigG-14"))
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def parts(
    params: list[tuple[str, tuple[int, ...]]], world_size: int
) -> Iterator[list[tuple[str, tuple, int, int]]]:
    """(name, shape, start, numel) of what each rank holds: all parameters end to end, cut evenly."""
    flat, at = [], 0
    for name, shape in params:
        flat.append((at, name, shape, torch.Size(shape).numel()))
        at += flat[-1][3]
    for rank in range(world_size):
        low, high = at * rank // world_size, at * (rank + 1) // world_size
        yield [
            (name, shape, max(low - begin, 0), min(high, begin + numel) - max(low, begin))
            for begin, name, shape, numel in flat
            if begin < high and low < begin + numel
        ]


def request_of(
    rank: int, world_size: int, part: list[tuple[str, tuple, int, int]], storage: Counting
) -> SaveRequest:
    """A rank's part of a save that is written: a file of the right size, without content."""
    rows, at = [], 4096
    for name, _, start, numel in part:
        rows.append(
            (
                name,
                start,
                numel,
                [(slot, "F32", at + i * 4 * numel) for i, slot in enumerate(SLOTS)],
            )
        )
        at += 4 * numel * len(SLOTS)
    fragments = {"shapes": {name: shape for name, shape, _, _ in part}, "rows": rows, "tensors": {}}
    path = storage.path(f"{PREFIX}/{FILE_NAME.format(rank)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(at)
    state = {"step": STEP} if rank == 0 else None
    request = SaveRequest(
        STEP, PREFIX, EPOCH, rank, world_size, at, fragments, state=state, created="now"
    )
    request.entry = FileEntry(FILE_NAME.format(rank), at, ["0" * 64] * -(-at // BLOCK_BYTES))
    return request


def saves(params: list, world_size: int, storage: Counting) -> list[dict]:
    storage.counts.clear()
    for rank, part in enumerate(parts(params, world_size)):
        request = request_of(rank, world_size, part, storage)
        commit.put_rank_manifest(storage, request)
        if rank == 0:
            first = request
    own = row("save, a rank", world_size, 0, 0, storage.counts["written"] // world_size, 1)
    whole, _ = measured(
        "save, rank 0",
        world_size,
        storage,
        lambda: commit.commit_checkpoint(storage, first, commit.NO_LEASE, timeout_seconds=600.0),
    )
    return [whole, own]


def resumes(params: list, world_size: int, storage: Counting) -> list[dict]:
    look = partial(read_checkpoint, storage, CommitRef(EPOCH, STEP))
    first, found = measured("resume, rank 0", world_size, storage, look)
    sent = len(pickle.dumps(found))
    half = max(1, world_size // 2)
    part = list(parts(params, half))[half // 2]

    def open_own() -> set[int]:
        mine = pickle.loads(pickle.dumps(found))
        reader = FragmentReader(mine, storage.path(PREFIX), None)
        wanted = [
            StateRange(name, slot, start, numel) for name, _, start, numel in part for slot in SLOTS
        ]
        return {
            piece.file
            for w in wanted
            for piece in reader._extents(w.name, w.slot, w.start, w.start + w.numel)
        }

    other, opened = measured("resume, a rank", world_size, storage, open_own)
    other |= {"read, MiB": sent / MIB, "files": len(opened)}
    return [first, other]


class Store:
    """The rendezvous store of a run in which all others are alive; counts what this rank asks."""

    def __init__(self, world_size: int) -> None:
        self.values = {f"beat/{rank}": b"0 node000" for rank in range(world_size)}
        self.requests, self.num_bytes, self.looks = 0, 0, 0

    def set(self, key: str, value: str) -> None:
        self.requests, self.num_bytes = self.requests + 1, self.num_bytes + len(key) + len(value)

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return False

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.looks += 1
        for key in keys:
            self.values[key] = f"{self.looks} node000".encode()
        found = [self.values[key] for key in keys]
        self.requests += 1
        self.num_bytes += sum(len(key) + len(value) for key, value in zip(keys, found, strict=True))
        return found

    def add(self, key: str, amount: int) -> int:
        return len(self.values)


def beats(rank: int, world_size: int) -> dict:
    store = Store(world_size)
    heartbeat = Heartbeat(
        RankEnv(rank, world_size, 0, 1, "127.0.0.1", 0, "this benchmark"), beat_seconds=0.02
    )

    def run() -> None:
        heartbeat.open(store)  # type: ignore[arg-type]
        heartbeat.all_joined = True
        while store.looks < 5:
            time.sleep(0.01)
        heartbeat.leave()

    what = f"heartbeat, {'rank 0' if rank == 0 else 'a rank'}"
    out, _ = measured(what, world_size, None, run)
    return out | {
        "read, MiB": store.num_bytes / store.looks / MIB,
        "requests": round(store.requests / store.looks),
    }


def consistency(world_size: int) -> dict:
    one = pickle.dumps(("node000", {**versions(), "the recipe": "0" * 12}))
    return row(
        "consistency, a rank", world_size, len(one) * world_size, len(one) * world_size, len(one), 1
    )


def shards() -> dict:
    """One rank of each node reads it, and every rank holds it; it does not depend on W."""
    blocks = SHARD_BYTES // SHARD_BLOCK

    def make() -> ShardIndex:
        names = [f"s3://bucket/laion2b/{i:06d}.tar" for i in range(SHARDS)]
        offsets = array("Q", range(SAMPLES // OFFSET_EVERY))
        entries = {
            name: ShardEntry(
                SAMPLES,
                f"{i:064x}",
                Checksums(SHARD_BYTES, SHARD_BLOCK, f"{i:016x}" * blocks),
                None,
                offsets[:],
            )
            for i, name in enumerate(names)
        }
        return ShardIndex.of(names, entries)

    out, index = measured("shards, a rank", 0, None, make)
    return out | {
        "written, MiB": len(json.dumps([list(name) for name in index.rows()[:1000]]))
        * SHARDS
        / 1000
        / MIB
    }


def judge(rows: list[dict]) -> list[str]:
    missed = []
    by_key = {(each["what"], each["ranks"]): each for each in rows}
    for (what, ranks), each in by_key.items():
        most = 256 if what.endswith("rank 0") else 64
        if ranks == WORLDS[-1] and each["held, MiB"] > most:
            missed.append(
                f"{what} at {ranks} ranks holds {each['held, MiB']:.0f} MiB, at most {most}"
            )
        before = by_key.get((what, WORLDS[1]))
        if ranks == WORLDS[-1] and before is not None:
            for column in ("held, MiB", "read, MiB", "written, MiB", "requests"):
                if each[column] > max(
                    4.4 * before[column], 4
                ):  # below it tables of Python grow in leaps
                    missed.append(
                        f"{what}: {column} grows from {before[column]:.3g} to {each[column]:.3g}"
                    )
        if what == "shards, a rank" and each["held, MiB"] * MIB > 4096 * SHARDS:
            missed.append(f"the index of {SHARDS:,} shards takes {each['held, MiB']:.0f} MiB")
        if what == "resume, a rank" and each["files"] > 4:
            missed.append(f"{what} at {ranks} ranks opens {each['files']} files")
    return missed


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    params, rows = shapes(), []
    for world_size in WORLDS[:2] if args.quick else WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            storage = Counting(Path(folder))
            rows += [*saves(params, world_size, storage), *resumes(params, world_size, storage)]
        rows += [beats(0, world_size), beats(1, world_size), consistency(world_size)]
    rows.append(shards())
    rows.sort(key=lambda each: (each["what"], each["ranks"]))
    print(
        "largest terms. save, rank 0: the manifests of all ranks, parsed. resume, rank 0 and a rank: the files'\n"
        f"entries, with a sha256 of every {BLOCK_BYTES >> 20} MiB. heartbeat, rank 0: one key of each rank.\n"
        "shards: the blocks' checksums, 16 digits for each 4 MiB, and 8 bytes for every 64 samples."
    )
    return finish("scale", rows, TARGETS, judge(rows), args)


if __name__ == "__main__":
    sys.exit(main())
