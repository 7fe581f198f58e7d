"""From "my part is there" to "it is a checkpoint": each rank's word, and rank 0's manifest, fence check and marker.

Ranks learn of each other through small files beside the data ("words"), never through the training's collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from clip_train.checkpoint import layout, lease, marks
from clip_train.checkpoint.files import in_parallel
from clip_train.checkpoint.layout import Commit, FileEntry, Manifest
from clip_train.checkpoint.order import Order, OvertakenError, RefusedError, explain
from clip_train.errors import CheckpointError
from clip_train.storage import Storage

_POLL_SECONDS = (0.05, 2.0)  # between looks for the other ranks' words: at first, at most
_UNLISTED = 8  # ranks that are asked for in a look, in turn, though no listing shows their words: it may hide some


def put_word(store: Storage, order: Order, word: dict[str, Any]) -> None:
    """This rank's word about its part: `files`, or `error`. OSError."""
    body = {"rank": order.rank, "step": order.step, **word}
    store.put_bytes(_word_name(order, order.rank), layout.seal(body))


def _word_name(order: Order, rank: int) -> str:
    return f"{order.prefix}/{layout.rank_manifest(rank)}"


class Committer:
    """Rank 0's. remote: the main store if there is one, whose leases hold for the local disk too. held: this process's.

    note: takes what a user should hear. timeout_seconds: how long, from the save on, to wait for other ranks.
    """

    def __init__(
        self, remote: Storage | None, held: lease.Lease, timeout_seconds: float, note: Callable[[str], None]
    ) -> None:
        self._remote = remote
        self._held = held
        self._timeout = timeout_seconds
        self._note = note
        self._cancelled: dict[str, str] = {}  # attempt -> why nobody should wait for it
        self._changed = threading.Condition()

    def cancel(self, prefix: str, why: str) -> None:
        """A rank has failed whose word will not come."""
        with self._changed:
            self._cancelled[prefix] = why
            self._changed.notify_all()

    def commit(self, store: Storage, order: Order) -> None:
        """When all ranks' words are there: the manifest, the fence check, the marker, the hint.

        FencedError, RefusedError; OSError or CheckpointError for what may go better the next time.
        """
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
        order.committed = order.prefix
        if not store.put_bytes(order.ref.name, marker.to_bytes(), if_absent=True):
            there = marks.read_commit(store, order.ref)
            if there != marker and there.prefix not in order.earlier:  # else by an earlier try of ours
                raise lease.FencedError(f"{store.url}/{order.ref.name} has been committed by another process")
            order.committed = there.prefix
        try:
            store.put_bytes(layout.HINT, layout.seal({"commit": order.ref.name}))
        except OSError as e:  # only a hint
            self._note(f"{store.url}/{layout.HINT} could not be written: {explain(e)}")

    def _check_fence(self, store: Storage) -> None:
        """FencedError; OSError, but not of the remote store for a local commit: that is wanted most when the remote
        store is down, and one that comes too late sorts below the successor's."""
        if self._remote is not None:
            try:
                lease.check(self._remote, self._held)
            except OSError:
                if store is self._remote:
                    raise
        if store is not self._remote:
            lease.check(store, self._held)

    def _gather_words(self, store: Storage, order: Order) -> list[FileEntry]:
        """Every rank's entries. RefusedError where a rank has failed or says nothing in time; OSError."""
        words: dict[int, list[FileEntry]] = {}

        def ask(rank: int) -> None:
            try:
                word = marks.read_sealed(store, _word_name(order, rank))
            except FileNotFoundError:
                return
            except ValueError as e:
                raise CheckpointError(f"the word of rank {rank} makes no sense: {e}") from e
            if "error" in word:
                raise (OvertakenError if word.get("overtaken") else RefusedError)(f"rank {rank}: {word['error']}")
            words[rank] = [FileEntry(**entry) for entry in word["files"]]

        missing = list(range(order.world_size))
        pause, most = _POLL_SECONDS
        while True:
            there = {entry.name for entry in store.list(order.prefix)} if len(missing) > _UNLISTED else set()
            unlisted = [rank for rank in missing if _word_name(order, rank) not in there]
            asked = [rank for rank in missing if _word_name(order, rank) in there] + unlisted[:_UNLISTED]
            for _ in in_parallel(ask, asked):
                pass
            missing = [rank for rank in unlisted[_UNLISTED:] + asked if rank not in words]  # the others' turn next
            if len(words) == order.world_size:
                return [entry for rank in sorted(words) for entry in words[rank]]
            with self._changed:
                self._changed.wait_for(lambda: order.prefix in self._cancelled, timeout=pause)
                if order.prefix in self._cancelled:
                    raise RefusedError(self._cancelled[order.prefix])
            pause = min(1.5 * pause, most)
            if time.monotonic() > order.since + self._timeout:
                shown = ", ".join(map(str, sorted(missing)[:8]))
                raise RefusedError(
                    f"nothing from ranks {shown} under {store.url}/{order.prefix} after "
                    f"{self._timeout:.0f} s: is it a place that all ranks share?"
                )
