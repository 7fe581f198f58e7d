"""How a run ends: `succeed` (all is committed), `finish` (this rank raised an error), or `end`
(another rank did).

All ranks get one error message, one verdict and one exit status. The rank that fails first decides
(`Heartbeat.claim`). It prints and writes before it closes anything, because a pending upload may
take `checkpoint.grace_seconds`. The last line of rank 0's log names the error again. Exit status: 0
done, 75 preempted after a commit, 130 interrupted twice, 2 the user's mistake, 1 anything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import textwrap
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_train.errors import (
    ClipTrainError,
    OutOfMemoryError,
    RemoteRankError,
    RendezvousError,
    Word,
)
from clip_train.processes import node_name
from clip_train.storage.redact import redact
from launcher.runtime.environment import this_rank
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.log import log, warn
from launcher.runtime.verdict import (
    RUN_DIR,
    Failure,
    notify,
    read_verdict,
    write_verdict,
)

if TYPE_CHECKING:
    from clip_train.memory.plan import StepLayout
    from clip_train.trainer import Trainer
    from launcher.runtime.watchdog import Watchdog

# Wait this long for the cause if another rank has failed: a death is noticed after 18 s.
CAUSE_SECONDS = 25.0
# If all ranks have the same error, rank 0 must be the first, because it knows the checkpoints.
MAIN_SECONDS = 2.0
# For the rank that failed first to print, write and end: a launcher should see it end first.
FIRST_SECONDS = 1.0
# For the pending save after a rank has died: its part of the save may be missing.
LOST_SECONDS = 5.0
LAST_LINE = 300  # characters of the error in the last line
DONE = "trained to the last step"
CONNECT_SECONDS = 120.0  # for an error before the ranks have met: rank 0 may still be importing


class Outcome:
    """How this process's run ends. `train` sets the attributes; `succeed` or `finish` ends the
    run."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.watchdog: Watchdog | None = None
        # Verdicts go there. Without a batch script, set once the run there is this recipe's.
        self.run_dir = Path(os.environ[RUN_DIR]) if RUN_DIR in os.environ else None
        self.notify: str | None = None  # `log.notify`
        self.trainer: Trainer | None = None
        self.layout: StepLayout | None = None  # what `auto` became, if anything is auto

    def succeed(self) -> None:
        """A rank that ended well: everything is committed. Rank 0 writes the verdict and the
        report."""
        import torch.distributed as torch_dist

        from clip_train import dist

        assert self.run_dir is not None and self.trainer is not None
        assert self.heartbeat is not None
        self.trainer.close()
        # from here on, a stop request does not end this rank: the run is done
        self.trainer.call("phase", "end")
        with contextlib.suppress(RuntimeError):  # the run is done, even if a rank is gone by now
            dist.barrier()
        failure = self.heartbeat.wait(0.0)
        if failure is not None and not failure.lost:  # a rank could not close its run
            raise RemoteRankError(str(failure))
        if dist.is_main():
            self._write_verdict("DONE", DONE)  # the report shows it
        with contextlib.suppress(RuntimeError):  # as above
            self.trainer.skipped.gather()
        if dist.is_main():
            self._plot()
            self._write_verdict("DONE", DONE)  # it lists failures of other ranks and of the report
            self._notify("DONE", DONE)
            for line in self.trainer.skipped.lines():
                warn(f"skipped: {line}")
            log(f"done. Run directory: {self.run_dir}; report: {self.run_dir / 'report.html'}")
            log(f"next: clip-train export {self.run_dir / 'recipe.yaml'}")
        self.trainer.stop.ignore()  # a launcher's signal must not look like a crash
        with contextlib.suppress(RuntimeError):  # from now on, the end of a rank is not a failure
            dist.barrier()
            torch_dist.destroy_process_group()
        self.close()

    def finish(self, error: BaseException) -> int:
        """The exit status after an error, on the failed rank and on the others.

        The first rank that failed publishes its error; then every rank closes its run.
        """
        if self.watchdog is not None:
            self.watchdog.phase("finish")
        if self.trainer is not None:
            with contextlib.suppress(Exception):  # a callback's; the run ends in any case
                self.trainer.call("phase", "finish")
        if self.heartbeat is None:
            self.heartbeat = Heartbeat(this_rank(), self.publish)
        heartbeat, env = self.heartbeat, self.heartbeat.env
        failure, trace = self._describe(error, env.rank)
        # another rank has failed, or cannot be reached
        secondhand = failure.lost or isinstance(error, RemoteRankError)
        late = isinstance(error, RendezvousError)
        if env.world_size > 1 and not (secondhand or late or heartbeat.is_open):
            from launcher.runtime import rendezvous

            with contextlib.suppress(RuntimeError, OSError, RendezvousError):
                rendezvous.connect(env, heartbeat, CONNECT_SECONDS)
        first = None
        if heartbeat.is_open:
            seconds = 0.0 if env.rank == 0 else MAIN_SECONDS
            first = heartbeat.wait(CAUSE_SECONDS if secondhand else seconds)
        if first is None:
            first = heartbeat.claim(failure, trace)
        if first != failure and trace:  # an error of its own at the same moment
            print(trace, file=sys.stderr, flush=True)
        self.end(first, error)
        return first.status

    def end(self, failure: Failure, error: BaseException | None = None) -> None:
        """Close this rank's run, which `failure` ends, and take leave of the other ranks.

        error: what the main thread raised. None: the watchdog calls this from a thread, because the
        main thread waits for a rank that has failed, and the process ends afterwards.
        """
        assert self.heartbeat is not None
        rank, alone = self.heartbeat.env.rank, self.heartbeat.env.world_size == 1
        if self.trainer is not None:
            why = error
            if failure.word == "PREEMPTED":
                why = None
            elif failure.rank != rank:  # the main thread's own error may only follow from that
                why = RemoteRankError(str(failure))
            save_seconds = LOST_SECONDS if failure.lost else None
            try:
                self.trainer.close(why, save_seconds=save_seconds, free=alone)
            except (Exception, KeyboardInterrupt) as e:  # another Ctrl-C gives up the save
                warn(f"error while closing the run: {type(e).__name__}: {e}")
        if self.watchdog is not None:
            self.watchdog.phase("finish")
        if rank == 0:
            self._plot()
            if failure.rank > 0 and not failure.lost and failure.word != "PREEMPTED":
                line = textwrap.shorten(str(failure), LAST_LINE, placeholder=" ...")
                log(f"ended by {line}", logging.ERROR)
        self.heartbeat.leave(wait_for_joining=not isinstance(error, RendezvousError))
        if failure.rank != rank:
            time.sleep(FIRST_SECONDS)

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        if self.heartbeat is not None:
            self.heartbeat.leave()
        if self.watchdog is not None:
            self.watchdog.end()

    def _describe(self, error: BaseException, rank: int) -> tuple[Failure, str]:
        """The consequence of this error for the run, and the traceback if the error is
        unexpected."""
        message = redact(str(error).strip() or type(error).__name__)
        failure = partial(Failure, rank, node_name())
        if isinstance(error, KeyboardInterrupt):
            message = "interrupted"
            if self.trainer is not None:
                message = (
                    f"interrupted at step {self.trainer.step}, without a save: "
                    f"{self.trainer.committed()}; run the same command to continue"
                )
            return failure(message, status=130), ""
        if isinstance(error, OutOfMemoryError):
            room = 0  # the recipe leaves nothing to choose: another attempt would be the same
            if self.trainer is not None and self.layout is not None:
                room = int(self.layout.profile.bytes_for(self.trainer.plan) / 2)
            return failure(message, word="FAILED" if room else "FATAL", room=room), ""
        if isinstance(error, ClipTrainError):
            return failure(
                message, error.word, error.exit_status, node_suspect=error.node_suspect
            ), ""
        if is_lost_contact(error):
            return failure(
                "lost contact with another rank, which may have printed the cause: "
                f"{' '.join(message.split())}",
                lost=True,
            ), ""
        trace = redact("".join(traceback.format_exception(error)))
        message, hardware = f"{type(error).__name__}: {message}", bool(HARDWARE.search(message))
        if hardware:
            message = f"{message} (the GPU's error, not the program's: `dmesg | grep Xid` there)"
        return failure(message, node_suspect=True, hardware=hardware), trace

    def publish(self, failure: Failure, trace: str = "") -> None:
        """Print the failure, with its traceback if there is one, and write the verdict unless there
        is one. A full or missing disk does not raise a second error."""
        where = f"rank {failure.rank} on {failure.node}"
        if trace:
            print(trace, file=sys.stderr, flush=True)
        elif failure.status in (75, 130):
            log(failure.message)
        else:
            prefix = f"[{where}] " if failure.rank and not failure.lost else ""
            log(f"{prefix}{failure.message}", logging.ERROR)
        if self.run_dir is not None and read_verdict(self.run_dir) is None:
            reason = f"{where}: {failure.message}"
            if failure.lost or failure.word == "PREEMPTED":
                # the message names the rank, or no rank caused it
                where, reason = "", failure.message
            try:
                self._write_verdict(
                    failure.word,
                    reason,
                    where=where,
                    blamed=failure.node if failure.node_suspect else "",
                    hardware=failure.hardware,
                    room=failure.room,
                )
            except OSError as e:
                log(f"the verdict ({failure.word}) could not be written: {e}", logging.ERROR)
            self._notify(failure.word, reason)

    def _write_verdict(self, word: Word, reason: str, **more: Any) -> None:
        assert self.run_dir is not None
        step, skipped = 0, []
        if self.trainer is not None:
            step, skipped = self.trainer.step, self.trainer.skipped.lines()
        write_verdict(self.run_dir, word, step, reason, skipped=skipped, **more)

    def _notify(self, word: Word, reason: str) -> None:
        """Run `log.notify`, unless the batch script's controller does."""
        if self.run_dir is not None and RUN_DIR not in os.environ:
            step = self.trainer.step if self.trainer is not None else 0
            notify(self.notify, self.run_dir, word, step, reason, warn)

    def _plot(self) -> None:
        """Write report.html, if the first step is done. It takes seconds for a long run."""
        if self.trainer is not None and self.run_dir is not None and self.trainer.step:
            from clip_train.metrics.report import write_report

            self.trainer.skipped.attempt(
                "report.html",
                partial(write_report, self.run_dir),
                remedy=f"correct the cause, then run: clip-train report {self.run_dir}",
            )


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
# CUDA's messages for a broken GPU, link or driver. They exclude NCCL's "unhandled system error" and
# "remote error", because the rank that reports these is rarely the cause.
HARDWARE = re.compile(
    r"uncorrectable|unspecified launch failure|hardware (stack )?error|fallen off the bus"
    r"|devices? (is|are)( all)? busy or unavailable|system not yet initialized"
    r"|CUDA error: (unknown error|no CUDA-capable device)",
    re.IGNORECASE,
)


def is_lost_contact(error: BaseException) -> bool:
    """Messages of gloo and NCCL for a collective that failed because another rank ended."""
    of_torch = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    of_network = isinstance(error, RuntimeError) and LOST.search(str(error)) is not None
    return (of_torch or of_network) and OWN.search(str(error)) is None
