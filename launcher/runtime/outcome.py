"""How a run ends, by role: `succeed` (all is committed), `_fail` (this rank failed), `_follow`
(another one did).

All ranks get one error message, one verdict, one error report and one exit status. The rank that
fails first decides (`Heartbeat.claim`): it prints and writes before it closes anything, since a
pending upload may take `checkpoint.grace_seconds`. Exit status: 0 done, 75 preempted after a
commit, 130 interrupted twice, 2 the user's mistake, 1 anything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
import traceback
from functools import partial
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
from launcher.runtime.environment import detect
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

# For what has ended another rank to be known here: a death 18 s after it, an error once a report
# has been written.
CAUSE_SECONDS = 25.0
# for rank 0 to be the first where all ranks have the same error: it knows of the checkpoints
MAIN_SECONDS = 2.0
# for the rank that failed first to print, write and end: a launcher is to see its end first
FIRST_SECONDS = 3.0
DONE = "trained to the last step"
CONNECT_SECONDS = 120.0  # for an error before the ranks have met: rank 0 may still be importing


class Outcome:
    """How this process's run ends. `train` fills in what it knows; `succeed` or `finish` ends the
    run."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.watchdog: Watchdog | None = None
        # Set once the run there is known to be this recipe's: verdicts go there.
        self.run_dir: Path | None = None
        self.notify: str | None = None  # `log.notify`
        self.trainer: Trainer | None = None

    def succeed(self) -> None:
        """A rank that ended well: everything is committed. Rank 0 writes the verdict and the
        report."""
        import torch.distributed as torch_dist

        from clip_train import dist

        assert self.run_dir is not None and self.trainer is not None
        self.trainer.close()
        if dist.is_main():
            self._write_verdict("DONE", DONE)  # the report shows it
            if not self._plot():
                self._write_verdict("DONE", DONE, notified=True)  # with the report that failed
            for line in self.trainer.skipped.lines():
                warn(f"skipped: {line}")
            log(f"done. Run directory: {self.run_dir}; report: {self.run_dir / 'report.html'}")
            log(f"next: clip-train export {self.run_dir / 'recipe.yaml'}")
        self.trainer.stop.ignore()  # a launcher's hurry must not look like a crash
        with contextlib.suppress(RuntimeError):  # that a rank dies now is no reason to fail
            dist.barrier()
            torch_dist.destroy_process_group()
        self.close()

    def finish(self, error: BaseException) -> int:
        """The exit status after an error, on the rank that failed as on those that learn of it."""
        if self.trainer is not None:
            self.trainer.call("phase", "finish")
        elif self.watchdog is not None:
            self.watchdog.phase("finish")
        env = detect({})  # a world of one
        with contextlib.suppress(UserError):  # of the launcher's variables, as the error says
            env = detect(os.environ) if self.heartbeat is None else self.heartbeat.env
        failure, trace = self._describe(error, env.rank)
        # another rank has failed, or cannot be reached
        secondhand = failure.lost or isinstance(error, RemoteRankError)
        late = isinstance(error, RendezvousError)
        if env.world_size > 1 and not (
            secondhand or late or (self.heartbeat and self.heartbeat.is_open)
        ):
            from launcher.runtime import heartbeat, rendezvous

            self.heartbeat = self.heartbeat or heartbeat.Heartbeat(env, self.publish)
            with contextlib.suppress(RuntimeError, OSError, RendezvousError):
                rendezvous.connect(env, self.heartbeat, CONNECT_SECONDS)
        first = None
        if self.heartbeat is not None and self.heartbeat.is_open:
            seconds = 0.0 if self.heartbeat.env.rank == 0 else MAIN_SECONDS
            first = self.heartbeat.wait(CAUSE_SECONDS if secondhand else seconds)
        if first is None:
            return self._fail(failure, trace, late=late)
        return self._follow(first, trace)

    def _fail(self, failure: Failure, trace: str, *, late: bool) -> int:
        """The rank that failed publishes its error first, and closes its run after."""
        first = failure
        if self.heartbeat is not None and self.heartbeat.is_open:
            first = self.heartbeat.claim(failure, trace)
        else:  # alone, or nobody can be reached
            self.publish(failure, trace)
        if first != failure:
            return self._follow(first, trace)
        self._close_failed_run(late=late)
        return failure.status

    def _follow(self, first: Failure, trace: str) -> int:
        """A rank that learns of another rank's failure, which that one prints and writes."""
        if trace:
            print(trace, file=sys.stderr, flush=True)  # an error of its own at the same moment
        self._close_failed_run()
        time.sleep(FIRST_SECONDS)
        return first.status

    def _close_failed_run(self, *, late: bool = False) -> None:
        """The error is published: nothing that fails now may hide it. Another Ctrl-C gives up the
        save."""
        if self.trainer is not None:
            try:
                self.trainer.close()
            except (Exception, KeyboardInterrupt) as e:
                warn(f"while the run was being closed: {type(e).__name__}: {e}")
        if self.watchdog is not None:
            self.watchdog.phase("finish")
        if self.heartbeat is not None and self.heartbeat.is_open:
            if self.heartbeat.env.rank == 0:
                self._plot()
            self.heartbeat.leave(late=late)

    def close(self) -> None:
        """No thread goes on. A second call does nothing."""
        if self.heartbeat is not None:
            self.heartbeat.leave()
        if self.watchdog is not None:
            self.watchdog.end()

    def _describe(self, error: BaseException, rank: int) -> tuple[Failure, str]:
        """What this error means for the run, and the traceback if nobody has foreseen it."""
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
                message = (
                    f"interrupted at step {self.trainer.step}, without a save: {saved}; "
                    "run the same line to continue"
                )
        elif isinstance(error, Preempted):
            word = "PREEMPTED"
        elif isinstance(error, (UserError, DivergedError)) and not isinstance(error, RankError):
            word = "FATAL"
        elif lost:
            message = (
                "lost contact with another rank, which may have its own message: "
                f"{' '.join(message.split())}"
            )
        elif not foreseen:
            message = f"{type(error).__name__}: {message}"
        suspect = not foreseen or isinstance(error, RankError)
        if isinstance(error, RendezvousError):
            suspect = error.node_suspect
        trace = "" if foreseen else redact("".join(traceback.format_exception(error)))
        return Failure(rank, node_name(), redact(message), word, status, lost, suspect), trace

    def publish(self, failure: Failure, trace: str = "") -> None:
        """Print it, with the traceback if nobody has foreseen it, and write verdict and report. The
        first one stays.

        A disk that is full or gone is no second error.
        """
        is_elsewhere = failure.rank > 0 and not failure.lost
        where = f"[rank {failure.rank} on {failure.node}] " if is_elsewhere else ""
        if trace:
            print(trace, file=sys.stderr, flush=True)
        elif failure.status in (75, 130):
            log(failure.message)
        else:
            log(f"{where}{failure.message}", logging.ERROR)
        write_report(failure, trace)
        if self.run_dir is not None and read_verdict(self.run_dir) is None:
            try:
                self._write_verdict(failure.word, failure.message)
            except OSError as e:
                log(f"the verdict ({failure.word}) could not be written: {e}", logging.ERROR)

    def _write_verdict(self, word: Word, reason: str, *, notified: bool = False) -> None:
        """VERDICT; then run `log.notify`, unless the batch script's controller does."""
        assert self.run_dir is not None
        step, skipped = 0, []
        if self.trainer is not None:
            step, skipped = self.trainer.step, self.trainer.skipped.lines()
        write_verdict(self.run_dir, word, step, reason, skipped=skipped)
        if self.notify is not None and ATTEMPT not in os.environ and not notified:
            failed = notify(self.notify, self.run_dir, word, step, reason)
            if failed:
                warn(failed)

    def _plot(self) -> bool:
        """Rank 0, after the first step: write report.html. Returns whether it was written. It
        takes seconds for a long run."""
        if self.trainer is None or self.run_dir is None or not self.trainer.step:
            return False
        from clip_train.metrics.report import write_report as plot

        remedy = f"mend the cause, then: clip-train report {self.run_dir}"
        plotted = partial(plot, self.run_dir)
        return self.trainer.skipped.attempt("report.html", plotted, remedy=remedy) is not None


LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Timed out (waiting|after)|Broken pipe"
    r"|NCCL (error|communicator)|Application timeout|wait timeout|Socket "
    r"(closed|Timeout)|unhandled system error",
    re.IGNORECASE,
)
# This rank's own mistakes, which NCCL reports as errors of communication too.
OWN = re.compile(
    r"Duplicate GPU detected|no socket interface found|invalid usage|unhandled cuda error|out of "
    r"memory"
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
