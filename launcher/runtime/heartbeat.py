"""Heartbeats in the rendezvous store: when one rank fails all others end, and one of them says why.

Every BEAT_SECONDS, each rank writes a key through its own client: a counter, its node, a line for
rank 0. Rank 0 reads them all, every other rank reads rank 0's. The first rank that fails, or that
finds another one silent, writes `abort`, which every rank reads once in LOOK_SECONDS. A rank that
is asked to stop writes `stop`: one signal, or a STOP file that only rank 0 looks for, reaches ranks
that wait for data.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from clip_train.processes import node_name
from launcher.runtime.environment import RankEnv
from launcher.runtime.verdict import Failure

if TYPE_CHECKING:
    from torch.distributed import Store

    from clip_train.stop import StopRequest

BEAT_SECONDS = 3.0
LOOK_SECONDS = 1.0  # between looks for a failure or a stop request of another rank
SILENT_BEATS = 5  # a rank whose key has not changed in this many checks is lost: 15 to 18 s
SILENT_SECONDS = 20.0  # the store itself is lost if it does not answer for this long
LEAVE_SECONDS = 15.0  # wait for the others before rank 0, which holds the store, ends
# The same before all have joined: imports may take one rank much longer than another.
LEAVE_EARLY_SECONDS = 120.0
LEFT = b"left"
ALL_JOINED = "all"  # key: set once all ranks have joined, or one has failed; ranks wait for it


class Heartbeat:
    """One rank's heartbeat. `open` once there is a store, `claim` with an error, `leave` at the
    end."""

    def __init__(
        self,
        env: RankEnv,
        publish: Callable[[Failure, str], None] = lambda failure, trace: None,
        *,
        beat_seconds: float = BEAT_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """publish: prints the failure that ends the run and writes its verdict, on one rank only;
        see `claim`."""
        self.env, self._publish = env, publish
        self._beat_seconds, self._silent_seconds = beat_seconds, silent_seconds
        self.abort: Failure | None = None  # why all ranks end
        self.aborted_at = 0.0  # seconds, monotonic: when this rank learned of it
        self.all_joined = False  # from then on, silence means death
        self.is_open = False  # until then this rank is alone
        self.line = ""  # for rank 0
        self.stop: StopRequest | None = None  # this rank's
        self._store: Store
        self._server: Store | None = None  # it is closed when the last reference to it goes
        self._store_is_lost = False  # it may never answer again: nothing more is asked of it
        self._claiming = threading.Lock()
        self._answered = 0.0  # seconds, monotonic: the store's last answer
        # rank -> its key's value, `NUMBER NODE LINE`, and looks since it changed
        self.beats: dict[int, tuple[bytes, int]] = {}
        self._closed = threading.Event()
        self._wake = threading.Event()  # for the thread: something cannot wait for the next look
        self._counting = threading.Lock()
        self._needs_store = True  # no longer once this rank has left, or knows why all end
        # the others know that this rank was asked to stop, or it knows from them
        self._stop_is_shared = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def open(self, store: Store, *, server: Store | None = None) -> None:
        """store: a client of this object's own. server: on rank 0, which holds the store and has to
        leave last."""
        self._store, self._server, self._answered = store, server, time.monotonic()
        store.set(f"beat/{self.env.rank}", f"0 {node_name()}")
        self.is_open = True
        self._thread.start()

    def claim(self, failure: Failure, trace: str = "") -> Failure:
        """End the run with this failure and publish it now, unless another one was first.

        Returns the failure that ends the run. From any thread.
        """
        # With this rank's number: ranks that notice the same death at once have equal failures.
        own = found = f"{self.env.rank} {json.dumps(asdict(failure))}".encode()
        with self._claiming:
            if self.abort is not None:
                return self.abort
            if self.is_open:
                with contextlib.suppress(RuntimeError):  # without the store, each rank decides
                    found = self._store.compare_set("abort", "", own.decode())
                    self._store.compare_set(ALL_JOINED, "", "1")
                    self._count_left()
            self._end_with(Failure(**json.loads(found.partition(b" ")[2])))
        if found == own:
            self._publish(failure, trace)
        assert self.abort is not None
        return self.abort

    def wait(self, seconds: float) -> Failure | None:
        """The failure that ends the run, if it is known within `seconds`; a collective fails before
        a death is known."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # the store is gone: the thread handles that
                self._poll()
            if self.abort is not None or time.monotonic() >= end:
                return self.abort
            time.sleep(0.1)

    def leave(self, *, late: bool = False) -> None:
        """This rank ends. Rank 0 holds the store, so it waits until every other living rank has left,
        or knows why all ranks end. A second call does nothing.

        late: do not wait for ranks that have not joined yet.
        """
        if self._closed.is_set() or not self.is_open:
            return
        self._closed.set()
        self._wake.set()
        if self._store_is_lost:
            return
        early = not (self.all_joined or late)
        end = time.monotonic() + (LEAVE_EARLY_SECONDS if early else LEAVE_SECONDS)
        silent = sum(
            value != LEFT and looks >= SILENT_BEATS - 1 for value, looks in self.beats.values()
        )
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self.env.rank}", LEFT.decode())
            left = self._count_left()
            while self._server is not None and left + silent < self.env.world_size:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
                left = self._store.add("left", 0)

    def check(self, frozen_seconds: float = 0.0) -> Failure | None:
        """The failure that ends the run. The watchdog's thread calls this, so a store that does not
        answer must not block it.

        frozen_seconds: how long this whole process was suspended.
        """
        self._answered += frozen_seconds
        silent = time.monotonic() - self._answered
        if self.is_open and not self._closed.is_set() and silent > self._silent_seconds:
            self._lose_store(f"its store does not answer for {silent:.0f} s")
        return self.abort

    def share_stop(self) -> None:
        """This rank was asked to stop: the others learn it now rather than at the next look."""
        self._wake.set()

    def _count_left(self) -> int:
        """The number of ranks that do not need the store any more; from here on also this one."""
        with self._counting:
            own = 1 if self._needs_store else 0
            self._needs_store = False
        return self._store.add("left", own)

    # -- the thread

    def _run(self) -> None:
        number, next_beat = 0, time.monotonic() + self._beat_seconds
        while True:
            self._wake.wait(min(LOOK_SECONDS, self._beat_seconds))
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                self._share_stop()
                self._poll()
                if time.monotonic() >= next_beat:
                    number, next_beat = number + 1, time.monotonic() + self._beat_seconds
                    self._store.set(f"beat/{self.env.rank}", f"{number} {node_name()} {self.line}")
                    self._look()
            except RuntimeError as e:  # torch's errors of stores and networks
                if not self._closed.is_set():
                    self._lose_store(" ".join(str(e).split())[:100])
                return
            self._answered = time.monotonic()

    def _poll(self) -> None:
        if self.is_open and self.abort is None and self._store.check(["abort"]):
            rank, _, failure = self._store.get("abort").partition(b" ")
            if int(rank) != self.env.rank:  # else the thread that claims it publishes it first
                self._end_with(Failure(**json.loads(failure)))
                self._count_left()

    def _end_with(self, failure: Failure) -> None:
        self.aborted_at = time.monotonic()  # first: whoever sees `abort` reads it
        self.abort = failure

    def _share_stop(self) -> None:
        if self.stop is None or self._stop_is_shared:
            return
        reason = self.stop.look()
        if reason is not None:
            self._store.set("stop", reason)
            self._stop_is_shared = True
        elif self._store.check(["stop"]):
            self.stop.ask(self._store.get("stop").decode())
            self._stop_is_shared = True

    def _look(self) -> None:
        """Find a silent rank. Rank 0 reads all W keys, the others read rank 0's: nothing grows as W
        squared."""
        if self.abort is not None or not self.all_joined:
            return
        ranks = range(self.env.world_size) if self.env.rank == 0 else [0]
        values = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        for rank, value in zip(ranks, values, strict=True):
            before, looks = self.beats.get(rank, (b"", 0))
            looks = looks + 1 if value == before else 0
            self.beats[rank] = (value, looks)
            if looks >= SILENT_BEATS and value != LEFT and rank != self.env.rank:
                how = f"no heartbeat for {looks * self._beat_seconds:.0f} s"
                self.claim(self._lost(rank, how))
                return

    def _lost(self, rank: int, how: str) -> Failure:
        value, _ = self.beats.get(rank, (b"", 0))
        node = " ".join(value.decode().split()[1:2]) or "another node"
        return Failure(
            rank,
            node,
            f"rank {rank} on {node} has died or is frozen ({how}): killed (out of memory?), "
            "or its node is gone",
            lost=True,
            node_suspect=True,
        )

    def _lose_store(self, how: str) -> None:
        """Rank 0, which held it, is lost."""
        self._store_is_lost = True
        if self.abort is not None:
            return
        failure = self._lost(0, how)
        self._end_with(failure)
        # No store is left to decide which rank reports: rank 1 does, and if it may be lost too,
        # one for each node.
        elsewhere = self.env.rank > self.env.local_rank == 0 and failure.node != node_name()
        if self.env.rank == 1 or elsewhere:
            self._publish(failure, "")
