"""What the saver does with one rank's snapshots: disk first, then the remote store, then the commit.

    write    the shared buffer -> a file, hashed on the way, fsynced, renamed; the buffer is free again
    keep     rank 0: when all ranks have written, commit on the local disk
    upload   file by file, with bounded memory; rank 0: when all ranks have, manifest, fence check, commit

Each is a thread of its own, so a slow upload holds up neither the next snapshot nor its local commit.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from clip_train.checkpoint import layout, lease
from clip_train.checkpoint.committing import Committer, put_word
from clip_train.checkpoint.disk import write_snapshot
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.order import Order, OvertakenError, RefusedError, Settings, explain
from clip_train.checkpoint.retention import Attempts, apply_retention, remove_own_files
from clip_train.checkpoint.uploading import Uploads, upload
from clip_train.storage import LocalStorage, Storage, open_storage


@dataclass
class _Metrics:
    """What evaluations came to, on its way to one store."""

    store: Storage
    waiting: dict[CommitRef, tuple[str, dict[str, float]]] = field(default_factory=dict)  # with the message's name
    lock: threading.Lock = field(default_factory=threading.Lock)  # one at a time brings them there


class Pipeline:
    """One rank's saves, in three threads. tell: takes a dict for the rank; called from any of them."""

    def __init__(self, settings: Settings, tell: Callable[[dict[str, Any]], None]) -> None:
        self.settings = settings
        self.local = LocalStorage(settings.folder)
        self.remote: Storage | None = open_storage(settings.remote) if settings.remote else None
        self._tell = tell
        self._committer = Committer(self.remote, settings.policy.lease, settings.timeout_seconds, self._note)
        self._buffer: int | None = None  # file descriptor
        self._active: set[str] = set()  # attempts that may still be committed: retention leaves them alone
        self._newest_done = -1  # step; each rank's saves go one by one, so all have finished with what is older
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._metrics = {store.url: _Metrics(store) for store in self._stores()}
        self._tidying = {store.url: threading.Lock() for store in self._stores()}
        self._to_write: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._to_keep: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._uploads = Uploads()
        for work in (self._write_all, self._keep_all, self._upload_all):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    # -- called by the server

    def set_buffer(self, fd: int) -> None:
        """Snapshots come in this file from now on. Not while one is being written."""
        if self._buffer is not None:
            os.close(self._buffer)
        self._buffer = fd

    def save(self, order: Order) -> None:
        with self._lock:
            self._active.add(order.prefix)
        self._to_write.put(order)

    def cancel(self, prefix: str, why: str) -> None:
        """Another rank has failed: nobody should wait for it."""
        self._committer.cancel(prefix, why)

    def note_metric(self, name: str, ref: CommitRef, values: dict[str, float]) -> None:
        """Rank 0: what the evaluation at a step came to, for retention; `noted` once all stores have it.

        OSError where one does not take it now: retention there tries again before it removes anything.
        """
        for metrics in self._metrics.values():
            metrics.waiting[ref] = (name, values)
        for metrics in self._metrics.values():
            self._store_metrics(metrics)

    def _store_metrics(self, metrics: _Metrics) -> None:
        with metrics.lock:
            for ref, (name, values) in list(metrics.waiting.items()):
                metrics.store.put_bytes(ref.metric_name, layout.seal({"step": ref.step, "values": values}))
                del metrics.waiting[ref]
                if not any(ref in each.waiting for each in self._metrics.values()):
                    self._tell({"told": "noted", "name": name})

    # -- the three threads

    def _write_all(self) -> None:
        while True:
            order = self._to_write.get()
            failed: Exception | None = None
            try:
                assert self._buffer is not None
                entry = write_snapshot(self.local, self._buffer, order)
                put_word(self.local, order, {"files": [asdict(entry)]})
                order.entry = entry
            except Exception as e:
                failed = e
            self._tell_of("written", order)  # the buffer is free
            if failed is None:
                self._to_keep.put(order)
            else:
                self._fail(order, failed)

    def _keep_all(self) -> None:
        while True:
            order = self._to_keep.get()
            try:
                if self.settings.local_commits and order.rank == 0:
                    self._committer.commit(self.local, order)
                    self._tell_of("kept", order, where=f"{self.local.url}/{order.committed}")
                    self._retain(self.local)
                elif not self.settings.local_commits:
                    remove_own_files(self.local, order.rank, self.settings.policy, self._attempts().in_flight)
            except Exception as e:
                if self.remote is None or isinstance(e, (lease.FencedError, RefusedError)):
                    self._fail(order, e)
                    continue
                # the remote store can do without
                self._note(f"step {order.step} is not committed locally: {explain(e)}")
            if self.remote is None:
                self._done(order)
                self._tell_of("rest", order)
                continue
            overtaken = self._uploads.put(order)
            if overtaken is not None:
                self._fail(overtaken, OvertakenError(f"overtaken by step {order.step} before its upload began"))

    def _upload_all(self) -> None:
        while True:
            order = self._uploads.next()
            assert self.remote is not None
            try:
                upload(
                    order,
                    self.local,
                    self.remote,
                    self._committer,
                    newer=self._uploads.newer,
                    retrying=lambda why, seconds, order=order: self._tell_of("retry", order, why=why, seconds=seconds),  # type: ignore[misc]
                    timeout_seconds=self.settings.timeout_seconds,
                )
            except Exception as e:
                self._fail(order, e)
            else:
                self._done(order)
            self._uploads.remove(order)
            for store in self._stores() if order.rank == 0 else []:  # what was in flight here may go from there
                self._retain(store)
            self._tell_of("rest", order)

    # -- what became of it

    def _done(self, order: Order) -> None:
        self._over(order)
        self._newest_done = order.step
        where = f"{(self.remote or self.local).url}/{order.committed or order.prefix}"
        self._tell_of("done", order, where=where, seconds=time.monotonic() - order.since, bytes=order.size)

    def _fail(self, order: Order, e: Exception) -> None:
        self._over(order)
        overtaken = isinstance(e, OvertakenError)
        kind = "fenced" if isinstance(e, lease.FencedError) else "overtaken" if overtaken else "failed"
        self._tell_of(kind, order, why=explain(e))
        self._tell_of("rest", order)
        if order.rank == 0:
            return
        # rank 0 waits for a word; what has been written may still be committed locally
        for store in self._stores() if order.entry is None else [self.remote]:
            try:
                if store is not None:
                    put_word(store, order, {"error": explain(e), "overtaken": overtaken})
            except Exception:  # it hears of it from this rank too, if later
                continue

    def _tell_of(self, what: str, order: Order, **more: Any) -> None:
        self._tell({"told": what, "step": order.step, "prefix": order.prefix, **more})

    def _note(self, text: str) -> None:
        self._tell({"told": "note", "text": text})

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)

    def _over(self, order: Order) -> None:
        with self._lock:
            self._active.discard(order.prefix)

    def _attempts(self) -> Attempts:
        with self._lock:
            return Attempts(set(self._active), self._newest_done, self.settings.timeout_seconds)

    def _stores(self) -> list[Storage]:
        stores: list[Storage] = [self.local] if self.settings.local_commits else []
        return stores + ([self.remote] if self.remote is not None else [])

    def _retain(self, store: Storage) -> None:
        try:
            with self._tidying[store.url]:  # two at once would find each other's folders gone
                self._store_metrics(self._metrics[store.url])  # they decide what is removed
                apply_retention(store, self.settings.policy, self._attempts, self._note_once)
        except Exception as e:  # whatever it is, saving goes on
            self._note(f"old checkpoints under {store.url} could not be removed: {explain(e)}")
