"""Heartbeats in the rendezvous store: when one rank fails all others end, and one of them says why.

Every BEAT_SECONDS, each rank writes a key through its own client: a counter, its node, a line for
rank 0. Rank 0 reads them all, every other rank reads rank 0's. The first rank that fails, or that
finds another one silent, writes `abort`, which every rank polls every POLL_SECONDS. A rank that is
asked to stop (by a signal, or on rank 0 by a STOP file) writes `stop`. All ranks poll it, even those
that wait for data. A rank that finds a hang writes `hang`: then each rank writes where it is. A rank
that finds a request of `clip-train doctor --hang` writes it to `asked`, where all see it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from clip_train.processes import node_name
from launcher.runtime.environment import RankEnv
from launcher.runtime.verdict import Failure

if TYPE_CHECKING:
    from torch.distributed import Store

    from clip_train.stop import StopRequest

BEAT_SECONDS = 3.0
POLL_SECONDS = 1.0  # between polls for a failure or a stop request of another rank
SILENT_BEATS = 5  # a rank whose key is unchanged in this many checks is lost: 15 to 18 s
SILENT_SECONDS = 20.0  # the store itself is lost if it does not answer for this long
LEAVE_SECONDS = 15.0  # wait for the others before rank 0, which holds the store, ends
# The same before all have joined: imports may take one rank much longer than another.
LEAVE_BEFORE_JOIN_SECONDS = 120.0
LEFT = b"left"
# key: set once all ranks have joined, or one has failed; ranks that have joined wait for it
JOIN_IS_OVER = "all"


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a rank."""

    value: bytes  # of its key: `NUMBER NODE LINE`, or LEFT
    unchanged_beats: int = 0  # checks since the value changed


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
        # where this rank is, as JSON, once there is a watchdog; it may take seconds
        self.describe: Callable[[], str] | None = None
        self._described = False  # this rank has written that, or is about to
        self.request = ""  # the newest of `clip-train doctor --hang` that this rank knows
        self._found_request = ""  # by this rank, in the run directory; not yet passed on
        self._store: Store
        self._server: Store | None = None  # it is closed when the last reference to it goes
        self._store_is_lost = False  # it may never answer again: nothing more is asked of it
        self._claiming = threading.Lock()
        self._answered = 0.0  # seconds, monotonic: the store's last answer
        self.beats: dict[int, Beat] = {}  # by rank
        self._closed = threading.Event()
        self._wake = threading.Event()  # for the thread: something cannot wait for the next poll
        self._counting = threading.Lock()
        self._needs_store = True  # no longer once this rank has left, or knows why all end
        self._stop_is_exchanged = False  # this rank has written the key `stop`, or has read it
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
        own = f"{self.env.rank} {json.dumps(asdict(failure))}".encode()
        winner = own  # if the store is gone, each rank decides for itself
        with self._claiming:
            if self.abort is not None:
                return self.abort
            if self.is_open:
                with contextlib.suppress(RuntimeError):
                    winner = self._store.compare_set("abort", "", own.decode())
                    # release ranks that still wait for the others to join
                    self._store.compare_set(JOIN_IS_OVER, "", "1")
                    self._mark_left()
            self._end_with(Failure(**json.loads(winner.partition(b" ")[2])))
        # the rank number in it makes equal failures of two ranks differ
        if winner == own:
            self._publish(failure, trace)
        assert self.abort is not None
        return self.abort

    def wait(self, seconds: float) -> Failure | None:
        """Returns the failure that ends the run, or None if none is known within `seconds`.

        Call this after a collective failed: the collective fails a few seconds before the heartbeat
        finds the dead rank.
        """
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # the store is gone: the thread handles that
                self._poll()
            if self.abort is not None or time.monotonic() >= end:
                return self.abort
            time.sleep(0.1)

    def leave(self, *, wait_for_joining: bool = True) -> None:
        """This rank ends. Rank 0 holds the store, so it waits until every other living rank has left,
        or knows why all ranks end. A second call does nothing.

        wait_for_joining: if some ranks have not joined yet, rank 0 gives them
        LEAVE_BEFORE_JOIN_SECONDS.
        """
        if self._closed.is_set() or not self.is_open:
            return
        self._closed.set()
        self._wake.set()
        if self._store_is_lost:
            return
        patience = LEAVE_SECONDS
        if not self.all_joined and wait_for_joining:
            patience = LEAVE_BEFORE_JOIN_SECONDS
        end = time.monotonic() + patience
        # One check less than SILENT_BEATS: `_check_beats` stops at the first dead rank, before it
        # counts that check for other ranks that died at the same time.
        num_silent = sum(
            beat.value != LEFT and beat.unchanged_beats >= SILENT_BEATS - 1
            for beat in self.beats.values()
        )
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self.env.rank}", LEFT.decode())
            num_left = self._mark_left()
            while self._server is not None and num_left + num_silent < self.env.world_size:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
                num_left = self._store.add("left", 0)

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

    def describe_all(self, own: str, seconds: float) -> None:
        """Write where this rank is, and ask the others to do the same. Returns once all have, after
        `seconds`, or when the run ends."""
        end = time.monotonic() + seconds
        if not self.is_open:
            return
        self._described = True
        with contextlib.suppress(RuntimeError):
            self._store.set("hang", "1")
            self._write_description(own)
            while self.abort is None and time.monotonic() < end:
                if self._store.add("described", 0) >= self.env.world_size:
                    return
                time.sleep(0.1)

    def descriptions(self) -> dict[int, str]:
        """What the ranks have written since `describe_all`, by rank."""
        if not self.is_open:
            return {}
        ranks = range(self.env.world_size)
        with contextlib.suppress(RuntimeError):
            written = [rank for rank in ranks if self._store.check([f"where/{rank}"])]
            texts = self._store.multi_get([f"where/{rank}" for rank in written])
            return {rank: text.decode() for rank, text in zip(written, texts, strict=True)}
        return {}

    def pass_on(self, request: str) -> None:
        """This rank has found a request of `clip-train doctor --hang`: let all ranks have it as their
        `request`."""
        if request != self.request:
            self.request = self._found_request = request
            self._wake.set()

    def publish_stop_now(self) -> None:
        """This rank was asked to stop: tell the others now rather than at the next poll."""
        self._wake.set()

    def _mark_left(self) -> int:
        """Register once that this rank no longer needs the store. Returns how many ranks have."""
        with self._counting:
            is_first_call = self._needs_store
            self._needs_store = False
        if is_first_call:
            return self._store.add("left", 1)
        return self._store.add("left", 0)  # only reads

    # -- the thread

    def _run(self) -> None:
        number, next_beat = 0, time.monotonic() + self._beat_seconds
        while True:
            self._wake.wait(min(POLL_SECONDS, self._beat_seconds))
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                self._exchange_stop()
                self._pass_on_request()
                self._poll()
                if time.monotonic() >= next_beat:
                    number, next_beat = number + 1, time.monotonic() + self._beat_seconds
                    self._store.set(f"beat/{self.env.rank}", f"{number} {node_name()} {self.line}")
                    self._check_beats()
                    self._answer_hang()
                    self._look_for_request()
            except RuntimeError as e:  # torch's errors of stores and networks
                if not self._closed.is_set():
                    self._lose_store(" ".join(str(e).split())[:100])
                return
            self._answered = time.monotonic()

    def _poll(self) -> None:
        if self.is_open and self.abort is None and self._store.check(["abort"]):
            rank, _, failure = self._store.get("abort").partition(b" ")
            # own failure: claim() sets self.abort itself, after which it publishes
            if int(rank) != self.env.rank:
                self._end_with(Failure(**json.loads(failure)))
                self._mark_left()

    def _end_with(self, failure: Failure) -> None:
        self.aborted_at = time.monotonic()  # first: whoever sees `abort` reads it
        self.abort = failure

    def _exchange_stop(self) -> None:
        """Write this rank's stop request, or read another rank's."""
        if self.stop is None or self._stop_is_exchanged:
            return
        reason = self.stop.look()
        if reason is not None:
            self._store.set("stop", reason)
            self._stop_is_exchanged = True
        elif self._store.check(["stop"]):
            self.stop.ask(self._store.get("stop").decode())
            self._stop_is_exchanged = True

    def _pass_on_request(self) -> None:
        if self._found_request:
            self._store.set("asked", self._found_request)
            self._found_request = ""

    def _look_for_request(self) -> None:
        if self._store.check(["asked"]):
            self.request = self._store.get("asked").decode()

    def _answer_hang(self) -> None:
        """If another rank has found a hang, write where this one is."""
        if self._described or self.describe is None or not self._store.check(["hang"]):
            return
        self._described, describe = True, self.describe

        def answer() -> None:
            with contextlib.suppress(RuntimeError):
                self._write_description(describe())

        # not in this thread: a GPU that hangs may hold up the answer, and this rank is alive
        threading.Thread(target=answer, name="where", daemon=True).start()

    def _write_description(self, text: str) -> None:
        self._store.set(f"where/{self.env.rank}", text)
        self._store.add("described", 1)

    def _check_beats(self) -> None:
        """Find a silent rank. Rank 0 reads all W keys, the others read rank 0's: nothing grows as W
        squared."""
        if self.abort is not None or not self.all_joined:
            return
        ranks = range(self.env.world_size) if self.env.rank == 0 else [0]
        values = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        for rank, value in zip(ranks, values, strict=True):
            before = self.beats.get(rank)
            unchanged_beats = 0
            if before is not None and value == before.value:
                unchanged_beats = before.unchanged_beats + 1
            self.beats[rank] = Beat(value, unchanged_beats)
            if unchanged_beats >= SILENT_BEATS and value != LEFT and rank != self.env.rank:
                seconds = unchanged_beats * self._beat_seconds
                self.claim(self._lost(rank, f"no heartbeat for {seconds:.0f} s"))
                return

    def _lost(self, rank: int, how: str) -> Failure:
        node = "another node"
        if rank in self.beats:
            words = self.beats[rank].value.decode().split()  # NUMBER NODE LINE
            if len(words) > 1:
                node = words[1]
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
        # No store is left to decide which rank reports. Rank 1 reports. It may have died with rank
        # 0's node, so the first rank of every other node reports too.
        first_of_node = self.env.rank > 0 and self.env.local_rank == 0
        first_of_other_node = first_of_node and node_name() != failure.node
        if self.env.rank == 1 or first_of_other_node:
            self._publish(failure, "")


def end_ranks_that_wait(address: str, port: int, failure: Failure, num_absent: int) -> bool:
    """From the process that starts ranks: `num_absent` ranks will never join, so the ranks that wait
    for them end with `failure`. Changes nothing once all ranks have joined, or one has failed.

    False: rank 0's store does not listen yet; call again.
    """
    from torch.distributed import PrefixStore, TCPStore

    with contextlib.suppress(RuntimeError):  # rank 0 has ended meanwhile
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            return False
        timeout = datetime.timedelta(seconds=SILENT_SECONDS)
        server = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        # the job of ranks whose MASTER_PORT was given is empty
        store = PrefixStore("", server)
        if store.check([JOIN_IS_OVER]):
            return True
        own = f"{failure.rank} {json.dumps(asdict(failure))}"
        if store.compare_set("abort", "", own) == own.encode():
            store.add("left", num_absent)  # rank 0 does not wait for them
        store.compare_set(JOIN_IS_OVER, "", "1")
    return True
