"""How a rank ends: its verdict, one message for all ranks, and no other rank left alone."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from clip_train import dist
from clip_train.errors import ClipTrainError, Preempted, RemoteRankError
from clip_train.metrics import write_report
from clip_train.stop import StopRequest
from clip_train.trainer import Trainer
from launcher.config.recipe import RunConfig
from launcher.runtime import rendezvous
from launcher.runtime.error_reports import is_lost_contact, node_name
from launcher.runtime.lifeline import Lifeline, LostRankError
from launcher.runtime.verdict import read_verdict, word_for, write_verdict

# For what became of a rank to be known here. The kernel tells at once, but a rank that ends with an error may have a
# report to write first, and any thread may be held up; without its word the error would be called a lost contact.
# All are to have ended 30 s after one has.
WORD_SECONDS = 25.0
TOGETHER_SECONDS = 60.0  # for all to meet at an error that they are to have together; rank 0 writes its report before


def explain_loss(error: Exception, lifeline: Lifeline) -> Exception:
    """A collective that failed because another rank has ended -> what became of that rank, told once."""
    loss = lifeline.wait(WORD_SECONDS) if is_lost_contact(error) else None
    if loss is None:
        return error
    if loss.how == "stopped":
        return Preempted(str(loss))
    if lifeline.is_to_say(loss):
        say(f"clip-train: error: {loss}")
    time.sleep(2)  # the launcher is to see that rank's end first: it takes the first for the cause
    return LostRankError(loss)


def end(config: RunConfig, trainer: Trainer | None, error: Exception, stop: StopRequest, lifeline: Lifeline) -> None:
    """Leave a verdict (not on a run that this recipe does not continue), tell it, report, and leave no other alone."""
    everywhere = isinstance(error, ClipTrainError) and error.everywhere
    if isinstance(error, LostRankError):
        silent = not lifeline.tells(error.loss)
    else:  # what all ranks raise rank 0 writes
        silent = isinstance(error, RemoteRankError) or (everywhere and not dist.is_main())
    lost = isinstance(error, LostRankError) or is_lost_contact(error)
    # a consequence must not hide its cause
    if trainer is not None and not silent and not (lost and read_verdict(config.run_dir) is not None):
        note(config, trainer, word_for(error), str(error) or type(error).__name__)
    if isinstance(error, ClipTrainError) and everywhere and not error.told:
        # Launchers end every rank when the first one has left: rank 0 is to have said all by then.
        if dist.is_main():
            say(f"clip-train: {error}" if isinstance(error, Preempted) else f"clip-train: error: {error}")
        error.told = True
        report(config, trainer)
        alone = threading.Timer(TOGETHER_SECONDS, say_alone, (config, trainer, error, lifeline))
        alone.daemon = True
        if not (isinstance(error, Preempted) or dist.is_main()):  # rank 0 has said it; stopping is agreed on
            alone.start()
        leave_together(stop, lifeline)
        alone.cancel()
        return
    report(config, trainer)
    if not lost:
        lifeline.leave("told")


def note(config: RunConfig, trainer: Trainer, word: str, why: str) -> None:
    """Leave a verdict; a disk that is full or gone is no second error."""
    try:
        write_verdict(config.run_dir, word, trainer.position.step, " ".join(why.split()))
    except OSError as e:
        say(f"the verdict ({word}) could not be written: {e}")


def report(config: RunConfig, trainer: Trainer | None) -> None:
    """Rank 0, once a step is made: after the verdict and what there is to tell, for a long run's takes seconds."""
    if trainer is None or not dist.is_main() or not trainer.position.step:
        return
    try:
        write_report(config.run_dir, bad_samples=trainer.bad_samples.total, bad_epochs=trainer.bad_samples.epochs)
    except Exception as e:  # a picture is no reason to call a good run failed
        say(f"the report could not be written: {type(e).__name__}: {e}")


def note_failure(config: RunConfig, trainer: Trainer, why: str) -> None:
    """From the thread beside this rank; what a rank has said itself stays."""
    if read_verdict(config.run_dir) is None:
        note(config, trainer, "FAILED", why)


def say_alone(config: RunConfig, trainer: Trainer | None, error: ClipTrainError, lifeline: Lifeline) -> None:
    """From a thread: the others have not come to leave together, so the error is this rank's own. Ends the process."""
    say(f"clip-train: error: [rank {dist.rank()} on {node_name()}] {error}")
    if trainer is not None:
        note_failure(config, trainer, str(error))
    lifeline.leave("told")
    os._exit(error.exit_status)


def leave_together(stop: StopRequest, lifeline: Lifeline) -> None:
    """All is committed and told; a rank that has died since is no reason to fail."""
    stop.ignore()
    with contextlib.suppress(RuntimeError):
        dist.barrier()
        rendezvous.stop()
    lifeline.leave("bye")


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
