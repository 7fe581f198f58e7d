"""One rank's uploads: one at a time, tried until it succeeds or a newer save waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from clip_train.checkpoint import lease
from clip_train.checkpoint.committing import Committer, put_word
from clip_train.checkpoint.order import Order, RefusedError, explain
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage, Storage

_LONGEST_PAUSE = 60.0  # seconds between tries


class Uploads:
    """The queue, in which at most one save waits behind the one under way."""

    def __init__(self) -> None:
        self._orders: list[Order] = []  # the one under way, and the newest that waits
        self._changed = threading.Condition()

    def put(self, order: Order) -> Order | None:
        """Returns the one whose place it takes."""
        with self._changed:
            overtaken = self._orders.pop() if len(self._orders) > 1 else None
            self._orders.append(order)
            self._changed.notify_all()
        return overtaken

    def next(self) -> Order:
        """It is under way until `remove`d; waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders)
            return self._orders[0]

    def remove(self, order: Order) -> None:
        with self._changed:
            self._orders.remove(order)

    def newer(self, timeout: float = 0.0) -> Order | None:
        """The save that waits; waits up to `timeout` seconds for one."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._orders) > 1, timeout)
            return self._orders[1] if len(self._orders) > 1 else None


def upload(
    order: Order,
    local: LocalStorage,
    remote: Storage,
    committer: Committer,
    *,
    newer: Callable[[float], Order | None],
    retrying: Callable[[str, float], None],
    timeout_seconds: float,
) -> None:
    """Bring `order`'s file and word to `remote`, on rank 0 the commit too. FencedError, RefusedError.

    newer: waits up to so many seconds for a save that is newer. retrying: told why, and the seconds until then.
    """
    assert order.entry is not None
    uploaded, tries = False, 0
    while True:
        tries += 1
        try:
            name = f"{order.prefix}/{order.entry.name}"
            if not uploaded:
                remote.put_file(local.path(name), name)
                put_word(remote, order, {"files": [asdict(order.entry)]})
                uploaded = True
            if order.rank == 0:
                committer.commit(remote, order)
            return
        except (lease.FencedError, RefusedError):
            raise
        except (OSError, CheckpointError) as e:
            why = explain(e)
        pause = min(2.0**tries, _LONGEST_PAUSE)
        if time.monotonic() + pause > order.since + timeout_seconds:
            raise RefusedError(f"{why}; given up after {tries} tries")
        next_one = newer(0.0)
        if next_one is None:
            retrying(why, pause)
            next_one = newer(pause)
        if next_one is not None:
            raise RefusedError(f"{why}; overtaken by step {next_one.step}")
