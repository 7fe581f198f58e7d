"""The batch script's other half: runs the ranks of one attempt, and decides by their verdict what comes next.

    python -m launcher.slurm.controller RECIPE [key.path=value ...] -- srun ... python -m launcher train RECIPE ...

A batch script runs it in its own shell's place, on the first node of the job, where Slurm's signals arrive:
  USR1 (time limit near)  -> handed to the ranks until they end
  TERM (scancel, ...)     -> the ranks have it from Slurm already; afterwards nothing is requeued
In the run directory it keeps attempts/0001.log, attempts/0001/ (the ranks' marks) and attempts.jsonl.
Exit status: 0 done or requeued, 75 preempted and left to be submitted again, 143 ended by Slurm, 2 a mistake,
1 given up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from launcher.runtime.error_reports import (
    END_TIME,
    FOLDER,
    PROGRESS_FILE,
    STOP_FILE,
    Cause,
    find_cause,
    leave_terminated,
    lost_node,
    read_marks,
    read_ranks,
    read_resumed,
    stopped_early,
    was_terminated,
)
from launcher.runtime.verdict import clear_verdict, read_verdict, write_verdict
from launcher.slurm.attempts import Decision, History, Limits, Outcome, decide
from launcher.slurm.scheduler import NotLeftOut, answer, end_time, exclusion, node_names, slurm

CLAIM_SECONDS = 60.0  # for a job that has made its attempt's log to begin it; it may be held up in between
REST_SECONDS = 60.0  # for what the ranks have written to reach the logs, of which some decides what comes next


class Signals:
    """What Slurm has told this process."""

    def __init__(self) -> None:
        self.time_is_near = False
        self.terminated = False

    def listen(self) -> None:
        signal.signal(signal.SIGUSR1, self._near)
        signal.signal(signal.SIGTERM, self._terminated)

    def _near(self, number: int, frame: FrameType | None) -> None:
        self.time_is_near = True

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True


def main(arguments: Sequence[str]) -> int:
    signals = Signals()
    signals.listen()  # before anything else: Slurm may be in a hurry
    if "--" not in arguments:
        print("usage: python -m launcher.slurm.controller RECIPE [key.path=value ...] -- srun ...", file=sys.stderr)
        return 2
    split = list(arguments).index("--")
    args, command = parse(arguments[:split]), list(arguments[split + 1 :])
    if "SLURM_JOB_ID" not in os.environ:
        say("SLURM_JOB_ID is not set: this belongs in a batch script, see slurm/")
        return 2
    from clip_train.errors import UserError
    from launcher.config.recipe import load_config

    try:
        config = load_config(args.recipe, args.overrides)
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as e:
        say(f"error: {e}")
        return 2
    limits = Limits(args.max_failures, args.max_fruitless, args.max_node_failures)
    try:
        return Supervisor(config.run_dir, config.steps, limits, signals, chain=args.chain).run(command)
    except OSError as e:  # without a history nothing is to be counted, so nothing is requeued either
        say(f"error: run.dir ({config.run_dir}) cannot be read or written: {e}; not requeued. Mend it, submit again")
        return 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.controller")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--chain", action="store_true", help="the next job of an array or a singleton goes on")
    parser.add_argument("--max-failures", type=int, default=Limits.failures)
    parser.add_argument("--max-fruitless", type=int, default=Limits.fruitless)
    parser.add_argument("--max-node-failures", type=int, default=Limits.node_failures)
    return parser.parse_args(arguments)


def say(message: str) -> None:
    print(f"{time.strftime('%F %T')} [job {os.environ.get('SLURM_JOB_ID', '-')}] {message}", flush=True)


class Supervisor:
    """One attempt of one run."""

    def __init__(self, run_dir: Path, steps: int, limits: Limits, signals: Signals, *, chain: bool = False) -> None:
        self.run_dir, self.steps, self.limits, self.signals, self.chain = run_dir, steps, limits, signals, chain
        self.job = os.environ["SLURM_JOB_ID"]
        self.nodes = node_names()
        self.history = History(run_dir)

    def run(self, command: Sequence[str]) -> int:
        """Returns the batch job's exit status. OSError where the run directory cannot be written."""
        while True:
            status = self._nothing_to_do()
            if status is not None:
                return status
            log = self._claim()
            if log is not None:
                return self._attempt(command, log)
            time.sleep(0.2)
            self.history = History(self.run_dir)

    def _nothing_to_do(self) -> int | None:
        """The exit status where another job trains this run, it has been given up, or is done."""
        other = self._running_elsewhere()
        if other is not None:
            say(f"error: job {other} trains {self.run_dir} already: scancel one of them, or choose another run.name")
            return 2
        lost = self._settle_lost_attempt()
        if lost is not None and lost.action == "give up":
            return self._give_up(lost)
        verdict = read_verdict(self.run_dir)
        if verdict is not None and verdict[0] == "DONE" and verdict[1]["step"] >= self.steps:
            say(f"{self.run_dir} is done already")
            self._end_chain()
            return 0
        return None

    def _claim(self) -> Path | None:
        """The log of the next attempt, which no other job can make any more; None where one has been quicker.

        Between a job's log and its `begin` lies a moment: who finds the one without the other waits for it.
        """
        end = time.monotonic() + CLAIM_SECONDS
        while self.history.announced and time.monotonic() < end:
            time.sleep(0.2)
            self.history = History(self.run_dir)
            if not self.history.announced:
                return None
        log = self.run_dir / "attempts" / f"{self.history.next_number:04d}.log"
        log.parent.mkdir(exist_ok=True)
        try:
            log.open("xb").close()
        except FileExistsError:
            return None
        return log

    def _attempt(self, command: Sequence[str], log: Path) -> int:
        number, before = int(log.stem), committed_step(self.run_dir)
        self.history.append(
            "begin",
            attempt=number,
            job=self.job,
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            nodes=self.nodes,
            step=before,
        )
        say(f"attempt {number} of {self.run_dir.name} on {','.join(self.nodes)}, from step {before}; log: {log}")
        clear_verdict(self.run_dir)  # an earlier attempt's word must not be taken for this one's
        started = time.monotonic()
        status = self._run_ranks(command, log)
        outcome = self._outcome(status, before, log)
        decision = decide(outcome, *self.history.counts(), self.limits)
        self.history.append(
            "end",
            attempt=number,
            resumed=read_resumed(log.with_suffix("")),
            verdict=outcome.verdict,
            step=outcome.after,
            reason=outcome.reason,
            blamed=list(outcome.blamed),
            failures=decision.failures,
            fruitless=decision.fruitless,
            decision=decision.action,
            seconds=round(time.monotonic() - started, 1),
            status=status,
        )
        say(f"attempt {number} ended after step {outcome.after}: {outcome.verdict}: {outcome.reason}")
        return self._act(decision, outcome)

    def _running_elsewhere(self) -> str | None:
        """The job, not this one, whose attempt has begun, has not ended, and is running by Slurm's word."""
        begun = self.history.unfinished()
        job = str(begun.get("job", "")) if begun is not None else ""
        if not job or job == self.job:
            return None
        state = answer("squeue", "-h", "-j", job, "-o", "%T")
        return job if state in ("RUNNING", "SUSPENDED", "STOPPED") else None

    def _settle_lost_attempt(self) -> Decision | None:
        """An attempt whose batch script never came to its end: the node under it was lost, or Slurm killed it."""
        lost = self.history.unfinished()
        if lost is None:
            return None
        log = self.run_dir / "attempts" / f"{lost['attempt']:04d}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        first, node = lost["nodes"][0], lost_node(text)
        if node is None and was_terminated(log.with_suffix("")):  # a preemption or a scancel
            word, cause = (
                "PREEMPTED",
                Cause("Slurm told the job to end (TERM), and killed it before the ranks had ended"),
            )
        else:
            word, cause = "LOST", node or Cause(f"the batch script on {first} was lost", (first,))
        after = committed_step(self.run_dir)
        decision = decide(
            Outcome(word, lost["step"], after, cause.reason, cause.nodes), *self.history.counts(), self.limits
        )
        self.history.append(
            "end",
            attempt=lost["attempt"],
            resumed=read_resumed(log.with_suffix("")),
            verdict=word,
            step=after,
            reason=cause.reason,
            blamed=list(cause.nodes),
            failures=decision.failures,
            fruitless=decision.fruitless,
            decision=decision.action,
        )
        say(f"attempt {lost['attempt']} was {word} after step {after}: {cause.reason}")
        return decision

    def _run_ranks(self, command: Sequence[str], log: Path) -> int:
        """Run to the end, whatever signals come; its output goes to the job's log and the attempt's."""
        environ = {**os.environ, FOLDER: str(log.with_suffix("").absolute())}
        if END_TIME not in environ:
            environ[END_TIME] = end_time(self.job)
        with log.open("ab", buffering=0) as copy:
            try:
                process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            except OSError as e:
                told = f"{command[0]} cannot be started: {e}\n"
                copy.write(told.encode())
                sys.stdout.write(told)
                return 127
            assert process.stdout is not None
            tee = threading.Thread(target=copy_lines, args=(process.stdout, copy))
            tee.start()
            last_sent, noted = 0.0, False
            while process.poll() is None:
                if self.signals.terminated and not noted:
                    noted = True
                    leave_terminated(log.with_suffix(""))
                # A rank that is still being started ignores USR1: say it again until all have ended.
                if self.signals.time_is_near and time.monotonic() - last_sent > 5:
                    if not last_sent:
                        say("USR1, the time limit is near: handed to the ranks")
                    last_sent = time.monotonic()
                    # without --batch: to the steps alone. Of an array's task it delivers, and then retries for ever
                    slurm("scancel", "--signal=USR1", self.job, timeout=3)
                time.sleep(0.2)
            tee.join(timeout=REST_SECONDS)
        return process.returncode

    def _outcome(self, status: int, before: int, log: Path) -> Outcome:
        word, why = read_verdict(self.run_dir) or ("", {})
        folder = log.with_suffix("")
        after = committed_step(self.run_dir)
        stop_file = (self.run_dir / STOP_FILE).exists()
        if word in ("DONE", "PREEMPTED"):
            return Outcome(word, before, after, why["reason"], (), self.signals.terminated, stop_file)
        text, marks = log.read_text(errors="replace"), read_marks(folder)
        early = stopped_early(marks, text)
        if not word and early is not None:
            return Outcome("PREEMPTED", before, after, early, (), self.signals.terminated, stop_file)
        ranks, terminated = read_ranks(folder), self.signals.terminated
        cause = find_cause(marks, ranks, text, status, job_nodes=self.nodes, terminated=terminated)
        word = "FATAL" if cause.fatal else word or "CRASHED"
        return Outcome(word, before, after, cause.reason, cause.nodes, self.signals.terminated, stop_file)

    def _act(self, decision: Decision, outcome: Outcome) -> int:
        match decision.action:
            case "done":
                self._end_chain()
                return 0
            case "give up":
                return self._give_up(decision)
            case "stop":
                say(f"not requeued: {decision.why}")
                self._end_chain()
                return 2
            case "leave":
                say(f"not requeued: {decision.why}")
                if outcome.stop_file:
                    self._end_chain()
                return 143 if outcome.terminated else 75
        if self.chain:
            self._leave_out_bad_nodes(os.environ.get("SLURM_ARRAY_JOB_ID", self.job))
            say(f"the next job of the chain goes on: {decision.why}")
            return 0
        return self._requeue(decision)

    def _requeue(self, decision: Decision) -> int:
        for _ in range(3):
            if self.signals.terminated:  # since: a requeue now would bring back what the user has cancelled
                say("not requeued: Slurm ended the job in the meantime")
                return 143
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the requeue itself sends; KillWait is left
            said = slurm("scontrol", "requeue", self.job)
            if said is None:
                say(f"requeued: {decision.why}")
                self._leave_out_bad_nodes(self.job)
                return 0  # which no longer matters: the job waits already
            self.signals.listen()
            time.sleep(2)
        say(f"scontrol requeue was refused ({said}): submit the same line again to go on")
        return 75

    def _give_up(self, decision: Decision) -> int:
        say(f"GIVING UP: {decision.why}")
        write_verdict(self.run_dir, "FAILED", committed_step(self.run_dir), f"gave up: {decision.why}")
        self._end_chain()
        return 1

    def _leave_out_bad_nodes(self, job: str) -> None:
        """The next attempt runs without them, if it certainly can. Slurm takes it for waiting jobs only."""
        bad = self.history.bad_nodes(self.limits)
        if not bad:
            return
        told = f"{', '.join(bad)} failed {self.limits.node_failures} times"
        try:
            nodelist = exclusion(job, bad, self.nodes, os.environ.get("SLURM_JOB_PARTITION", ""))
        except NotLeftOut as e:
            return say(f"{told}, but {e}: not left out")
        if not nodelist:
            return
        for _ in range(20):
            said = slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={nodelist}")
            if said is None:
                break
            time.sleep(0.3)
        self.history.append("exclude", attempt=self.history.next_number - 1, nodes=bad, refused=said)
        say(f"{told}: {'left out of the next attempt' if said is None else f'could not be left out: {said}'}")

    def _end_chain(self) -> None:
        """Nothing is left for the other jobs of the array."""
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        if self.chain and array:
            slurm("scancel", "--state=PENDING", array)


def copy_lines(source: IO[bytes], log: IO[bytes]) -> None:
    """To both logs, to the end: a pipe that nobody empties would stop the ranks, so a full disk must not end this."""
    for line in source:
        for target in (log, sys.stdout.buffer):
            with contextlib.suppress(OSError, ValueError):  # full, gone; closed, as at the very end
                target.write(line)
                target.flush()


def committed_step(run_dir: Path) -> int:
    """The newest committed step that is known here: what rank 0 has told, or the commits themselves."""
    steps = [0]
    with contextlib.suppress(OSError, ValueError):  # none yet
        steps.append(int((run_dir / PROGRESS_FILE).read_text()))
    for commit in (run_dir / "checkpoints" / "commit").glob("e*-s*.json"):
        number = commit.stem.rpartition("-s")[2]
        if number.isdigit():
            steps.append(int(number))
    return max(steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
