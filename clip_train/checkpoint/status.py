"""One rank's saves: when one is due, what has become of the last ones, and the process that writes them."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any, NamedTuple

from clip_train import dist
from clip_train.checkpoint.commit import SaveRequest, explain, put_rank_manifest
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.writer import FINISH, Metrics, Settings
from clip_train.errors import CheckpointError
from clip_train.storage.local import LocalStorage

logger = logging.getLogger(__name__)

MOST_STARTS = 3  # of checkpoint writers for one save
_EXIT_SECONDS = 10.0  # for a process whose socket is closed to be gone


class Schedule:
    """When a save is due: the same answers on all ranks, which ask together after every step.

    clock: seconds, of which rank 0's count.
    """

    def __init__(
        self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._clock = config, clock
        self._since = self._clock()  # seconds; of the last save
        self._since_step: int | None = None  # step at which the clock started
        self._next_look = 0  # step at which the clock is looked at again
        self.deferred: int | None = (
            None  # the step at which a save was due that is still to be taken
        )
        self._deferred_since = 0.0  # seconds

    def due(self, step: int) -> bool:
        """Whether to save after `step`, counted from 1."""
        every = self._config.every_steps
        by_steps = every is not None and step > 0 and step % every == 0
        return self.deferred is not None or by_steps or self._due_by_time(step)

    def defer(self, step: int) -> bool:
        """The save that is due at `step` cannot be taken yet; whether that is new."""
        if self.deferred is not None:
            return False
        self.deferred, self._deferred_since = step, self._clock()
        return True

    def overdue(self, seconds: float) -> bool:
        """Whether a save has been deferred for so long; asked again, since the last time that it had."""
        if self.deferred is None or self._clock() - self._deferred_since <= seconds:
            return False
        self._deferred_since = self._clock()
        return True

    def saved(self, step: int) -> None:
        """A save has been tried: the minutes begin anew, and nothing is deferred any more."""
        self._since, self._since_step, self._next_look = self._clock(), step, 0
        self.deferred = None

    def _due_by_time(self, step: int) -> bool:
        """Rank 0's clock decides. It also decides when to ask again, so that most steps cost no message."""
        if self._config.every_minutes is None:
            return False
        if self._since_step is None:
            self._since_step = step - 1
        if step < self._next_look:
            return False
        passed = self._clock() - self._since
        left = 60 * self._config.every_minutes - passed  # seconds
        # half of the steps that fit into the time left at the present rate, lest steps become slower
        steps_left = left * (step - self._since_step) / max(passed, 1e-9)
        due, self._next_look = dist.broadcast_object(
            (left <= 0, step + max(1, int(min(steps_left, 2e6) / 2)))
        )
        return due


class WriterProcess:
    """This rank's checkpoint writer: a child over a socketpair, so there is no name that another process could take.

    memory_fd: the snapshots' memory.
    """

    def __init__(self, settings: Settings, memory_fd: int) -> None:
        """OSError where no process can be started."""
        self._connection, theirs = Pipe()
        # the same import path as here, whatever it came from
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from clip_train.checkpoint.writer import main; "
            f"main({theirs.fileno()}, {memory_fd}, {os.getpid()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=(theirs.fileno(), memory_fd), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.ended: str | None = None  # how, once that is known
        self.send(settings)

    def send(self, message: Settings | SaveRequest | Metrics | str) -> None:
        """Where it has ended, `receive` finds out."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """What has come since; waits up to `timeout` seconds for the first. Sets `ended`."""
        messages: list[dict[str, Any]] = []
        try:
            while self.ended is None and self._connection.poll(0.0 if messages else timeout):
                messages.append(self._connection.recv())
        except (EOFError, OSError):
            self.ended = self._how()
        return messages

    def _how(self) -> str:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(
                _EXIT_SECONDS
            )  # its socket closes before it can be waited for
        how = (
            ""
            if status is None
            else f" (signal {-status})"
            if status < 0
            else f" (exit status {status})"
        )
        return f"the checkpoint writer has ended{how}"

    def close(self) -> None:
        """It ends, whatever it is doing."""
        self._connection.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a disk that hangs
                self._process.wait(1.0)


class LastGood(NamedTuple):
    """The checkpoint that a failing run can go back to."""

    step: int
    path: str


class Saves:
    """What this rank's checkpoint writer does, and what has become of it. Rank 0's saves decide for the run.

    log: takes what a user should read: on rank 0, but for checkpoint writers that end; warn: what speaks of failures.
    """

    def __init__(
        self, max_failed_saves: int, log: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._max_failed = max_failed_saves
        self._log, self._warn = log, warn
        self.last_good: LastGood | None = None
        self.saved: int | None = (
            None  # rank 0: the step last committed in the main store, or resumed from there
        )
        self.failures = 0  # rank 0: saves in a row
        self.fatal: str | None = None  # why the run must stop
        self.pending: dict[int, SaveRequest] = {}  # step -> submitted, not yet committed or failed
        self.writing: SaveRequest | None = None  # it still needs the memory
        self.numbers: dict[str, float] = {}  # for the next step's record
        self._metrics: dict[int, Metrics] = {}  # of rank 0, by step
        self._gave_up: tuple[int, str] | None = None  # not on rank 0: a step, and why
        self._starts = 0  # of checkpoint writers since a save was committed
        self._writer: WriterProcess | None = None
        self._settings: Settings | None = None
        self._memory_fd = -1

    # -- the checkpoint writer

    def start(self, settings: Settings, memory_fd: int) -> None:
        """CheckpointError where no process can be started."""
        self._settings, self._memory_fd = settings, memory_fd
        try:
            self._writer = WriterProcess(settings, memory_fd)
        except OSError as e:
            raise CheckpointError(
                f"no process to write checkpoints can be started: {explain(e)}"
            ) from e

    def submit(self, request: SaveRequest) -> None:
        self.pending[request.step] = self.writing = request
        if self._writer is not None:
            self._writer.send(request)
        else:
            self._start_anew("the last checkpoint writer has ended", new=request)

    def note_metrics(self, step: int, values: dict[str, float]) -> None:
        assert self._settings is not None
        self._metrics[step] = Metrics(CommitRef(self._settings.policy.epoch, step), values)
        self._send(self._metrics[step])

    def _send(self, message: SaveRequest | Metrics) -> None:
        if self._writer is not None:
            self._writer.send(message)

    def poll(self, timeout: float = 0.0) -> None:
        """The checkpoint writer's messages; waits up to `timeout` seconds for the first. One that has died is
        replaced."""
        if self._writer is None:
            return
        for message in self._writer.receive(timeout):
            self._receive(message)
        if (how := self._writer.ended) is not None:
            self._writer.close()
            self._writer = None
            self._starts += 1
            if self._starts <= MOST_STARTS:
                self._start_anew(how)
            else:
                self._give_up(f"{how}, {MOST_STARTS} times in a row")

    def _start_anew(self, how: str, new: SaveRequest | None = None) -> None:
        """Another one repeats what is pending: the same bytes to the same names, from the memory or from the disk."""
        assert self._settings is not None
        requests = [self.pending[step] for step in sorted(self.pending)]
        steps = " and ".join(f"step {request.step}" for request in requests)
        text = f"{how}; another one repeats {steps}" if steps else f"{how}; another one is started"
        self._warn(text if dist.is_main() else f"rank {dist.rank()}: {text}")
        try:
            self.start(self._settings, self._memory_fd)
        except CheckpointError as e:
            self._give_up(str(e))
            return
        for metrics in self._metrics.values():
            self._send(metrics)
        for request in requests:
            request.repeated = request is not new
            self._send(request)

    def _give_up(self, why: str) -> None:
        """Until the next save, which starts another one."""
        self._starts, self.writing = 0, None
        assert self._settings is not None
        for request in list(self.pending.values()):
            self.fail(request.step, why)
            self._gave_up = None if dist.is_main() else (request.step, why)
            with contextlib.suppress(
                OSError
            ):  # rank 0's checkpoint writer waits for this rank's manifest
                put_rank_manifest(
                    LocalStorage(self._settings.folder), request, CheckpointError(why)
                )

    def close(self, grace: float) -> None:
        """What is under way is finished, for up to `grace` seconds. Then the checkpoint writer ends."""
        if self._writer is None:
            return
        end = time.monotonic() + grace
        waiting = max(self.pending, default=None)
        if waiting is not None:
            self.report(f"finishing the checkpoint of step {waiting} (up to {grace:.0f} s)")
        self._writer.send(FINISH)
        while self._writer.ended is None and time.monotonic() < end:
            for message in self._writer.receive(min(1.0, max(end - time.monotonic(), 0.0))):
                self._receive(message)
        if waiting is not None and not self.pending and self.saved == waiting:
            self.report(f"step {waiting} is committed ({self.fallback()})")
        elif self.pending:
            self.warn(f"abandoned the checkpoint of step {max(self.pending)}; {self.fallback()}")
        self._writer.close()
        self._writer = None

    def wait_together(self, waiting: Callable[[], bool], end: float) -> bool:
        """Until no rank is `waiting`; False if `end` comes first, by rank 0's clock. Collective.

        No rank sits in a collective for longer than a second, and a rank that gives up fails the save at once.
        """
        while True:
            self.poll(min(1.0, max(end - time.monotonic(), 0.0)) if waiting() else 0.0)
            over = dist.is_main() and time.monotonic() >= end
            still, expired, failed = dist.max_scalars(waiting(), over, self._gave_up is not None)
            if failed:
                for rank, each in enumerate(dist.gather_objects(self._gave_up)):
                    if dist.is_main() and each is not None and each[0] in self.pending:
                        self.fail(each[0], f"rank {rank}: {each[1]}")
                self._gave_up = None
            elif not still or expired:
                return not still

    # -- what has become of it

    def _receive(self, message: dict[str, Any]) -> None:
        """One message of the checkpoint writer."""
        event = message["event"]
        if event == "note":
            self.report(message["text"])
            return
        step, prefix = message["step"], message["prefix"]
        if event == "written":
            if self.writing is not None and self.writing.prefix == prefix:
                self.writing.in_memory, self.writing = False, None
        elif event == "committed" and not message["final"]:
            self._good(message)
        elif step not in self.pending or self.pending[step].prefix != prefix:
            return  # of an earlier attempt that nobody waits for any more
        elif event == "committed":
            del self.pending[step]
            self._starts = 0
            self._committed(message)
        elif message["fatal"]:
            del self.pending[step]
            self.fatal = message["why"]
        elif message["superseded"]:
            del self.pending[step]
            self.warn(f"checkpoint of step {step} is not uploaded: {message['why']}")
        else:
            self.fail(step, message["why"])

    def _good(self, message: dict[str, Any]) -> None:
        if self.last_good is None or message["step"] >= self.last_good.step:
            self.last_good = LastGood(message["step"], message["where"])

    def _committed(self, message: dict[str, Any]) -> None:
        """On rank 0 it is a checkpoint; elsewhere this rank's part is where it belongs."""
        if not dist.is_main():
            return
        self.failures, self.saved = 0, message["step"]
        self._good(message)
        seconds, size = message["seconds"], message["bytes"]
        self.numbers |= {
            "checkpoint_step": message["step"],
            "checkpoint_seconds": seconds,
            "checkpoint_failures": 0,
        }
        logger.info(
            "checkpoint of step %d committed after %.1f s (%d bytes on rank 0)",
            message["step"],
            seconds,
            size,
        )

    def fail(self, step: int, why: str) -> None:
        """One save has failed. Too many in a row, on rank 0, are fatal; its checkpoint writer reads of the others'."""
        self.pending.pop(step, None)
        if not dist.is_main() or self.fatal is not None:
            return
        self.failures += 1
        self.numbers |= {"checkpoint_failures": self.failures}
        message = f"checkpoint of step {step} failed ({self.failures} in a row): {why}"
        if self.failures >= self._max_failed:
            self.fatal = f"{message}; {self.fallback()}"
        else:
            self.warn(f"{message}; training goes on, {self.fallback()}")

    def fallback(self) -> str:
        return (
            f"the last good one is {self.last_good.path}"
            if self.last_good
            else "there is no good one yet"
        )

    def report(self, text: str) -> None:
        if dist.is_main():
            self._log(text)

    def warn(self, text: str) -> None:
        if dist.is_main():
            self._warn(text)

    def share(self) -> None:
        """Collective: what rank 0 knows of commits and failures, on all ranks."""
        self.saved, self.last_good, self.fatal = dist.broadcast_object(
            (self.saved, self.last_good, self.fatal)
        )
