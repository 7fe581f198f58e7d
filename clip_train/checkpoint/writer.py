"""The checkpoint writer: one process beside each rank that writes its snapshots to disk and remote store. No torch.

Its rank starts it and holds the other end of a socketpair; the snapshot lies in memory that both have. Three threads:
messages; the local disk (file, rank manifest, commit, retention); the remote store (the same). It ends with its rank.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from clip_train.checkpoint import commit, lease, manifest
from clip_train.checkpoint.commit import (
    FencedError,
    RefusedError,
    SaveRequest,
    SupersededError,
    explain,
)
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.retention import Policy, apply_retention, remove_own_files
from clip_train.checkpoint.transfer import write_snapshot
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage

_LONGEST_PAUSE = 60.0  # seconds between tries of an upload
FINISH = "finish"


@dataclass(frozen=True)
class Settings:
    """The first message to a checkpoint writer."""

    folder: str
    remote: str | None
    local_commits: bool  # all ranks see `folder`
    timeout_seconds: float
    policy: Policy


@dataclass(frozen=True)
class Metrics:
    """What an evaluation of a checkpoint came to."""

    ref: CommitRef
    values: dict[str, float]


def main(connection_fd: int, memory_fd: int, parent: int) -> None:
    """The process: until its rank asks it to finish, or is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank: it decides when this ends
    os.nice(5)  # training comes first
    with contextlib.suppress(
        OSError, AttributeError
    ):  # a rank may be bound to the cores that it keeps busy
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    connection = Connection(connection_fd)
    try:
        writer = Writer(connection.recv(), memory_fd, connection.send)
        while os.getppid() == parent:  # a process that the rank has forked may hold its end open
            if connection.poll(1.0):
                writer.receive(connection.recv())
    except (EOFError, OSError):
        pass
    os._exit(0)  # not sys.exit: uploads must not go on for a run that has ended


class Writer:
    """One rank's saves. report: takes a dict for the rank; called from any thread."""

    def __init__(
        self, settings: Settings, memory_fd: int, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.settings = settings
        self.local = LocalStorage(settings.folder)
        self.remote: Storage | None = open_storage(settings.remote) if settings.remote else None
        self._memory_fd = memory_fd
        self._send, self._sending = report, threading.Lock()
        self._newest = ("", 0.0)  # attempt, and when its request came
        self._noted: set[str] = set()
        self._stores: list[Storage] = [self.local] if settings.local_commits else []
        self._stores += [self.remote] if self.remote is not None else []
        self._metrics: dict[str, dict[CommitRef, Metrics]] = {
            store.url: {} for store in self._stores
        }  # not yet there
        # of each store: two retentions at once would find each other's folders gone
        self._tidying = {store.url: threading.Lock() for store in self._stores}
        self._errors: list[
            tuple[SaveRequest, Exception]
        ] = []  # that rank 0 has to read in the remote store
        self._jobs: queue.SimpleQueue[SaveRequest | Metrics | str] = queue.SimpleQueue()
        self._active: set[str] = (
            set()
        )  # attempts that may still be committed: retention leaves them alone
        self._changed = threading.Condition()  # guards what follows
        self._uploads: list[SaveRequest] = []  # the one under way, and the newest that waits
        self._woken = self._finishing = False
        for work in (self._work_locally, self._work_remotely):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    def receive(self, message: SaveRequest | Metrics | str) -> None:
        """Of the rank. Never waits for a disk or a store."""
        if isinstance(message, SaveRequest):
            message.since = time.monotonic()
            self._newest = (message.prefix, message.since)
            self._active.add(message.prefix)
        elif isinstance(message, Metrics):
            for waiting in self._metrics.values():
                waiting[message.ref] = message
        self._jobs.put(message)

    # -- the local disk

    def _work_locally(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, SaveRequest):
                self._save_locally(job)
                continue
            if isinstance(job, Metrics) and self.settings.local_commits:
                self._tidy(self.local, retention=False)
            self._wake(finish=job == FINISH)

    def _save_locally(self, request: SaveRequest) -> None:
        failed: Exception | None = None
        try:
            self._write(request)
        except Exception as e:
            failed = e
        self._report("written", request)  # the memory is free
        if failed is not None:
            self._fail(request, failed)
            return
        try:
            if self.settings.local_commits and request.rank == 0:
                self._commit(self.local, request)
                self._report(
                    "committed", request, where=f"{self.local.url}/{request.committed}", final=False
                )
        except Exception as e:
            if self.remote is None or isinstance(e, (FencedError, RefusedError)):
                self._fail(request, e)
                return
            self._note(
                f"step {request.step} is not committed locally: {explain(e)}"
            )  # the remote store can do without
        if not self.settings.local_commits:
            with contextlib.suppress(OSError):
                remove_own_files(self.local, request.rank, self.settings.policy, set(self._active))
        elif request.rank == 0:
            self._tidy(self.local)
        if self.remote is None:
            self._succeed(request)
            return
        with self._changed:
            superseded = self._uploads.pop() if len(self._uploads) > 1 else None
            self._uploads.append(request)
            self._changed.notify_all()
        if superseded is not None:
            self._fail(
                superseded,
                SupersededError(f"superseded by step {request.step} before its upload began"),
            )

    def _write(self, request: SaveRequest) -> None:
        """File and rank manifest. CheckpointError, OSError."""
        if request.repeated:  # else what is there is another run's
            request.entry = commit.written_before(self.local, request)
        if request.entry is None:
            if not request.in_memory:
                raise RefusedError(
                    f"the snapshot of step {request.step} is neither in memory nor on the disk"
                )
            request.entry = write_snapshot(self.local, self._memory_fd, request)
            commit.put_rank_manifest(self.local, request)

    def _commit(self, store: Storage, request: SaveRequest) -> None:
        def end() -> float:
            """Of a newer save all ranks know that this one is on all disks; not that it is in the remote store."""
            prefix, since = self._newest
            newer = store is self.local and prefix != request.prefix
            timeout = request.since + self.settings.timeout_seconds
            return min(timeout, since + commit.LATE_SECONDS) if newer else timeout

        # A local commit does not ask the remote store: it is wanted most when that is down, and one that comes too late
        # sorts below the successor's.
        fence = lambda: lease.check(store, self.settings.policy.lease)  # noqa: E731
        commit.commit(store, request, fence, self.settings.policy.token, end)

    # -- the remote store

    def _work_remotely(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._uploads or self._woken)
                self._woken = False
                request = self._uploads[0] if self._uploads else None
            if request is not None:
                try:
                    self._upload(request)
                except Exception as e:
                    self._fail(request, e)
                else:
                    self._succeed(request)
                with self._changed:
                    self._uploads.remove(request)
            self._put_errors()
            # what was in flight here may go from the disk too
            for store in self._stores if request is None or request.rank == 0 else []:
                self._tidy(store, retention=request is not None)
            with self._changed:
                if self._finishing and not self._uploads:
                    os._exit(0)

    def _upload(self, request: SaveRequest) -> None:
        """File and rank manifest, on rank 0 the commit too; tried until it succeeds or a newer save waits. FencedError,
        RefusedError."""
        assert self.remote is not None and request.entry is not None
        uploaded, tries = False, 0
        while True:
            tries += 1
            try:
                if not uploaded:
                    name = f"{request.prefix}/{request.entry.name}"
                    self.remote.put_file(self.local.path(name), name)
                    commit.put_rank_manifest(self.remote, request)
                    uploaded = True
                if request.rank == 0:
                    self._commit(self.remote, request)
                return
            except (FencedError, RefusedError):
                raise
            except (OSError, CheckpointError) as e:
                why = explain(e)
            pause = min(2.0**tries, _LONGEST_PAUSE)
            if time.monotonic() + pause > request.since + self.settings.timeout_seconds:
                raise RefusedError(f"{why}; given up after {tries} tries")
            if (newer := self._newer(0.0)) is None:
                self._note(
                    f"checkpoint of step {request.step}: {why}; trying again in {pause:.0f} s"
                )
                newer = self._newer(pause)
            if newer is not None:
                raise RefusedError(f"{why}; superseded by step {newer.step}")

    def _newer(self, timeout: float) -> SaveRequest | None:
        """The save that waits; waits up to `timeout` seconds for one."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._uploads) > 1, timeout)
            return self._uploads[1] if len(self._uploads) > 1 else None

    def _wake(self, finish: bool = False) -> None:
        with self._changed:
            self._woken, self._finishing = True, self._finishing or finish
            self._changed.notify_all()

    def _put_errors(self) -> None:
        """Rank 0's checkpoint writer waits for a manifest of this rank: what cannot be put now is put later."""
        with contextlib.suppress(OSError):
            while self._errors and self.remote is not None:
                commit.put_rank_manifest(self.remote, *self._errors[0])
                self._errors.pop(0)

    # -- what became of it

    def _succeed(self, request: SaveRequest) -> None:
        self._active.discard(request.prefix)
        where = f"{(self.remote or self.local).url}/{request.committed or request.prefix}"
        seconds = time.monotonic() - request.since
        self._report(
            "committed", request, where=where, final=True, seconds=seconds, bytes=request.size
        )

    def _fail(self, request: SaveRequest, e: Exception) -> None:
        self._active.discard(request.prefix)
        superseded = isinstance(e, SupersededError)
        self._report(
            "failed",
            request,
            why=explain(e),
            superseded=superseded,
            fatal=isinstance(e, FencedError),
        )
        if request.rank == 0:
            return
        if request.entry is None:  # else it may still be committed locally
            with contextlib.suppress(OSError):
                commit.put_rank_manifest(self.local, request, e)
        self._errors.append((request, e))
        self._wake()

    def _report(self, event: str, request: SaveRequest, **more: Any) -> None:
        self._send_safely({"event": event, "step": request.step, "prefix": request.prefix, **more})

    def _note(self, text: str) -> None:
        self._send_safely({"event": "note", "text": text})

    def _send_safely(self, body: dict[str, Any]) -> None:
        with (
            self._sending,
            contextlib.suppress(OSError),
        ):  # the rank is gone: the message thread ends this process
            self._send(body)

    def _tidy(self, store: Storage, *, retention: bool = True) -> None:
        """Rank 0: metrics, which decide what is removed, and retention."""
        try:
            with self._tidying[store.url]:
                waiting = self._metrics[store.url]
                for ref, metrics in list(waiting.items()):
                    body = {"step": ref.step, "values": metrics.values}
                    store.put_bytes(ref.metric_name, manifest.add_checksum(body))
                    waiting.pop(ref)
                if retention:
                    apply_retention(store, self.settings.policy, set(self._active), self._note_once)
        except Exception as e:  # whatever it is, saving goes on
            what = (
                "old checkpoints could not be removed"
                if retention
                else "the metrics could not be written"
            )
            self._note(f"{store.url}: {what}: {explain(e)}")

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)
