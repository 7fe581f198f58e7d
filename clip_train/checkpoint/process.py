"""This rank's checkpoint writer, and when a save is due."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe

from clip_train import dist
from clip_train.checkpoint.commit import SaveRequest, explain
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.retention import Policy
from clip_train.checkpoint.writer import Message
from clip_train.errors import CheckpointError

_EXIT_SECONDS = 10.0  # for a process whose socket is closed to be gone


class Schedule:
    """When a save is due. The ranks ask together after every step and get the same answer.

    clock: seconds; rank 0's decides.
    """

    def __init__(
        self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._clock = config, clock
        self._since, self._since_step = clock(), -1  # of the last save; -1: no step yet
        self._next_look = 0  # the step at which the clock is read again
        self.deferred: int | None = None  # the step whose save could not be taken yet

    def due(self, step: int) -> bool:
        """Whether to save after `step`, counted from 1."""
        every = self._config.every_steps
        by_steps = every is not None and step > 0 and step % every == 0
        return self.deferred is not None or by_steps or self._due_by_time(step)

    def overdue(self) -> bool:
        """Whether a deferred save has waited for `save_timeout_minutes`. If so, the time starts
        again.
        """
        late = self._clock() - self._since > 60 * self._config.save_timeout_minutes
        if late:
            self._since = self._clock()
        return late

    def saved(self, step: int) -> None:
        """Called after an attempt to save: the minutes start again, and nothing is deferred any
        more."""
        self._since, self._since_step, self._next_look = self._clock(), step, 0
        self.deferred = None

    def _due_by_time(self, step: int) -> bool:
        """Rank 0's clock decides this, and when the ranks ask again, so most steps need no
        message."""
        if self._config.every_minutes is None or step < self._next_look:
            return False
        if self._since_step < 0:
            self._since_step = step - 1
        passed = self._clock() - self._since
        left = 60 * self._config.every_minutes - passed  # seconds
        # half of the steps that fit into the time left at the present rate, as steps may get faster
        steps_left = min(left * (step - self._since_step) / max(passed, 1e-9), 2e6)
        look = (left <= 0, step + max(1, int(steps_left / 2)))
        due, self._next_look = dist.broadcast_object(look)
        return due


class WriterProcess:
    """This rank's checkpoint writer: a child over a socketpair, which has no name to be taken.

    memory_fd: the memory of the snapshots.
    """

    def __init__(self, policy: Policy, memory_fd: int) -> None:
        """CheckpointError if no process can be started."""
        try:
            self._connection, theirs = Pipe()
            # the same import path as here, wherever it comes from
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                "from clip_train.checkpoint.writer import main; "
                f"main({theirs.fileno()}, {memory_fd}, {os.getpid()})"
            )
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=(theirs.fileno(), memory_fd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        except OSError as e:
            raise CheckpointError(f"no checkpoint writer can be started: {explain(e)}") from e
        self.ended: str | None = None  # how, once that is known
        self.send(policy)

    def send(self, message: Policy | SaveRequest | None) -> None:
        """A save, or None to finish. If the process has ended, `receive` finds out."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self, timeout: float = 0.0) -> list[Message]:
        """All messages; waits up to `timeout` seconds for the first. Sets `ended`."""
        messages: list[Message] = []
        try:
            while self.ended is None and self._connection.poll(0.0 if messages else timeout):
                messages.append(self._connection.recv())
        except (EOFError, OSError):
            self.ended = "the checkpoint writer has ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                # its socket closes before it can be waited for
                status = self._process.wait(_EXIT_SECONDS)
                self.ended += f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return messages

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._connection.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # blocked by a disk that hangs
                self._process.wait(1.0)
