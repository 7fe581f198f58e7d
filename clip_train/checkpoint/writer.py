"""The checkpoint writer: a process beside each rank that writes its snapshots. No torch.

Its rank starts it and has the other end of a socketpair. Both processes map the memory with the
snapshot. The writer has three threads: one receives messages, one runs jobs for the local disk
(file, rank manifest, commit, retention), one runs the same jobs for the remote store. It ends with
its rank.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from clip_train.checkpoint.commit import (
    FencedError,
    SaveFailedError,
    SaveRequest,
    SupersededError,
    commit_checkpoint,
    error_text,
    in_parallel,
    put_rank_manifest,
)
from clip_train.checkpoint.manifest import BLOCK_BYTES, CommitRef, FileEntry
from clip_train.checkpoint.retention import (
    Failures,
    WriterSettings,
    apply_retention,
    remove_leftovers,
)
from clip_train.errors import CheckpointError
from clip_train.stop import SIGNALS
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage, open_own
from clip_train.storage.urls import open_storage

_CHUNK = 4 << 20  # bytes written at a time
_HASHING_THREADS = 4


class Event(Enum):
    """A message from a checkpoint writer to its rank."""

    NOTE = auto()  # a line for the user
    WARNING = auto()  # a line about a problem that the user has to correct
    WRITTEN = auto()  # writing to the disk is over, even if it failed: the memory is free
    LOCAL = auto()  # committed on the local disk
    # rank 0: committed in the remote store, or on the disk if there is none; other ranks: their file
    # and manifest are written there
    COMMITTED = auto()
    SUPERSEDED = auto()  # not uploaded, because a newer save took its place
    FAILED = auto()
    FENCED = auto()  # another process has taken over


def end_of_save(error: BaseException | None) -> Event:
    """The message about a save that has ended with this error; None: without one."""
    if error is None:
        return Event.COMMITTED
    if isinstance(error, FencedError):
        return Event.FENCED
    if isinstance(error, SupersededError):
        return Event.SUPERSEDED
    return Event.FAILED


@dataclass(frozen=True)
class Message:
    event: Event
    text: str  # why it failed, where it was committed, or a line for the user
    prefix: str = ""  # the attempt's folder
    step: int = 0
    seconds: float = 0.0  # since the snapshot was taken


def main(connection_fd: int, memory_fd: int, parent: int) -> None:
    """Run the process until its rank asks it to finish, or has ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # meant for the rank, which decides when this ends
    os.nice(5)  # training has priority
    with contextlib.suppress(OSError, AttributeError):
        # use all cores: the rank may be bound to those that it keeps busy
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    connection = Connection(connection_fd)
    try:
        writer = Writer(connection.recv(), memory_fd, connection.send)
        # Check the parent too: if the rank has forked, a child may keep its end of the socket open.
        while os.getppid() == parent:
            if connection.poll(1.0):
                writer.receive(connection.recv())
    except (EOFError, OSError):  # the rank has closed its end of the socket
        pass
    os._exit(0)  # not sys.exit: uploads must not continue for a run that has ended


class Writer:
    """Writes one rank's saves. send: sends a message to the rank; called from any thread."""

    def __init__(
        self, settings: WriterSettings, memory_fd: int, send: Callable[[Message], None]
    ) -> None:
        self.settings = settings
        self._timeout = 60 * settings.config.save_timeout_minutes  # seconds
        self.local = LocalStorage(settings.folder)
        remote = settings.config.remote
        # uploads outlast an outage that is shorter than this
        patience = float(os.environ.get("CLIP_TRAIN_S3_PATIENCE_SECONDS", self._timeout))
        self.remote = open_storage(remote, patience_seconds=patience) if remote else None
        self._memory_fd = memory_fd
        self._send = send
        self._send_lock = threading.Lock()
        # Both threads run the local retention. Two at once would find each other's folders removed.
        # The remote retention has no lock: it may take as long as an outage.
        self._tidy_lock = threading.Lock()
        self._active: set[str] = set()  # attempts that may still be committed
        # failed attempts of which rank 0 does not know yet: it waits for this rank's manifests
        self._unsent_errors: set[str] = set()
        self._stuck: dict[str, set[str]] = {}  # by store: what could not be removed last time
        self._local_jobs = ThreadPoolExecutor(1)  # one after the other
        self._remote_jobs = ThreadPoolExecutor(1)
        self._newest = 0  # the step that is uploaded next
        self._upload_job: Future[Any] | None = None  # the upload of that step

    def receive(self, request: SaveRequest | None) -> None:
        """Start a save; None: finish all saves, then exit. Never waits for a disk or a store."""
        if request is None:
            # The last local job queues the exit as a remote job: local jobs queue uploads.
            self._local_jobs.submit(lambda: self._remote_jobs.submit(self._exit))
            return
        request.since = time.monotonic()
        self._active.add(request.prefix)
        job = self._local_jobs.submit(self._save_locally, request)
        job.add_done_callback(partial(self._ended, request))

    # -- the local disk

    def _save_locally(self, request: SaveRequest) -> str | None:
        """Write a save to the local disk and, on rank 0 of a shared disk, commit it.

        Returns where it is committed ("" if this rank commits nothing); None: the save has not
        ended, its upload follows.
        """
        shared, local = self.settings.shared, self.local
        name = f"rank{request.rank:05d}.safetensors"
        try:
            with local.writing(f"{request.prefix}/{name}") as part:
                blocks = copy_hashed(self._memory_fd, part, request.size)
            request.entry = FileEntry(name, request.size, blocks)
            if shared:
                put_rank_manifest(local, request)
        finally:
            self._report(Event.WRITTEN, "", request)
        url = ""
        if shared and request.rank == 0:
            try:
                url = commit_checkpoint(local, request, self.settings.lease, self._timeout)
                self._report(Event.LOCAL, url, request)
            except (OSError, CheckpointError) as e:
                if self.remote is None or isinstance(e, (FencedError, SaveFailedError)):
                    raise
                text = f"step {request.step} is not committed locally: {error_text(e)}"
                self._report(Event.NOTE, text)
        self._tidy(local, request.scores)
        if self.remote is None:
            return url
        self._newest = request.step  # before `cancel`, which calls `_ended`: that names this step
        if self._upload_job is not None:
            self._upload_job.cancel()  # has no effect once the upload has begun
        self._upload_job = self._remote_jobs.submit(self._upload, request)
        self._upload_job.add_done_callback(partial(self._ended, request))
        return None

    # -- the remote store

    def _upload(self, request: SaveRequest) -> str:
        """Upload file and rank manifest and, on rank 0, commit. Returns where it is committed.

        The store repeats each of its requests. After a failed upload the next save is uploaded.
        FencedError, SaveFailedError, OSError.
        """
        assert self.remote is not None and request.entry is not None
        name = f"{request.prefix}/{request.entry.name}"
        self.remote.put_file(self.local.path(name), name)
        put_rank_manifest(self.remote, request)
        if request.rank > 0:
            return ""
        return commit_checkpoint(self.remote, request, self.settings.lease, self._timeout)

    # -- results of saves

    def _ended(self, request: SaveRequest, job: Future[Any]) -> None:
        """Called when a job has ended. Report the end of the save, unless its upload follows.

        If an upload was cancelled, a newer save took its place.
        """
        error: BaseException | None
        if job.cancelled():
            error = SupersededError(f"superseded by step {self._newest} before its upload began")
        else:
            error = job.exception()
        if error is None and job.result() is None:
            return
        text = job.result() if error is None else error_text(error)
        self._report(end_of_save(error), text, request)
        self._active.discard(request.prefix)
        if not self.settings.shared:
            self._remove_file(request)
        if error is not None:
            self._tell_rank_0(request, error)
        elif self.remote is not None:
            self._tidy(self.remote, request.scores)
            self._tidy(self.local, request.scores)  # uploaded files may now be removed

    def _remove_file(self, request: SaveRequest) -> None:
        """Remove the file of a save that has ended, on a disk that not all ranks share."""
        if request.entry is None:
            return
        with contextlib.suppress(OSError):
            path = self.local.path(f"{request.prefix}/{request.entry.name}")
            path.unlink()
            path.parent.rmdir()  # fails if another rank's file is there
            path.parent.parent.rmdir()

    def _tell_rank_0(self, request: SaveRequest, error: BaseException) -> None:
        """Put the error in place of this rank's manifest, for which rank 0's checkpoint writer
        waits."""
        if request.rank == 0:
            return
        # without a file, rank 0 must not wait for it on the disk either
        if self.settings.shared and request.entry is None:
            with contextlib.suppress(OSError):
                put_rank_manifest(self.local, request, error)
        if self.remote is not None:
            self._unsent_errors.add(request.prefix)
            self._remote_jobs.submit(self._put_error, self.remote, request, error)

    def _put_error(self, remote: Storage, request: SaveRequest, error: BaseException) -> None:
        self._unsent_errors.discard(request.prefix)
        try:
            put_rank_manifest(remote, request, error)
        except OSError:
            time.sleep(1.0)
            self._unsent_errors.add(request.prefix)
            self._remote_jobs.submit(self._put_error, remote, request, error)  # again

    def _exit(self) -> None:
        """End the process, as a remote job; after the retries of `_put_error`."""
        if self._unsent_errors:
            self._remote_jobs.submit(self._exit)
        else:
            os._exit(0)

    def _report(self, event: Event, text: str, request: SaveRequest | None = None) -> None:
        message = Message(event, text)
        if request is not None:
            seconds = time.monotonic() - request.since
            message = Message(event, text, request.prefix, request.step, seconds)
        # if the rank is gone, the message thread ends this process
        with self._send_lock, contextlib.suppress(OSError):
            self._send(message)

    def _tidy(self, store: Storage, scores: dict[CommitRef, float] | None) -> None:
        """Remove old checkpoints, on rank 0. On a disk that not all ranks share, each rank removes
        its leftovers.

        scores: rank 0's; None on the others.
        """
        is_local = store is self.local
        try:
            lock = self._tidy_lock if is_local else contextlib.nullcontext()  # see __init__
            with lock:
                failures: Failures = {}
                if is_local and not self.settings.shared:
                    failures = remove_leftovers(self.local, self.settings.lease.epoch)
                elif scores is not None:
                    failures = apply_retention(store, self.settings, scores, set(self._active))
            new = sorted(failures.keys() - self._stuck.get(store.url, set()))
            self._stuck[store.url] = set(failures)
            if new:
                more = f" and {len(new) - 1} more" if len(new) > 1 else ""
                self._report(
                    Event.WARNING,
                    f"{store.url}: {new[0]}{more} could not be removed: {failures[new[0]]}. All "
                    "other old checkpoints were. Each save tries again; remove it by hand, or it "
                    "takes space",
                )
        except Exception as e:  # saving continues after any error
            text = f"{store.url}: old checkpoints could not be removed: {error_text(e)}"
            self._report(Event.WARNING, text)


# -- from memory to the disk, hashed while it is copied


def copy_hashed(memory_fd: int, path: os.PathLike[str], size: int) -> list[str]:
    """Copy the first `size` bytes to a new file; returns the sha256 of each block. OSError.

    A block is mapped only while it is copied, because a mapping's pages count as this process's
    memory. If the disk allows it, the file is written past the page cache (O_DIRECT), which costs
    less and leaves the cache to the training data. One thread writes at a time: others would spin
    in the kernel for the file, on cores that training needs.
    """
    writing = threading.Lock()
    with open_own(path, "wb") as file:

        def copy(start: int) -> str:
            length = min(BLOCK_BYTES, size - start)
            # O_DIRECT needs whole pages, which the memory has
            padded = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
            with (
                mmap.mmap(memory_fd, padded, prot=mmap.PROT_READ, offset=start) as block,
                memoryview(block) as view,
            ):
                with writing:
                    _write(file.fileno(), view, start)
                with view[:length] as content:
                    return hashlib.sha256(content).hexdigest()

        with contextlib.suppress(OSError):  # this disk has no O_DIRECT
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        starts = range(0, size, BLOCK_BYTES)
        digests = list(in_parallel(copy, starts, min(_HASHING_THREADS, os.cpu_count() or 1)))
        file.truncate(size)  # the last block was written in whole pages
    return digests


def _write(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done : done + _CHUNK], at + done)
        except OSError as e:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if e.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # this file system needs another alignment: write through the page cache
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
