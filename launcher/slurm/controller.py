"""The batch script's other half: runs the ranks of one attempt, and decides by VERDICT and progress what follows.

    python -m launcher.slurm.controller RECIPE [key.path=value ...] -- srun ... python -m launcher train RECIPE ...

A batch script runs it in its own shell's place, on the first node of the job, where TERM arrives (scancel, preemption):
the ranks have it from Slurm already, and afterwards nothing is requeued. USR1 (time limit near) goes to them alone.
In the run directory it keeps attempts/0001.log, attempts/0001/error.json (the first rank's that failed) and
attempts.jsonl. Exit status: 0 done, requeued, or stopped by a STOP file; 75 preempted and left to be submitted again;
143 ended by Slurm; 2 a mistake; 1 given up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launcher.runtime.environment import END_TIME
from launcher.runtime.ports import candidates, free_port
from launcher.runtime.verdict import (
    ATTEMPT,
    PROGRESS_FILE,
    STOP_FILE,
    clear_verdict,
    notify,
    read_report,
    read_verdict,
    write_verdict,
)
from launcher.slurm.attempts import Decision, History, Outcome, decide, explain, lost_node
from launcher.slurm.scheduler import (
    NO_ARRAY,
    OUTAGE,
    answer,
    end_time,
    exclude,
    field,
    node_names,
    slurm,
    update,
)

if TYPE_CHECKING:
    from launcher.config.recipe import RunConfig

USAGE = "[--chain] RECIPE [key.path=value ...] -- srun ..."
RUNNING = ("RUNNING", "SUSPENDED", "STOPPED")
RETRY_SECONDS = 15.0  # between requests to requeue, at most
REST_SECONDS = (
    60.0  # for what the ranks have written to reach the logs, of which some decides what comes next
)


def main(arguments: Sequence[str]) -> int:
    terminated = threading.Event()
    listen(terminated)  # before anything else: Slurm may be in a hurry
    parser = argparse.ArgumentParser(
        prog="python -m launcher.slurm.controller", usage="%(prog)s [-h] " + USAGE
    )
    parser.add_argument(
        "--chain", action="store_true", help="the next job of an array resumes instead"
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    args, command = parser.parse_args(arguments[:split]), list(arguments[split + 1 :])
    if not command or "SLURM_JOB_ID" not in os.environ:
        parser.error(
            "SLURM_JOB_ID is not set, or no command follows --: this belongs in a batch script, see slurm/"
        )
    if "SLURM_ARRAY_JOB_ID" in os.environ and not args.chain:
        say(f"error: {NO_ARRAY}")
        return 2
    from clip_train.errors import RankError, UserError
    from launcher.config.recipe import load_config

    for wait in (*RECIPE_WAITS, None):
        try:
            config = load_config(args.recipe, args.overrides)
            config.run_dir.mkdir(parents=True, exist_ok=True)
            break
        except (UserError, OSError) as e:
            say(f"error: {e}")
            lasting = isinstance(e, PermissionError) or not isinstance(e, (RankError, OSError))
            if wait is None or lasting or terminated.wait(wait):
                return 2
            say(f"the recipe is read again after {wait:g} s")
    try:
        return Controller(config, terminated, chain=args.chain).run([*command, *config.counted])
    except (
        OSError
    ) as e:  # without a history nothing is to be counted, so nothing is requeued either
        say(
            f"error: run.dir ({config.run_dir}) cannot be read or written: {e}; not requeued. Mend it, submit again"
        )
        return 1


RECIPE_WAITS = (
    15.0,
    60.0,
    240.0,
)  # seconds, where what it names, such as a shard's count, cannot be read for now


def listen(terminated: threading.Event) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: terminated.set())
    signal.signal(
        signal.SIGUSR1, lambda number, frame: None
    )  # --signal=B:USR1, to this script alone: see END_TIME


def say(message: str) -> None:
    print(
        f"{time.strftime('%F %T')} [job {os.environ.get('SLURM_JOB_ID', '-')}] {message}",
        flush=True,
    )


class Controller:
    """One attempt of one run."""

    def __init__(
        self, config: RunConfig, terminated: threading.Event, *, chain: bool = False
    ) -> None:
        self.config, self.run_dir, self.terminated, self.chain = (
            config,
            config.run_dir,
            terminated,
            chain,
        )
        self.job = os.environ["SLURM_JOB_ID"]
        self.nodes = node_names()

    def run(self, command: Sequence[str]) -> int:
        """Returns the batch job's exit status. OSError where the run directory cannot be written."""
        restart, number = int(os.environ.get("SLURM_RESTART_COUNT", "0")), None
        while number is None:  # again where another job has been quicker
            self.history = History(self.run_dir)
            following = self.history.next_number  # whoever begins from now on begins this one
            status = self._nothing_to_do()
            if status is not None:
                return status
            before = committed_step(self.run_dir)
            number = self.history.claim(
                following, job=self.job, restart=restart, nodes=self.nodes, step=before
            )
        log = self._log(number)
        say(
            f"attempt {number} of {self.run_dir.name} on {','.join(self.nodes)}, from step {before}; log: {log}"
        )
        self._comment(f"attempt {number} from step {before}")
        clear_verdict(self.run_dir)  # an earlier attempt's must not be taken for this one's
        started = time.time()
        status = self._run_ranks(command, number)
        outcome = self._outcome(status, before, log)
        seconds = time.time() - started
        gpus = len(self.nodes) * int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
        lost = 0.0 if outcome.verdict == "DONE" else seconds
        with contextlib.suppress(OSError):
            if lost and outcome.step > before:  # what was trained since the last commit is lost
                lost = min(lost, time.time() - (self.run_dir / PROGRESS_FILE).stat().st_mtime)
        hours = {
            "gpu_hours": round(gpus * seconds / 3600, 3),
            "gpu_hours_lost": round(gpus * max(lost, 0.0) / 3600, 3),
        }
        decision = self._end(number, outcome, seconds=round(seconds, 1), status=status, **hours)
        self._comment(f"attempt {number}: {outcome.verdict} at step {outcome.step}")
        return self._act(decision, outcome)

    def _comment(self, text: str) -> None:
        """In `squeue -o %k`, after the user's own comment. Best effort."""
        own = re.sub(r" ?\[clip-train: [^]]*\]", "", field(self.job, "Comment"))
        update(self.job, Comment=f"{own} [clip-train: {text}]".strip())

    def _log(self, number: int) -> Path:
        return self.run_dir / "attempts" / f"{number:04d}.log"

    def _nothing_to_do(self) -> int | None:
        """The exit status where another job trains this run, it has been given up, or is done."""
        begun = self.history.unfinished()
        job = str(begun.get("job", "")) if begun is not None else ""
        if job not in ("", self.job) and answer("squeue", "-h", "-j", job, "-o", "%T") in RUNNING:
            say(
                f"error: job {job} trains {self.run_dir} already: scancel one of them, or choose another run.name"
            )
            return 2
        if begun is not None:
            decision = self._settle_lost_attempt(begun["attempt"], begun["step"], begun["nodes"][0])
            if decision.decision == "give up":
                return self._give_up(decision)
        verdict = read_verdict(self.run_dir)
        if verdict is None or verdict[0] != "DONE" or verdict[1]["step"] < self.config.steps:
            return None
        self._end_chain()
        vain = self._changed_in_vain()
        say(f"error: {vain}" if vain else f"{self.run_dir} is done already")
        return 2 if vain else 0

    def _changed_in_vain(self) -> str:
        """That the recipe has been changed since the run was finished, of which nothing would come."""
        from clip_train.errors import UserError
        from launcher.config.recipe import read_recipe
        from launcher.config.resume import changes, in_vain

        path = str(self.run_dir / "recipe.yaml")  # as the ranks have resolved it
        with contextlib.suppress(UserError):
            return in_vain(self.config, changes(self.config, read_recipe(path)), path)
        return ""  # it cannot be read

    def _settle_lost_attempt(self, number: int, before: int, first_node: str) -> Decision:
        """An attempt whose batch script never came to its end: the node under it was lost, or Slurm killed it."""
        log = self._log(number)
        node = lost_node(log.read_text(errors="replace") if log.exists() else "")
        after = committed_step(self.run_dir)
        if node is None and self.history.was_terminated(number):
            reason = "Slurm sent TERM to the job, and killed it before the ranks had ended"
            return self._end(number, Outcome("PREEMPTED", before, after, reason))
        reason = (
            f"Slurm lost the node {node}" if node else f"the batch script on {first_node} was lost"
        )
        return self._end(number, Outcome("LOST", before, after, reason, (node or first_node,)))

    def _end(self, number: int, outcome: Outcome, **more: float) -> Decision:
        decision = decide(outcome, *self.history.counts())
        resumed = History(self.run_dir).resumed()  # as rank 0 has noted it since
        self.history.append(
            "end", attempt=number, resumed=resumed, **asdict(outcome), **asdict(decision), **more
        )
        say(
            f"attempt {number} ended after step {outcome.step}: {outcome.verdict}: {outcome.reason}"
        )
        if self.config.log.notify is not None:
            word = "FAILED" if decision.decision == "give up" else outcome.verdict
            failed = notify(
                self.config.log.notify,
                self.run_dir,
                word,
                outcome.step,
                f"{outcome.reason} ({decision.decision}: {decision.why})",
            )
            if failed:
                say(f"warning: {failed}")
        return decision

    def _run_ranks(self, command: Sequence[str], number: int) -> int:
        """Run to the end, whatever signals come; its output goes to the job's log and the attempt's."""
        log = self._log(number)
        environ = {**os.environ, ATTEMPT: str(log.with_suffix("").absolute())}
        environ.setdefault(END_TIME, end_time(self.job))
        # rank 0 runs on this node; another attempt starts with another port
        ports = candidates(f"{self.job}.{number}")
        environ.setdefault("MASTER_PORT", str(free_port(ports)))
        with log.open("ab", buffering=0) as copy:
            try:
                process = subprocess.Popen(
                    command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            except OSError as e:
                copy_lines([f"{command[0]} cannot be started: {e}\n".encode()], copy)
                return 127
            assert process.stdout is not None
            tee = threading.Thread(target=copy_lines, args=(process.stdout, copy))
            tee.start()
            noted = False
            while process.poll() is None:
                if self.terminated.is_set() and not noted:
                    noted = True  # at once: KILL may follow before the ranks have ended
                    self.history.append("terminated", attempt=number)
                time.sleep(0.2)
            tee.join(timeout=REST_SECONDS)
        return process.returncode

    def _outcome(self, status: int, before: int, log: Path) -> Outcome:
        """By the verdict; where there is none, or a failure, by the error report and by what srun has printed."""
        word, why = read_verdict(self.run_dir) or ("", {"reason": ""})
        report, text = read_report(log.with_suffix("")), log.read_text(errors="replace")
        reason: str = why["reason"]
        blamed: tuple[str, ...] = ()
        if word not in ("DONE", "PREEMPTED"):
            word, reason, blamed = explain(word, report, text, status)
        if self.terminated.is_set() and (report is None or report.lost) and lost_node(text) is None:
            blamed = ()  # who is killed while it saves is not to blame; a node that Slurm has lost is
        file = self.run_dir / STOP_FILE  # rank 0 may have removed it once it has obeyed
        after, stop_file = committed_step(self.run_dir), file.exists() or f"{file}" in reason
        return Outcome(word, before, after, reason, blamed, self.terminated.is_set(), stop_file)

    def _act(self, decision: Decision, outcome: Outcome) -> int:
        match decision.decision:
            case "done":
                self._end_chain()
                return 0
            case "give up":
                return self._give_up(decision)
            case "requeue" if self.chain:
                say(f"the next job of the chain resumes: {decision.why}")
                return 0
            case "requeue":
                return self._requeue(decision)
        say(f"not requeued: {decision.why}")
        if decision.decision == "stop" or outcome.stop_file:
            self._end_chain()
        left = 0 if outcome.stop_file else 75
        return 2 if decision.decision == "stop" else 143 if outcome.terminated else left

    def _requeue(self, decision: Decision) -> int:
        """Ask until Slurm has requeued the job, as long as slurmctld is away; a refusal ends it soon."""
        wait, refusals = 2.0, 0
        while not self.terminated.is_set():
            # Slurm sends TERM to the job, scontrol included
            line = ("sh", "-c", 'trap "" TERM; exec scontrol requeue "$0"', self.job)
            failed = slurm(*line)[1]
            if not failed:
                say(f"requeued: {decision.why}")
                self._exclude_suspects()
                if decision.failures:  # what failed may need time to recover
                    seconds = self.config.launch.restart_wait_seconds * 2 ** (decision.failures - 1)
                    update(self.job, StartTime=f"now+{round(seconds)}")
                return 0  # which no longer matters: the job waits already
            # its words for an outage differ, so it is asked whether slurmctld is there, too
            up = "is UP" in answer("scontrol", "ping") and not OUTAGE.search(failed)
            refusals = refusals + 1 if up else 0
            if refusals == 3:  # right after a restart of slurmctld one may pass
                say(f"Slurm refuses to requeue the job ({failed}): submit it again to resume")
                return 75
            say(f"the requeue failed and is tried again in {wait:g} s: {failed}")
            self.terminated.wait(wait)
            wait = min(2 * wait, RETRY_SECONDS)
        # a requeue now would restart what the user has cancelled
        say("not requeued: Slurm ended the job in the meantime")
        return 143

    def _exclude_suspects(self) -> None:
        """The next attempt of this job, which is pending now, gets no node that failed twice."""
        nodes = list(self.history.suspects())
        excluded, failed = exclude(self.job, nodes, os.environ)
        if failed:
            say(
                f"{','.join(nodes)} failed twice or more, but is not excluded, because the job may not run without "
                f"it: {failed}"
            )
        elif excluded:
            self.history.append("exclude", nodes=nodes)
            say(f"{','.join(nodes)} failed twice or more: the next attempts exclude it")

    def _give_up(self, decision: Decision) -> int:
        say(f"GIVING UP: {decision.why}")
        write_verdict(
            self.run_dir, "FAILED", committed_step(self.run_dir), f"gave up: {decision.why}"
        )
        self._end_chain()
        return 1

    def _end_chain(self) -> None:
        """Nothing is left for the other jobs of the array."""
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        if self.chain and array:
            slurm("scancel", "--state=PENDING", array)


def copy_lines(source: Iterable[bytes], log: IO[bytes]) -> None:
    """To both logs, to the end: a pipe that nobody empties would stop the ranks, so a full disk must not end this."""
    for line in source:
        for target in (log, sys.stdout.buffer):
            with contextlib.suppress(OSError, ValueError):  # full, gone; closed, as at the very end
                target.write(line)
                target.flush()


def committed_step(run_dir: Path) -> int:
    """The newest committed step that is known here: PROGRESS, or the commits themselves, where a rank was killed
    before it could write it."""
    steps = [0]
    with contextlib.suppress(OSError, ValueError):
        steps.append(int((run_dir / PROGRESS_FILE).read_text()))
    numbers = (
        file.stem.rpartition("-s")[2]
        for file in (run_dir / "checkpoints" / "commit").glob("e*-s*.json")
    )
    return max(steps + [int(number) for number in numbers if number.isdigit()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
