"""The checkpoint writer: one process beside each rank that writes its snapshots to disk and remote store. No torch.

Its rank starts it and holds the other end of a socketpair; the snapshot lies in memory that both have. Three threads:
messages; the local disk (file, rank manifest, commit, retention); the remote store (the same). It ends with its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from clip_train.checkpoint import commit, lease, manifest
from clip_train.checkpoint.commit import FencedError, RefusedError, SaveRequest, SupersededError, explain
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.retention import Attempts, apply_retention, remove_own_files
from clip_train.checkpoint.transfer import Settings, Uploads, upload, write_snapshot
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage

_EXIT_SECONDS = 10.0  # for a process whose socket is closed to be gone
Metrics = dict[CommitRef, dict[str, float]]
Message = dict[str, Any]


class WriterProcess:
    """This rank's checkpoint writer: a child over a socketpair, so there is no name that another process could take.

    settings: its first message. memory_fd: the snapshots' memory.
    """

    def __init__(self, settings: Message, memory_fd: int) -> None:
        """OSError where no process can be started."""
        self._connection, theirs = Pipe()
        # the same import path as here, whatever it came from
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from clip_train.checkpoint.writer import main; "
            f"main({theirs.fileno()}, {memory_fd}, {os.getpid()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=(theirs.fileno(), memory_fd), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.pid = self._process.pid
        self.ended: str | None = None  # how, once that is known
        self.send(settings)

    def send(self, message: Message) -> None:
        """Where it has ended, `receive` finds out."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self, timeout: float = 0.0) -> list[Message]:
        """What has come since; waits up to `timeout` seconds for the first. Sets `ended`."""
        messages: list[Message] = []
        while self.ended is None and self._ready(0.0 if messages else timeout):
            try:
                messages.append(json.loads(self._connection.recv_bytes()))
            except (EOFError, OSError):
                self.ended = self._how()
        return messages

    def _ready(self, timeout: float) -> bool:
        try:
            return self._connection.poll(timeout)
        except OSError:
            return True  # it has ended: `recv_bytes` raises

    def _how(self) -> str:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_EXIT_SECONDS)  # its socket closes before it can be waited for
        how = "" if status is None else f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return f"the checkpoint writer has ended{how}"

    def close(self) -> None:
        """It ends, whatever it is doing."""
        self._connection.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a disk that hangs
                self._process.wait(1.0)


# -- in the process


def main(connection_fd: int, memory_fd: int, parent: int) -> None:
    """The process: until its rank asks it to finish, or is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank: it decides when this ends
    os.nice(5)  # training comes first
    with contextlib.suppress(OSError, AttributeError):  # a rank may be bound to the cores that it keeps busy
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    connection = Connection(connection_fd)
    try:
        settings = Settings.from_json(json.loads(connection.recv_bytes()))
        writer = Writer(settings, memory_fd, lambda body: connection.send_bytes(json.dumps(body).encode()))
        while os.getppid() == parent:  # a process that the rank has forked may hold its end open
            if connection.poll(1.0):
                writer.receive(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        pass
    os._exit(0)  # not sys.exit: uploads must not go on for a run that has ended


class Writer:
    """One rank's saves. report: takes a dict for the rank; called from any thread."""

    def __init__(self, settings: Settings, memory_fd: int, report: Callable[[Message], None]) -> None:
        self.settings = settings
        self.local = LocalStorage(settings.folder)
        self.remote: Storage | None = open_storage(settings.remote) if settings.remote else None
        self._memory_fd = memory_fd
        self._send, self._sending = report, threading.Lock()
        self._active: set[str] = set()  # attempts that may still be committed: retention leaves them alone
        self._newest_done = -1  # step; each rank's saves go one by one, so all have finished with what is older
        self._newest = ("", 0.0)  # attempt, and when its request came
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._metrics: dict[str, Metrics] = {store.url: {} for store in self._stores()}  # not yet in that store
        # of each store: two retentions at once would find each other's folders gone
        self._tidying = {store.url: threading.Lock() for store in self._stores()}
        self._errors: list[tuple[SaveRequest, str, bool]] = []  # that rank 0 has to read in the remote store
        self._jobs: queue.SimpleQueue[SaveRequest | str] = queue.SimpleQueue()
        self._uploads = Uploads()
        for work in (self._work_locally, self._work_remotely):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    def receive(self, body: Message) -> None:
        """A message of the rank: `save`, `metric` or `finish`. Never waits for a disk or a store."""
        match body.pop("do"):
            case "save":
                request = SaveRequest(**body)
                self._newest = (request.prefix, time.monotonic())
                with self._lock:
                    self._active.add(request.prefix)
                self._jobs.put(request)
            case "metric":
                for waiting in self._metrics.values():
                    waiting[CommitRef(body["epoch"], body["step"])] = body["values"]
                self._jobs.put("metric")
            case "finish":
                self._jobs.put("finish")

    # -- the local disk

    def _work_locally(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, SaveRequest):
                self._save_locally(job)
                continue
            if job == "metric" and self.settings.local_commits:
                self._tidy(self.local, retention=False)
            self._uploads.wake(finish=job == "finish")

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
                self._report("committed", request, where=f"{self.local.url}/{request.committed}", final=False)
        except Exception as e:
            if self.remote is None or isinstance(e, (FencedError, RefusedError)):
                self._fail(request, e)
                return
            self._note(f"step {request.step} is not committed locally: {explain(e)}")  # the remote store can do without
        if not self.settings.local_commits:
            with contextlib.suppress(OSError):
                remove_own_files(self.local, request.rank, self.settings.policy, self._attempts().in_flight)
        elif request.rank == 0:
            self._tidy(self.local)
        if self.remote is None:
            self._succeed(request)
            return
        superseded = self._uploads.put(request)
        if superseded is not None:
            why = f"superseded by step {request.step} before its upload began"
            self._fail(superseded, SupersededError(why))

    def _write(self, request: SaveRequest) -> None:
        """File and rank manifest. CheckpointError, OSError."""
        if request.repeated:
            request.entry = commit.written_before(self.local, request)
        if request.entry is None:
            if not request.in_memory:
                raise RefusedError(f"the snapshot of step {request.step} is neither in memory nor on the disk")
            request.entry = write_snapshot(self.local, self._memory_fd, request)
            commit.put_rank_manifest(self.local, request)

    def _commit(self, store: Storage, request: SaveRequest) -> None:
        def newer_since() -> float | None:
            """Of a newer save all ranks know that this one is on all disks; not that it is in the remote store."""
            prefix, since = self._newest
            return since if store is self.local and prefix != request.prefix else None

        commit.commit(
            store,
            request,
            lambda: self._check_fence(store),
            self.settings.policy.token,
            end=request.since + self.settings.timeout_seconds,
            newer_since=newer_since,
            note=self._note,
        )

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

    # -- the remote store

    def _work_remotely(self) -> None:
        while True:
            request = self._uploads.next()
            if request is not None:
                assert self.remote is not None
                try:
                    upload(
                        request,
                        self.local,
                        self.remote,
                        self._commit,
                        newer=self._uploads.newer,
                        note=self._note,
                        timeout_seconds=self.settings.timeout_seconds,
                    )
                except Exception as e:
                    self._fail(request, e)
                else:
                    self._succeed(request)
                self._uploads.remove(request)
            self._put_errors()
            # what was in flight here may go from the disk too
            for store in self._stores() if request is None or request.rank == 0 else []:
                self._tidy(store, retention=request is not None)
            if self._uploads.finished():
                os._exit(0)

    def _put_errors(self) -> None:
        """Rank 0's checkpoint writer waits for a manifest of this rank: what cannot be put now is put later."""
        with contextlib.suppress(OSError):
            while self._errors and self.remote is not None:
                request, why, superseded = self._errors[0]
                commit.put_rank_manifest(self.remote, request, error=why, superseded=superseded)
                self._errors.pop(0)

    # -- what became of it

    def _succeed(self, request: SaveRequest) -> None:
        self._over(request)
        self._newest_done = request.step
        where = f"{(self.remote or self.local).url}/{request.committed or request.prefix}"
        seconds = time.monotonic() - request.since
        self._report("committed", request, where=where, final=True, seconds=seconds, bytes=request.size)

    def _fail(self, request: SaveRequest, e: Exception) -> None:
        self._over(request)
        superseded, why = isinstance(e, SupersededError), explain(e)
        self._report("failed", request, why=why, superseded=superseded, fatal=isinstance(e, FencedError))
        if request.rank == 0:
            return
        if request.entry is None:  # else it may still be committed locally
            with contextlib.suppress(OSError):
                commit.put_rank_manifest(self.local, request, error=why, superseded=superseded)
        self._errors.append((request, why, superseded))
        self._uploads.wake()

    def _report(self, event: str, request: SaveRequest, **more: Any) -> None:
        self._send_safely({"event": event, "step": request.step, "prefix": request.prefix, **more})

    def _note(self, text: str) -> None:
        self._send_safely({"event": "note", "text": text})

    def _send_safely(self, body: Message) -> None:
        with self._sending, contextlib.suppress(OSError):  # the rank is gone: the message thread ends this process
            self._send(body)

    def _over(self, request: SaveRequest) -> None:
        with self._lock:
            self._active.discard(request.prefix)

    def _attempts(self) -> Attempts:
        with self._lock:
            return Attempts(set(self._active), self._newest_done, self.settings.timeout_seconds)

    def _stores(self) -> list[Storage]:
        stores: list[Storage] = [self.local] if self.settings.local_commits else []
        return stores + ([self.remote] if self.remote is not None else [])

    def _tidy(self, store: Storage, *, retention: bool = True) -> None:
        """Rank 0: metrics, which decide what is removed, and retention."""
        try:
            with self._tidying[store.url]:
                waiting = self._metrics[store.url]
                for ref, values in list(waiting.items()):
                    store.put_bytes(ref.metric_name, manifest.add_checksum({"step": ref.step, "values": values}))
                    waiting.pop(ref)
                if retention:
                    apply_retention(store, self.settings.policy, self._attempts, self._note_once)
        except Exception as e:  # whatever it is, saving goes on
            what = "old checkpoints could not be removed" if retention else "the metrics could not be written"
            self._note(f"{store.url}: {what}: {explain(e)}")

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)
