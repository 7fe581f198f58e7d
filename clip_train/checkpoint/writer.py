"""The checkpoint writer: one process beside each rank, which writes its snapshots. No torch.

Its rank starts it and holds the other end of a socketpair; both processes have the memory with the
snapshot. Three threads: messages; the local disk (file, rank manifest, commit, retention); the
remote store (the same). It ends with its rank.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection

from clip_train.checkpoint import commit, lease, manifest
from clip_train.checkpoint.commit import (
    FencedError,
    RefusedError,
    SaveRequest,
    SupersededError,
    explain,
    in_parallel,
)
from clip_train.checkpoint.manifest import BLOCK_BYTES, FileEntry
from clip_train.checkpoint.retention import (
    Policy,
    apply_retention,
    check_space,
    free_bytes,
    remove_leftovers,
)
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage, open_own
from clip_train.storage.urls import open_storage

_CHUNK = 4 << 20  # bytes written at a time
_HASHING_THREADS = 4
_LONGEST_PAUSE = 60.0  # seconds between tries of an upload


@dataclass(frozen=True)
class Settings:
    """The first message to a checkpoint writer."""

    folder: str
    remote: str | None
    shared: bool  # all ranks see `folder`, so checkpoints are committed there too
    timeout_seconds: float
    policy: Policy


class Event(Enum):
    """What a checkpoint writer tells its rank."""

    NOTE = auto()  # a line for the user
    WRITTEN = auto()  # the snapshot is on the disk, or cannot be: the memory is free
    LOCAL = auto()  # committed on the local disk
    COMMITTED = auto()  # committed in the main store; not on rank 0: this rank's part is there
    SUPERSEDED = auto()  # not uploaded, as a newer one was waiting
    FAILED = auto()
    FENCED = auto()  # another process has taken over


@dataclass(frozen=True)
class Message:
    event: Event
    text: str = ""  # why it failed, where it was committed, or a line for the user
    prefix: str = ""  # the attempt
    step: int = 0
    seconds: float = 0.0  # since the snapshot was taken


def main(connection_fd: int, memory_fd: int, parent: int) -> None:
    """The process: until its rank asks it to finish, or is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank, which decides when this ends
    os.nice(5)  # training comes first
    with contextlib.suppress(OSError, AttributeError):
        # the rank may be bound to the cores that it keeps busy
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    connection = Connection(connection_fd)
    try:
        writer = Writer(connection.recv(), memory_fd, connection.send)
        while os.getppid() == parent:  # a process that the rank has forked may hold its end open
            if connection.poll(1.0):
                writer.receive(connection.recv())
    except (EOFError, OSError):
        pass
    os._exit(0)  # not sys.exit: uploads must not continue for a run that has ended


class Writer:
    """One rank's saves. send: takes messages for the rank; called from any thread."""

    def __init__(self, settings: Settings, memory_fd: int, send: Callable[[Message], None]) -> None:
        self.settings, self.policy = settings, settings.policy
        self.local = LocalStorage(settings.folder)
        self.remote: Storage | None = open_storage(settings.remote) if settings.remote else None
        self._memory_fd = memory_fd
        self._send, self._sending = send, threading.Lock()
        self._newest: SaveRequest | None = None
        # two retentions at once would find each other's folders gone
        self._tidying = threading.Lock()
        self._jobs: queue.SimpleQueue[SaveRequest | None] = queue.SimpleQueue()
        self._active: set[str] = set()  # attempts that may still be committed
        self._changed = threading.Condition()  # guards what follows
        self._uploads: list[SaveRequest] = []  # the one being uploaded, and the newest that waits
        self._errors: list[tuple[SaveRequest, Exception]] = []  # to put into the remote store
        self._finishing = False
        for work in (self._work_locally, self._work_remotely):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    def receive(self, request: SaveRequest | None) -> None:
        """From the rank; None: finish. Never waits for a disk or a store."""
        if request is not None:
            request.since = time.monotonic()
            self._newest = request
            self._active.add(request.prefix)
        self._jobs.put(request)

    # -- the local disk

    def _work_locally(self) -> None:
        while True:
            request = self._jobs.get()
            if request is None:
                with self._changed:
                    self._finishing = True
                    self._changed.notify_all()
                continue
            try:
                self._save_locally(request)
            except Exception as e:
                self._fail(request, e)

    def _save_locally(self, request: SaveRequest) -> None:
        try:
            write_snapshot(self.local, self._memory_fd, request, publish=self.settings.shared)
            if self.settings.shared:
                commit.put_rank_manifest(self.local, request)
        finally:
            self._report(Event.WRITTEN, request=request)
        where = ""
        if self.settings.shared and request.rank == 0:
            try:
                where = self._commit(self.local, request)
                self._report(Event.LOCAL, where, request)
            except (OSError, CheckpointError) as e:
                if self.remote is None or isinstance(e, (FencedError, RefusedError)):
                    raise
                text = f"step {request.step} is not committed locally: {explain(e)}"
                self._report(Event.NOTE, text)
        if self.remote is None:
            self._active.discard(request.prefix)
        self._tidy(self.local, request)
        if self.remote is None:
            self._report(Event.COMMITTED, where, request)
            return
        with self._changed:
            superseded = self._uploads.pop() if len(self._uploads) > 1 else None
            self._uploads.append(request)
            self._changed.notify_all()
        if superseded is not None:
            why = f"superseded by step {request.step} before its upload began"
            self._fail(superseded, SupersededError(why))

    def _commit(self, store: Storage, request: SaveRequest) -> str:
        """Returns where. FencedError, RefusedError; OSError, CheckpointError for what may pass."""

        def end() -> float:
            """If a newer save has begun, all ranks have this one on their disks, maybe not
            uploaded.
            """
            newest, end = self._newest, request.since + self.settings.timeout_seconds
            if store is self.local and newest is not None and newest is not request:
                end = min(end, newest.since + commit.LATE_SECONDS)
            return end

        # A local commit does not ask the remote store for the lease: it is needed most when that is
        # down, and one that comes too late sorts below the successor's.
        check_fence = partial(lease.check, store, self.policy.lease)
        prefix = commit.commit(store, request, check_fence, self.policy.lease.token, end)
        return f"{store.url}/{prefix}"

    # -- the remote store

    def _work_remotely(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._uploads or self._errors or self._finishing)
                request = self._uploads[0] if self._uploads else None
            if request is not None:
                try:
                    where = self._upload(request)
                except Exception as e:
                    self._fail(request, e)
                else:
                    self._report(Event.COMMITTED, where, request)
                    self._release(request)
                with self._changed:
                    self._uploads.remove(request)
            if self._errors and self.remote is not None:
                try:
                    commit.put_rank_manifest(self.remote, *self._errors[0])
                    self._errors.pop(0)
                except OSError:
                    time.sleep(1.0)  # then again
            if request is not None and self.remote is not None:
                self._tidy(self.remote, request)
                self._tidy(self.local, request)  # what has been uploaded may now go
            with self._changed:
                if self._finishing and not self._uploads:
                    os._exit(0)

    def _upload(self, request: SaveRequest) -> str:
        """Upload file and rank manifest and, on rank 0, commit; returns where.

        It is tried until it succeeds or a newer save waits. FencedError, RefusedError.
        """
        assert self.remote is not None and request.entry is not None
        name = f"{request.prefix}/{request.entry.name}"
        uploaded, tries = False, 0
        while True:
            tries += 1
            try:
                if not uploaded:
                    self.remote.put_file(request.path, name)
                    commit.put_rank_manifest(self.remote, request)
                    uploaded = True
                return self._commit(self.remote, request) if request.rank == 0 else ""
            except (FencedError, RefusedError):
                raise
            except (OSError, CheckpointError) as e:
                why = explain(e)
            pause = min(2.0**tries, _LONGEST_PAUSE)
            if time.monotonic() + pause > request.since + self.settings.timeout_seconds:
                raise RefusedError(f"{why}; given up after {tries} tries")
            if len(self._uploads) == 1:
                text = f"checkpoint of step {request.step}: {why}; trying again in {pause:.0f} s"
                self._report(Event.NOTE, text)
            with self._changed:
                self._changed.wait_for(lambda: len(self._uploads) > 1, pause)
                if len(self._uploads) > 1:
                    raise RefusedError(f"{why}; superseded by step {self._uploads[1].step}")

    # -- what became of it

    def _fail(self, request: SaveRequest, e: Exception) -> None:
        event = Event.FAILED
        if isinstance(e, FencedError):
            event = Event.FENCED
        elif isinstance(e, SupersededError):
            event = Event.SUPERSEDED
        self._report(event, explain(e), request)
        self._release(request)
        if request.rank == 0:
            return
        # rank 0's checkpoint writer waits for a manifest of this rank
        if self.settings.shared and request.entry is None:  # else it may be committed locally
            with contextlib.suppress(OSError):
                commit.put_rank_manifest(self.local, request, e)
        if self.remote is not None:
            with self._changed:
                self._errors.append((request, e))
                self._changed.notify_all()

    def _release(self, request: SaveRequest) -> None:
        """It is not going to be committed any more, in any store."""
        self._active.discard(request.prefix)
        if not self.settings.shared and request.entry is not None:
            with contextlib.suppress(OSError):
                request.path.unlink()

    def _report(self, event: Event, text: str = "", request: SaveRequest | None = None) -> None:
        message = Message(event, text)
        if request is not None:
            seconds = time.monotonic() - request.since
            message = Message(event, text, request.prefix, request.step, seconds)
        # if the rank is gone, the message thread ends this process
        with self._sending, contextlib.suppress(OSError):
            self._send(message)

    def _tidy(self, store: Storage, request: SaveRequest) -> None:
        """Retention, by rank 0; on a disk that not all ranks share each rank removes leftovers."""
        try:
            with self._tidying:
                if store is self.local and not self.settings.shared:
                    remove_leftovers(self.local, self.policy.lease.epoch)
                elif request.rank == 0:
                    apply_retention(store, self.policy, request.scores, set(self._active))
        except Exception as e:  # saving continues, whatever it is
            self._report(
                Event.NOTE, f"{store.url}: old checkpoints could not be removed: {explain(e)}"
            )


# -- from memory to the disk, hashed once on the way


def write_snapshot(
    storage: LocalStorage, memory_fd: int, request: SaveRequest, *, publish: bool = True
) -> None:
    """Write the first bytes of `memory_fd` as this rank's file; sets the request's `entry` and
    `path`.

    publish: into the attempt's folder; else it stays where it is staged. CheckpointError, OSError.
    """
    check_space(storage.root, request.size, free_bytes(storage.root))
    name = manifest.rank_file(request.rank)
    path = storage.path(f"{manifest.staged_name(request.prefix)}+{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        blocks = copy_hashed(memory_fd, path, request.size)
        if publish:
            storage.put_file(path, f"{request.prefix}/{name}", move=True)  # which fsyncs it
    except Exception:
        path.unlink(missing_ok=True)
        raise
    request.path = storage.path(f"{request.prefix}/{name}") if publish else path
    request.entry = FileEntry(name, request.size, blocks, request.rank)


def copy_hashed(memory_fd: int, path: os.PathLike[str], size: int) -> list[str]:
    """Copy the first `size` bytes to a new file; returns the sha256 of each block. OSError.

    A block is mapped only while it is copied: a mapping's pages count as this process's memory.
    Where the disk allows it, the file is written past the page cache, which costs less and leaves
    the cache to the training data. One thread writes at a time: the kernel lets others spin for
    the file, on cores that training needs.
    """
    digests: dict[int, str] = {}
    writing = threading.Lock()
    with open_own(path, "wb") as file:

        def copy(start: int) -> None:
            length = min(BLOCK_BYTES, size - start)
            # the memory has whole pages, and the disk takes only those past the page cache
            pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
            with (
                mmap.mmap(memory_fd, pages, prot=mmap.PROT_READ, offset=start) as block,
                memoryview(block) as view,
            ):
                with writing:
                    _write(file.fileno(), view, start)
                with view[:length] as content:
                    digests[start] = hashlib.sha256(content).hexdigest()

        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        starts = range(0, size, BLOCK_BYTES)
        list(in_parallel(copy, starts, min(_HASHING_THREADS, os.cpu_count() or 1)))
        file.truncate(size)
    return [digests[start] for start in starts]


def _write(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done : done + _CHUNK], at + done)
        except OSError as e:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if e.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # this file system aligns differently: write through the page cache
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
