"""A thread in each rank that checks for progress, for stop requests, and for failures of other
ranks.

It asks for a stop when a STOP file is in the run directory, and when the launcher above this rank
has ended. When another rank has failed (`heartbeat`), it closes this rank's run and ends the
process, because the main thread waits in a collective. When a phase exceeds its limit, it logs every
thread's stack, asks all ranks where they are (`hang`), says which collective which ranks have not
entered, and ends all ranks. It also answers `clip-train doctor --hang`.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import hashlib
import json
import logging
import os
import re
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from clip_train import stacks
from clip_train.callbacks import Callback
from clip_train.processes import node_name
from clip_train.recipe.launch import LaunchConfig
from clip_train.stop import StopRequest
from clip_train.storage.local import LocalStorage
from launcher.runtime.environment import detect, launcher_pid
from launcher.runtime.hang import (
    ANSWER,
    REQUEST,
    Diagnosis,
    Standing,
    diagnose,
    place,
    recorded,
)
from launcher.runtime.heartbeat import BEAT_SECONDS, LEAVE_SECONDS, Heartbeat
from launcher.runtime.log import log, warn
from launcher.runtime.verdict import PROGRESS_FILE, STOP_FILE, Failure, end_process

if TYPE_CHECKING:
    from clip_train.trainer import Trainer

FROZEN_SECONDS = 3.0  # between two looks at the clock; the thread looks four times a second
# For the main thread to end by itself once another rank has failed.
GRACE_SECONDS = 1.0
# To close a run after a failure, in addition to `checkpoint.grace_seconds` for a pending save:
# callbacks, the loader, the report.
CLOSE_SECONDS = 60.0
# From a stop request during the start or an evaluation: the main thread may end by itself.
STOP_SECONDS = 3.0
# For rank 0, which holds the store, to wait after a stop request for ranks that have not joined
# yet. A scheduler signals all ranks, so each of them ends by itself.
LEAVE_STOPPED_SECONDS = 5.0
# For callbacks to close after a stop request, when everything is committed: a logging service may
# need a few seconds, or may not answer at all.
STOP_CLOSE_SECONDS = 8.0
CLAIM_SECONDS = 5.0  # for rank 0, which knows what is committed, to say why all ranks end
# From a hang until it ends all ranks. The ranks that wait for the hanging one show their stacks in
# this time, and let it be the one to name.
STACKS_SECONDS, WAITING_SECONDS = 2.0, 5.0
# For all ranks to say where they are: they see the question with their next heartbeat.
DESCRIBE_SECONDS = BEAT_SECONDS + 3.0
# Ranks with the same rights to name the cause do it one after the other, so that one of them reads
# what all have said, and the others find that it has. The first this many ranks wait for each other.
TURN_SECONDS, TURNS = 0.1, 20
REQUEST_SECONDS = 2.0  # between looks for a request of `clip-train doctor --hang`
# So many ranks look in the run directory, and pass a request on: one of them may be what hangs.
LOOKING_RANKS = 2
SHOWN = 2  # loader workers of a rank that waits for data


class Phase(str, enum.Enum):
    """The phase of the main thread."""

    START = "start"  # up to the end of the first step, in which things compile
    STEP = "step"
    SAVE = "save"
    EVALUATE = "evaluate"
    END = "end"  # the loop has ended, the last save is being finished
    CLOSE = "close"  # the callbacks and the loader are being closed
    FINISH = "finish"  # an error is being reported


# Seconds until a phase other than a step counts as a hang. A larger `launch.hang_seconds` extends
# them. A smaller one does not shorten them: compiling or saving may take longer than a step.
LIMITS = {
    Phase.START: 3600.0,
    Phase.SAVE: 3600.0,
    Phase.EVALUATE: 7200.0,
    Phase.END: 3600.0,
    Phase.CLOSE: 3600.0,
}
FINISH_SECONDS = 300.0  # until FINISH counts as a hang, whatever `launch.hang_seconds` is


class Watchdog(Callback):
    """The trainer sets its `phase`; started by `start`, ended by `end`."""

    def __init__(
        self,
        config: LaunchConfig,
        stop: StopRequest,
        heartbeat: Heartbeat | None = None,
        *,
        run_dir: Path | None = None,
        hang_dir: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """run_dir: on rank 0, where STOP is looked for and PROGRESS is written. hang_dir: on all
        ranks, where each says where it is if it hangs or is asked (`hang.HANG`)."""
        self.config, self.stop, self.run_dir = config, stop, run_dir
        self._hang_dir = hang_dir
        self._answered, self._next_request = "", 0.0  # the last one; seconds, when to look again
        self.step: Callable[[], int | None] = lambda: None  # steps taken, once there is a trainer
        # the newest committed step, once there is a trainer
        self.committed: Callable[[], int | None] = lambda: None
        # `Trainer.finish_save`, once there is one
        self.finish_save: Callable[[], str | None] = lambda: None
        # `Trainer.committed`, once there is one
        self.describe_committed: Callable[[], str] = lambda: "nothing is committed"
        self._heartbeat = heartbeat or Heartbeat(detect({}))
        self._heartbeat.stop = stop
        self._heartbeat.describe = lambda: self.standing().dump()
        # `Outcome.end`, for `train`: closes this rank's run
        self.end_run: Callable[[Failure], None] = lambda failure: self._heartbeat.leave()
        self._save_seconds = 0.0  # `checkpoint.grace_seconds`, once there is a trainer
        # Either the main thread ends the process, or a thread of this class. In the second case the
        # main thread does nothing more.
        self._deciding = threading.Lock()
        self._main_ends = self._leaving = False
        self._launcher = launcher_pid(environ)
        self._phase, self._since = Phase.START, time.monotonic()
        self._steps: deque[float] = deque(maxlen=50)  # seconds; the latest
        # seconds until the phase counts as a hang
        self.limit = phase_limit(config.hang_seconds, self._phase, self._steps)
        self._begun = False  # the first step
        self._progress: int | None = None  # the step in PROGRESS
        self._asked: float | None = None  # when a stop was asked for
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._hang_dir is not None:
            stacks.answer(rank_of_run(self._heartbeat.env.rank, self._hang_dir.parent))
        self._thread.start()

    def watch(self, trainer: Trainer) -> None:
        """There is something to save from now on."""
        saves = trainer.checkpoints
        self.step = lambda: trainer.step
        self.committed = lambda: saves.last_good.step if saves.last_good else None
        self._save_seconds = saves.config.grace_seconds
        self.finish_save = trainer.finish_save
        self.describe_committed = trainer.committed

    def end(self) -> None:
        """The rank ends; also writes the last PROGRESS. A second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            if self._thread.is_alive():
                self._thread.join()
            self._write_progress()

    def phase(self, name: str) -> None:
        """A phase begins, or the next step: a value of `Phase`."""
        now, phase = time.monotonic(), Phase(name)
        if threading.current_thread() is threading.main_thread():
            with self._deciding:
                self._main_ends = self._main_ends or (phase is Phase.FINISH and not self._leaving)
            while self._leaving:
                time.sleep(1.0)
        if self._phase is Phase.START and phase is Phase.STEP and not self._begun:
            self._begun = True
            return  # the first step still belongs to the start
        if phase is self._phase is Phase.STEP:
            self._steps.append(now - self._since)
        self._phase, self._since = phase, now
        self.limit = phase_limit(self.config.hang_seconds, phase, self._steps)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(0.25):
            now = time.monotonic()
            # Not even this thread ran: Ctrl-Z, a suspended job, a paused machine.
            frozen = now - before if now - before >= FROZEN_SECONDS else 0.0
            before = now
            self._since += frozen
            try:
                self._look(now, frozen)
            except Exception as e:  # it continues watching, whatever a disk or a library does
                warn(f"the watchdog could not look: {type(e).__name__}: {e}")

    def _look(self, now: float, frozen_seconds: float) -> None:
        with contextlib.suppress(OSError):  # a disk that does not answer now: at the next look
            if self.run_dir is not None and (self.run_dir / STOP_FILE).exists():
                self.stop.file = self.run_dir / STOP_FILE
                self.stop.ask(f"the file {self.stop.file}")
        if self._launcher is not None and os.getppid() != self._launcher:
            self.stop.ask("its launcher's death")
        if self.stop.look():
            if self._asked is None:
                self._asked = now
                self._heartbeat.publish_stop_now()
            patience = STOP_CLOSE_SECONDS if self._phase is Phase.CLOSE else STOP_SECONDS
            if now - max(self._asked, self._since) > patience:
                self._end_stopped()
        abort = self._heartbeat.check(frozen_seconds)
        if abort is not None:
            self._end_after(abort, now - self._heartbeat.aborted_at)
        self._write_progress()
        if self._hang_dir is not None:
            self._answer_request(self._hang_dir / REQUEST, now)
        # once a rank has failed, a rank that waits for it is not a second hang
        watched = abort is None or self._phase is Phase.FINISH
        if watched and now - self._since > self.limit:
            self._fire(now - self._since)

    def _end_after(self, abort: Failure, seconds: float) -> None:
        """All ranks end by `abort`, which this rank has known for `seconds`.

        If the main thread does not come to it, because it waits for a failed rank in a collective or
        on a GPU, another thread closes the run. This one continues to watch.
        """
        if seconds > GRACE_SECONDS and self._take_over():
            threading.Thread(target=self._close, args=[abort], name="close", daemon=True).start()
        if self._phase is not Phase.FINISH and seconds > self._save_seconds + CLOSE_SECONDS:
            self._exit(abort)

    def _take_over(self) -> bool:
        """Whether a thread of this class ends the process from now on. False if the main thread is
        at it, or another thread."""
        with self._deciding:
            if self._main_ends or self._leaving:
                return False
            self._leaving = True
            return True

    def _close(self, abort: Failure) -> None:
        try:
            self.end_run(abort)
            self._write_progress()
        finally:
            end_process(abort.status)

    def _end_stopped(self) -> None:
        """A stop was asked for, and the main thread does not come to it. End the process if no step
        is lost by that: during the start, during an evaluation before which the run was saved, and
        while callbacks are closed."""
        when = "before the first step"
        if self._phase is Phase.EVALUATE:
            if not self._take_over():
                return
            committed = self.finish_save()
            if committed is None:
                self._leaving = False
                return
            self._write_progress()
            when = f"during an evaluation: {committed}; run the same command to continue"
            if self._heartbeat.env.rank > 0:
                self._heartbeat.wait(CLAIM_SECONDS)
        elif self._phase is Phase.CLOSE:
            self._leaving = True  # also if the main thread ends the process: it does not come to it
            self._write_progress()
            committed = self.describe_committed()
            when = f"while the run was closed: {committed}; run the same command to finish"
        elif self._phase is not Phase.START:
            return
        removed = ", which was removed," if self.stop.remove_file() else ""
        stopped = Failure(
            self._heartbeat.env.rank,
            node_name(),
            f"stopped by {self.stop.reason}{removed} {when}",
            word="PREEMPTED",
            status=75,
        )
        self._exit(self._heartbeat.claim(stopped))

    def _exit(self, abort: Failure) -> None:
        """End the process at once, also if the main thread or the store hangs."""
        leaving = threading.Thread(target=self._heartbeat.leave, daemon=True)
        leaving.start()
        early = abort.word == "PREEMPTED" and not self._heartbeat.all_joined
        leaving.join(LEAVE_STOPPED_SECONDS if early else LEAVE_SECONDS + 1)
        end_process(abort.status)

    def _write_progress(self) -> None:
        """For the batch script, which counts attempts without progress."""
        step = self.committed()
        if self.run_dir is not None and step not in (None, self._progress):
            with contextlib.suppress(OSError):  # again in a moment
                LocalStorage(self.run_dir).put_bytes(PROGRESS_FILE, f"{step}\n".encode())
                self._progress = step

    def standing(self) -> Standing:
        """Where this rank is. It takes seconds, and changes nothing."""
        from clip_train.torch_internals import group_members

        frames = sys._current_frames()
        where, waits = position(frames.get(self._main or 0))
        env = self._heartbeat.env
        return Standing(
            rank=env.rank,
            world_size=env.world_size,
            node=node_name(),
            pid=os.getpid(),
            phase=self._phase.value,
            step=self.step(),
            seconds=round(time.monotonic() - self._since, 1),
            where=where,
            waits=waits,
            usual=round(statistics.median([*self._steps] or [0.0]), 3),
            data=reading(frames, self._main),
            collectives=recorded(),
            members=group_members(),
        )

    def _answer_request(self, file: Path, now: float) -> None:
        """Answer a new request of `clip-train doctor --hang`, in a thread: this one keeps watching."""
        heartbeat = self._heartbeat
        looks = heartbeat.env.rank < LOOKING_RANKS or not heartbeat.is_open
        if looks and now > self._next_request:
            self._next_request = now + REQUEST_SECONDS
            with contextlib.suppress(OSError):  # usually there is none
                heartbeat.pass_on(file.read_text())
        request = heartbeat.request
        if request and request != self._answered:
            self._answered = request
            threading.Thread(
                target=self._answer, args=[request], name="answer", daemon=True
            ).start()

    def _answer(self, request: str, standing: Standing | None = None) -> None:
        """Write where this rank is, with the stacks of all threads, for `clip-train doctor --hang`."""
        if self._hang_dir is None:
            return
        standing = standing or self.standing()
        content = {
            "request": request,
            "standing": json.loads(standing.dump()),
            "stacks": all_stacks(),
            "time": time.time(),
        }
        name = ANSWER.format(rank=standing.rank)
        with contextlib.suppress(OSError):  # it is also in the log, or nobody waits any more
            LocalStorage(self._hang_dir).put_bytes(name, json.dumps(content).encode())

    def _fire(self, seconds: float) -> None:
        standing = self.standing()
        message = (
            f"no progress for {seconds:.0f} s in phase {self._phase.value} (its limit is "
            f"{self.limit:.0f} s), {standing.does()}"
        )
        rank, node = self._heartbeat.env.rank, node_name()
        log(f"[rank {rank} on {node}] {message}", logging.ERROR)
        faulthandler.dump_traceback(all_threads=True)
        threading.Thread(target=self._answer, args=["", standing], daemon=True).start()
        self._heartbeat.describe_all(standing.dump(), DESCRIBE_SECONDS)
        turn = min(rank, TURNS) * TURN_SECONDS
        self._heartbeat.wait((WAITING_SECONDS if standing.waits else STACKS_SECONDS) + turn)
        suspect = not standing.waits
        if self._heartbeat.abort is None and self._heartbeat.env.world_size > 1:
            found = self._diagnosis()
            suspect = suspect and len(found.ranks) < 2  # more: a store, or code, and no node
            message = f"{message}; {found.said if found.ranks == (rank,) else found.describe()}"
        abort = self._heartbeat.claim(Failure(rank, node, message, node_suspect=suspect))
        if self._phase in (Phase.END, Phase.CLOSE, Phase.FINISH):
            self._exit(abort)  # it hangs while it closes the run

    def _diagnosis(self) -> Diagnosis:
        """Of the ranks together."""
        standings = {
            rank: Standing.load(json.loads(text))
            for rank, text in self._heartbeat.descriptions().items()
        }
        return diagnose(standings, self._heartbeat.env.world_size)


def phase_limit(hang_seconds: float | None, phase: Phase, steps: Sequence[float]) -> float:
    """Seconds until a phase counts as a hang.

    hang_seconds: `launch.hang_seconds`. steps: seconds of the latest.
    """
    if phase is Phase.FINISH:
        return FINISH_SECONDS
    if phase is Phase.STEP:
        return hang_seconds or max(300.0, 20 * statistics.median(steps or [0.0]))
    return max(hang_seconds or 0.0, LIMITS[phase])


def longest_limit(hang_seconds: float | None) -> float:
    """Seconds: the longest limit of all phases, except of a step that is limited by the steps."""
    return max(hang_seconds or 0.0, *LIMITS.values())


# A rank whose innermost frames are in these files waits for others: torch's own, an engine's layer
# over it, and ours, where NCCL's results are read. Functions that these files call may hang.
COMMUNICATION = (
    "/torch/distributed/",
    "/comm/",
    "/clip_train/dist.py",
    "/launcher/runtime/rendezvous.py",
)
WRAPPERS = ("/torch/_ops.py", "/torch/distributed/c10d_logger.py")  # around torch's own functions


def position(frame: FrameType | None) -> tuple[str, bool]:
    """The location of the main thread as a text, and whether it waits for other ranks."""
    if frame is None:
        return "and the main thread is gone", False
    stack = [f for f in traceback.extract_stack(frame) if not f.filename.endswith(WRAPPERS)]
    entered = len(stack)
    while entered > 1 and any(part in stack[entered - 1].filename for part in COMMUNICATION):
        entered -= 1
    here = stack[entered - 1]
    there = place(here.filename, here.lineno, here.name)
    if entered == len(stack):
        return f"in {there}", False
    return f"waiting in {stack[entered].name}, called from {there}", True


def rank_of_run(rank: int, run_dir: Path) -> str:
    """Names a rank to `clip_train.stacks`. By a hash, because a path may be too long for a name."""
    run = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:32]
    return f"rank {rank} of run {run}"


def all_stacks() -> str:
    """Of this process's threads, by name, the innermost frame last; the main thread comes first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found: list[str] = []
    for ident, frame in sys._current_frames().items():
        name = threads[ident].name if ident in threads else str(ident)
        text = f"thread {name}:\n{''.join(traceback.format_stack(frame))}"
        is_main = threads.get(ident) is threading.main_thread()
        if ident != threading.get_ident():
            found.insert(0 if is_main else len(found), text)
    return "\n".join(found)


LOADER = "/clip_train/data/loader.py"
# Frames of Python's and of packages: what they were called for says more.
PACKAGES = re.compile(r"/lib/python3|<frozen")
FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')  # as faulthandler writes it


def reading(frames: Mapping[int, FrameType], main: int | None) -> str:
    """What the code that reads the next batch does, if the main thread waits for it; else empty."""
    frame = frames.get(main or 0)
    if frame is None or not any(
        f.filename.endswith(LOADER) for f in traceback.extract_stack(frame)
    ):
        return ""
    workers = [each for each in stacks.processes() if each.who == f"worker of {os.getpid()}"]
    if workers:
        return "; ".join(f"loader worker {each.pid} {work(each)}" for each in workers[:SHOWN])
    names = {thread.name: thread.ident for thread in threading.enumerate()}
    reader = frames.get(names.get("prefetch") or 0, frame)
    own = [f for f in traceback.extract_stack(reader) if not PACKAGES.search(f.filename)]
    return f"in {place(own[-1].filename, own[-1].lineno, own[-1].name)}" if own else ""


def work(worker: stacks.Answering) -> str:
    """What a loader worker does."""
    if worker.is_stopped():
        return "is frozen"
    threads = stacks.ask(worker).split("\n\n")
    reads = next((text for text in threads if " in _pieces" in text), "")
    for file, line, function in FRAME.findall(reads):
        if not PACKAGES.search(file):
            return f"in {place(file, int(line), function)}"
    return "in no code that reads" if threads[0] else "does not answer"
