"""This rank's checkpoint writer, as its rank sees it."""

import contextlib
import os
import subprocess
import sys
from multiprocessing import Pipe

from clip_train.checkpoint.commit import SaveRequest, error_text
from clip_train.checkpoint.retention import WriterSettings
from clip_train.checkpoint.writer import Message
from clip_train.errors import CheckpointError

_EXIT_SECONDS = 10.0  # to wait until a process whose socket is closed has ended


class WriterProcess:
    """This rank's checkpoint writer: a child process, connected by a socketpair.

    memory_fd: the file descriptor of the snapshots' memory.
    """

    def __init__(self, settings: WriterSettings, memory_fd: int) -> None:
        """CheckpointError if no process can be started."""
        try:
            self._connection, child_end = Pipe()
            # the child imports from the same paths as this process
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                "from clip_train.checkpoint.writer import main; "
                f"main({child_end.fileno()}, {memory_fd}, {os.getpid()})"
            )
            with child_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=(child_end.fileno(), memory_fd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        except OSError as e:
            raise CheckpointError(f"no checkpoint writer can be started: {error_text(e)}") from e
        self.ended: str | None = None  # how the process has ended, once that is known
        self.send(settings)

    def send(self, message: WriterSettings | SaveRequest | None) -> None:
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
                # the socket closes before the exit status is known
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
