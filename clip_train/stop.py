"""Stop requests: a signal, a time limit, a file. All set one flag. The ranks exchange it with the
gradients of the next step (`clip_train.task.Flags`).

No torch here: signals are caught before the heavy imports, during which they would otherwise kill
the rank.
"""

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

# TERM: preemption, scancel. USR1, USR2: a scheduler's warning before the time limit. XCPU: a limit on
# CPU seconds (`ulimit -t`, SGE's soft limit). INT: Ctrl-C. HUP: a closed terminal.
SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGINT,
    signal.SIGHUP,
)


class StopRequest:
    """The reason why this rank should stop, if any. The first reason stays."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.file: Path | None = None  # the STOP file that asked, on the rank that saw it
        self._arrived: int | None = None  # the reading end of a pipe of signal numbers
        self._before: dict[int, Any] = {}  # the handlers before `listen`
        self._wakeup_before = -1  # `signal.set_wakeup_fd` before

    def ask(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason

    def remove_file(self) -> bool:
        """Remove the STOP file that asked for the stop, so that the same command resumes. True if
        it was removed."""
        if self.file is None:
            return False
        with contextlib.suppress(OSError):
            self.file.unlink()
            return True
        return False

    def asked(self) -> bool:
        return self.look() is not None

    def listen(self) -> None:
        """Handle SIGNALS; HUP unless nohup ignores it.

        A second INT ends the process, as Ctrl-C always did. A second TERM or USR1 changes nothing:
        torchrun, Slurm and a batch script may each send one for the same event, and the save must
        survive them.
        """
        if self._arrived is None:
            self._arrived, write = os.pipe()
            os.set_blocking(self._arrived, False)
            os.set_blocking(write, False)
            self._wakeup_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, SIGNALS
        )  # whoever started this rank may have blocked them until now

    def look(self) -> str | None:
        """The reason, if there is one. Works in any thread, even while the main thread is in C (a
        rendezvous, a collective) and Python's handlers do not run."""
        if self._arrived is not None:
            with contextlib.suppress(BlockingIOError):
                for number in os.read(self._arrived, 64):
                    if number in SIGNALS:
                        self.ask(signal.Signals(number).name)
        return self.reason

    def ignore(self) -> None:
        """Ignore further signals: everything is committed, so a launcher's signal must not look
        like a crash."""
        for number in SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Handle signals as before `listen`: the run is done, and the program that called it
        continues."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
