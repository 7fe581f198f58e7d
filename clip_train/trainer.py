"""The loop: a batch, a step, a record; and at step boundaries a checkpoint, an evaluation, an end.

It carries state between siblings that do not know each other: the loader's cursors into the checkpoint,
the engine's numbers into the metrics. Everything that can end a run is agreed on by all ranks here.
"""

from __future__ import annotations

import enum
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from clip_train import dist
from clip_train.batch import BatchPlan
from clip_train.checkpoint.manager import CheckpointManager, Resumed
from clip_train.contrastive import ContrastiveLoss, StatefulLoss
from clip_train.contrastive.rng import RngState
from clip_train.errors import DataError, DivergedError, Preempted, RemoteRankError
from clip_train.metrics import (
    ProgressLine,
    Sinks,
    StepRecord,
    StepTimer,
    StepTimes,
    batch_digest,
    peak_memory_bytes,
)
from clip_train.protocols import Batch, Engine
from clip_train.step import StepResult, train_step


class StopRequest:
    """Set by SIGTERM or SIGINT; looked at by all ranks together at the next step boundary."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self) -> None:
        """Take over both signals. A second one of the same kind does what it always did: ends the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


class Boundary(enum.IntEnum):
    """What a rank has to say at a step boundary; the gravest of all ranks' words holds for all."""

    GO_ON = 0
    STOP = 1
    FAILED = 2


@dataclass
class Position:
    """How far the run is; part of every checkpoint."""

    step: int = 0  # optimizer steps taken
    samples: int = 0  # seen by all ranks together
    cursors: dict[int, dict[str, Any]] = field(default_factory=dict)  # lane -> position; this rank's lanes


@dataclass
class Trainer:
    """Everything a run needs, already built (see `launcher.train`). All ranks make the same calls."""

    engine: Engine
    contrastive: ContrastiveLoss
    batches: Iterable[Batch]  # endless; this rank's shares
    plan: BatchPlan
    steps: int
    learning_rate: Callable[[int], float]  # step, from 0 -> rate
    checkpoints: CheckpointManager
    sinks: Sinks
    progress: ProgressLine
    evaluate: Callable[[], dict[str, float]] | None = None
    evaluate_every: int | None = None
    digest: bool = False
    run_state: dict[str, Any] = field(default_factory=dict)  # what a resumed run compares itself with
    stop: StopRequest = field(default_factory=StopRequest)
    position: Position = field(default_factory=Position)
    bad_samples: Counter[str] = field(default_factory=Counter)

    def resume(self, resumed: Resumed) -> None:
        """Take weights, optimizer, random state and position from a checkpoint."""
        state = resumed.state
        self.engine.load_fragments(resumed.reader, state["engine"])
        self.position = Position(state["step"], state["samples"], state["cursors"])
        # the sum over ranks was saved: one rank takes it
        self.bad_samples = Counter(state["bad_samples"]) if dist.is_main() else Counter()
        if resumed.rank_tensors is not None:
            RngState.from_tensors(resumed.rank_tensors, self.engine.device).restore()
        if isinstance(self.contrastive, StatefulLoss):
            self.contrastive.load_state_tensors(resumed.reader.shared_tensors(), self.engine.device)

    def run(self) -> dict[str, float]:
        """Train to the last step; returns the last evaluation's numbers (none: empty).

        Raises Preempted after a committed checkpoint, DivergedError, DataError, CheckpointError; on all ranks.
        """
        batches = iter(self.batches)
        timer = StepTimer()
        evaluated: dict[str, float] = {}
        while self.position.step < self.steps:
            with timer.data_wait():
                batch = self._next_batch(batches)
            if batch is None:
                self._end_preempted()
            else:
                evaluated = self._step(batch, timer)
        self._save()
        return evaluated

    def _next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch on the device; None if any rank was asked to stop. An error on one rank ends all."""
        error: Exception | None = None
        batch: Batch | None = None
        try:
            batch = next(batches).to(self.engine.device)
        except StopIteration:
            error = DataError("the data has ended, although it should go round")
        except Exception as e:
            error = e
        word = Boundary.FAILED if error else Boundary.STOP if self.stop.reason else Boundary.GO_ON
        agreed = dist.max_scalar(word)
        if error is not None:
            raise error
        if agreed == Boundary.FAILED:
            raise RemoteRankError("another rank could not read its data")
        return None if agreed == Boundary.STOP else batch

    def _step(self, batch: Batch, timer: StepTimer) -> dict[str, float]:
        """One step with all that follows from it; returns the evaluation's numbers, if there was one."""
        lr = self.learning_rate(self.position.step)
        try:
            result = train_step(
                self.engine,
                batch,
                self.contrastive,
                micro_size=self.plan.micro_size,
                kept_graphs=self.plan.kept_graphs,
                lr=lr,
            )
        except DivergedError as e:
            good = self.checkpoints.last_good
            where = (
                f"the last good checkpoint is that of step {good.step} ({good.path})" if good else "no checkpoint yet"
            )
            raise DivergedError(
                f"step {self.position.step + 1}: {e}; {where}. Lower optim.lr or optim.grad_clip_norm, "
                "or raise schedule.warmup_steps, and run again"
            ) from None
        position = self.position
        position.step += 1
        position.samples += self.plan.global_size
        position.cursors.update(batch.cursors)
        self.bad_samples.update(batch.bad_samples)
        self._record(result, lr, timer.finish(), batch)
        if self.checkpoints.due(position.step):
            self._save()
            timer.restart()
        last = position.step == self.steps
        if self.evaluate is not None and (last or (self.evaluate_every and position.step % self.evaluate_every == 0)):
            evaluated = self.evaluate()
            self.sinks.write({"step": position.step, **evaluated}, "eval")
            told = "  ".join(f"{name} {value:.4g}" for name, value in evaluated.items())
            self.progress.message(f"step {position.step}: {told}")
            timer.restart()
            return evaluated
        return {}

    def _record(self, result: StepResult, lr: float, times: StepTimes, batch: Batch) -> None:
        digest = None
        if self.digest:
            digest = batch_digest(key for keys in dist.gather_objects(batch.keys) for key in keys)
        record = StepRecord(
            step=self.position.step,
            samples=self.position.samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            logit_scale=result.logit_scale,
            lr=lr,
            samples_per_second=self.plan.global_size / times.step,
            step_seconds=times.step,
            data_wait_seconds=times.data_wait,
            micro_size=self.plan.micro_size,
            accum_steps=self.plan.accum_steps,
            kept_graphs=self.plan.kept_graphs,
            peak_memory_bytes=peak_memory_bytes(self.engine.device),
            batch_digest=digest,
        ).to_dict()
        record |= result.extra
        self.sinks.write(record)
        self.progress.update(record)

    def _save(self) -> bool:
        everyone = dist.gather_objects((self.position.cursors, dict(self.bad_samples)))
        cursors = {lane: cursor for share, _ in everyone for lane, cursor in share.items()}
        bad_samples = sum((Counter(counts) for _, counts in everyone), Counter[str]())
        state = {
            **self.run_state,
            "step": self.position.step,
            "samples": self.position.samples,
            "cursors": cursors,
            "bad_samples": dict(bad_samples),
            "engine": self.engine.extra_state(),
        }
        rng = RngState.capture(self.engine.device).tensors()
        shared = self.contrastive.state_tensors() if isinstance(self.contrastive, StatefulLoss) else None
        return self.checkpoints.save(self.position.step, self.engine.state_fragments(), rng, state, shared)

    def _end_preempted(self) -> None:
        reasons = dict.fromkeys(r for r in dist.gather_objects(self.stop.reason) if r is not None)
        saved = self.position.step == 0 or self._save()
        good = self.checkpoints.last_good
        where = f"step {good.step} is committed ({good.path})" if good else "nothing was trained yet"
        told = "" if saved else "; the save at the end FAILED, see above"
        raise Preempted(
            f"stopped by {', '.join(reasons)} after step {self.position.step}: {where}{told}; "
            "run the same line to go on"
        )
