"""One way to end: `finish(error)` gives all ranks one error message, one verdict, one error report, one exit status.

The rank that fails first decides (`Heartbeat.claim`): it prints and writes; the others end with its status. A rank
publishes its error before it closes anything: a pending upload may take `checkpoint.grace_seconds`. Exit status: 0
done, 75 preempted after a commit, 130 interrupted twice, 2 the user's mistake, 1 anything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from clip_train.errors import (
    ClipTrainError,
    DivergedError,
    Preempted,
    RankError,
    RemoteRankError,
    RendezvousError,
    UserError,
)
from clip_train.storage.redact import redact
from launcher.runtime.environment import RankEnv, detect
from launcher.runtime.log import log, warn
from launcher.runtime.verdict import (
    ATTEMPT,
    Failure,
    Word,
    node_name,
    notify,
    read_verdict,
    write_report,
    write_verdict,
)

if TYPE_CHECKING:
    from clip_train.trainer import Trainer
    from launcher.runtime.heartbeat import Heartbeat
    from launcher.runtime.watchdog import Watchdog

# For what has ended another rank to be known here: a death 18 s after it, an error once a report has been written.
CAUSE_SECONDS = 25.0
MAIN_SECONDS = 2.0  # for rank 0 to be the first where all ranks have the same error: it knows of the checkpoints
FIRST_SECONDS = 3.0  # for the rank that failed first to print, write and end: a launcher is to see its end first
DONE = "trained to the last step"
CONNECT_SECONDS = 120.0  # for an error before the ranks have met: rank 0 may still be importing


class Outcome:
    """Of this process. `train` fills in what it knows; `finish` works at any time."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.watchdog: Watchdog | None = None
        self.run_dir: Path | None = (
            None  # once the run there is known to be this recipe's: verdicts go there
        )
        self.notify: str | None = None  # `log.notify`
        self.trainer: Trainer | None = None

    def done(self) -> None:
        """Rank 0, when all is committed."""
        assert self.run_dir is not None and self.trainer is not None
        skipped = self.trainer.skipped
        lost = self.watchdog is not None and self.watchdog.lost
        reason = f"{DONE}, but {self.watchdog.describe_lost()}" if lost and self.watchdog else DONE
        write_verdict(self.run_dir, "DONE", self._step, reason, skipped=skipped.lines())
        self._notify("DONE", reason)
        if not self.plot():
            write_verdict(self.run_dir, "DONE", self._step, reason, skipped=skipped.lines())
        if lost:
            log(reason, logging.ERROR)
        for line in skipped.lines():
            warn(f"skipped: {line}")

    def leave(self) -> None:
        """In order, with all others; that one of them dies now is no reason to fail."""
        from clip_train import dist
        from launcher.runtime import rendezvous

        with contextlib.suppress(RuntimeError):
            dist.barrier()
            rendezvous.stop()
        self.close()

    def close_run(self) -> None:
        """Finish what is being saved within `checkpoint.grace_seconds`, and end the loader's workers. A second call
        does nothing."""
        if self.trainer is not None:
            self.trainer.close()

    def close(self) -> None:
        """No thread goes on. Again does nothing."""
        if self.heartbeat is not None:
            self.heartbeat.leave()
        if self.watchdog is not None:
            self.watchdog.close()

    def finish(self, error: BaseException) -> int:
        """The exit status. Another rank's failure, if it came first, is printed by that rank, and not here."""
        own, trace = self.describe(error)
        if self.trainer is not None:
            self.trainer.call("on_error", error, False)
        if self.watchdog is not None:
            self.watchdog.phase("finish")
        secondhand = own.lost or isinstance(error, RemoteRankError)
        heartbeat = self.heartbeat
        alone = secondhand or isinstance(error, RendezvousError)  # there is nobody to connect to
        if (heartbeat is None or not heartbeat.is_open) and not alone:
            heartbeat = self._connect()
        if heartbeat is None or not heartbeat.is_open:  # alone, or nobody can be reached
            self.publish(own, trace)
            self._close_failed_run()
            return own.status
        is_main = heartbeat.env.rank == 0
        cause = heartbeat.wait(CAUSE_SECONDS if secondhand else 0.0 if is_main else MAIN_SECONDS)
        first = cause or heartbeat.claim(own, trace)
        if first.rank != heartbeat.env.rank and trace:
            print(trace, file=sys.stderr, flush=True)  # an error of its own at the same moment
        self._close_failed_run()
        if first.rank != heartbeat.env.rank:
            time.sleep(FIRST_SECONDS)
        if is_main:
            self.plot()
        heartbeat.leave(late=isinstance(error, RendezvousError))
        return first.status

    def _close_failed_run(self) -> None:
        """The error is published: nothing that fails now may hide it. Another Ctrl-C gives up what is being saved."""
        try:
            self.close_run()
        except (Exception, KeyboardInterrupt) as e:
            warn(f"while the run was being closed: {type(e).__name__}: {e}")
        if self.watchdog is not None:
            self.watchdog.phase("finish")

    def _connect(self) -> Heartbeat | None:
        """The heartbeat, before the ranks have met; None in a world of one, or where rank 0 has gone."""
        env = world()
        if env is not None:
            from launcher.runtime import heartbeat, rendezvous

            self.heartbeat = self.heartbeat or heartbeat.Heartbeat(env, self.publish)
            with contextlib.suppress(RuntimeError, OSError, RendezvousError):
                rendezvous.connect(env, self.heartbeat, CONNECT_SECONDS)
        return self.heartbeat

    def describe(self, error: BaseException) -> tuple[Failure, str]:
        """What this error means for the run, wherever it came from; and the traceback of what nobody has foreseen."""
        message = str(error).strip() or type(error).__name__
        lost = is_lost_contact(error)
        foreseen = lost or isinstance(error, (ClipTrainError, KeyboardInterrupt))
        status = getattr(error, "exit_status", 1)
        word: Word = "FAILED"
        if isinstance(error, KeyboardInterrupt):
            status, message = 130, "interrupted"
            if self.trainer is not None:
                good = self.trainer.checkpoints.last_good
                saved = (
                    f"step {good.step} is committed ({good.path})"
                    if good
                    else "nothing is committed"
                )
                message = f"interrupted at step {self._step}, without a save: {saved}; run the same line to continue"
        elif isinstance(error, Preempted):
            word = "PREEMPTED"
        elif isinstance(error, (UserError, DivergedError)) and not isinstance(error, RankError):
            word = "FATAL"
        elif lost:
            message = f"lost contact with another rank, which may have its own message: {' '.join(message.split())}"
        elif not foreseen:
            message = f"{type(error).__name__}: {message}"
        env, suspect = world(), not foreseen or isinstance(error, RankError)
        if isinstance(error, RendezvousError):
            suspect = error.node_suspect
        trace = "" if foreseen else "".join(traceback.format_exception(error))
        return Failure(
            env.rank if env else 0, node_name(), redact(message), word, status, lost, suspect
        ), redact(trace)

    def publish(self, failure: Failure, trace: str = "") -> None:
        """Print it, with the traceback of what nobody has foreseen, and leave verdict and report. The first one stays.

        A disk that is full or gone is no second error.
        """
        where = (
            f"[rank {failure.rank} on {failure.node}] "
            if failure.rank > 0 and not failure.lost
            else ""
        )
        if trace:
            print(trace, file=sys.stderr, flush=True)
        elif failure.status in (75, 130):
            log(failure.message)
        else:
            log(f"{where}{failure.message}", logging.ERROR)
        write_report(failure, trace)
        if self.run_dir is not None and read_verdict(self.run_dir) is None:
            try:
                write_verdict(
                    self.run_dir,
                    failure.word,
                    self._step,
                    str(failure) if failure.lost else failure.message,
                    skipped=self.trainer.skipped.lines() if self.trainer is not None else [],
                )
            except OSError as e:
                log(f"the verdict ({failure.word}) could not be written: {e}", logging.ERROR)
            self._notify(failure.word, str(failure))

    def _notify(self, word: Word, reason: str) -> None:
        """Run `log.notify`, but where the batch script's controller does so."""
        if self.notify is not None and self.run_dir is not None and ATTEMPT not in os.environ:
            failed = notify(self.notify, self.run_dir, word, self._step, reason)
            if failed:
                warn(failed)

    def plot(self) -> bool:
        """Rank 0, once a step is made: report.html, and whether it was written. After all that there is to print: a
        long run's takes seconds."""
        if self.trainer is None or self.run_dir is None or not self._step:
            return False
        from clip_train.metrics.report import write_report as plot

        remedy = f"mend the cause, then: clip-train report {self.run_dir}"
        run_dirs = [self.run_dir]
        written = self.trainer.skipped.attempt("report.html", lambda: plot(run_dirs), remedy=remedy)
        return written is not None

    @property
    def _step(self) -> int:
        return self.trainer.step if self.trainer is not None else 0


def world() -> RankEnv | None:
    """This rank by its launcher's variables; None in a world of one. Before a process group there is no other way."""
    with contextlib.suppress(UserError):
        env = detect(os.environ)
        return env if env.world_size > 1 else None
    return None


LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Timed out (waiting|after)|Broken pipe"
    r"|NCCL (error|communicator)|Application timeout|wait timeout|Socket (closed|Timeout)|unhandled system error",
    re.IGNORECASE,
)
# This rank's own mistakes, which NCCL reports as errors of communication too.
OWN = re.compile(
    r"Duplicate GPU detected|no socket interface found|invalid usage|unhandled cuda error|out of memory"
    r"|shared memory segment|No space left",
    re.IGNORECASE,
)


def is_lost_contact(error: BaseException) -> bool:
    """A collective that failed because another rank has gone: gloo's and NCCL's words for it."""
    if OWN.search(str(error)):
        return False
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None
