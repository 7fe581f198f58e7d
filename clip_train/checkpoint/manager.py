"""The trainer's interface to checkpoints: decide when to save, save, follow earlier saves,
resume."""

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import SaveRequest, acquire, error_text, put_rank_manifest
from clip_train.checkpoint.config import CheckpointConfig, preflight
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.process import WriterProcess
from clip_train.checkpoint.restore import Log, Resumed, Stores, is_shared, select
from clip_train.checkpoint.retention import ORPHAN_SECONDS, WriterSettings, check_space
from clip_train.checkpoint.snapshot import FilePlan, SharedMemory, plan_file
from clip_train.checkpoint.writer import Event, Message
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage
from clip_train.task import Fragment

logger = logging.getLogger(__name__)


class Saved(Enum):
    """The result of `CheckpointManager.save`; the same on all ranks."""

    COMMITTED = auto()  # in the main store: the remote one if there is one, else the disk
    UNDER_WAY = auto()  # the snapshot is taken; `poll` reports the rest
    FAILED = auto()  # rank 0 has logged why, and training may continue


class LastGood(NamedTuple):
    """The checkpoint that a failing run can go back to."""

    step: int
    path: str


class CheckpointManager:
    """Save and resume one run's checkpoints. All ranks make the same calls in the same order,
    including the constructor.

    Call `resume`, then `begin` (before the first `save`), `poll` at every step, `close` at the end.

    Args:
        folder: `<run.dir>/checkpoints`.
        log, warn: called on rank 0 with messages for the user; `warn` gets failures.
        clock: seconds. It decides when a save is due, or has been deferred for too long.

    Attributes:
        last_good: the newest checkpoint that this process has committed, on the disk or in the
            store, or resumed from.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path | str,
        *,
        log: Log | None = None,
        warn: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
        orphan_seconds: float = ORPHAN_SECONDS,
    ) -> None:
        self.config = config
        self.folder = Path(folder).absolute()
        self.storage = LocalStorage(self.folder)
        self.remote: Storage | None = open_storage(config.remote) if config.remote else None
        self.last_good: LastGood | None = None
        # all ranks see `folder`; else only what is committed in the remote store counts
        self._shared = is_shared(self.storage, required=self.remote is None)
        log = log or logger.warning
        self._warn_here = warn or log  # on any rank
        self._log = log if dist.is_main() else logger.debug
        self._warn = self._warn_here if dist.is_main() else logger.debug
        self._orphan_seconds = orphan_seconds
        self._clock = clock
        self._last_save_time = clock()  # or when a save was last reported as overdue
        self._last_save_step = -1
        self._next_clock_step = 0  # the step at which the clock is read next
        self._deferred: int | None = None  # the step whose save is due and has not begun
        self._protect: set[CommitRef] = set()  # this run's checkpoint that was resumed from
        self._writer_settings: WriterSettings | None = None  # once `begin` has taken a lease
        self._memory: SharedMemory | None = None
        self._writer: WriterProcess | None = None
        self._receiving = threading.RLock()  # `close` may come from another thread
        self._step = -1  # of the last snapshot, or resumed from
        self._snapshots = 0  # the number taken so far; it names the folder of each attempt
        self._pending: dict[int, SaveRequest] = {}  # by step: not yet committed or failed
        self._writing: SaveRequest | None = None  # the save that still needs the memory
        self._committed_step: int | None = None  # rank 0: the last one in the main store
        self._failures = 0  # rank 0: failed saves in a row
        self._fatal: str | None = None  # why the run must stop
        self._scores: dict[CommitRef, float] = {}  # rank 0: the evaluations of `keep_best`
        self._numbers: dict[str, float] = {}  # for the next step's record
        self._deadline: float | None = None  # of the last save that waits, in `time.monotonic`

    # -- begin

    def preflight(self) -> None:
        """Check that the remote store can be used. UserError, CheckpointError: what to fix.

        A run does not start while its store is down, even if the disk has checkpoints.
        """
        if self.remote is not None:
            for warning in dist.on_main(partial(preflight, self.remote)):
                self._warn(warning)

    def resume(self) -> Resumed | None:
        """The checkpoint chosen by `checkpoint.resume`, the same on all ranks; None: start fresh.

        CheckpointError if a checkpoint is required and none is complete, or if one cannot be read.
        UserError for a path without checkpoints.
        """
        stores = Stores(self.storage if self._shared else None, self.remote)
        resumed = select(self.config.resume, stores, self.storage, self._log)
        if resumed is not None:
            self.last_good = LastGood(resumed.step, resumed.path)
            best = resumed.state.get("keep_best", {})
            if best.get("metric") == self.config.keep_best:
                for name, value in best.get("values", {}).items():
                    self._scores[CommitRef.parse(name) or CommitRef(0, 0)] = value
        if resumed is not None and resumed.from_this_run:
            self._protect = {resumed.ref}
            if self.remote is None or resumed.in_remote:
                self._step = resumed.step
                self._committed_step = resumed.step
        return resumed

    def begin(self) -> None:
        """Take the lease away from any older process of this run, and start the checkpoint writer.

        Once, after `resume`; `save` does it if need be. CheckpointError.
        """
        if self._writer_settings is not None:
            return
        if self.remote is None:
            take_lease = partial(acquire, self.storage)
        else:
            take_lease = partial(acquire, self.remote, [self.storage])
        lease = dist.on_main(take_lease)
        self._memory = SharedMemory()
        self._writer_settings = WriterSettings(
            self.config,
            lease,
            str(self.folder),
            self._shared,
            self._protect,
            self._orphan_seconds,
        )
        self._writer = dist.agreed(WriterProcess, self._writer_settings, self._memory.fd)

    def prepare(
        self,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        shared_tensors: dict[str, Tensor] | None = None,
    ) -> None:
        """Allocate the memory that `save` will need, while training continues.

        Called on this rank alone, after `begin` and the first step.
        """
        if self._memory is not None:
            plan = plan_file(dist.rank(), fragments, rank_tensors, shared_tensors)
            self._memory.reserve(plan.num_bytes, pin=plan.on_gpu)

    # -- save

    def due(self, step: int, *, evaluates: bool = False) -> bool:
        """Whether to save after `step` (counted from 1); collective, once per step.

        evaluates: an evaluation follows. The step is saved before it, because the evaluation may
        take longer than a preempted job has left.

        While a disk is still writing the previous snapshot, a due save is deferred. Being deferred
        for longer than `checkpoint.save_timeout_minutes` is a failure.
        """
        self._poll()
        every, minutes = self.config.every_steps, self.config.every_minutes
        is_due = self._deferred is not None or evaluates
        is_due |= every is not None and step > 0 and step % every == 0
        if minutes is not None and step >= self._next_clock_step:
            is_due |= self._is_time_to_save(step, minutes)
        if not is_due:
            return False
        if not dist.any_rank(self._writing is not None):
            return True
        if self._deferred is None:
            self._deferred = step
            self._log(f"checkpoint of step {step} is deferred: {self._still_writing()}")
        limit = self.config.save_timeout_minutes
        if dist.is_main() and self._clock() - self._last_save_time > 60 * limit:
            self._last_save_time = self._clock()
            self._fail(self._deferred, f"for {limit:g} minutes {self._still_writing()}")
        return False

    def _still_writing(self) -> str:
        return f"step {self._step} is still being written to {self.folder}"

    def _is_time_to_save(self, step: int, minutes: float) -> bool:
        """Whether a timed save is due, by rank 0's clock. Collective.

        Reading the clock costs a broadcast. So it is read next after half of the steps that are
        expected until the save.
        """
        if self._last_save_step < 0:
            self._last_save_step = step - 1
        passed = self._clock() - self._last_save_time
        left = 60 * minutes - passed
        steps_left = min(left * (step - self._last_save_step) / max(passed, 1e-9), 2e6)
        next_clock_step = step + max(1, int(steps_left / 2))
        is_due, self._next_clock_step = dist.broadcast_object((left <= 0, next_clock_step))
        return is_due

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        state: dict[str, Any],
        shared_tensors: dict[str, Tensor] | None = None,
        *,
        wait: bool = False,
    ) -> Saved:
        """Save the run after `step`: all ranks' fragments and tensors, and rank 0's `state`.

        shared_tensors: the same on all ranks; rank 0's are written. wait: return when the
        checkpoint is committed, or has failed, or after `checkpoint.grace_seconds`.

        If a previous snapshot is still being written, `save` waits for it. (`due` defers the save
        instead.) A step that is committed already is not saved again. With `wait`, a step whose
        save is under way is not saved again either.

        CheckpointError after `max_failed_saves` failures in a row, or when another process has
        taken over.
        """
        self.begin()
        self._poll()
        end = time.monotonic() + self.config.grace_seconds
        self._deadline = end if wait else None
        if self._step == step:
            known = (self._committed_step == step, step in self._pending)
            is_saved, under_way = dist.broadcast_object(known)
            # a stop request during an evaluation: its save has begun before
            if is_saved or (wait and under_way and self._finish(step, end)):
                return Saved.COMMITTED
            if dist.broadcast_object(time.monotonic() >= end):
                return Saved.FAILED
        if not self._wait_together(lambda: self._writing is not None, end):
            self._abandon(step, f"; {self._still_writing()}")
            return Saved.FAILED
        self._deferred = None
        self._last_save_time = self._clock()
        self._last_save_step = step
        self._next_clock_step = 0
        self._step = step
        self._snapshots += 1
        make_plan = partial(plan_file, dist.rank(), fragments, rank_tensors, shared_tensors)
        try:
            self._writing = dist.agreed(self._snapshot, step, make_plan, state)
        except Exception as e:  # anything may go wrong
            if not dist.is_agreed(e):
                raise
            self._fail(step, error_text(e))
            self._share()
            if self._fatal is not None:
                raise CheckpointError(self._fatal) from None
            return Saved.FAILED
        self._pending[step] = self._writing
        assert self._writer is not None
        self._writer.send(self._writing)
        if not wait:
            return Saved.UNDER_WAY
        return Saved.COMMITTED if self._finish(step, end) else Saved.FAILED

    def _snapshot(
        self, step: int, make_plan: Callable[[], FilePlan], state: dict[str, Any]
    ) -> SaveRequest:
        """Copy this rank's state to the shared memory. CheckpointError, or any other error."""
        assert self._memory is not None and self._writer_settings is not None
        if dist.is_main() and self._fatal is not None:
            raise CheckpointError(self._fatal)
        if self._writer is None:
            self._writer = WriterProcess(self._writer_settings, self._memory.fd)
        if dist.is_main() and self._scores:
            values = {ref.name: value for ref, value in self._scores.items()}
            state = {**state, "keep_best": {"metric": self.config.keep_best, "values": values}}
        plan = make_plan()
        num_files = dist.world_size() if self._shared else 1  # on this disk, of about equal size
        check_space(self.folder, num_files * plan.num_bytes)
        self._memory.reserve(plan.num_bytes, pin=plan.on_gpu).result()
        self._memory.fill(plan)
        epoch = self._writer_settings.lease.epoch
        return SaveRequest(
            step=step,
            prefix=manifest.attempt_prefix(epoch, step, self._snapshots),
            epoch=epoch,
            rank=dist.rank(),
            world_size=dist.world_size(),
            size=plan.num_bytes,
            fragments=plan.fragments,
            state=json.loads(json.dumps(state)) if dist.is_main() else None,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            scores=dict(self._scores) if dist.is_main() else None,
        )

    def note_metrics(self, step: int, values: dict[str, float]) -> None:
        """Take the evaluation's results at `step`, for `checkpoint.keep_best`."""
        if self.config.keep_best is None or self._writer_settings is None:
            return
        name = self.config.keep_best.removeprefix("-")
        if name not in values:
            known = ", ".join(sorted(values))
            self._log(f"checkpoint.keep_best ({name}): the evaluation has only {known}")
        elif math.isfinite(values[name]):
            self._scores[CommitRef(self._writer_settings.lease.epoch, step)] = values[name]

    # -- results of saves

    def poll(self) -> dict[str, float]:
        """At every step: collect the results of earlier saves without waiting. Returns numbers for
        the record.

        CheckpointError, on rank 0, after too many failures in a row, or when another process has
        taken over.
        """
        self._poll()
        if self._fatal is not None and dist.is_main():
            raise CheckpointError(self._fatal)
        numbers, self._numbers = self._numbers, {}
        return numbers

    def _poll(self, timeout: float = 0.0) -> None:
        """Take the checkpoint writer's messages; waits up to `timeout` seconds for the first.

        If the writer has died, its unfinished saves have failed, and the next save starts a new
        one.
        """
        with self._receiving:
            if self._writer is None:
                return
            for message in self._writer.receive(timeout):
                self._handle(message)
            how = self._writer.ended
            if how is None:
                return
            self._writer.close()
            self._writer = None
        self._warn_here(how if dist.is_main() else f"rank {dist.rank()}: {how}")
        if dist.rank() > 0:
            self._put_errors(CheckpointError(how))
        newest = max(self._pending, default=None)
        self._pending.clear()
        self._writing = None
        if newest is not None:
            self._fail(newest, how)

    def _put_errors(self, error: CheckpointError) -> None:
        """Rank 0's checkpoint writer waits for this rank's manifests: give it the error instead."""
        for request in self._pending.values():
            stores = [self.remote] if self.remote is not None else []
            if self._shared and request is self._writing:
                stores.append(self.storage)
            for store in stores:
                with contextlib.suppress(OSError):
                    put_rank_manifest(store, request, error)

    def _handle(self, message: Message) -> None:
        """Act on a message from the checkpoint writer."""
        step, text, seconds = message.step, message.text, message.seconds
        if message.event not in (Event.NOTE, Event.WARNING, Event.WRITTEN, Event.LOCAL):
            # an attempt has ended; ignore it if another one of this step is pending
            if step not in self._pending or self._pending[step].prefix != message.prefix:
                return
            del self._pending[step]
        match message.event:
            case Event.NOTE:
                self._log(text)
            case Event.WARNING:
                self._warn(text)
            case Event.WRITTEN:
                self._writing = None
            case Event.LOCAL:
                self._note_good(step, text)
            case Event.FAILED:
                self._fail(step, text)
            case Event.FENCED:
                self._fatal = text
            case Event.SUPERSEDED:
                self._warn(f"checkpoint of step {step} is not uploaded: {text}")
            case Event.COMMITTED if dist.is_main():  # elsewhere: this rank's part is there
                self._failures = 0
                self._committed_step = step
                self._note_good(step, text)
                self._numbers |= {
                    "checkpoint_step": step,
                    "checkpoint_seconds": seconds,
                    "checkpoint_failures": 0,
                }
                logger.info("checkpoint of step %d committed after %.1f s", step, seconds)

    def _note_good(self, step: int, path: str) -> None:
        if self.last_good is None or step >= self.last_good.step:
            self.last_good = LastGood(step, path)

    def _fail(self, step: int, why: str) -> None:
        """A save has failed. On rank 0, too many in a row are fatal."""
        if not dist.is_main() or self._fatal is not None:
            return
        self._failures += 1
        self._numbers["checkpoint_failures"] = self._failures
        text = f"checkpoint of step {step} failed ({self._failures} in a row): {why}"
        if self._failures >= self.config.max_failed_saves:
            self._fatal = f"{text}; {self._fallback()}"
        else:
            self._warn(f"{text}; training continues, {self._fallback()}")

    def _fallback(self) -> str:
        if self.last_good is None:
            return "no checkpoint is committed yet"
        return f"the last good one is {self.last_good.path}"

    # -- end

    def _wait_together(self, waiting: Callable[[], bool], end: float) -> bool:
        """Wait until `waiting()` is false on all ranks. Returns False if `end` comes first, by rank
        0's clock. Collective.

        No rank is in a collective for longer than a second.
        """
        while True:
            left = max(end - time.monotonic(), 0.0)
            self._poll(min(1.0, left) if waiting() else 0.0)
            is_late = dist.is_main() and time.monotonic() >= end
            any_waiting, expired = dist.max_scalars(waiting(), is_late)
            if not any_waiting or expired:
                return not any_waiting

    def _finish(self, step: int, end: float) -> bool:
        """Wait until rank 0 knows that `step` is committed or has failed, or until `end`.
        Collective.
        """
        if step in self._pending and self.remote is not None:
            left = max(end - time.monotonic(), 0.0)
            url = self.remote.url
            self._log(f"waiting up to {left:.0f} s for step {step} to be committed at {url}")
        in_time = self._wait_together(lambda: dist.is_main() and step in self._pending, end)
        self._share()
        if self._committed_step == step:
            self._pending.clear()  # older ones have been superseded
            return True
        if self._fatal is not None:
            raise CheckpointError(self._fatal)
        if not in_time:
            self._abandon(step)
        return False

    def _share(self) -> None:
        """Collective: share rank 0's knowledge of commits and failures with all ranks."""
        known = (self._committed_step, self.last_good, self._fatal)
        self._committed_step, self.last_good, self._fatal = dist.broadcast_object(known)

    def _abandon(self, step: int, why: str = "") -> None:
        self._pending.clear()
        text = f"the save of step {step} was abandoned after {self.config.grace_seconds:.0f} s{why}"
        self._warn(f"{text}; {self._fallback()}")

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until the newest save is committed, on the disk or in the store, or has failed. Then
        `last_good` is up to date.
        """
        end = time.monotonic() + min(seconds, self.config.grace_seconds)
        newest = max(self._pending, default=0)
        while newest in self._pending and time.monotonic() < end:
            if self.last_good is not None and self.last_good.step == newest:
                return
            self._poll(min(0.2, max(end - time.monotonic(), 0.0)))

    def close(self, seconds: float | None = None, *, free: bool = True) -> None:
        """The checkpoint writer finishes within `checkpoint.grace_seconds`, and within `seconds` if
        they are given, or is ended.

        free: also free the memory of the snapshots. False if the process ends next: another thread
        may still be using the memory.

        Time already spent waiting for the last save counts. Not collective. The log reports the
        result of an unfinished save.
        """
        with self._receiving:
            self._finish_writer(seconds)
            self._writer_settings = None
        if free and self._memory is not None:
            self._memory.close()
            self._memory = None

    def _finish_writer(self, seconds: float | None) -> None:
        if self._writer is None:
            return
        now = time.monotonic()
        end = self._deadline or now + self.config.grace_seconds
        if seconds is not None:
            end = min(end, now + seconds)
        step = max(self._pending, default=None)
        if step is not None:
            self._log(f"finishing the checkpoint of step {step} (up to {end - now:.0f} s)")
        self._writer.send(None)
        while self._writer.ended is None and time.monotonic() < end:
            left = max(end - time.monotonic(), 0.0)
            for message in self._writer.receive(min(1.0, left)):
                self._handle(message)
        if self._pending:
            self._warn(f"abandoned the checkpoint of step {max(self._pending)}; {self._fallback()}")
        self._writer.close()
        self._writer = None
