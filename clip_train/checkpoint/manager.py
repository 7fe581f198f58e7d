"""What the trainer calls: is a save due, save, hear what became of it, resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import layout, lease
from clip_train.checkpoint.client import SaverClient
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.locate import locate
from clip_train.checkpoint.opening import Resumed, open_found
from clip_train.checkpoint.pipeline import Settings, check_space, explain, free_bytes
from clip_train.checkpoint.preflight import preflight
from clip_train.checkpoint.resume import Places, Resolution, keep_locally, resolve
from clip_train.checkpoint.retention import Policy
from clip_train.checkpoint.snapshot import Plan, SharedBuffer, plan_file
from clip_train.errors import CheckpointError
from clip_train.protocols import Fragment
from clip_train.storage import LocalStorage, Storage, open_storage

logger = logging.getLogger(__name__)


class LastGood(NamedTuple):
    """The checkpoint that a failing run can go back to."""

    step: int
    path: str


class _Offer(NamedTuple):
    """What a rank brings to the moment at which all decide about a save."""

    error: str | None  # why it cannot
    num_bytes: int
    free: int  # bytes, on the disk
    lost: dict[int, str]  # earlier steps that this rank's saver has failed at
    prefix: str  # rank 0's holds, and so for the next two
    failures: int
    last_good: LastGood | None
    fatal: str | None


class CheckpointManager:
    """Saves and resumes one run's checkpoints. All ranks make the same calls in the same order.

    `resume`, then `begin` (before the first `save`), `poll` at every step, `close` at the end.

    folder: `<run.dir>/checkpoints`. log: told of what became of saves and of damaged checkpoints, on rank 0.
    """

    def __init__(
        self, config: CheckpointConfig, folder: Path | str, *, log: Callable[[str], None] | None = None
    ) -> None:
        self.config = config
        self.folder = Path(folder).absolute()
        self.storage = LocalStorage(self.folder)
        self.remote: Storage | None = open_storage(config.remote) if config.remote else None
        self._log = log or logger.warning
        self._last_good: LastGood | None = None
        self._shared: bool | None = None  # all ranks see `folder`; None: not looked yet
        self._policy: Policy | None = None  # once `begin` has taken a lease
        self._saver: SaverClient | None = None
        self._buffer: SharedBuffer | None = None
        self._buffer_busy: int | None = None  # the step that is being written from it
        self._pending: dict[int, str] = {}  # step -> where its attempt lies; handed over, not yet decided
        self._attempts: list[str] = []  # where those of the last step lie
        self._tidying: set[int] = set()  # steps after whose commit old checkpoints are being removed
        self._lost: dict[int, str] = {}  # steps that this rank's saver has failed at, not yet told to the others
        self._handed_over: int | None = None  # the last step given to the saver, or resumed from: on all ranks alike
        self._saved: int | None = None  # rank 0: the step last committed in the main store, or resumed from there
        self._protect: set[CommitRef] = set()
        self._damaged: set[CommitRef] = set()
        self._failures = 0  # saves in a row
        self._abandoned = False  # the last save did not make it within the grace
        self._fatal: str | None = None  # why the run must stop
        self._numbers: dict[str, float] = {}
        self._clock_started = time.monotonic()  # seconds; of the last save
        self._clock_step: int | None = None  # step at which the clock started
        self._next_look = 0  # step at which the clock is looked at again

    @property
    def last_good(self) -> LastGood | None:
        """The newest checkpoint that this process has committed or resumed from."""
        return self._last_good

    # -- when

    def due(self, step: int) -> bool:
        """Whether to save after `step` (counted from 1): the same answer on all ranks, once per step."""
        by_steps = self.config.every_steps is not None and step > 0 and step % self.config.every_steps == 0
        return by_steps or self._due_by_time(step)

    def _due_by_time(self, step: int) -> bool:
        """Rank 0's clock decides. It also says when to ask again, so that most steps cost no message."""
        if self.config.every_minutes is None:
            return False
        if self._clock_step is None:
            self._clock_step = step - 1
        if step < self._next_look:
            return False
        passed = time.monotonic() - self._clock_started
        left = 60 * self.config.every_minutes - passed  # seconds
        # half of the steps that fit into the time left at the present rate, lest steps become slower
        steps_left = left * (step - self._clock_step) / max(passed, 1e-9)
        due, self._next_look = dist.broadcast_object((left <= 0, step + max(1, int(min(steps_left, 2e6) / 2))))
        return due

    # -- begin

    def preflight(self) -> None:
        """Before anything is built: can the remote store be used? UserError or CheckpointError says what to fix."""

        def look() -> list[str]:
            assert self.remote is not None
            return preflight(self.remote).warnings(self.remote.url)

        if self.remote is not None:
            for warning in dist.on_main(look):
                if dist.is_main():
                    self._log(f"warning: {warning}")

    def begin(self) -> None:
        """Take the right to write, which an older process of this run loses by it, and start the saver.

        Once, after `resume`; `save` does it if need be. CheckpointError.
        """
        if self._policy is not None:
            return
        others = [self.storage] if self.remote is not None else []
        main = self.remote or self.storage

        def take() -> lease.Lease:
            try:
                return lease.acquire(main, others)
            except OSError as e:
                raise CheckpointError(f"checkpoints cannot be written to {main.url}: {explain(e)}") from e

        held = dist.on_main(take)
        config = self.config
        self._policy = Policy(
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            orphan_grace_seconds=60 * config.orphan_grace_minutes,
            epoch=held.epoch,
            token=held.token,
            protect=self._protect,
            damaged=self._damaged,
        )
        settings = Settings(
            str(self.folder), config.remote, self._all_see_folder(), 60 * config.save_timeout_minutes, self._policy
        )
        self._saver = SaverClient(settings)

    def _all_see_folder(self) -> bool:
        """Rank 0 leaves a file; whoever does not see it has another disk. Without a remote store they must."""
        if self._shared is None and (self.remote is None or dist.world_size() == 1):
            self._shared = True
        if self._shared is None:
            name = f".seen-{time.time_ns()}"
            token = dist.on_main(lambda: self.storage.put_bytes(name, b"") and name)
            self._shared = all(dist.gather_objects(self.storage.path(str(token)).exists()))
            if dist.is_main():
                self.storage.delete(name)
        return self._shared

    # -- save

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        state: dict[str, Any],
        shared_tensors: dict[str, Tensor] | None = None,
        *,
        wait: bool = False,
    ) -> bool:
        """Make a checkpoint of the run after `step`: all ranks' fragments and tensors, and rank 0's `state`.

        Returns when the snapshot is taken; `poll` hears the rest. shared_tensors: the same on all ranks; rank
        0's are written. wait: return when it is committed, or after `checkpoint.grace_seconds`.

        True: it is on its way (wait: it is committed). False: it is not, on any rank; rank 0 has logged why and
        training may go on. CheckpointError after `max_failed_saves` failures in a row, or when another process
        has taken over. A step that is saved already is not again.
        """
        self.begin()
        self._hear(0.0)
        end = time.monotonic() + self.config.grace_seconds
        if self._handed_over == step and dist.broadcast_object(self._saved == step or step in self._pending):
            return self._finish(step, end) if wait else True
        while wait and self._buffer_busy is not None and time.monotonic() < end:
            self._hear(min(1.0, end - time.monotonic()))
        try:
            self._hand_over(step, fragments, rank_tensors, state, shared_tensors)
        except CheckpointError as e:
            self._count_failure(step, str(e))
            if self._fatal is not None:
                raise CheckpointError(self._fatal) from e
            return False
        finally:
            self._clock_started, self._clock_step, self._next_look = time.monotonic(), step, 0
        return self._finish(step, end) if wait else True

    def _hand_over(
        self,
        step: int,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        state: dict[str, Any],
        shared_tensors: dict[str, Tensor] | None,
    ) -> None:
        """CheckpointError, on all ranks alike, if any cannot."""
        assert self._saver is not None and self._policy is not None
        rank = dist.rank()
        plan, encoded, error = None, None, None
        try:
            encoded = layout.encode_state(state) if rank == 0 else None
            plan = self._snapshot(rank, fragments, rank_tensors, shared_tensors)
        except Exception as e:
            error = explain(e)
            logger.debug("the snapshot failed on this rank", exc_info=True)
        lost, self._lost = self._lost, {}
        offer = _Offer(
            error,
            plan.num_bytes if plan else 0,
            free_bytes(self.folder),
            lost,
            layout.new_prefix(self._policy.epoch, step),
            self._failures,
            self._last_good,
            self._fatal,
        )
        offers = dist.gather_objects(offer)
        first = offers[0]
        self._failures, self._last_good, self._fatal = first.failures, first.last_good, first.fatal
        if first.fatal is not None:
            raise CheckpointError(first.fatal)
        if rank == 0:
            self._stop_waiting_for(offers)
        errors = [f"rank {r}: {each.error}" for r, each in enumerate(offers) if each.error is not None]
        if errors:
            more = f" (and {len(errors) - 3} more ranks)" if len(errors) > 3 else ""
            raise CheckpointError("; ".join(errors[:3]) + more)
        # where ranks share the disk the sum must fit where the least is free
        free = min(each.free for each in offers)
        check_space(self.folder, sum(each.num_bytes for each in offers) if self._shared else 0, free)
        assert plan is not None
        self._attempts = [*(self._attempts if self._handed_over == step else []), first.prefix]
        body = {
            "do": "save", "step": step, "prefix": first.prefix, "epoch": self._policy.epoch, "rank": rank,
            "world_size": dist.world_size(), "size": plan.num_bytes, "state": encoded,
            "earlier": self._attempts[:-1],
        }  # fmt: skip
        self._pending[step], self._buffer_busy, self._handed_over = first.prefix, step, step
        self._tidying.add(step)
        try:
            self._saver.send(body)
        except CheckpointError as e:  # of this rank alone: the others hear of it at the next save
            self._decide({"told": "failed", "step": step, "why": str(e)})

    def _snapshot(
        self,
        rank: int,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        shared_tensors: dict[str, Tensor] | None,
    ) -> Plan:
        assert self._saver is not None
        if not self._saver.connected:
            self._saver.connect()
            if self._buffer is not None:
                self._saver.send({"do": "buffer"}, self._buffer.fd)
        if self._buffer_busy is not None:
            raise CheckpointError(f"step {self._buffer_busy} is still being written to {self.folder}")
        plan = plan_file(rank, fragments, rank_tensors, shared_tensors)
        if self._buffer is None or self._buffer.capacity < plan.num_bytes:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None
            pin = any(tensor.is_cuda for _, tensor in plan.places)
            self._buffer = SharedBuffer(plan.num_bytes, pin=pin)
            self._saver.send({"do": "buffer"}, self._buffer.fd)
        self._buffer.fill(plan)
        return plan

    def _stop_waiting_for(self, offers: list[_Offer]) -> None:
        """Rank 0's saver waits for all ranks' words; some will not come."""
        assert self._saver is not None
        for rank, offer in enumerate(offers):
            for step, why in offer.lost.items():
                if rank != 0 and step in self._pending and self._saver.connected:
                    self._saver.send({"do": "cancel", "step": step, "why": f"rank {rank}: {why}"})

    def _count_failure(self, step: int, why: str) -> None:
        """Too many in a row are fatal."""
        if self._fatal is not None:
            return
        self._failures += 1
        message = f"checkpoint of step {step} failed ({self._failures} in a row): {why}"
        if self._failures >= self.config.max_failed_saves:
            self._fatal = f"{message}; {self._fallback()}"
        else:
            self._say(f"{message}; training goes on, {self._fallback()}")

    def _fallback(self) -> str:
        return f"the last good one is {self.last_good.path}" if self.last_good else "there is no good one yet"

    # -- hear

    def poll(self) -> dict[str, float]:
        """At every step: what has become of earlier saves, without waiting; numbers for the step's record.

        CheckpointError, on rank 0, after too many failures in a row, or when another process has taken over.
        """
        self._hear(0.0)
        if self._fatal is not None and dist.is_main():
            raise CheckpointError(self._fatal)
        numbers, self._numbers = self._numbers, {}
        return numbers

    def note_metrics(self, step: int, values: dict[str, float]) -> None:
        """What the evaluation at `step` came to, for `checkpoint.keep_best`."""
        if self.config.keep_best is None or not dist.is_main() or self._saver is None or self._policy is None:
            return
        name = self.config.keep_best.removeprefix("-")
        if name not in values:
            self._log(f"checkpoint.keep_best ({name}): no such number; the evaluation has {', '.join(sorted(values))}")
        elif self._saver.connected:
            value = {name: values[name]}
            self._saver.send({"do": "metric", "epoch": self._policy.epoch, "step": step, "values": value})

    def _hear(self, timeout: float) -> None:
        for told in self._saver.news(timeout) if self._saver is not None else []:
            self._decide(told)

    def _decide(self, told: dict[str, Any]) -> None:
        """One message of the saver's."""
        match told["told"]:
            case "written":
                self._buffer_busy = None
            case "rest":
                self._tidying.discard(told["step"])
            case "kept":
                self._last_good = LastGood(told["step"], told["where"])
            case "done":
                self._done(told)
            case "failed":
                self._failed(told["step"], told["why"])
            case "overtaken":  # no failure: the one before it is still on its way
                self._pending.pop(told["step"], None)
                self._say(f"step {told['step']} was not uploaded: {told['why']}")
            case "fenced":
                self._pending.pop(told["step"], None)
                self._fatal = told["why"]
            case "retry":
                pause = told["seconds"]
                self._say(f"checkpoint of step {told['step']}: {told['why']}; trying again in {pause:.0f} s")
            case "note":
                self._say(told["text"])
            case "gone":
                self._saver_gone()

    def _saver_gone(self) -> None:
        self._buffer_busy = None
        self._tidying.clear()
        why, newest = "the process that writes checkpoints has ended", max(self._pending, default=None)
        for step in list(self._pending):
            if step == newest or not dist.is_main():
                self._failed(step, why)
            else:  # one death is one failure
                self._pending.pop(step)
                self._say(f"step {step} was not uploaded: {why}")

    def _done(self, told: dict[str, Any]) -> None:
        """On rank 0 it is committed; elsewhere this rank's part is where it belongs."""
        self._pending.pop(told["step"], None)
        if not dist.is_main():
            return
        self._failures, self._saved = 0, told["step"]
        self._last_good = LastGood(told["step"], told["where"])
        seconds, size = told["seconds"], told["bytes"]
        self._numbers = {"checkpoint_step": told["step"], "checkpoint_seconds": seconds, "checkpoint_failures": 0}
        logger.info("checkpoint of step %d committed after %.1f s (%d bytes on rank 0)", told["step"], seconds, size)

    def _failed(self, step: int, why: str) -> None:
        self._pending.pop(step, None)
        if dist.is_main():
            self._numbers = {"checkpoint_failures": self._failures + 1}
            self._count_failure(step, why)
        else:
            self._lost[step] = why

    def _say(self, text: str) -> None:
        if dist.is_main():
            self._log(text)

    # -- end

    def _finish(self, step: int, end: float) -> bool:
        """Wait until `step` is decided on all ranks, or until `end` (by this process's clock). Collective."""
        if step in self._pending and self.remote is not None:
            left = max(end - time.monotonic(), 0.0)
            self._say(f"waiting up to {left:.0f} s for step {step} to be committed at {self.remote.url}")
        while step in self._pending and time.monotonic() < end:
            self._hear(min(1.0, max(end - time.monotonic(), 0.0)))
        abandoned = step in self._pending
        self._abandoned = abandoned
        self._pending.clear()  # what is older has been overtaken
        told = dist.broadcast_object((self._saved, self._last_good, self._failures, self._fatal))
        self._saved, self._last_good, self._failures, self._fatal = told
        if self._saved == step:
            return True
        if self._fatal is not None:
            raise CheckpointError(self._fatal)
        if abandoned:
            seconds = self.config.grace_seconds
            self._say(f"the save of step {step} was abandoned after {seconds:.0f} s; {self._fallback()}")
        return False

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until the newest save is committed somewhere or has failed, so that `last_good` is up to date."""
        end = time.monotonic() + min(seconds, self.config.grace_seconds)
        newest = max(self._pending, default=0)
        while newest in self._pending and time.monotonic() < end:
            if self._last_good is not None and self._last_good.step == newest:
                return
            self._hear(min(0.2, max(end - time.monotonic(), 0.0)))

    def close(self) -> None:
        """The saver finishes what is under way within `checkpoint.grace_seconds`, or abandons it, and says which.

        Every rank for itself: nothing here waits for another one.
        """
        if self._saver is None:
            return
        end = time.monotonic() + self.config.grace_seconds
        waiting = sorted(self._pending)
        if waiting:
            self._say(f"finishing the checkpoint of step {waiting[-1]} (up to {self.config.grace_seconds:.0f} s)")
        while (self._pending or (self._tidying and not self._abandoned)) and time.monotonic() < end:
            if not self._saver.connected:
                break
            self._hear(min(1.0, max(end - time.monotonic(), 0.0)))
        if waiting and not self._pending and self._saved == waiting[-1]:
            self._say(f"step {waiting[-1]} is committed ({self._fallback()})")
        elif self._pending:
            self._say(f"abandoned the checkpoint of step {max(self._pending)}; {self._fallback()}")
        self._saver.close()
        self._saver, self._policy = None, None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    # -- resume

    def resume(self) -> Resumed | None:
        """What `checkpoint.resume` asks for; None for a fresh start. All ranks get the same checkpoint.

        CheckpointError when there must be one and none is whole, or where one cannot be read. UserError for
        a path that holds no checkpoints.
        """
        mode = self.config.resume
        if mode == "never":
            return None
        own = mode in ("auto", "must")
        only: CommitRef | None = None
        places = Places(self.storage, self.remote, self.storage)
        if not own:
            place, only = dist.on_main(lambda: locate(mode))
            own = place in {self.folder.resolve().as_posix(), self.remote.url if self.remote else None}
            if not own:
                places = _elsewhere(place, self.storage)
        answer = resolve(places, only)
        if own:
            self._damaged = {each.ref for each in answer.skipped}
        if answer.found is None:
            self._nothing_found(mode, places, answer)
            return None
        resumed = self._open(places, answer)
        if own:
            self._protect = {answer.found.commit.ref}
            if self.remote is None or answer.in_remote:
                self._saved = self._handed_over = resumed.step
        self._last_good = LastGood(resumed.step, resumed.path)
        return resumed

    def _open(self, places: Places, answer: Resolution) -> Resumed:
        everything_here = not answer.in_remote or self._all_see_folder()
        local, remote, found = places.local, places.remote, answer.found
        if everything_here and local is not None and remote is not None and found is not None and not answer.in_local:
            dist.on_main(lambda: keep_locally(local, remote, found))
        return open_found(places, answer, everything_here=everything_here)

    def _nothing_found(self, mode: str, places: Places, answer: Resolution) -> None:
        where = " and ".join(each.url for each in places[:2] if each is not None)
        reasons = "".join(f"\n  {each}" for each in answer.skipped)
        what = f"none of the checkpoints under {where} is whole:{reasons}" if reasons else ""
        if mode != "auto":
            remedy = "set checkpoint.resume to auto to start fresh" if mode == "must" else "choose another"
            raise CheckpointError(f"{what or f'there is no checkpoint under {where}'}\n{remedy}")
        if what and dist.is_main():
            self._log(f"{what}\nSTARTING FRESH, from step 0")


def _elsewhere(place: str, fetch_to: LocalStorage) -> Places:
    """Another run's checkpoints: a folder is read where it is, a remote one fetched to this run's folder."""
    storage = open_storage(place)
    return Places(storage, None, storage) if isinstance(storage, LocalStorage) else Places(None, storage, fetch_to)
