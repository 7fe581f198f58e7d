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
from dataclasses import asdict
from typing import Any

from clip_train.checkpoint import layout, lease
from clip_train.checkpoint.committing import Committer, put_word
from clip_train.checkpoint.disk import write_snapshot
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.order import Order, Settings, explain
from clip_train.checkpoint.retention import apply_retention, remove_own_files
from clip_train.checkpoint.uploading import Uploads, upload
from clip_train.storage import LocalStorage, Storage, open_storage


class Pipeline:
    """One rank's saves, in three threads. tell: takes a dict for the rank; called from any of them."""

    def __init__(self, settings: Settings, tell: Callable[[dict[str, Any]], None]) -> None:
        self.settings = settings
        self.local = LocalStorage(settings.folder)
        self.remote: Storage | None = open_storage(settings.remote) if settings.remote else None
        self._tell = tell
        self._committer = Committer(self.remote, settings.timeout_seconds, self._note)
        self._buffer: int | None = None  # file descriptor
        self._active: set[str] = set()  # attempts that may still be committed: retention leaves them alone
        self._lock = threading.Lock()
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

    def cancel(self, step: int, why: str) -> None:
        """Another rank has failed: nobody should wait for it."""
        self._committer.cancel(step, why)

    def note_metric(self, epoch: int, step: int, values: dict[str, float]) -> None:
        """Rank 0: what the evaluation at `step` came to, for retention."""
        for store in self._stores():
            store.put_bytes(CommitRef(epoch, step).metric_name, layout.seal({"step": step, "values": values}))

    # -- the three threads

    def _write_all(self) -> None:
        while True:
            order = self._to_write.get()
            why = None
            try:
                assert self._buffer is not None
                order.entry = write_snapshot(self.local, self._buffer, order)
                put_word(self.local, order, {"files": [asdict(order.entry)]})
            except Exception as e:
                why = explain(e)
            self._tell({"told": "written", "step": order.step})  # the buffer is free
            if why is None:
                self._to_keep.put(order)
            else:
                self._fail(order, why)

    def _keep_all(self) -> None:
        while True:
            order = self._to_keep.get()
            try:
                if self.settings.local_commits and order.rank == 0:
                    self._committer.commit(self.local, order)
                    self._tell({"told": "kept", "step": order.step, "where": f"{self.local.url}/{order.prefix}"})
                    self._retain(self.local)
                elif not self.settings.local_commits:
                    remove_own_files(self.local, order.rank, self.settings.policy.keep_last, self._in_flight())
            except Exception as e:
                if self.remote is None or isinstance(e, lease.FencedError):
                    self._fail(order, explain(e), fenced=isinstance(e, lease.FencedError))
                    continue
                # the remote store can do without
                self._note(f"step {order.step} is not committed locally: {explain(e)}")
            if self.remote is None:
                self._done(order)
                self._tell({"told": "rest", "step": order.step})
                continue
            overtaken = self._uploads.put(order)
            if overtaken is not None:
                self._fail(overtaken, f"overtaken by step {order.step} before its upload began")

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
                    retrying=lambda why, seconds, step=order.step: self._tell(  # type: ignore[misc]
                        {"told": "retry", "step": step, "why": why, "seconds": seconds}
                    ),
                    timeout_seconds=self.settings.timeout_seconds,
                )
            except Exception as e:
                self._fail(order, explain(e), fenced=isinstance(e, lease.FencedError))
            else:
                self._done(order)
            self._uploads.remove(order)
            if order.rank == 0:
                self._retain(self.remote)
            self._tell({"told": "rest", "step": order.step})

    # -- what became of it

    def _done(self, order: Order) -> None:
        self._over(order)
        where = f"{(self.remote or self.local).url}/{order.prefix}"
        seconds = time.monotonic() - order.since
        self._tell({"told": "done", "step": order.step, "where": where, "seconds": seconds, "bytes": order.size})

    def _fail(self, order: Order, why: str, *, fenced: bool = False) -> None:
        self._over(order)
        self._tell({"told": "fenced" if fenced else "failed", "step": order.step, "why": why})
        self._tell({"told": "rest", "step": order.step})
        if order.rank == 0:
            return
        for store in self._stores():  # rank 0 waits for a word
            try:
                put_word(store, order, {"error": why})
            except OSError:
                continue

    def _note(self, text: str) -> None:
        self._tell({"told": "note", "text": text})

    def _over(self, order: Order) -> None:
        with self._lock:
            self._active.discard(order.prefix)

    def _in_flight(self) -> set[str]:
        with self._lock:
            return set(self._active)

    def _stores(self) -> list[Storage]:
        stores: list[Storage] = [self.local] if self.settings.local_commits else []
        return stores + ([self.remote] if self.remote is not None else [])

    def _retain(self, store: Storage) -> None:
        try:
            apply_retention(store, self.settings.policy, in_flight=self._in_flight())
        except Exception as e:  # whatever it is, saving goes on
            self._note(f"old checkpoints under {store.url} could not be removed: {explain(e)}")
