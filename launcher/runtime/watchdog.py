"""A thread beside each rank: does the rank get anywhere, should it stop, has another one failed?

It asks for a stop when the job's time is nearly over, when a STOP file lies in the run directory, and when the launcher
above this rank has gone. It ends the rank after another one has failed (`heartbeat`), and when a phase exceeds its
limit: with every thread's stack in the log, and whether this rank waited for others or is the one that hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from clip_train.settings import Seconds, Settings
from clip_train.stop import StopRequest
from clip_train.storage.local import LocalStorage
from launcher.runtime.environment import END_TIME, detect, launcher_pid
from launcher.runtime.heartbeat import LEAVE_SECONDS, Heartbeat
from launcher.runtime.log import log, warn
from launcher.runtime.verdict import PROGRESS_FILE, STOP_FILE, Failure, end_process, node_name

FROZEN_SECONDS = 3.0  # between two looks at the clock; the thread looks four times a second
ABORT_SECONDS = 5.0  # the main thread has this long to end by itself once another rank has failed
CLOSE_SECONDS = 300.0  # or, while it closes what it has open, for a checkpoint that is under way
FINISH_SECONDS = 300.0  # of `Outcome.finish`
EARLY_SECONDS = (
    3.0  # from a stop during the start: the main thread may come to the first step by itself
)


class LaunchConfig(Settings):
    """The `launch` section: how long things may take before they count as broken. All in seconds."""

    rendezvous_seconds: Seconds = 600.0
    """For all ranks to join and to form the process group, from the moment at which a rank looks for the others; more
    where imports or the listing of shards take some ranks longer."""
    first_timeout_seconds: Seconds = 1800.0
    """Of a collective until the first step is done: ranks start at different times, kernels are compiled; a quarter
    more than hang_start_seconds at least."""
    timeout_seconds: Seconds = 600.0
    """Of a collective afterwards, while steps run; at least twice the limit of a step."""
    hang_start_seconds: Seconds = 3600.0
    """A rank that has not finished its first step by then hangs."""
    hang_step_seconds: Seconds | None = None
    """The same for one step; null: 20 times the median of the steps so far, and 300 at least."""
    hang_save_seconds: Seconds = 3600.0
    """The same for a checkpoint."""
    hang_evaluate_seconds: Seconds = 7200.0
    """The same for an evaluation."""
    stop_before_end_seconds: Seconds = 120.0
    """Save and stop this long before the job's time is over; a quarter of the job's time at most."""
    restart_wait_seconds: Seconds = 60.0
    """A batch job that failed without a new checkpoint waits this long before its next attempt, and twice as long after
    each further failure."""


class Watchdog:
    """The trainer sets its `phase`; started by `start`, ended by `close`."""

    def __init__(
        self,
        config: LaunchConfig,
        stop: StopRequest,
        heartbeat: Heartbeat | None = None,
        *,
        run_dir: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        on_limit: Callable[[float], None] = lambda limit: None,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        """run_dir: on rank 0, where STOP is looked for and PROGRESS is written. on_limit: called with the limit of a
        phase, in seconds, where it is another one than before. on_first_step: called when it is done."""
        self.config, self.stop, self.run_dir = config, stop, run_dir
        self.committed: Callable[[], int | None] = lambda: (
            None
        )  # the newest committed step, once there is a trainer
        self._heartbeat = heartbeat or Heartbeat(detect({}))
        self._on_limit, self._on_first_step = on_limit, on_first_step
        self._launcher = launcher_pid(environ)
        self._stop_at = stop_time(config, environ, time.time())
        self._phase, self._since, self._limit = "start", time.monotonic(), config.hang_start_seconds
        self._steps: deque[float] = deque(maxlen=50)  # seconds; the latest
        self._begun = False  # the first step
        self._progress: int | None = None  # the step in PROGRESS
        self._folder: int | None = None  # run_dir, held open: no other folder gets its inode
        self.lost = False  # run_dir was removed or moved under the run
        self._asked: float | None = None  # when a stop was asked for during the start
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._heartbeat.env.world_size == 1:  # of several the others would notice
            self._arm()
            main = threading.current_thread() is threading.main_thread()
            if main and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                signal.signal(signal.SIGTSTP, self._pause)

    def close(self) -> None:
        """The rank ends; also writes the last PROGRESS. Again does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            if signal.getsignal(signal.SIGTSTP) == self._pause:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            faulthandler.cancel_dump_traceback_later()
            if self._thread.is_alive():
                self._thread.join()
            if self._folder is not None:
                os.close(self._folder)
            self._write_progress()

    def phase(self, name: str) -> None:
        """A "step", a "save" or an "evaluate" begins; "end": the loop has been left; "finish": so has `train`."""
        now = time.monotonic()
        if name == "step" and self._phase == "start" and not self._begun:
            self._begun = True
            return  # the first step, in which things compile, still belongs to the start
        if self._phase == "start" and self._begun and name not in ("end", "finish"):
            self._on_first_step()
        if name == self._phase == "step":
            self._steps.append(now - self._since)
        self._phase, self._since = name, now
        limit = phase_limit(self.config, name, self._steps)
        if limit != self._limit:
            self._limit = limit
            self._on_limit(limit)

    def _arm(self) -> None:
        """The last resort, in C: a main thread that holds the interpreter's lock stops this module's thread too."""
        faulthandler.dump_traceback_later(
            2 * self._limit + 60, exit=True, file=2
        )  # stderr, whoever holds sys.stderr

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z; Slurm before it suspends a job. The timer in C would take the pause for a hang when it is over."""
        faulthandler.cancel_dump_traceback_later()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._arm()

    def _run(self) -> None:
        armed = before = time.monotonic()
        while not self._closed.wait(0.25):
            now = time.monotonic()
            frozen, before = now - before, now
            if frozen < FROZEN_SECONDS:
                frozen = (
                    0.0  # else not even this thread ran: Ctrl-Z, a suspended job, a paused machine
                )
            self._since += frozen
            try:
                self._look(now, frozen)
            except Exception as e:  # it goes on watching, whatever a disk or a library makes of it
                warn(f"the watchdog could not look: {type(e).__name__}: {e}")
            if self._heartbeat.env.world_size == 1 and (
                now - armed > 30 or frozen
            ):  # the lock is free
                armed = now
                self._arm()

    def _look(self, now: float, frozen_seconds: float) -> None:
        self._look_for_stop()
        with contextlib.suppress(OSError):  # the same
            self._look_at_folder()
        if self._phase == "start" and not self._begun and self.stop.look():
            self._asked = self._asked or now
            if (
                now - self._asked > EARLY_SECONDS
            ):  # nothing is to be saved, and the others may be gone already
                removed = ", which was removed," if self.stop.obey() else ""
                message = f"stopped by {self.stop.reason}{removed} before the first step"
                self._exit(self._claim(message, word="PREEMPTED", status=75))
        abort = self._heartbeat.check(frozen_seconds)
        if abort is not None and self._phase != "finish":
            # The main thread notices in a collective, but it may be elsewhere, or on a GPU.
            allowed = CLOSE_SECONDS if self._phase == "end" and not abort.lost else ABORT_SECONDS
            if now - self._heartbeat.aborted_at > allowed:
                self._exit(abort)
        self._write_progress()
        # once a rank has failed, a rank that waits for it is no second hang
        if (abort is None or self._phase == "finish") and now - self._since > self._limit:
            self._fire(now - self._since)

    def _look_for_stop(self) -> None:
        if self._stop_at is not None and time.time() >= self._stop_at:
            self.stop.ask("the job's time, which is nearly over")
        with contextlib.suppress(OSError):  # a disk that does not answer now: at the next look
            if self.run_dir is not None and (self.run_dir / STOP_FILE).exists():
                self.stop.file = self.run_dir / STOP_FILE
                self.stop.ask(f"the file {self.stop.file}")
        if self._launcher is not None and os.getppid() != self._launcher:
            self.stop.ask("its launcher's death")

    def _look_at_folder(self) -> None:
        """Records are written to open files: they would go on into a folder that nobody can find any more."""
        if self.run_dir is None or self.lost:
            return
        try:
            if self._folder is None:
                self._folder = os.open(self.run_dir, os.O_RDONLY)
            self.lost = not os.path.samestat(os.fstat(self._folder), self.run_dir.stat())
        except FileNotFoundError:
            self.lost = self._folder is not None
        if self.lost:
            warn(f"{self.describe_lost()}; the run continues, and will end with exit status 1")

    def describe_lost(self) -> str:
        return (
            f"run.dir ({self.run_dir}) was removed or moved while the run wrote to it: its metrics.jsonl, eval.jsonl, "
            "attempts.jsonl and local checkpoints are not there any more, and later records follow the old folder"
        )

    def _claim(self, message: str, **more: Any) -> Failure:
        return self._heartbeat.claim(
            Failure(self._heartbeat.env.rank, node_name(), message, **more)
        )

    def _exit(self, abort: Failure) -> None:
        """At once, whatever the main thread does; a store that does not answer must not hold this up."""
        leaving = threading.Thread(target=self._heartbeat.leave, daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS + 1)
        end_process(abort.status)

    def _write_progress(self) -> None:
        """For the batch script: it counts attempts that have come no further."""
        step = self.committed() if self.run_dir is not None else None
        if step is not None and step != self._progress and self.run_dir is not None:
            with contextlib.suppress(OSError):  # again in a moment
                LocalStorage(self.run_dir).put_bytes(PROGRESS_FILE, f"{step}\n".encode())
                self._progress = step

    def _fire(self, seconds: float) -> None:
        where, waiting = position(sys._current_frames().get(self._main or 0))
        entries = recorded()
        pending = None if waiting else unfinished(entries)
        if pending is not None:
            where, waiting = f"{where}, where {pending} is unfinished", True
        message = f"no progress for {seconds:.0f} s in phase {self._phase} (its limit is {self._limit:.0f} s), {where}"
        log(f"[rank {self._heartbeat.env.rank} on {node_name()}] {message}", logging.ERROR)
        faulthandler.dump_traceback(all_threads=True)
        newest = [
            f"{e.get('profiling_name')} {e.get('input_sizes')} {e.get('state')}"
            for e in entries[-4:]
        ]
        print(
            f"the last collectives: {'; '.join(newest) or 'none recorded'}",
            file=sys.stderr,
            flush=True,
        )
        if waiting:
            self._heartbeat.wait(5)  # the rank that hangs itself is the one to name
        abort = self._claim(message, node_suspect=not waiting)
        time.sleep(2)  # the other ranks have stacks to show too, and end with the first that leaves
        self._exit(abort)


def first_timeout(config: LaunchConfig) -> float:
    """Seconds: a rank that waits must not give up before the watchdog of the one that hangs has fired."""
    return max(config.first_timeout_seconds, 1.25 * config.hang_start_seconds)


def phase_limit(config: LaunchConfig, phase: str, steps: deque[float]) -> float:
    """Seconds that a phase may take."""
    others = {
        "save": config.hang_save_seconds,
        "end": config.hang_save_seconds,
        "finish": FINISH_SECONDS,
        "evaluate": config.hang_evaluate_seconds,
    }
    if phase in others:
        return others[phase]
    if config.hang_step_seconds is not None:
        return config.hang_step_seconds
    limit = 300.0  # doubled, so that it seldom changes
    while steps and limit < 20 * statistics.median(steps):
        limit *= 2
    return limit


def stop_time(config: LaunchConfig, environ: Mapping[str, str], now: float) -> float | None:
    """Unix time at which to save and stop, from the job's end; None where it has none."""
    text = environ.get(END_TIME, "")
    if not text.isdigit():
        return None
    end = int(text)
    return end - min(config.stop_before_end_seconds, max(0.0, end - now) / 4)


COMMUNICATION = ("/torch/distributed/", "/comm/")  # torch's own, and an engine's layer over it
# Here a rank stands in the file itself: NCCL's results are waited for where they are read. What these call may hang.
OUR_COMMUNICATION = ("/clip_train/dist.py", "/launcher/runtime/rendezvous.py")


def position(frame: FrameType | None) -> tuple[str, bool]:
    """Where the main thread stands: in words, and whether it waits for other ranks."""
    if frame is None:
        return "and the main thread is gone", False
    stack = traceback.extract_stack(frame)
    entered = next(
        (i for i, f in enumerate(stack) if any(part in f.filename for part in COMMUNICATION)), None
    )
    if entered is None and stack[-1].filename.endswith(OUR_COMMUNICATION):
        entered = max(i for i, f in enumerate(stack) if f.filename != stack[-1].filename) + 1
    here = stack[-1] if entered is None else stack[max(0, entered - 1)]
    place = f"{'/'.join(here.filename.split('/')[-2:])}:{here.lineno} {here.name}"
    if entered is None:
        return f"in {place}", False
    collective = next(
        (
            f.name
            for f in stack[entered:]
            if f.name not in ("wrapper", "log_wrapper", "inner") and f.name[0] != "_"
        ),
        stack[-1].name,
    )
    return f"waiting in {collective}, called from {place}", True


def recorded() -> list[dict[str, Any]]:
    """torch's flight recorder, the oldest entry first; empty where this torch has none."""
    with contextlib.suppress(Exception):
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        return json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    return []


def unfinished(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """The NCCL collective that some group of this rank has not finished: an asynchronous one is waited for anywhere, in
    .item() say. A group's newest entry tells: the parts of a coalesced one before it are never marked as completed."""
    newest = {str(entry.get("process_group")): entry for entry in entries}
    for entry in newest.values():
        name = str(entry.get("profiling_name"))
        if (
            name.startswith("nccl:")
            and entry.get("state") != "completed"
            and not entry.get("retired")
        ):
            return name
    return None
