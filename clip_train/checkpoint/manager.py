"""What the trainer calls: is a save due, save, hear what became of it, resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint.beginning import all_ranks_see, policy_of, take_lease
from clip_train.checkpoint.choice import choose
from clip_train.checkpoint.client import SaverClient
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.handover import Content, HandOver, StillWritingError
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.lease import living_holder
from clip_train.checkpoint.opening import Resumed
from clip_train.checkpoint.order import Settings
from clip_train.checkpoint.outcomes import LastGood, Outcomes
from clip_train.checkpoint.preflight import preflight
from clip_train.checkpoint.retention import Policy
from clip_train.checkpoint.schedule import Schedule
from clip_train.errors import CheckpointError, UserError
from clip_train.protocols import Fragment
from clip_train.storage import LocalStorage, Storage, open_storage

logger = logging.getLogger(__name__)

ENDING_SECONDS = 10.0  # that the process of the last run on this machine may take to be gone


class CheckpointManager:
    """Saves and resumes one run's checkpoints. All ranks make the same calls in the same order.

    `resume`, then `begin` (before the first `save`), `poll` at every step, `close` at the end.

    folder: `<run.dir>/checkpoints`. log: told of what became of saves and of damaged checkpoints, on rank 0.
    clock: the seconds by which saves are due and have waited too long.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path | str,
        *,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.folder = Path(folder).absolute()
        self.storage = LocalStorage(self.folder)
        self.remote: Storage | None = open_storage(config.remote) if config.remote else None
        self._log = log or logger.warning
        self._schedule = Schedule(config, clock)
        self._outcomes = Outcomes(config.max_failed_saves, self._log)
        self._shared: bool | None = None  # all ranks see `folder`; None: not looked yet
        self._policy: Policy | None = None  # once `begin` has taken a lease
        self._saver: SaverClient | None = None
        self._hand_over: HandOver | None = None
        self._handed_over: int | None = None  # the last step given to the saver, or resumed from: on all ranks alike
        self._protect: set[CommitRef] = set()
        self._damaged: set[CommitRef] = set()
        self._abandoned = False  # the last save did not make it within the grace
        self._grace_left: float | None = None  # seconds, of the last save if it was waited for

    @property
    def last_good(self) -> LastGood | None:
        """The newest checkpoint that this process has committed or resumed from."""
        return self._outcomes.last_good

    def due(self, step: int) -> bool:
        """Whether to save after `step` (counted from 1): the same answer on all ranks, once per step.

        A save that is due while the disk still takes the previous snapshot is put off until it has it. That is no
        failure; but one that is put off for `checkpoint.save_timeout_minutes` counts as one.
        """
        self._hear(0.0)
        schedule, before = self._schedule, self._schedule.put_off
        due = schedule.due(step, busy=self._outcomes.writing is not None)
        if before is None:
            self._tell_put_off()
        if dist.is_main() and schedule.put_off_for() > 60 * self.config.save_timeout_minutes:
            schedule.wait_anew()
            why = f"for {self.config.save_timeout_minutes:g} minutes {self._still_writing()}"
            self._outcomes.count_failure([schedule.put_off or step], why)
        return due

    def _tell_put_off(self) -> None:
        if self._schedule.put_off is not None:
            step = self._schedule.put_off
            self._outcomes.say(f"checkpoint of step {step} is put off: {self._still_writing()}")

    def _still_writing(self) -> str:
        return f"step {self._handed_over} is still being written to {self.folder}"

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

    def resume(self) -> Resumed | None:
        """What `checkpoint.resume` asks for; None for a fresh start. All ranks get the same checkpoint.

        CheckpointError when there must be one and none is whole, or where one cannot be read. UserError for
        a path that holds no checkpoints.
        """
        choice = choose(
            self.config.resume, self.storage, self.remote, all_see_folder=self._all_see_folder, log=self._log
        )
        self._damaged = set(choice.damaged)
        resumed = choice.resumed
        if resumed is None:
            return None
        self._protect = set(choice.protect)
        if choice.saved:
            self._outcomes.saved = self._handed_over = resumed.step
        self._outcomes.last_good = LastGood(resumed.step, resumed.path)
        return resumed

    def refuse_second_writer(self) -> None:
        """UserError on all ranks where another process of this machine writes there; one that is about to end may."""

        def look() -> None:
            end = time.monotonic() + ENDING_SECONDS
            for storage in (self.storage, *([self.remote] if self.remote else [])):
                while (holder := living_holder(storage)) is not None:
                    if time.monotonic() > end:
                        raise UserError(
                            f"process {holder['pid']} on this machine has been writing to {storage.url} since "
                            f"{holder['since']}: wait for its end, stop it (kill {holder['pid']}), give this run "
                            "another run.dir and checkpoint.remote, or take over from its last checkpoint with "
                            "checkpoint.takeover=true"
                        )
                    time.sleep(0.2)

        if not self.config.takeover:
            dist.on_main(look)

    def begin(self) -> None:
        """Take the right to write, which an older process of this run loses by it, and start the saver.

        Once, after `resume`; `save` does it if need be. CheckpointError.
        """
        if self._policy is not None:
            return
        others: list[Storage] = [self.storage] if self.remote is not None else []
        held = take_lease(self.remote or self.storage, others, self.config.resume)
        self._policy = policy_of(self.config, held, self._protect, self._damaged)
        shared = self._all_see_folder()
        settings = Settings(
            str(self.folder), self.config.remote, shared, 60 * self.config.save_timeout_minutes, self._policy
        )
        self._saver = SaverClient(settings)
        self._hand_over = HandOver(self.folder, self._saver, held.epoch, self._outcomes, shared_disk=shared)

    def _all_see_folder(self) -> bool:
        """Without a remote store they must."""
        if self._shared is None:
            self._shared = self.remote is None or all_ranks_see(self.storage)
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
        has taken over. A step that is saved already is not again. Where a rank's buffer is not free (`due` does
        not ask for a save then) it is put off, or waited for.
        """
        self.begin()
        assert self._hand_over is not None
        self._hear(0.0)
        outcomes = self._outcomes
        outcomes.saver_died = self._abandoned = False
        self._grace_left = None
        end = time.monotonic() + self.config.grace_seconds
        if self._handed_over == step and dist.broadcast_object(outcomes.saved == step or step in outcomes.pending):
            if not wait or self._finish(step, end):
                return True
            if self._abandoned:
                return False  # else it has failed, and there is time to try again
        if wait and not self._buffers_free(step, end):
            return False
        try:
            self._hand_over.save(Content(step, fragments, rank_tensors, shared_tensors, state))
        except StillWritingError:
            self._schedule.postpone(step)
            self._tell_put_off()
            return False
        except CheckpointError as e:
            self._schedule.saved(step)
            return self._refused(step, e)
        if self._schedule.put_off is not None:
            outcomes.number("checkpoint_late_steps", step - self._schedule.put_off)
        self._schedule.saved(step)
        self._handed_over = step
        return not wait or self._finish(step, end) or self._once_more(step, end)

    def _refused(self, step: int, why: CheckpointError) -> bool:
        """It could not be handed over, on all ranks alike: a failure like any other."""
        if dist.is_main():
            self._outcomes.count_failure([step], str(why))
        self._outcomes.agree()
        if self._outcomes.fatal is not None:
            raise CheckpointError(self._outcomes.fatal) from why
        return False

    def _once_more(self, step: int, end: float) -> bool:
        """A save that is waited for is lost with a saver, but what it was to write is still in the buffers."""
        assert self._hand_over is not None
        if self._abandoned or not self._outcomes.saver_died or not self._buffers_free(step, end):
            return False
        try:
            self._hand_over.again()
        except CheckpointError as e:
            return self._refused(step, e)
        return self._finish(step, end)

    def poll(self) -> dict[str, float]:
        """At every step: what has become of earlier saves, without waiting; numbers for the step's record.

        CheckpointError, on rank 0, after too many failures in a row, or when another process has taken over.
        """
        self._hear(0.0)
        if self._outcomes.fatal is not None and dist.is_main():
            raise CheckpointError(self._outcomes.fatal)
        return self._outcomes.take_numbers()

    def note_metrics(self, step: int, values: dict[str, float]) -> None:
        """What the evaluation at `step` came to, for `checkpoint.keep_best`."""
        if self.config.keep_best is None or not dist.is_main() or self._hand_over is None or self._policy is None:
            return
        name = self.config.keep_best.removeprefix("-")
        if name not in values:
            self._log(f"checkpoint.keep_best ({name}): no such number; the evaluation has {', '.join(sorted(values))}")
        else:
            body = {"do": "metric", "epoch": self._policy.epoch, "step": step, "values": {name: values[name]}}
            self._hand_over.note(f"metric of step {step}", body)

    def _hear(self, timeout: float) -> None:
        if self._hand_over is not None:
            self._hand_over.hear(timeout)

    # -- end

    def _wait_together(self, waiting: Callable[[], bool], end: float) -> bool:
        assert self._hand_over is not None
        in_time = self._hand_over.wait_together(waiting, end)
        self._grace_left = max(end - time.monotonic(), 0.0)
        return in_time

    def _buffers_free(self, step: int, end: float) -> bool:
        """Wait until no rank's last snapshot is being written any more. Collective."""
        free = self._wait_together(lambda: self._outcomes.writing is not None, end)
        if not free:
            self._abandon(step, f"; {self._still_writing()}")
        return free

    def _finish(self, step: int, end: float) -> bool:
        """Wait until `step` is decided, which rank 0 hears first, or until `end`. Collective."""
        outcomes = self._outcomes
        if step in outcomes.pending and self.remote is not None:
            left = max(end - time.monotonic(), 0.0)
            outcomes.say(f"waiting up to {left:.0f} s for step {step} to be committed at {self.remote.url}")
        decided = self._wait_together(lambda: dist.is_main() and step in outcomes.pending, end)
        outcomes.agree()
        if outcomes.saved == step:
            outcomes.pending.clear()  # what is older has been overtaken
            return True
        if outcomes.fatal is not None:
            raise CheckpointError(outcomes.fatal)
        if not decided:
            self._abandon(step)
        return False

    def _abandon(self, step: int, why: str = "") -> None:
        self._abandoned = True
        seconds, outcomes = self.config.grace_seconds, self._outcomes
        outcomes.pending.clear()
        outcomes.say(f"the save of step {step} was abandoned after {seconds:.0f} s{why}; {outcomes.fallback()}")

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until the newest save is committed somewhere or has failed, so that `last_good` is up to date."""
        end = time.monotonic() + min(seconds, self.config.grace_seconds)
        newest = max(self._outcomes.pending, default=0)
        while newest in self._outcomes.pending and time.monotonic() < end:
            if self.last_good is not None and self.last_good.step == newest:
                return
            self._hear(min(0.2, max(end - time.monotonic(), 0.0)))

    def close(self) -> None:
        """The saver finishes what is under way within `checkpoint.grace_seconds`, or abandons it, and says which.

        What a last save has waited counts. Every rank for itself: nothing here waits for another one.
        """
        if self._saver is None or self._hand_over is None:
            return
        outcomes, grace = self._outcomes, self.config.grace_seconds
        grace = grace if self._grace_left is None else min(grace, self._grace_left)
        end = time.monotonic() + grace
        waiting = sorted(outcomes.pending)
        if waiting:
            outcomes.say(f"finishing the checkpoint of step {waiting[-1]} (up to {grace:.0f} s)")
        while (outcomes.pending or (outcomes.tidying and not self._abandoned)) and time.monotonic() < end:
            if not self._saver.connected:
                break
            self._hear(min(1.0, max(end - time.monotonic(), 0.0)))
        if waiting and not outcomes.pending and outcomes.saved == waiting[-1]:
            outcomes.say(f"step {waiting[-1]} is committed ({outcomes.fallback()})")
        elif outcomes.pending:
            outcomes.say(f"abandoned the checkpoint of step {max(outcomes.pending)}; {outcomes.fallback()}")
        self._saver.close()
        self._hand_over.close()
        self._saver, self._hand_over, self._policy = None, None, None
