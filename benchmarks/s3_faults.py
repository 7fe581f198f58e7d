"""Three epochs of the real loader from a real S3 server, through a proxy that breaks every answer it can.

Each row is one kind of fault. The batches (images, tokens, keys, seeds) are compared with those that the same
shards give from the local disk. The server is LocalStack's S3 (scripts/setup_s3.sh), or Ceph's gateway with
CLIP_TRAIN_S3_SERVER=ceph; the shards are small and so are the waits, so nothing here says how fast it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, parser

from clip_train.errors import ClipTrainError
from tests.s3.conftest import forget_buckets
from tests.s3.epochs import (
    FAST,
    NEED_AN_INDEX,
    SURVIVED,
    epoch_digests,
    make_shards,
    retries,
    upload,
)
from tests.s3.proxy import Fault, FaultyProxy, fresh
from tests.s3.server import Server, chosen

TARGETS = {
    "passing faults": "the same digests as from the local disk, with the index for faults that only a checksum can see",
    "lasting faults": "an error that names the shard; never another epoch without a word",
}
QUICK = ("none", "reset in mid-body", "burst of 503", "stall", "short body", "flipped bit")
SHARD = "003.tar"  # what lasting faults are about


def spoil(server: Server, bucket: str, what: str, data: bytes) -> None:
    """Damages one shard where it is stored."""
    key = f"{bucket}/set/{SHARD}"
    if what == "deleted":
        server.delete(key)
    elif what == "cut":
        server.put(key, data[: len(data) // 2])
    else:
        server.put(key, data[:70_000] + bytes([data[70_000] ^ 1]) + data[70_001:])


# What lasts: the fault that never ends, or what is done to the store.
LASTING: dict[str, Fault | str] = {
    "one shard always reset": Fault("cut", key=SHARD),
    "one shard always stalls": Fault("hang", key=SHARD),
    "one shard always 503": Fault("status", key=SHARD),
    "one shard always flipped": Fault("flip", key=SHARD),
    "one shard forbidden": Fault(
        "status", key=SHARD, code=403, s3code="AccessDenied", method="GET|HEAD"
    ),
    "one shard deleted": "deleted",
    "one shard cut where it is stored": "cut",
    "one bit flipped where it is stored": "flipped",
}


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    if missing := chosen().missing():
        print(missing)
        return 1
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "set")
        make_shards(data)
        expected = {True: epoch_digests(str(data / "*.tar"))}  # the index has a part in the order
        make_shards(Path(folder, "bare"), index=False)
        expected[False] = epoch_digests(str(Path(folder, "bare", "*.tar")))
        server = chosen()().start()
        try:
            with FaultyProxy(server.port, server.sign) as proxy:
                os.environ |= server.environment(proxy.url)
                bench = Bench(server, proxy, data, expected, rows, missed)
                for name, faults in {"none": [], **SURVIVED}.items():
                    if not args.quick or name in QUICK:
                        bench.survive(name, faults, index=True)
                for name, faults in SURVIVED.items():
                    if not args.quick:
                        bench.survive(name, faults, index=False)
                for name, fault in LASTING.items():
                    if not args.quick or "flipped" in name:
                        bench.last(name, fault)
        finally:
            server.stop()
    return finish("s3_faults", rows, TARGETS, missed, args)


class Bench:
    """One bucket for each row."""

    def __init__(
        self,
        server: Server,
        proxy: FaultyProxy,
        data: Path,
        expected: dict[bool, list[str]],
        rows: list,
        missed: list[str],
    ) -> None:
        self.server, self.proxy, self.data, self.expected = server, proxy, data, expected
        self.rows, self.missed = rows, missed

    def survive(self, name: str, faults: list[Fault], *, index: bool) -> None:
        train = self.bucket(index)
        outcome, hits, attempts = self.run(train, fresh(faults), index)
        if not index and name in NEED_AN_INDEX:
            outcome += " (as the start of the run tells)"
        elif outcome != "same digests":
            self.missed.append(f"{name}, {'with' if index else 'without'} index: {outcome}")
        self.add(name, index, outcome, hits, attempts)

    def last(self, name: str, fault: Fault | str) -> None:
        train = self.bucket(True)
        if isinstance(fault, str):
            spoil(self.server, train.split("/")[2], fault, (self.data / SHARD).read_bytes())
        outcome, hits, attempts = self.run(
            train, fresh([fault]) if isinstance(fault, Fault) else [], True
        )
        if not outcome.startswith("error naming"):
            self.missed.append(f"{name}: {outcome}")
        self.add(name, True, outcome, hits, attempts)

    def bucket(self, index: bool) -> str:
        name = f"row{len(self.rows)}"
        self.server.put(name)
        return upload(self.server, self.data, name, index)

    def run(self, train: str, faults: list[Fault], index: bool) -> tuple[str, int, int]:
        """(outcome, faults that hit, attempts repeated)"""
        self.proxy.faults = faults
        with retries() as lines:
            try:
                found = epoch_digests(train, storage=FAST)
            except (ClipTrainError, OSError) as e:
                told = f"{train.rpartition('/')[0]}/{SHARD}" in str(e)
                outcome = (
                    f"error naming the shard: {e}"
                    if told
                    else f"error without the shard's name: {e}"
                )
            else:
                same = sum(a == b for a, b in zip(found, self.expected[index], strict=True))
                outcome = (
                    "same digests"
                    if found == self.expected[index]
                    else f"{same} of {len(found)} batches the same"
                )
        self.proxy.faults = []
        forget_buckets()
        return outcome, sum(fault.fired for fault in faults), len(lines)

    def add(self, name: str, index: bool, outcome: str, hits: int, attempts: int) -> None:
        row = {
            "fault": name,
            "index": "yes" if index else "no",
            "faults": hits,
            "retries": attempts,
            "outcome": outcome,
        }
        self.rows.append(row)
        print(
            f"{name}, index {row['index']}: {hits} faults, {attempts} retries: {outcome}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
