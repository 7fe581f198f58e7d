"""What is removed beside old checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clip_train.checkpoint import lease, manifest
from clip_train.checkpoint.manifest import Commit, CommitRef
from clip_train.checkpoint.retention import Policy, apply_retention, remove_own_files
from clip_train.storage.local import LocalStorage


def attempt(step: int, name: str, epoch: int = 0) -> str:
    return f"ckpt/s{step:010d}/e{epoch:06d}-{name * 8}"


def left(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def test_a_rank_with_a_disk_of_its_own_leaves_no_halves_there(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    older, under_way = attempt(2, "b"), attempt(3, "c")
    for prefix in (attempt(1, "a"), older, under_way):
        for name in ("rank00001.safetensors", "_rank00001.json"):
            storage.put_bytes(f"{prefix}/{name}", b"1")
    storage.put_bytes(f"{older}/rank00000.safetensors", b"another rank of this node")
    storage.path(attempt(4, "e")).mkdir(parents=True)  # another rank is about to write there
    halves = {
        (prefix, rank): f"tmp/{prefix.replace('/', '+')}+rank0000{rank}.safetensors"
        for prefix, rank in ((older, 1), (attempt(2, "f"), 1), (attempt(2, "f"), 0), (under_way, 1))
    }
    for half in halves.values():
        storage.put_bytes(half, b"half")
    remove_own_files(storage, 1, Policy(keep_last=1), {under_way})
    assert left(tmp_path) == {
        f"{under_way}/rank00001.safetensors",
        f"{under_way}/_rank00001.json",
        f"{older}/rank00000.safetensors",
        attempt(4, "e"),
        halves[attempt(2, "f"), 0],
        halves[under_way, 1],
    }


def test_what_was_never_committed_leaves_no_metric(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    held = lease.acquire(storage)
    assert held.epoch == 0
    for step, name in ((1, "a"), (2, "b")):
        prefix = attempt(step, name)
        storage.put_bytes(f"{prefix}/rank00000.safetensors", b"1")
        storage.put_bytes(CommitRef(0, step).name, Commit(0, step, prefix, "0" * 64).to_bytes())
    for step in (1, 2, 3, 4):
        metric = manifest.add_checksum({"step": step, "values": {"top1": 0.1}})
        storage.put_bytes(CommitRef(0, step).metric_name, metric)
    storage.path(attempt(3, "d")).mkdir(parents=True)
    policy = Policy(keep_last=1, orphan_grace_seconds=600.0, token=held.token)
    apply_retention(storage, policy)
    assert [entry.name[-7:-5] for entry in storage.list("metric")] == [
        "02",
        "03",
        "04",
    ]  # 1 went with its checkpoint
    assert {name for name in left(tmp_path) if name.startswith("ckpt")} == {
        f"{attempt(2, 'b')}/rank00000.safetensors",
        attempt(3, "d"),  # newer than all: another rank may be about to write there
    }
    storage.put_bytes(f"{attempt(4, 'e')}/rank00000.safetensors", b"1")
    storage.put_bytes(CommitRef(0, 4).name, Commit(0, 4, attempt(4, "e"), "0" * 64).to_bytes())
    apply_retention(storage, policy)
    assert [entry.name[-7:-5] for entry in storage.list("metric")] == ["04"]


class Denying(LocalStorage):
    """Who has not the right to list what uploads have begun."""

    def sweep(self, *_: Any, **__: Any) -> int:
        raise PermissionError(13, "give these credentials the right to do it")


def test_the_rest_goes_where_unfinished_uploads_cannot_be_listed(tmp_path: Path) -> None:
    storage = Denying(tmp_path)
    leases = [lease.acquire(storage) for _ in range(25)]
    prefix = attempt(1, "a", epoch=24)
    storage.put_bytes(f"{prefix}/rank00000.safetensors", b"1")
    storage.put_bytes(CommitRef(24, 1).name, Commit(24, 1, prefix, "0" * 64).to_bytes())
    storage.put_bytes(CommitRef(1, 9).metric_name, b"{}")
    storage.put_bytes("preflight/a/file", b"1")
    noted: list[str] = []
    policy = Policy(keep_last=1, orphan_grace_seconds=0.0, epoch=24, token=leases[-1].token)
    apply_retention(storage, policy, note=noted.append)
    assert storage.list("metric") == storage.list("preflight") == []
    assert (
        len(noted) == 1 and "(s3:ListBucketMultipartUploads), or let a lifecycle rule" in noted[0]
    )
