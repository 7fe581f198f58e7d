"""The loop: a batch, a step, a record; and at step boundaries a checkpoint, an evaluation, an end.

It carries state between siblings that do not know each other: the engine's into the checkpoint, its numbers into
the metrics. Everything that can end a run is agreed on by all ranks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from clip_train import dist
from clip_train.batch import BatchPlan, BatchSizes
from clip_train.checkpoint.manager import CheckpointManager
from clip_train.checkpoint.restore import Resumed
from clip_train.contrastive.rng import restore_rng, rng_state
from clip_train.data.invalid import InvalidLog
from clip_train.engine import Engine
from clip_train.errors import CheckpointError, DataError, DivergedError, Preempted
from clip_train.metrics.meters import StepTimer, StepTimes, batch_digest, peak_memory_bytes
from clip_train.metrics.progress import ProgressLine, headline
from clip_train.metrics.sinks import Sinks
from clip_train.metrics.skipped import Skipped
from clip_train.protocols import Batch
from clip_train.recovery import recovering_step, release
from clip_train.step import StepResult
from clip_train.stop import StopRequest
from clip_train.task import Objective

EVALUATE_LATER = (
    "once the cause is mended, `clip-train evaluate RECIPE` evaluates the newest checkpoint; the next "
    "start of the run takes a changed `evaluate` section"
)


@dataclass
class Trainer:
    """Everything a run needs, already built (see `launcher.train`). All ranks make the same calls."""

    engine: Engine
    objective: Objective
    batches: Iterable[Batch]  # endless; this rank's shares, on the engine's device
    plan: BatchPlan  # of the largest global batch
    sizes: BatchSizes
    steps: int
    learning_rate: Callable[[int], float]  # step, from 0 -> rate
    checkpoints: CheckpointManager
    sinks: Sinks
    progress: ProgressLine
    evaluate: Callable[[], dict[str, float]] | None = None
    evaluate_every: int | None = None
    digest: bool = False
    log: Callable[[str], None] = print  # lines that a user must see, progress shown or not
    run_state: dict[str, Any] = field(
        default_factory=dict
    )  # what a resumed run compares itself with
    stop: StopRequest = field(default_factory=StopRequest)
    phase: Callable[[str], None] = lambda phase: (
        None
    )  # is given where the rank is: "step", "save", "evaluate"
    step: int = 0  # optimizer steps taken; part of every checkpoint, as `samples` is
    samples: int = 0  # seen by all ranks together
    epoch_at: Callable[[int], int] = lambda step: 0  # step -> whole epochs of the data before it
    bad_samples: InvalidLog = field(default_factory=InvalidLog)
    skipped: Skipped = field(default_factory=Skipped)  # what looked at the run and failed
    saves_prepared: bool = False  # there is memory for the first snapshot
    failure: Exception | None = (
        None  # of this rank alone; the others learn of it at the next boundary
    )

    def resume(self, resumed: Resumed) -> None:
        """Take weights, optimizer, random state and position from a checkpoint."""
        state = resumed.state
        self.engine.load_fragments(resumed.reader, state["engine"])
        self.step, self.samples = state["step"], state["samples"]
        self.skipped.step = self.step
        self.bad_samples = InvalidLog.load(state, self.epoch_at(state["step"]))
        if resumed.rank_tensors is not None:
            restore_rng(resumed.rank_tensors, self.engine.device)
        self.objective.load_state_dict(resumed.reader.shared_tensors(), self.engine.device)

    def run(self) -> dict[str, float]:
        """Train to the last step; returns the last evaluation's numbers (none: empty).

        Raises Preempted after a committed checkpoint, DivergedError, DataError, CheckpointError; on all ranks.
        """
        batches = iter(self.batches)
        timer = StepTimer()
        while self.step < self.steps:
            self.phase("step")
            with timer.data_wait():
                batch = self._next_batch(batches)
            if batch is None:
                self._end_preempted()
            else:
                self._step(batch, timer)
        if not self._save(
            wait=True
        ):  # before the evaluation: a mistake in its inputs must not cost the last steps
            raise CheckpointError(
                f"all {self.steps} steps are trained, but the last save failed (see above); run the same line again"
            )
        evaluated = self._evaluate()
        dist.raise_agreed(self.failure)  # of the last records, which no boundary follows
        return evaluated

    def _next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch; None if any rank was asked to stop. An error on one rank ends all."""
        batch: Batch | None = None
        if self.failure is None:
            try:
                batch = next(batches)
            except StopIteration:
                self.failure = DataError("the data has ended, although it should go round")
            except Exception as e:
                self.failure = e
        failed, stopped = dist.max_scalars(self.failure is not None, self.stop.reason is not None)
        if failed:
            self._sum_invalid()
            dist.raise_agreed(self.failure)
        return None if stopped else batch

    def _step(self, batch: Batch, timer: StepTimer) -> None:
        """One step with all that follows from it."""
        lr = self.learning_rate(self.step)
        plan = self.plan.at(self.sizes.at(self.step))
        try:
            result, fitting = recovering_step(
                self.engine, batch, self.objective, plan, lr=lr, log=self._log_of_this_step
            )
        except DivergedError as e:
            self.checkpoints.settle()
            good = self.checkpoints.last_good
            where = (
                f"the last good checkpoint is that of step {good.step} ({good.path})"
                if good
                else "no checkpoint yet"
            )
            raise DivergedError(
                f"step {self.step + 1}: {e}; {where}. Lower optim.lr or optim.grad_clip_norm, "
                "or raise schedule.warmup_steps, and run again"
            ) from None
        if fitting is not plan:  # where memory has ended, and smaller from here on
            kept = min(self.plan.kept_graphs, fitting.kept_graphs)
            self.plan = replace(self.plan, micro_size=fitting.micro_size, kept_graphs=kept)
            plan = fitting
        self.step += 1
        self.skipped.step = self.step
        self.samples += plan.global_size
        self.bad_samples.add(batch.bad_samples, batch.bad_pictures)
        self._record(result, lr, plan, timer.finish(), batch)
        summary = self.bad_samples.reached(self.epoch_at(self.step), self.step)
        if summary is not None:
            self.progress.message(summary)
            self._report_invalid()
        if not self.saves_prepared:  # now that the optimizer has its state
            self.saves_prepared = True
            self._on_this_rank(
                lambda: self.checkpoints.prepare(self.engine.state_fragments(), *self._rank_state())
            )
        if self.step == self.steps:
            return  # `run` saves and evaluates at the end
        saves, evaluates = (
            self.checkpoints.due(self.step),
            self.step % (self.evaluate_every or self.steps) == 0,
        )
        if saves:
            self._save()
        if evaluates:
            self._evaluate()
        if saves or evaluates:
            timer.restart()

    def _log_of_this_step(self, message: str) -> None:
        if dist.is_main():
            self.log(f"step {self.step + 1}: {message}")

    def _evaluate(self) -> dict[str, float]:
        if self.evaluate is None:
            return {}
        self.phase("evaluate")
        step = self.step
        evaluated = self.skipped.attempt(
            "the evaluation", self.evaluate, remedy=EVALUATE_LATER, together=True
        )
        if evaluated is None:
            release()  # it may have run out of memory
            return {}
        self._on_this_rank(lambda: self.sinks.write({"step": step, **evaluated}, "eval"))
        self.progress.message(f"step {step}: {headline(evaluated)}")
        self._on_this_rank(lambda: self.checkpoints.note_metrics(step, evaluated))
        return evaluated

    def _on_this_rank(self, action: Callable[[], None]) -> None:
        """What one rank does without the others: it may fail, but must not leave them in a collective."""
        try:
            action()
        except Exception as e:
            self.failure = self.failure or e

    def _record(
        self, result: StepResult, lr: float, plan: BatchPlan, times: StepTimes, batch: Batch
    ) -> None:
        """One optimizer step, as `metrics.jsonl` has it."""
        record: dict[str, Any] = {
            "step": self.step,  # counted from 1
            "samples": self.samples,  # seen since the run began
            "loss": result.loss,  # of the global batch
            "grad_norm": result.grad_norm,  # global, before the clip
            "lr": lr,
            "samples_per_second": plan.global_size / times.step,  # over all ranks
            "step_seconds": times.step,  # waiting for data included
            "data_wait_seconds": times.data_wait,
            "micro_size": plan.micro_size,
            "accum_steps": plan.accum_steps,
            "kept_graphs": plan.kept_graphs,
            "peak_memory_bytes": peak_memory_bytes(self.engine.device),
        }
        if self.digest:
            record["batch_digest"] = batch_digest(
                key for keys in dist.gather_objects(batch.keys) for key in keys
            )
        record |= result.metrics
        self._on_this_rank(
            lambda: record.update(self.checkpoints.poll())
        )  # what became of earlier saves
        self._on_this_rank(lambda: self.sinks.write(record))
        self.progress.update(record)

    def _sum_invalid(self) -> None:
        """Collective."""
        self.bad_samples.sum()
        self._report_invalid()

    def _report_invalid(self) -> None:
        if self.bad_samples.total:
            record = {
                "step": self.step,
                **self.bad_samples.state(),
                "pictures": self.bad_samples.pictures,
            }
            self._on_this_rank(lambda: self.sinks.write(record, "invalid"))

    def _save(self, *, wait: bool = False) -> bool:
        self.phase("save")
        self._sum_invalid()
        state = {
            **self.run_state,
            "step": self.step,
            "samples": self.samples,
            **self.bad_samples.state(),
            "engine": self.engine.extra_state(),
        }
        rng, shared = self._rank_state()
        return self.checkpoints.save(
            self.step, self.engine.state_fragments(), rng, state, shared, wait=wait
        )

    def _rank_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a checkpoint holds beside the fragments: this rank's random state; the objective's, alike on all."""
        return rng_state(self.engine.device), self.objective.state_dict()

    def _end_preempted(self) -> None:
        reasons = ", ".join(
            dict.fromkeys(r for r in dist.gather_objects(self.stop.reason) if r is not None)
        )
        step = self.step
        if step == 0:
            removed = self._remove_stop_file()
            raise Preempted(
                f"stopped by {reasons} before the first step{removed}; run the same line to begin"
            )
        saved = self._save(wait=True)
        good = self.checkpoints.last_good
        committed = (
            f"step {good.step} is committed ({good.path})" if good else "nothing is committed"
        )
        if not saved and (
            good is None or good.step != step
        ):  # nor on the local disk, if not in the remote store
            raise CheckpointError(
                f"stopped by {reasons} after step {step}, and the save failed (see above); {committed}"
            )
        removed = self._remove_stop_file()
        raise Preempted(
            f"stopped by {reasons} after step {step}: {committed}{removed}; run the same line to go on"
        )

    def _remove_stop_file(self) -> str:
        """Collective."""
        return ", and the STOP file was removed" if dist.any_rank(self.stop.obey()) else ""
