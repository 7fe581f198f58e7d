"""Heartbeats in the rendezvous store: when one rank fails all others end, and one of them says why.

Each rank writes a key every BEAT_SECONDS through a client of its own; rank 0 reads them all, every other rank reads
rank 0's. The first rank that fails, or that finds another one silent, writes `abort`, which all ranks poll.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.runtime.environment import RankEnv
from launcher.runtime.verdict import Failure, node_name

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_SECONDS = 3.0
SILENT_BEATS = 5  # a rank whose key has not changed for so many looks is lost: 15 to 18 s
SILENT_SECONDS = 20.0  # the store itself, if it does not answer for so long
LEAVE_SECONDS = 15.0  # for the others, before the rank that holds the store ends
LEAVE_EARLY_SECONDS = (
    120.0  # the same before all have come: imports may take one rank much longer than another
)
LEFT = "left"


class Heartbeat:
    """Of one rank. `open` once there is a store, `claim` with an error, `leave` at the end."""

    def __init__(
        self,
        env: RankEnv,
        publish: Callable[[Failure, str], None] = lambda failure, trace: None,
        *,
        beat_seconds: float = BEAT_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """publish: prints the failure that ends the run and writes its verdict, on one rank only; see `claim`."""
        from torch.distributed import HashStore

        self.env, self._publish = env, publish
        self._beat_seconds, self._silent_seconds = beat_seconds, silent_seconds
        self.abort: Failure | None = None  # why all ranks end
        # seconds, monotonic: when this rank learned of it; later while the rank that failed is closing its run
        self.aborted_at = 0.0
        self._store: Store = HashStore()  # until `open`: of this rank alone
        self._server: Store | None = None  # it is closed when the last reference to it goes
        self._answered = 0.0  # seconds, monotonic: the store's last answer
        self._seen: dict[
            int, tuple[bytes, int]
        ] = {}  # rank -> its key's value, and looks since it changed
        self._all_came = False
        self._closed = threading.Event()
        self._claimed = False  # by a thread of this rank, which publishes it
        self._lock = threading.Lock()  # of `abort` and `_claimed`
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def open(self, store: Store, *, server: Store | None = None) -> None:
        """store: a client of this object's own. server: where this process holds the store; it has to leave last."""
        self._store, self._server, self._answered = store, server, time.monotonic()
        self._beat(0)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.ident is not None

    def came(self) -> None:
        """All ranks have opened theirs: from now on silence is a death."""
        self._all_came = True

    def claim(self, failure: Failure, trace: str = "") -> Failure:
        """The failure that ends the run: this one, which is published here and now, or the first one before it.

        From any thread. Later ranks say nothing.
        """
        if self.abort is not None:
            return self.abort
        # With this rank's number: ranks that notice the same death at once have equal failures.
        own = f"{self.env.rank} {failure.to_json()}"
        found = own.encode()
        with contextlib.suppress(RuntimeError):  # gone: every rank for itself
            found = self._store.compare_set("abort", "", own)
            for awaited in ("recipe", "all"):  # wakes the ranks that wait for the others
                self._store.compare_set(awaited, "", "null")
        first = parse_claim(found)
        self._learn(first)
        # Not who learned of it: this rank's other threads may have read it in the store by now.
        with self._lock:
            is_mine = found == own.encode() and not self._claimed
            self._claimed = self._claimed or is_mine
        if is_mine:
            self._publish(failure, trace)
        return first

    def _learn(self, failure: Failure) -> bool:
        """Whether this is news to this rank."""
        with self._lock:
            if self.abort is not None:
                return False
            self.abort, self.aborted_at = failure, time.monotonic()
            return True

    def wait(self, seconds: float) -> Failure | None:
        """What ends the run, if that is known within `seconds`; a collective fails before a death is known."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # gone: the thread finds out what that means
                self._poll()
            if self.abort is not None or time.monotonic() >= end:
                return self.abort
            time.sleep(0.1)

    def leave(self, *, late: bool = False) -> None:
        """This rank ends; whoever holds the store waits for the others that live. Again does nothing.

        late: ranks that have not come by now have had their time.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self.env.rank}", LEFT)
            left = self._store.add("left", 1)
            lost = sum(
                looks >= SILENT_BEATS - 1 and value != LEFT.encode()
                for value, looks in self._seen.values()
            )
            early = not (self._all_came or late)
            end = time.monotonic() + (LEAVE_EARLY_SECONDS if early else LEAVE_SECONDS)
            while (
                self._server is not None
                and left < self.env.world_size - lost
                and time.monotonic() < end
            ):
                time.sleep(0.05)
                left = self._store.add("left", 0)

    def check(self, frozen_seconds: float = 0.0) -> Failure | None:
        """Of the watchdog's thread, which is not held up by a store that does not answer: what ends the run.

        frozen_seconds: for which this whole process has not run.
        """
        self._answered += frozen_seconds
        silent = time.monotonic() - self._answered
        if (
            self.is_open
            and self.abort is None
            and not self._closed.is_set()
            and silent > self._silent_seconds
        ):
            self._lose_store(f"its store does not answer for {silent:.0f} s")
        return self.abort

    # -- the thread

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(self._beat_seconds):
            number += 1
            try:
                self._beat(number)
                self._poll()
                if self.abort is not None:
                    self._wait_for_failed_rank(self.abort)
                elif self._all_came:
                    self._look()
            except RuntimeError as e:  # torch's errors of stores and networks
                if not self._closed.is_set():
                    self._lose_store(" ".join(str(e).split())[:100])
                return
            self._answered = time.monotonic()

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self.env.rank}", f"{number} {node_name()}")

    def _poll(self) -> None:
        if self.abort is None and self._store.check(["abort"]):
            self._learn(parse_claim(self._store.get("abort")))

    def _look(self) -> None:
        """Rank 0 at all keys, which are W, the others at rank 0's: nothing grows as W squared."""
        ranks = [
            r
            for r in (range(self.env.world_size) if self.env.rank == 0 else [0])
            if r != self.env.rank
        ]
        for rank, value in zip(
            ranks, self._store.multi_get([f"beat/{r}" for r in ranks]), strict=True
        ):
            looks = self._unchanged_looks(rank, value)
            if looks >= SILENT_BEATS and value != LEFT.encode():
                self.claim(
                    lost(
                        rank,
                        self._node(rank),
                        f"no heartbeat for {looks * self._beat_seconds:.0f} s",
                    )
                )
                return

    def _unchanged_looks(self, rank: int, value: bytes) -> int:
        before, looks = self._seen.get(rank, (b"", 0))
        looks = looks + 1 if value == before else 0
        self._seen[rank] = (value, looks)
        return looks

    def _wait_for_failed_rank(self, abort: Failure) -> None:
        """The rank that failed has published its error and finishes its part of a pending checkpoint: this rank's
        part is needed as well, so that it must not end before."""
        if abort.lost or abort.rank == self.env.rank:
            return
        value = self._store.get(f"beat/{abort.rank}")
        if value != LEFT.encode() and self._unchanged_looks(abort.rank, value) < SILENT_BEATS:
            self.aborted_at = time.monotonic()

    def _node(self, rank: int) -> str:
        return self._seen.get(rank, (b"", 0))[0].decode().partition(" ")[2] or "another node"

    def _lose_store(self, how: str) -> None:
        """Rank 0 held it. Where torchrun's agent did, the watchdog asks the ranks to save and end."""
        failure = lost(0, self._node(0), how)
        # Nobody is left to ask which rank is the first: rank 1, and where it may be lost as well, one for each node.
        publishes = self.env.rank == 1 or (
            self.env.rank > self.env.local_rank == 0 and self._node(0) != node_name()
        )
        if not self.env.agent_store and self._learn(failure) and publishes:
            self._publish(failure, "")


def parse_claim(value: bytes) -> Failure:
    """value: of the key `abort`, the number of the rank that wrote it and its failure's JSON."""
    return Failure.parse(value.partition(b" ")[2])


def lost(rank: int, node: str, how: str) -> Failure:
    message = f"rank {rank} on {node} has died or is frozen ({how}): killed (out of memory?), or its node is gone"
    return Failure(rank, node, message, lost=True, node_suspect=True)
