"""What the trainer calls: is a save due, save, what has become of it, resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import lease, manifest
from clip_train.checkpoint.commit import SaveRequest, explain
from clip_train.checkpoint.config import CheckpointConfig, preflight
from clip_train.checkpoint.restore import Log, Resumed, Selection, ranks_of_folder, select, writable
from clip_train.checkpoint.retention import check_space, free_bytes
from clip_train.checkpoint.snapshot import Plan, SharedMemory, plan_file
from clip_train.checkpoint.status import LastGood, Saves, Schedule
from clip_train.checkpoint.writer import Settings
from clip_train.errors import CheckpointError
from clip_train.protocols import Fragment
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and resumes one run's checkpoints. All ranks make the same calls in the same order.

    `resume`, then `begin` (before the first `save`), `poll` at every step, `close` at the end.

    folder: `<run.dir>/checkpoints`. log: takes what has become of saves, and damaged checkpoints, on rank 0.
    warn: takes what of it speaks of failures.
    clock: the seconds by which saves are due and have waited too long.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path | str,
        *,
        log: Log | None = None,
        warn: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.folder = Path(folder).absolute()
        self.storage = LocalStorage(self.folder)
        self.remote: Storage | None = open_storage(config.remote) if config.remote else None
        self._log = log or logger.warning
        self._schedule = Schedule(config, clock)
        self._saves = Saves(config.max_failed_saves, self._log, warn or self._log)
        self._shared = True  # all ranks see `folder`; without a remote store they must
        self._selection = Selection()
        self._settings: Settings | None = None  # once `begin` has taken a lease
        self._memory: SharedMemory | None = None
        self._snapshot = (
            -1,
            0,
        )  # the last submitted, or resumed from: step, how many of it; alike on all ranks
        self._grace_left: float | None = None  # seconds, of the last save if it was waited for

    @property
    def last_good(self) -> LastGood | None:
        """The newest checkpoint that this process has committed or resumed from."""
        return self._saves.last_good

    def due(self, step: int) -> bool:
        """Whether to save after `step` (counted from 1): the same answer on all ranks, once per step.

        A save that is due while the disk still takes the previous snapshot is deferred until it has it. That is no
        failure; but one that is deferred for `checkpoint.save_timeout_minutes` counts as one.
        """
        self._saves.poll()
        if not self._schedule.due(step):
            return False
        if not dist.any_rank(self._saves.writing is not None):
            return True
        self._defer(step)
        if dist.is_main() and self._schedule.overdue(60 * self.config.save_timeout_minutes):
            why = f"for {self.config.save_timeout_minutes:g} minutes {self._still_writing()}"
            self._saves.fail(self._schedule.deferred or step, why)
        return False

    def _defer(self, step: int) -> None:
        """To the first step at which no rank's last snapshot is being written any more: there is one memory for it."""
        if self._schedule.defer(step):
            self._saves.report(f"checkpoint of step {step} is deferred: {self._still_writing()}")

    def _still_writing(self) -> str:
        return f"step {self._snapshot[0]} is still being written to {self.folder}"

    # -- begin

    def preflight(self) -> None:
        """Before anything is built: can the remote store be used? UserError, CheckpointError: what to fix."""
        if (remote := self.remote) is not None:
            for warning in dist.on_main(lambda: preflight(remote)):
                self._saves.warn(warning)

    def refuse_second_writer(self) -> None:
        """UserError on all ranks where another process of this machine writes there; one that is about to end may."""
        if not self.config.takeover:
            dist.on_main(
                lambda: lease.refuse_second_writer(
                    [self.storage, *([self.remote] if self.remote else [])]
                )
            )

    def resume(self) -> Resumed | None:
        """What `checkpoint.resume` asks for; None for a fresh start. All ranks get the same checkpoint.

        CheckpointError when there must be one and none is whole, or where one cannot be read. UserError for
        a path that holds no checkpoints.
        """
        self._selection = select(self.config.resume, self.storage, self.remote, self._saves.report)
        resumed = self._selection.resumed
        if resumed is not None:
            if self._selection.saved:
                self._saves.saved, self._snapshot = resumed.step, (resumed.step, 0)
            self._saves.last_good = LastGood(resumed.step, resumed.path)
        return resumed

    def begin(self) -> None:
        """Take the right to write, which an older process of this run loses by it, and start the checkpoint writer.

        Once, after `resume`; `save` does it if need be. CheckpointError.
        """
        if self._settings is not None:
            return
        main = self.remote or self.storage
        others: list[Storage] = [self.storage] if self.remote is not None else []
        held = dist.on_main(
            lambda: writable(main, lambda: lease.acquire(main, others, resume=self.config.resume))
        )
        policy = self.config.policy(
            held, set(self._selection.protect), set(self._selection.damaged)
        )
        timeout = 60 * self.config.save_timeout_minutes
        self._shared = (
            self.remote is None or len(ranks_of_folder(self.storage)) == dist.world_size()
        )
        settings = Settings(str(self.folder), self.config.remote, self._shared, timeout, policy)
        self._memory = SharedMemory()
        fd = self._memory.fd
        dist.agreed(lambda: self._saves.start(settings, fd))
        self._settings = settings

    def prepare(
        self,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        shared_tensors: dict[str, Tensor] | None = None,
    ) -> None:
        """On this rank, after `begin` and the first step: what `save` will be given. Its memory is allocated and
        touched while training goes on, so that the first save costs no more than the others."""
        if self._memory is not None:
            self._memory.reserve(
                plan_file(dist.rank(), fragments, rank_tensors, shared_tensors), wait=False
            )

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

        Returns when the snapshot is taken; `poll` reports the rest. shared_tensors: the same on all ranks; rank
        0's are written. wait: return when it is committed, or after `checkpoint.grace_seconds`.

        True: it is on its way (wait: it is committed). False: it is not, on any rank; rank 0 has logged why and
        training may go on. CheckpointError after `max_failed_saves` failures in a row, or when another process
        has taken over. A step that is saved already is not again. Where a rank's memory is not free (`due` does
        not ask for a save then) it is deferred, or waited for.
        """
        self.begin()
        saves, self._grace_left = self._saves, None
        saves.poll()
        end = time.monotonic() + self.config.grace_seconds
        if self._snapshot[0] == step and dist.broadcast_object(
            saves.saved == step or step in saves.pending
        ):
            if not wait or self._finish(step, end):
                return True
            if not dist.broadcast_object(self._grace_left):
                return False  # else it has failed, and there is time to try again
        if wait and not self._wait_together(lambda: saves.writing is not None, end):
            self._abandon(step, f"; {self._still_writing()}")
            return False
        request: SaveRequest | None = None
        error: str | None = None
        free = 0
        try:
            free = free_bytes(self.folder)
            if saves.writing is None:
                request = self._take(
                    step, plan_file(dist.rank(), fragments, rank_tensors, shared_tensors), state
                )
                if not self._shared:
                    check_space(self.folder, request.size, free)
        except Exception as e:
            error = explain(e)
        try:
            busy = self._vote(request, error, free)
        except CheckpointError as e:
            self._schedule.saved(step)
            if dist.is_main():
                saves.fail(step, str(e))
            saves.share()
            if saves.fatal is not None:
                raise CheckpointError(saves.fatal) from e
            return False
        if busy:
            self._defer(step)
            return False
        if self._schedule.deferred is not None:
            saves.numbers["checkpoint_late_steps"] = step - self._schedule.deferred
        self._schedule.saved(step)
        assert request is not None
        self._snapshot = (step, self._snapshot_number(step))
        saves.submit(request)
        return not wait or self._finish(step, end)

    def _snapshot_number(self, step: int) -> int:
        """Of snapshots of this step: an attempt's folder is never written with other bytes."""
        return self._snapshot[1] + 1 if self._snapshot[0] == step else 1

    def _take(self, step: int, plan: Plan, state: dict[str, Any]) -> SaveRequest:
        """The copy. Anything may go wrong."""
        assert self._memory is not None and self._settings is not None
        rank, epoch = dist.rank(), self._settings.policy.epoch
        if rank == 0 and self._saves.fatal is not None:
            raise CheckpointError(self._saves.fatal)
        encoded = manifest.encode_state(state) if rank == 0 else None
        self._memory.reserve(plan)
        self._memory.fill(plan)
        return SaveRequest(
            step=step,
            prefix=manifest.attempt_prefix(epoch, step, self._snapshot_number(step)),
            epoch=epoch,
            rank=rank,
            world_size=dist.world_size(),
            size=plan.num_bytes,
            fragments=plan.fragments,
            state=encoded,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def _vote(self, request: SaveRequest | None, error: str | None, free: int) -> bool:
        """Collective: whether a rank is busy with its last snapshot. CheckpointError, on all, where one cannot save.

        What is sent has the same size for any number of ranks. free: bytes on this rank's disk.
        """
        failed, busy, least = dist.max_scalars(
            error is not None, self._saves.writing is not None, -free
        )
        (total,) = dist.sum_scalars(request.size if request is not None else 0)
        if failed:
            everyone = enumerate(dist.gather_objects(error))
            raise CheckpointError(
                "; ".join([f"rank {rank}: {each}" for rank, each in everyone if each][:3])
            )
        if not busy and self._shared:
            check_space(self.folder, int(total), int(-least))
        return bool(busy)

    def note_metrics(self, step: int, values: dict[str, float]) -> None:
        """The evaluation's results at `step`, for `checkpoint.keep_best`."""
        if self.config.keep_best is None or not dist.is_main() or self._settings is None:
            return
        name = self.config.keep_best.removeprefix("-")
        if name not in values:
            self._log(
                f"checkpoint.keep_best ({name}): no such number; the evaluation has {', '.join(sorted(values))}"
            )
        else:
            self._saves.note_metrics(step, {name: values[name]})

    def poll(self) -> dict[str, float]:
        """At every step: what has become of earlier saves, without waiting; numbers for the step's record.

        CheckpointError, on rank 0, after too many failures in a row, or when another process has taken over.
        """
        self._saves.poll()
        if self._saves.fatal is not None and dist.is_main():
            raise CheckpointError(self._saves.fatal)
        numbers, self._saves.numbers = self._saves.numbers, {}
        return numbers

    # -- end

    def _wait_together(self, waiting: Callable[[], bool], end: float) -> bool:
        in_time = self._saves.wait_together(waiting, end)
        self._grace_left = max(end - time.monotonic(), 0.0)
        return in_time

    def _finish(self, step: int, end: float) -> bool:
        """Wait until `step` is committed or has failed, which rank 0 learns first, or until `end`. Collective."""
        saves = self._saves
        if step in saves.pending and self.remote is not None:
            left = max(end - time.monotonic(), 0.0)
            saves.report(
                f"waiting up to {left:.0f} s for step {step} to be committed at {self.remote.url}"
            )
        in_time = self._wait_together(lambda: dist.is_main() and step in saves.pending, end)
        saves.share()
        if saves.saved == step:
            saves.pending.clear()  # what is older has been superseded
            return True
        if saves.fatal is not None:
            raise CheckpointError(saves.fatal)
        if not in_time:
            self._abandon(step)
        return False

    def _abandon(self, step: int, why: str = "") -> None:
        self._grace_left = 0.0
        seconds, saves = self.config.grace_seconds, self._saves
        saves.pending.clear()
        saves.warn(
            f"the save of step {step} was abandoned after {seconds:.0f} s{why}; {saves.fallback()}"
        )

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until the newest save is committed somewhere or has failed, so that `last_good` is up to date."""
        end = time.monotonic() + min(seconds, self.config.grace_seconds)
        newest = max(self._saves.pending, default=0)
        while newest in self._saves.pending and time.monotonic() < end:
            if self.last_good is not None and self.last_good.step == newest:
                return
            self._saves.poll(min(0.2, max(end - time.monotonic(), 0.0)))

    def close(self) -> None:
        """The checkpoint writer finishes what is under way within `checkpoint.grace_seconds`, or abandons it, and the
        log has which. What a last save has waited counts. Every rank for itself: nothing here waits for another one.
        """
        grace = self.config.grace_seconds
        self._saves.close(grace if self._grace_left is None else self._grace_left)
        if self._memory is not None:
            self._memory.close()
        self._memory, self._settings = None, None
