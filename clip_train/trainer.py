"""The loop: a batch, a step, a record; then, if they are due, a checkpoint and an evaluation.

The trainer decides what happens between steps. An error of any part is raised as it is, on the rank
that has it: `launcher.runtime.outcome` ends the others. Code that only observes the run is a
`Callback`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from clip_train import dist
from clip_train.batch import BatchPlan, BatchSizes, shares
from clip_train.callbacks import Callback
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.checkpoint.restore import Resumed
from clip_train.data.loader import Prefetcher, StoppedWaiting
from clip_train.engines.base import Engine
from clip_train.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    EvaluationStopped,
    Preempted,
)
from clip_train.metrics.meters import peak_memory_bytes
from clip_train.metrics.skipped import Skipped
from clip_train.recovery import recovering_step, release
from clip_train.step import StepDiscarded, restore_rng, rng_state, with_equal_chunks
from clip_train.stop import StopRequest
from clip_train.task import Batch, Flags, Objective, StepResult

EVALUATE_LATER = (
    "after you fix the cause, `clip-train evaluate RECIPE` evaluates the newest checkpoint; the "
    "next start of the run takes a changed `evaluate` section"
)


@dataclass
class Trainer:
    """A run, assembled by `launcher.train`. All ranks make the same calls."""

    engine: Engine
    objective: Objective
    batches: Prefetcher  # this rank's shares without end, on the engine's device
    plan: BatchPlan  # of the largest global batch
    sizes: BatchSizes
    steps: int
    learning_rate: Callable[[int], float]  # step, from 0 -> rate
    checkpoints: CheckpointManager
    callbacks: Sequence[Callback]
    stop: StopRequest
    evaluate: Callable[[], dict[str, float]] | None = None  # collective
    evaluate_every: int | None = None  # steps; None: after the last one
    log: Callable[[str], None] = print  # for lines that appear even without a progress display
    # recipe, architecture, digests: saved in every checkpoint, and compared on a resume
    run_state: dict[str, Any] = field(default_factory=dict)
    # failures of observers (metrics, evaluations, reports), which do not end a run
    skipped: Skipped = field(default_factory=Skipped)
    step: int = 0  # optimizer steps taken; part of every checkpoint, as `samples` is
    samples: int = 0  # seen by all ranks together
    step_start: float = 0.0  # seconds of time.perf_counter()
    saves_prepared: bool = False  # memory for the first snapshot is allocated
    closed: bool = False
    closing: threading.Lock = field(default_factory=threading.Lock)  # held while `close` runs
    last: Batch | None = None  # the newest batch from `batches`
    starved: bool = False  # asked to stop while the next batch did not come
    # during an evaluation: the step before it is saved, or its save has begun
    saved_before_evaluation: bool = False

    def resume(self, resumed: Resumed, *, new_optimizer: bool = False) -> None:
        """Take weights, optimizer, random state and position from a checkpoint.

        new_optimizer: another one wrote it, and its state is left out.
        """
        state = resumed.state
        self.engine.load_fragments(resumed.reader, state["engine"], new_optimizer=new_optimizer)
        self.step, self.samples = state["step"], state["samples"]
        self.skipped.step = self.step
        if resumed.rank_tensors is not None:
            restore_rng(resumed.rank_tensors, self.engine.device)
        self.objective.load_state_dict(resumed.reader.tensors(), self.engine.device)
        for callback in self.callbacks:
            callback.resume(state)

    def run(self) -> dict[str, float]:
        """Train to the last step; returns the last evaluation's numbers (none: empty).

        Raises Preempted, on all ranks, after a committed checkpoint. Any other error is raised on
        the ranks that have it: DivergedError, DataError, CheckpointError, or what a callback
        raises. At the end the checkpoint must be in the remote store, if there is one. For a
        preemption the disk is enough.
        """
        batches = iter(self.batches)
        self.step_start = time.perf_counter()
        while self.step < self.steps:
            self.call("phase", "step")
            wait_start = time.perf_counter()
            batch = self._next_batch(batches)
            stop = self._step(batch, time.perf_counter() - wait_start)
            if stop and self.step < self.steps:
                self._end_preempted()
        # Save first: a mistake in the evaluation's inputs must not cost the last steps.
        if self._save(wait=True) is not Saved.COMMITTED:
            raise CheckpointError(
                f"all {self.steps} steps are trained, but the last save failed (see above); "
                f"{self.committed()}; run the same command again"
            )
        return self._evaluate(saved=True)

    def call(self, method: str, *args: Any) -> None:
        """Call `method` of every callback."""
        for callback in self.callbacks:
            getattr(callback, method)(*args)

    def close(
        self,
        error: BaseException | None = None,
        *,
        save_seconds: float | None = None,
        free: bool = True,
    ) -> None:
        """Finish the pending save within `checkpoint.grace_seconds`, then close everything else.

        error: why the run ends early; the callbacks get it. save_seconds: at most this long for
        the save. free: also free the memory of the snapshots. That waits for the GPU, which may wait
        for a rank that has failed: then it is False, and the process ends.

        Not collective. Another thread may call this while the main thread waits for the other
        ranks; the process must end then. A second call waits for the first and does nothing.
        Raises the first error of closing.
        """
        with self.closing:
            if self.closed:
                return
            self.closed = True
            actions: list[Callable[[], None]] = [
                partial(self.call, "phase", "end"),
                partial(self.checkpoints.close, save_seconds, free=free),
                partial(self.call, "phase", "close"),
            ]
            if error is not None:
                actions += [partial(callback.on_error, error) for callback in self.callbacks]
            actions += [callback.close for callback in self.callbacks]
            actions.append(self.batches.close)
            first_error: Exception | None = None
            for action in actions:
                try:
                    action()
                except Exception as e:
                    first_error = first_error or e
            if first_error is not None:
                raise first_error

    def _next_batch(self, batches: Iterator[Batch]) -> Batch:
        """The next batch.

        A rank that was asked to stop while its data does not come gets its previous batch again,
        because the other ranks wait for it in the step's collectives. Its flag then makes all ranks
        discard the step and stop.
        """
        is_first = self.last is None
        try:
            self.last = next(batches)
        except StopIteration:
            raise DataError("the data ended, although it should repeat") from None
        except StoppedWaiting:
            self.starved = True
        assert self.last is not None  # the first batch is always waited for
        if is_first and dist.any_rank(self.stop.asked()):  # the first step may compile for minutes
            self._end_preempted()
        if not self.starved:
            return self.last
        samples_by_rank = shares(self.sizes.at(self.step), dist.world_size())
        return self.last.repeated(samples_by_rank[dist.rank()], tuple(samples_by_rank))

    def _flags(self) -> Flags:
        return Flags(starved=self.starved, stop=self.stop.reason is not None)

    def _step(self, batch: Batch, waited: float) -> bool:
        """One step, then a save and an evaluation if they are due. waited: seconds for the batch.

        Returns True if any rank was asked to stop. `run` then saves."""
        lr = self.learning_rate(self.step)
        plan = self.plan.at(self.sizes.at(self.step))
        if plan.micro_tokens is not None:
            batch = with_equal_chunks(batch, plan.micro_tokens)
        try:
            result, next_plan = recovering_step(
                self.engine,
                batch,
                self.objective,
                plan,
                lr=lr,
                log=self._log_of_this_step,
                flags=self._flags,
            )
        except StepDiscarded:  # a rank was asked to stop while its data does not come
            self._end_preempted()
        except DivergedError as e:
            self.checkpoints.settle()  # a pending save may become the last good checkpoint
            good = self.checkpoints.last_good
            where = "no checkpoint yet"
            if good is not None:
                where = f"the last good checkpoint is that of step {good.step} ({good.path})"
            raise DivergedError(
                f"step {self.step + 1}: {e}; {where}. Lower optim.lr or optim.grad_clip_norm, "
                "or raise schedule.warmup_steps, and run again"
            ) from None
        if next_plan is not plan:  # out of memory: all later steps use the smaller micro-batches
            kept = min(self.plan.kept_graphs, next_plan.kept_graphs)
            self.plan = replace(
                self.plan,
                micro_size=next_plan.micro_size,
                micro_tokens=next_plan.micro_tokens,
                kept_graphs=kept,
            )
        self.step += 1
        self.skipped.step = self.step
        self.samples += next_plan.global_size
        record = self._record(result, lr, next_plan, waited)
        self.call("after_step", record, batch.names, batch.bad_samples)
        if not self.saves_prepared:  # after the first step, which creates the optimizer's state
            self.saves_prepared = True
            self.checkpoints.prepare(
                self.engine.state_fragments(),
                rng_state(self.engine.device),
                self.objective.state_dict(),
            )
        if result.flags.stop or self.step == self.steps:
            return result.flags.stop  # `run` saves and evaluates at the end
        evaluation_due = (
            self.evaluate is not None and self.step % (self.evaluate_every or self.steps) == 0
        )
        save_due = self.checkpoints.due(self.step, evaluates=evaluation_due)
        saved = save_due and self._save() is not Saved.FAILED
        if evaluation_due:
            self._evaluate(saved=saved)
            if dist.any_rank(self.stop.asked()):
                return True
        if save_due or evaluation_due:
            self.step_start = time.perf_counter()  # neither counts as time of the next step
        return False

    def _log_of_this_step(self, message: str) -> None:
        if dist.is_main():
            self.log(f"step {self.step + 1}: {message}")

    def _record(
        self, result: StepResult, lr: float, plan: BatchPlan, waited: float
    ) -> dict[str, Any]:
        """The line of `metrics.jsonl` for one optimizer step."""
        now = time.perf_counter()  # the loss was read, so the device has finished the step
        seconds = now - self.step_start
        self.step_start = now
        record: dict[str, Any] = {
            "step": self.step,  # counted from 1
            "samples": self.samples,  # seen since the run began
            "loss": result.loss,  # of the global batch
            "grad_norm": result.grad_norm,  # global, before the clip
            "lr": lr,
            "samples_per_second": plan.global_size / seconds,  # over all ranks
            "step_seconds": seconds,  # waiting for data included
            "data_wait_seconds": waited,
            "micro_size": plan.micro_size,
            "accum_steps": plan.accum_steps if plan.micro_tokens is None else result.accum_steps,
            "kept_graphs": plan.kept_graphs,
            "rounds": result.rounds,  # 2: exponentials underflowed, and the step was computed again
            "peak_memory_bytes": peak_memory_bytes(self.engine.device),
            **result.metrics,
        }
        # results of earlier saves; an error on rank 0 after too many failures
        record.update(self.checkpoints.poll())
        return record

    def _evaluate(self, *, saved: bool) -> dict[str, float]:
        """saved: this step is saved, or its save has begun. Preempted, on all ranks, if one of them
        is asked to stop meanwhile."""
        if self.evaluate is None:
            return {}
        self.saved_before_evaluation = saved
        self.call("phase", "evaluate")
        try:
            evaluated = self.skipped.attempt(
                "the evaluation", self.evaluate, remedy=EVALUATE_LATER, together=True
            )
        except EvaluationStopped:
            self._end_preempted()
        finally:
            self.saved_before_evaluation = False
        if evaluated is None:
            release()  # the evaluation may have run out of memory: free what it held
            return {}
        self.call("after_evaluate", {"step": self.step, **evaluated})
        self.checkpoints.note_metrics(self.step, evaluated)
        return evaluated

    def _save(self, *, wait: bool = False) -> Saved:
        self.call("phase", "save")
        state = {
            **self.run_state,
            "step": self.step,
            "samples": self.samples,
            "engine": self.engine.extra_state(),
        }
        self.call("before_save", state)
        return self.checkpoints.save(
            self.step,
            self.engine.state_fragments(),
            rng_state(self.engine.device),
            state,
            self.objective.state_dict(),  # the same on all ranks
            wait=wait,
        )

    def finish_save(self) -> str | None:
        """From another thread, during an evaluation that does not end: finish the save that was
        begun before it. The process must end then. The newest committed checkpoint, as part of a
        message; None if there was no such save, so this process has steps to lose."""
        if not self.saved_before_evaluation:
            return None
        self.checkpoints.close(free=False)
        return self.committed()

    def _end_preempted(self) -> NoReturn:
        """Collective. Save, then raise Preempted; CheckpointError if nothing could be committed."""
        all_reasons = dist.gather_objects(self.stop.reason)
        distinct_reasons = dict.fromkeys(reason for reason in all_reasons if reason is not None)
        reasons = ", ".join(distinct_reasons)
        step = self.step
        where = "before the first step"
        remedy = "run the same command to start"
        if step > 0:
            saved = self._save(wait=True)
            good = self.checkpoints.last_good
            # on a disk that all ranks see; enough for a stop, even if the upload failed
            on_disk = good is not None and good.step == step
            if saved is not Saved.COMMITTED and not on_disk:
                raise CheckpointError(
                    f"stopped by {reasons} after step {step}, and the save failed (see above); "
                    f"{self.committed()}"
                )
            where = f"after step {step}: {self.committed()}"
            remedy = "run the same command to continue"
            if self.checkpoints.config.resume == "never":
                remedy = "run again with checkpoint.resume=auto to continue"
        file_removed = dist.any_rank(self.stop.remove_file())
        removed = ", and the STOP file was removed" if file_removed else ""
        raise Preempted(f"stopped by {reasons} {where}{removed}; {remedy}")

    def committed(self) -> str:
        """The newest committed checkpoint, as part of a message."""
        good = self.checkpoints.last_good
        return f"step {good.step} is committed ({good.path})" if good else "nothing is committed"
