"""What a save costs the training loop, what the checkpoint writer takes, and how fast it uploads.

About 1 GB of state on one rank. `stall` is the time that `save` keeps the loop waiting, against one copy of the same
bytes by torch within memory, both into memory that has been touched before: a run touches a save's after its first
step. CPU seconds are those of the checkpoint writer, for a save to the disk, against what the first edition did with
the same bytes: read them, hash them twice, write them. The upload goes to a real S3 server (LocalStack, from
scripts/setup_s3.sh; with CLIP_TRAIN_S3_SERVER=ceph Ceph's gateway) and is compared with obstore's own `put`, which it
uses, with the same checksum (LocalStack verifies it on these cores); s3fs's stands beside them. Each in turn; the
medians are compared. benchmarks/stores.py compares stores.
Absolute figures are this machine's and this server's.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish, parser

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.storage.object_store import S3Storage
from clip_train.task import Fragment
from tests.s3.bucket import Bucket
from tests.s3.server import chosen

TARGETS = {
    "stall": "a save, the first one too, keeps the loop waiting for at most 1.2 x one memory copy of the snapshot",
    "cpu": "the checkpoint writer takes at most 0.6 x the CPU seconds per GB of the first edition's",
    "memory": "the checkpoint writer's resident memory grows by at most 300 MiB while it writes and uploads",
    "upload": "at least 95% of the rate of obstore alone, with the same checksum",
}
SLOTS = ("param", "exp_avg", "exp_avg_sq")
TENSORS = 64


def state(num_bytes: int) -> list[Fragment]:
    numel = num_bytes // 4 // len(SLOTS) // TENSORS
    generator = torch.Generator().manual_seed(0)
    return [
        Fragment(
            f"w{i}", (numel,), 0, {slot: torch.randn(numel, generator=generator) for slot in SLOTS}
        )
        for i in range(TENSORS)
    ]


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Memory:
    """The most that a process has had resident while this was watching, above what it had at first."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stop = pid, threading.Event()
        self.first = self.most = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most = max(self.most, self._now())

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.most - self.first


def measure_stalls(folder: Path, fragments: list[Fragment], repeats: int) -> dict[str, Any]:
    """A save and a plain copy of the same tensors, in turn; each save is on the disk before the next one."""
    manager = CheckpointManager(CheckpointConfig(keep_last=1, grace_seconds=600), folder)
    manager.begin()
    manager.prepare(fragments, {})
    tensors = [tensor for fragment in fragments for tensor in fragment.tensors.values()]
    target = [torch.zeros_like(tensor) for tensor in tensors]

    def copy() -> None:
        for to, tensor in zip(target, tensors, strict=True):
            to.copy_(tensor)

    time.sleep(2.0)  # as a training's first steps: the memory is touched meanwhile
    stalls, copies = [], []
    writer = next(pid for pid in children() if b"clip_train.checkpoint.writer" in command_line(pid))
    before = cpu_seconds(writer)
    for step in range(1, repeats + 2):
        copies.append(seconds(copy))
        stalls.append(seconds(lambda step=step: manager.save(step, fragments, {}, {"step": step})))
        manager.settle()
        assert manager.last_good is not None and manager.last_good.step == step
    spent = (cpu_seconds(writer) - before) / (repeats + 1)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    reference = statistics.median(first_edition(folder, num_bytes) for _ in range(3))
    manager.close()
    save, plain = statistics.median(stalls[1:]), statistics.median(copies)
    return {
        "first save": stalls[0],
        "save": save,
        "copy": plain,
        "first stall / copy": stalls[0] / plain,
        "stall / copy": save / plain,
        "CPU s per GB": spent / num_bytes * 1e9,
        "the first edition's": reference / num_bytes * 1e9,
        "CPU / the first edition's": spent / reference,
    }


def children() -> list[int]:
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_edition(folder: Path, num_bytes: int) -> float:
    """CPU seconds of its way from the shared memory to the disk: whole files and blocks had each a sha256."""
    memory = os.memfd_create("reference")
    os.truncate(memory, num_bytes)
    with mmap.mmap(memory, num_bytes) as filled:
        for at in range(0, num_bytes, mmap.PAGESIZE):
            filled[at] = 1
    began = time.process_time()
    whole, block, piece = hashlib.sha256(), hashlib.sha256(), memoryview(bytearray(4 << 20))
    with (folder / "reference").open("wb", buffering=0) as file:
        at = 0
        while got := os.preadv(memory, [piece], at):
            file.write(piece[:got])
            whole.update(piece[:got])
            block.update(piece[:got])
            at += got
        os.fsync(file.fileno())
    spent = time.process_time() - began
    os.close(memory)
    (folder / "reference").unlink()
    return spent


def measure_memory(
    folder: Path, url: str, fragments: list[Fragment]
) -> tuple[dict[str, Any], Path]:
    """The checkpoint writer's memory over a whole save, and the file that it has uploaded."""
    manager = CheckpointManager(CheckpointConfig(remote=url, grace_seconds=600), folder)
    manager.begin()
    while (
        writer := next(
            (p for p in children() if b"clip_train.checkpoint.writer" in command_line(p)), None
        )
    ) is None:
        time.sleep(0.05)  # it has been forked, and is not that program yet
    memory = Memory(writer)
    assert manager.save(1, fragments, {}, {"step": 1}, wait=True) is Saved.COMMITTED
    grown = memory.stop()
    manager.close()
    row = {"writer MiB": grown / 2**20, "writer MiB at rest": memory.first / 2**20}
    return row, next(folder.glob("ckpt/*/*/rank00000.safetensors"))


def clients(path: Path, bucket: str) -> dict[str, Callable[[], Any]]:
    """name -> an upload of `path`."""
    import obstore
    import s3fs

    ours = S3Storage(f"s3://{bucket}/ours")
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    client = {"allow_http": True}
    store = obstore.store.S3Store(
        bucket, endpoint=endpoint, client_options=client, checksum_algorithm="sha256"
    )
    out: dict[str, Callable[[], Any]] = {
        "clip_train": lambda: ours.put_file(path, "file"),
        "obstore": lambda: obstore.put(
            store, "obstore", path, chunk_size=16 << 20, max_concurrency=8
        ),
    }
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    out["s3fs"] = lambda: fs.put_file(
        str(path), f"{bucket}/s3fs", chunksize=16 << 20, max_concurrency=4
    )
    return out


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    if missing := chosen().missing():
        print(missing)
        return 1
    torch.set_num_threads(1)
    num_bytes, repeats = (256 << 20, 3) if args.quick else (1 << 30, 7)
    server = chosen()().start()
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    try:
        os.environ |= server.environment()
        bucket = Bucket(server, "bench")
        with tempfile.TemporaryDirectory() as folder:
            fragments = state(num_bytes)
            saves = measure_stalls(Path(folder, "local"), fragments, repeats)
            memory, path = measure_memory(Path(folder, "remote"), f"{bucket.url}/run", fragments)
            saves |= memory
            rates: dict[str, list[float]] = {}
            uploads = clients(path, bucket.name)
            for _ in range(max(repeats, 5)):
                for name, upload in uploads.items():
                    rates.setdefault(name, []).append(path.stat().st_size / seconds(upload) / 1e6)
    finally:
        server.stop()
    medians = {name: statistics.median(each) for name, each in rates.items()}
    share = medians["clip_train"] / medians["obstore"]
    rows = [{"what": name, "value": value} for name, value in saves.items()]
    rows += [{"what": f"upload, {name}, MB/s", "value": rate} for name, rate in medians.items()]
    rows += [{"what": "upload, share of obstore", "value": share}]
    for name, value, most in (
        ("stall / copy", saves["stall / copy"], 1.2),
        ("first stall / copy", saves["first stall / copy"], 1.2),
        ("CPU / the first edition's", saves["CPU / the first edition's"], 0.6),
        ("writer MiB", saves["writer MiB"], 300),
        ("obstore / ours", 1 / share, 1 / 0.95),
    ):
        if value > most:
            missed.append(f"{name}: {value:.2f}, at most {most:g}")
    return finish("checkpoint", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
