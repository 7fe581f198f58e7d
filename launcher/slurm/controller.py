r"""The second half of the batch script: run the ranks of one attempt, and decide what follows.

    python -m launcher.slurm.controller RECIPE [key.path=value ...] -- \
        srun ... python -m launcher train RECIPE ...

The batch script replaces its shell by this program (exec), on the job's first node. Slurm sends
TERM to it and to the ranks (scancel, preemption); nothing is requeued afterwards. Only the ranks
get USR1 (time limit near). This program decides by VERDICT and PROGRESS, and writes attempts.jsonl
in the run directory.

Exit statuses:
    0    done, requeued, or stopped by a STOP file
    1    given up
    2    a mistake of the user
    75   preempted; the user submits the job again
    143  ended by Slurm
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_train.errors import UserError
from clip_train.storage.redact import redact
from launcher.runtime.environment import candidates, check_restarts, free_port
from launcher.runtime.verdict import (
    PROGRESS_FILE,
    ROOM,
    RUN_DIR,
    STOP_FILE,
    VERDICT_FILE,
    notify,
    read_verdict,
    write_verdict,
)
from launcher.slurm.attempts import (
    AttemptResult,
    Decision,
    History,
    explain_verdict,
    next_action,
)
from launcher.slurm.scheduler import (
    NO_ARRAY,
    OUTAGE,
    exclude,
    field,
    run_command,
    update,
)

if TYPE_CHECKING:
    from clip_train.recipe.recipe import Recipe

USAGE = "RECIPE [key.path=value ...] -- srun ..."
RUNNING = ("RUNNING", "SUSPENDED", "STOPPED")
RETRY_SECONDS = 15.0  # between requests to requeue, at most


def main(arguments: Sequence[str]) -> int:
    terminated = threading.Event()
    # before anything else: Slurm may kill the job soon
    signal.signal(signal.SIGTERM, lambda number, frame: terminated.set())
    # --signal=B:USR1, to this script alone
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, lambda number, frame: None)
    from clip_train.recipe.recipe import load_config, with_samples
    from clip_train.storage.urls import use_client

    line = list(arguments)
    try:
        if "--" not in line[1:-1] or "SLURM_JOB_ID" not in os.environ:
            raise UserError(
                f"SLURM_JOB_ID is not set, or the arguments are not {USAGE}; see slurm/"
            )
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            raise UserError(NO_ARRAY)
        split = line.index("--")
        config = load_config(line[0], line[1:split])
        use_client(config.storage.client)
        check_restarts(config.checkpoint.resume, os.environ, requeues=True)
        config = with_samples(config)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        return Controller(config, terminated).run([*line[split + 1 :], *config.counted])
    except UserError as e:
        say(f"error: {e}")
        return 2
    except OSError as e:  # without a history, attempts cannot be counted, so nothing is requeued
        say(
            f"error: run.dir ({config.run_dir}) cannot be read or written: {e}; not requeued. "
            f"Correct it and submit again"
        )
        return 1


def say(message: str) -> None:
    job = os.environ.get("SLURM_JOB_ID", "-")
    print(f"{time.strftime('%F %T')} [job {job}] {redact(message)}", flush=True)


class Controller:
    """One attempt of one run."""

    def __init__(self, config: Recipe, terminated: threading.Event) -> None:
        self.config = config
        self.run_dir = config.run_dir
        self.terminated = terminated  # set by TERM
        self.job = os.environ["SLURM_JOB_ID"]
        nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
        listed = run_command("scontrol", "show", "hostnames", nodelist).output
        self.nodes = listed.split() or [nodelist]
        self.history = History(self.run_dir)

    def run(self, command: Sequence[str]) -> int:
        """Returns the batch job's exit status.

        Raises:
            OSError: the run directory cannot be written.
            UserError: another job trains this run.
        """
        begin = self.history.unfinished()
        if begin is not None:
            self._check_not_running(str(begin.get("job", "")))
            result = self._lost_attempt(begin)
            started = datetime.strptime(begin["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
            # it wrote a record of each step until it was lost
            ended = max(started, modified(self.run_dir / "metrics.jsonl"))
            hours = self._hours(result, begin["nodes"], started, ended)
            decision = self._end(begin["attempt"], result, **hours)
            if decision.decision == "give up":
                return self._act(decision, result)
        verdict = read_verdict(self.run_dir)
        if verdict is not None:
            word, content = verdict
            if word == "DONE" and content["step"] >= self.config.steps:
                say(f"{self.run_dir} is done already")
                return 0
        number = self.history.next_number()
        before = committed_step(self.run_dir)
        self.history.append(
            "begin",
            attempt=number,
            job=self.job,
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            nodes=self.nodes,
            step=before,
        )
        nodes = ",".join(self.nodes)
        say(f"attempt {number} of {self.run_dir.name} on {nodes}, from step {before}")
        self._comment(f"attempt {number} from step {before}")
        # an earlier attempt's file must not count for this one
        (self.run_dir / VERDICT_FILE).unlink(missing_ok=True)
        started = time.time()
        status = self._run_ranks(command, number)
        result = self._result(status, before)
        hours = self._hours(result, self.nodes, started, time.time())
        decision = self._end(number, result, status=status, **hours)
        return self._act(decision, result)

    def _check_not_running(self, other: str) -> None:
        """Raises UserError if the job `other` trains this run. "": the job is not known."""
        state = ""
        if other:
            state = run_command("squeue", "-h", "-j", other, "-o", "%T").output
        if other != self.job and state in RUNNING:
            raise UserError(
                f"job {other} trains {self.run_dir} already: scancel one of them, or choose "
                "another run.name"
            )

    def _hours(
        self, result: AttemptResult, nodes: Sequence[str], started: float, ended: float
    ) -> dict[str, float]:
        """The numbers of an attempt's `end`. After a commit, only the time since then is lost.

        started, ended: of the attempt, in seconds since 1970.
        """
        seconds = ended - started
        lost = 0.0 if result.verdict == "DONE" else seconds
        if result.step > result.before:
            lost = min(lost, max(ended - modified(self.run_dir / PROGRESS_FILE), 0.0))
        num_gpus = len(nodes) * int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
        gpu_hours_per_second = num_gpus / 3600
        return {
            "seconds": round(seconds, 1),
            "gpu_hours": round(gpu_hours_per_second * seconds, 3),
            "gpu_hours_lost": round(gpu_hours_per_second * lost, 3),
        }

    def _lost_attempt(self, begin: dict[str, Any]) -> AttemptResult:
        """The result of an attempt without an `end`: its node was lost, or Slurm killed its batch
        script.

        begin: its line in the history.
        """
        before, after = begin["step"], committed_step(self.run_dir)
        if begin["attempt"] in [line["attempt"] for line in self.history.of("terminated")]:
            reason = "Slurm sent TERM to the job, and killed it before the ranks had ended"
            return AttemptResult("PREEMPTED", before, after, reason, terminated=True)
        node = begin["nodes"][0]
        return AttemptResult("LOST", before, after, f"the batch script on {node} was lost", (node,))

    def _end(self, number: int, result: AttemptResult, **numbers: float) -> Decision:
        """Decide what follows, and record and report the end of an attempt."""
        decision = next_action(result, self.history.failures())
        self.history.append("end", attempt=number, **asdict(result), **asdict(decision), **numbers)
        say(f"attempt {number} ended after step {result.step}: {result.verdict}: {result.reason}")
        word = "FAILED" if decision.decision == "give up" else result.verdict
        reason = f"{result.reason} ({decision.decision}: {decision.why})"
        notify(self.config.log.notify, self.run_dir, word, result.step, reason, say)
        self._comment(f"attempt {number}: {result.verdict} at step {result.step}")
        return decision

    def _comment(self, text: str) -> None:
        """Shown by `squeue -o %k`, after the user's own comment. Best effort."""
        own = re.sub(r" ?\[clip-train: [^]]*\]", "", field(self.job, "Comment"))
        update(self.job, Comment=f"{own} [clip-train: {text}]".strip())

    def _run_ranks(self, command: Sequence[str], number: int) -> int:
        """Run the ranks to their end; signals do not end this. Returns the exit status."""
        environ = {**os.environ, RUN_DIR: str(self.run_dir.absolute())}
        environ[ROOM] = str(self.history.room())
        # rank 0 runs on this node; another attempt starts with another port
        environ.setdefault("MASTER_PORT", str(free_port(candidates(f"{self.job}.{number}"))))
        try:
            process = subprocess.Popen(command, env=environ, stderr=subprocess.STDOUT)
        except OSError as e:
            say(f"{command[0]} cannot be started: {e}")
            return 127
        is_recorded = False
        while process.poll() is None:
            if self.terminated.is_set() and not is_recorded:
                # now: KILL may follow before the ranks have ended
                is_recorded = True
                self.history.append("terminated", attempt=number)
            time.sleep(0.2)
        return process.returncode

    def _result(self, status: int, before: int) -> AttemptResult:
        verdict = read_verdict(self.run_dir)
        explanation = explain_verdict(verdict, status)
        blamed = explanation.blamed
        terminated = self.terminated.is_set()
        if terminated:
            # a rank that is killed while it saves does not suggest a fault of its node
            blamed = ()
        room = 0
        if verdict is not None:
            _, content = verdict
            room = content.get("room", 0)
        # rank 0 may have removed the file after it has stopped; then the reason names it
        file = self.run_dir / STOP_FILE
        return AttemptResult(
            verdict=explanation.verdict,
            before=before,
            step=committed_step(self.run_dir),
            reason=explanation.reason,
            blamed=blamed,
            room=room,
            terminated=terminated,
            stop_file=file.exists() or str(file) in explanation.reason,
        )

    def _act(self, decision: Decision, result: AttemptResult) -> int:
        """Do what was decided. Returns the batch job's exit status."""
        if decision.decision == "done":
            return 0
        if decision.decision == "requeue":
            return self._requeue(decision, result)
        if decision.decision == "give up":
            say(f"GIVING UP: {decision.why}")
            write_verdict(self.run_dir, "FAILED", result.step, f"gave up: {decision.why}")
            return 1
        say(f"not requeued: {decision.why}")
        if decision.decision == "stop":
            return 2
        assert decision.decision == "leave"
        if result.terminated:
            return 143
        return 0 if result.stop_file else 75

    def _requeue(self, decision: Decision, result: AttemptResult) -> int:
        """Request a requeue until Slurm accepts it, as long as slurmctld is unreachable or
        overloaded. Three refusals in a row end this. Returns the batch job's exit status."""
        wait, refusals = 2.0, 0
        while not self.terminated.is_set():
            # Slurm sends TERM to the job, scontrol included
            line = ("sh", "-c", 'trap "" TERM; exec scontrol requeue "$0"', self.job)
            error = run_command(*line).error
            if not error:
                say(f"requeued: {decision.why}")
                self._change_pending_job(decision)
                return 0  # no longer matters: the job is already pending
            # OUTAGE does not know the messages of all versions
            is_up = "is UP" in run_command("scontrol", "ping").output
            if is_up and not OUTAGE.search(error):
                refusals += 1
            else:
                refusals = 0
            # right after a restart of slurmctld, one or two refusals may pass
            if refusals == 3:
                why = f"Slurm refuses to requeue the job ({error}): submit it again to resume"
                say(why)
                # the notice before this one promised a requeue
                notify(self.config.log.notify, self.run_dir, "FAILED", result.step, why, say)
                return 75
            say(f"the requeue failed and is tried again in {wait:g} s: {error}")
            self.terminated.wait(wait)
            wait = min(2 * wait, RETRY_SECONDS)
        # a requeue now would restart what the user has cancelled
        say("not requeued: Slurm ended the job in the meantime")
        return 143

    def _change_pending_job(self, decision: Decision) -> None:
        """After a requeue: exclude suspect nodes, and delay the start after a failure."""
        suspects = self.history.suspects()
        names = f"{','.join(suspects)} failed twice or more, or by its hardware"
        exclusion = exclude(self.job, suspects)
        if exclusion.added:
            self.history.append("exclude", nodes=suspects)
            say(f"{names}: the next attempts exclude it")
        if exclusion.error:
            say(
                f"{names}, but is not excluded, because the job may not run without it: "
                f"{exclusion.error}"
            )
        if decision.failures:
            # what failed may need time to recover
            seconds = self.config.launch.restart_wait_seconds * 2 ** (decision.failures - 1)
            update(self.job, StartTime=f"now+{round(seconds)}")


def modified(file: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 if there is none."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def committed_step(run_dir: Path) -> int:
    """The newest committed step, as rank 0 wrote it into PROGRESS."""
    with contextlib.suppress(OSError, ValueError):
        return int((run_dir / PROGRESS_FILE).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
