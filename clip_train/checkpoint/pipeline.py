"""What the saver does with one rank's snapshots: disk first, then the remote store, then the commit.

    write    the shared buffer -> a file, hashed on the way, fsynced, renamed; the buffer is free again
    keep     rank 0: when all ranks have written, commit on the local disk
    upload   file by file, with bounded memory; rank 0: when all ranks have, manifest, fence check, commit

Each is a thread of its own, so a slow upload holds up neither the next snapshot nor its local commit. Ranks
learn of each other through small files beside the data ("words"), never through the training's collectives.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clip_train.checkpoint import layout, lease, marks
from clip_train.checkpoint.layout import BLOCK_BYTES, Commit, CommitRef, FileEntry, Manifest
from clip_train.checkpoint.retention import Attempts, Policy, apply_retention, remove_own_files
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage, Storage, open_storage

HEADROOM = 64 << 20  # bytes left free beside a checkpoint: manifests, and whoever else writes there
_CHUNK = 4 << 20  # bytes copied and hashed at a time: all the memory that writing takes
_POLL_SECONDS = (0.05, 2.0)  # between looks for the other ranks' words: at first, at most
_LONGEST_PAUSE = 60.0  # seconds between tries to upload


@dataclass(frozen=True)
class Settings:
    """What the saver is told once."""

    folder: str
    remote: str | None
    local_commits: bool  # all ranks see `folder`
    timeout_seconds: float
    policy: Policy

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "policy": self.policy.to_json()}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Settings:
        return cls(**{**body, "policy": Policy.from_json(body["policy"])})


@dataclass
class Order:
    """One rank's part of one save."""

    step: int
    prefix: str
    epoch: int
    rank: int
    world_size: int
    size: int  # bytes, at the beginning of the buffer: a safetensors file as it will be
    state: Any = None  # rank 0: the trainer's, encoded
    earlier: list[str] = field(default_factory=list)  # this process's other attempts at the same step
    since: float = field(default_factory=time.monotonic)
    entry: FileEntry | None = None  # once written
    manifest: bytes = b""  # rank 0: made once, so that every try to commit means the same bytes

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.epoch, self.step)


class RefusedError(CheckpointError):
    """This save has failed for good."""


class OvertakenError(RefusedError):
    """A newer save has taken its place before its upload began: uploads take longer than the time between saves."""


class Pipeline:
    """One rank's saves, in three threads. tell: takes a dict for the rank; called from any of them."""

    def __init__(self, settings: Settings, tell: Callable[[dict[str, Any]], None]) -> None:
        self.settings = settings
        self.local = LocalStorage(settings.folder)
        self.remote: Storage | None = open_storage(settings.remote) if settings.remote else None
        self._tell = tell
        self._buffer: int | None = None  # file descriptor
        self._cancelled: dict[int, str] = {}  # step -> why no rank should wait for it
        self._uploading: list[Order] = []  # the one under way, and the newest that waits
        self._active: set[str] = set()  # attempts that may still be committed: retention leaves them alone
        self._ended: dict[str, int] = {}  # attempts that are committed or given up, and their steps
        self._newest_done = -1  # step; all ranks have finished with what is older
        self._changed = threading.Condition()
        self._to_write: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._to_keep: queue.SimpleQueue[Order] = queue.SimpleQueue()
        for work in (self._write_all, self._keep_all, self._upload_all):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    # -- called by the server

    def set_buffer(self, fd: int) -> None:
        """Snapshots come in this file from now on. Not while one is being written."""
        if self._buffer is not None:
            os.close(self._buffer)
        self._buffer = fd

    def save(self, order: Order) -> None:
        with self._changed:
            self._active.add(order.prefix)
        self._to_write.put(order)

    def cancel(self, step: int, why: str) -> None:
        """Another rank has failed: nobody should wait for it."""
        with self._changed:
            self._cancelled[step] = why
            self._changed.notify_all()

    def note_metric(self, epoch: int, step: int, values: dict[str, float]) -> None:
        """Rank 0: what the evaluation at `step` came to, for retention."""
        for store in self._stores():
            store.put_bytes(CommitRef(epoch, step).metric_name, layout.seal({"step": step, "values": values}))

    def protect(self, refs: list[CommitRef], damaged: list[CommitRef]) -> None:
        self.settings.policy.protect.update(refs)
        self.settings.policy.damaged.update(damaged)

    def _stores(self) -> list[Storage]:
        stores: list[Storage] = [self.local] if self.settings.local_commits else []
        return stores + ([self.remote] if self.remote is not None else [])

    # -- write

    def _write_all(self) -> None:
        while True:
            order = self._to_write.get()
            error = None
            try:
                entry = self._write(order)
                self._word(self.local, order, {"files": [asdict(entry)]})
                order.entry = entry
            except Exception as e:
                error = e
            self._tell({"told": "written", "step": order.step})  # the buffer is free
            if error is None:
                self._to_keep.put(order)
            else:
                self._fail(order, error)

    def _write(self, order: Order) -> FileEntry:
        """Copy the buffer's beginning into the attempt's folder, whole or not at all."""
        free = free_bytes(Path(self.settings.folder))
        check_space(self.settings.folder, order.size, free)
        name = layout.rank_file(order.rank)
        staging = Path(self.settings.folder) / "tmp"
        staging.mkdir(parents=True, exist_ok=True)
        local = staging / f"{order.prefix.replace('/', '+')}+{name}"
        assert self._buffer is not None
        try:
            sha256, blocks = copy_hashed(self._buffer, local, order.size)
            self.local.put_file(local, f"{order.prefix}/{name}", move=True)
        finally:
            local.unlink(missing_ok=True)
        return FileEntry(name, order.size, sha256, order.rank, blocks)

    # -- keep

    def _keep_all(self) -> None:
        while True:
            order = self._to_keep.get()
            try:
                if self.settings.local_commits and order.rank == 0:
                    self._commit(self.local, order)
                    self._tell({"told": "kept", "step": order.step, "where": f"{self.local.url}/{order.prefix}"})
                    self._retain(self.local)
                elif not self.settings.local_commits:
                    remove_own_files(self.local, order.rank, self.settings.policy, self._attempts().in_flight)
            except Exception as e:
                if self.remote is None or isinstance(e, lease.FencedError):
                    self._fail(order, e)
                    continue
                # the remote store can do without
                self._tell({"told": "note", "text": f"step {order.step} is not committed locally: {explain(e)}"})
            if self.remote is None:
                self._done(order)
                self._tell({"told": "rest", "step": order.step})
            else:
                self._hand_over(order)

    def _done(self, order: Order) -> None:
        self._over(order)
        self._newest_done = order.step
        where = f"{(self.remote or self.local).url}/{order.prefix}"
        seconds = time.monotonic() - order.since
        self._tell({"told": "done", "step": order.step, "where": where, "seconds": seconds, "bytes": order.size})

    def _fail(self, order: Order, error: Exception) -> None:
        self._over(order)
        why, overtaken = explain(error), isinstance(error, OvertakenError)
        told = "fenced" if isinstance(error, lease.FencedError) else "overtaken" if overtaken else "failed"
        self._tell({"told": told, "step": order.step, "why": why})
        self._tell({"told": "rest", "step": order.step})
        if order.rank == 0:
            return
        # rank 0 waits for a word; what has been written may still be committed locally
        for store in self._stores() if order.entry is None else [self.remote]:
            try:
                if store is not None:
                    self._word(store, order, {"error": why, "overtaken": overtaken})
            except OSError:
                continue

    def _word(self, store: Storage, order: Order, word: dict[str, Any]) -> None:
        body = {"rank": order.rank, "step": order.step, **word}
        store.put_bytes(f"{order.prefix}/{layout.rank_manifest(order.rank)}", layout.seal(body))

    # -- upload

    def _hand_over(self, order: Order) -> None:
        """At most one waits: a newer one takes its place."""
        with self._changed:
            overtaken = self._uploading.pop() if len(self._uploading) > 1 else None
            self._uploading.append(order)
            self._changed.notify_all()
        if overtaken is not None:
            self._fail(overtaken, OvertakenError(f"overtaken by step {order.step} before its upload began"))

    def _attempts(self) -> Attempts:
        with self._changed:
            over = {prefix for prefix, step in self._ended.items() if step < self._newest_done}
            return Attempts(set(self._active), over, self.settings.timeout_seconds)

    def _over(self, order: Order) -> None:
        with self._changed:
            self._active.discard(order.prefix)
            self._ended[order.prefix] = order.step

    def _upload_all(self) -> None:
        while True:
            with self._changed:
                while not self._uploading:
                    self._changed.wait()
                order = self._uploading[0]
            try:
                self._upload(order)
            except Exception as e:
                self._fail(order, e)
            else:
                self._done(order)
            with self._changed:
                self._uploading.remove(order)
            for store in self._stores() if order.rank == 0 else []:  # what was in flight here may go from there
                self._retain(store)
            self._tell({"told": "rest", "step": order.step})

    def _upload(self, order: Order) -> None:
        """Try until it succeeds, is fenced, is out of time, or a newer save waits. CheckpointError."""
        assert self.remote is not None and order.entry is not None
        uploaded, tries = False, 0
        while True:
            tries += 1
            try:
                name = f"{order.prefix}/{order.entry.name}"
                if not uploaded:
                    self.remote.put_file(self.local.path(name), name)
                    self._word(self.remote, order, {"files": [asdict(order.entry)]})
                    uploaded = True
                if order.rank == 0:
                    self._commit(self.remote, order)
                return
            except (lease.FencedError, RefusedError):
                raise
            except (OSError, CheckpointError) as e:
                why = explain(e)
            pause = min(2.0**tries, _LONGEST_PAUSE)
            with self._changed:
                if time.monotonic() + pause > order.since + self.settings.timeout_seconds:
                    raise RefusedError(f"{why}; given up after {tries} tries")
                newer = self._changed.wait_for(lambda: len(self._uploading) > 1, timeout=0)
                if not newer:
                    self._tell({"told": "retry", "step": order.step, "why": why, "seconds": pause})
                    newer = self._changed.wait_for(lambda: len(self._uploading) > 1, timeout=pause)
                if newer:
                    raise RefusedError(f"{why}; overtaken by step {self._uploading[1].step}")

    # -- commit

    def _commit(self, store: Storage, order: Order) -> None:
        """Rank 0: when all ranks' words are there, the manifest, the fence check, the marker, the hint."""
        files = self._gather_words(store, order)
        sizes = {entry.name: entry.size for entry in store.list(order.prefix)}
        for entry in files:
            name = f"{order.prefix}/{entry.name}"
            size = sizes[name] if name in sizes else store.size(name)
            if size != entry.size:
                raise CheckpointError(f"{store.url}/{name} has {size} bytes instead of {entry.size}")
        if not order.manifest:
            created = datetime.now(timezone.utc).isoformat(timespec="seconds")
            state = layout.decode_state(order.state)
            order.manifest = Manifest(order.step, order.epoch, order.world_size, files, state, created).to_bytes()
        store.put_bytes(f"{order.prefix}/{layout.MANIFEST}", order.manifest)
        self._check_fence(store)
        marker = Commit(order.epoch, order.step, order.prefix, layout.sha256_of(order.manifest))
        if not store.put_bytes(order.ref.name, marker.to_bytes(), if_absent=True):
            there = marks.read_commit(store, order.ref)
            if there != marker and there.prefix not in order.earlier:  # else by an earlier try of ours
                raise lease.FencedError(f"{store.url}/{order.ref.name} has been committed by another process")
        try:
            store.put_bytes(layout.HINT, layout.seal({"commit": order.ref.name}))
        except OSError as e:  # only a hint
            self._tell({"told": "note", "text": f"{store.url}/{layout.HINT} could not be written: {explain(e)}"})

    def _check_fence(self, store: Storage) -> None:
        """FencedError; OSError, but not of the remote store for a local commit: that is wanted most when the remote
        store is down, and one that comes too late sorts below the successor's."""
        held = self.settings.policy.lease
        if self.remote is not None:
            try:
                lease.check(self.remote, held)
            except OSError:
                if store is self.remote:
                    raise
        if store is not self.remote:
            lease.check(store, held)

    def _gather_words(self, store: Storage, order: Order) -> list[FileEntry]:
        """Every rank's entries. RefusedError where a rank has failed or says nothing in time; OSError."""
        words: dict[int, list[FileEntry]] = {}
        pause, most = _POLL_SECONDS
        while True:
            for rank in set(range(order.world_size)) - set(words):
                try:
                    word = marks.read_sealed(store, f"{order.prefix}/{layout.rank_manifest(rank)}")
                except FileNotFoundError:
                    continue
                except ValueError as e:
                    raise CheckpointError(f"the word of rank {rank} makes no sense: {e}") from e
                if "error" in word:
                    kind = OvertakenError if word.get("overtaken") else RefusedError
                    raise kind(f"rank {rank}: {word['error']}")
                words[rank] = [FileEntry(**entry) for entry in word["files"]]
            missing = sorted(set(range(order.world_size)) - set(words))
            if not missing:
                return [entry for rank in sorted(words) for entry in words[rank]]
            with self._changed:
                self._changed.wait_for(lambda: order.step in self._cancelled, timeout=pause)
                if order.step in self._cancelled:
                    raise RefusedError(self._cancelled[order.step])
            pause = min(1.5 * pause, most)
            if time.monotonic() > order.since + self.settings.timeout_seconds:
                shown = ", ".join(map(str, missing[:8]))
                raise RefusedError(
                    f"nothing from ranks {shown} under {store.url}/{order.prefix} after "
                    f"{self.settings.timeout_seconds:.0f} s: is it a place that all ranks share?"
                )

    def _retain(self, store: Storage) -> None:
        try:
            apply_retention(store, self.settings.policy, self._attempts)
        except Exception as e:  # whatever it is, saving goes on
            text = f"old checkpoints under {store.url} could not be removed: {explain(e)}"
            self._tell({"told": "note", "text": text})


def explain(e: BaseException) -> str:
    return str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}"


def free_bytes(folder: Path) -> int:
    """Free space on the disk of `folder`, which need not exist yet."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: str | Path, needed: int, free: int) -> None:
    """CheckpointError when `needed` bytes will not fit into `free`."""
    if needed + HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or lower "
            "checkpoint.keep_last"
        )


def copy_hashed(fd: int, path: Path, size: int) -> tuple[str, list[str]]:
    """The first `size` bytes of `fd` into a new file, fsynced; its sha256, and that of each block. OSError.

    Read in pieces rather than mapped: pages of a mapping would count as this process's memory.
    """
    whole, blocks, block = hashlib.sha256(), [], hashlib.sha256()
    piece = memoryview(bytearray(_CHUNK))
    with path.open("wb", buffering=0) as f:
        at = 0
        while at < size:
            got = os.preadv(fd, [piece[: min(_CHUNK, size - at)]], at)
            if got == 0:
                raise OSError(f"the snapshot ends at byte {at} of {size}")
            data, rest = piece[:got], piece[:got]
            while rest:
                rest = rest[f.write(rest) :]
            whole.update(data)
            while data:
                room = BLOCK_BYTES - at % BLOCK_BYTES
                block.update(data[:room])
                at += len(data[:room])
                data = data[room:]
                if at % BLOCK_BYTES == 0 or at == size:
                    blocks.append(block.hexdigest())
                    block = hashlib.sha256()
        os.fsync(f.fileno())
    return whole.hexdigest(), blocks


def encoded(body: dict[str, Any]) -> bytes:
    """A message between a rank and its saver: length, then JSON."""
    data = json.dumps(body).encode()
    return len(data).to_bytes(4, "little") + data
