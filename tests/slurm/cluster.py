"""The cluster and its jobs, as the tests see them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.runtime.verdict import read_verdict
from tests import lab
from tests.launcher.conftest import PATIENCE, ROOT, metrics
from tests.processes import running
from tests.s3.bucket import Bucket

SETUP = ROOT / "scripts" / "setup_slurm.sh"


@dataclass
class Cluster:
    """Nodes n1, n2, n3."""

    lab: Path

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.lab / "slurm.conf")}

    @property
    def gateway(self) -> str:
        """This machine's own address in the nodes' network."""
        return lab.call(SETUP, "gateway", self.lab).strip()

    def crash(self, node: str) -> None:
        lab.call(SETUP, "crash", self.lab, node)

    def repair(self, job: str = "") -> None:
        """n3 is back, with a folder for `job`: the prolog that makes it does not run for a number that the node knows
        already, from having been asked to end what it ran before the crash."""
        lab.call(SETUP, "up", self.lab, "3")
        if job:
            lab.call(SETUP, "exec", self.lab, "n3", "mkdir", "-p", str(self.lab / "disk" / job))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is submitted meanwhile waits."""
        self.call("scontrol", "update", "PartitionName=main", "State=DOWN")
        try:
            yield
        finally:
            self.call("scontrol", "update", "PartitionName=main", "State=UP")

    @contextlib.contextmanager
    def controller_away(self) -> Iterator[None]:
        """slurmctld is stopped, and started again with its state."""
        pid = int((self.lab / "ctld.pid").read_text())
        self.call("scontrol", "shutdown", "slurmctld")
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.1)
        try:
            yield
        finally:
            line = ["slurmctld", "-f", str(self.lab / "slurm.conf")]
            subprocess.run(line, cwd="/", env=self.environ, check=True)

    @contextlib.contextmanager
    def taken_port(self, node: str, port: int) -> Iterator[None]:
        """Another process of the node listens there."""
        code = (
            "import os, socket, sys, time\n"
            f"s = socket.create_server(('', {port})); print('listens', flush=True); time.sleep(600)"
        )
        line = [SETUP, "exec", self.lab, node, sys.executable, "-c", code]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listens\n"
            yield
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def clear_disks(self, job: str) -> None:
        """Of what a job has left; nodes' disks are in memory."""
        for node in ("n1", "n2", "n3"):
            lab.call(SETUP, "exec", self.lab, node, "rm", "-rf", str(self.lab / "disk" / job))

    def call(self, *command: str) -> str:
        """One of Slurm's commands; its output."""
        return call(*command, environ=self.environ)


def call(*command: str | Path, environ: dict[str, str], cwd: Path | None = None) -> str:
    """One of Slurm's commands; its output. Again where the controller was held up."""
    for _ in range(20):
        done = subprocess.run(
            command, env=environ, cwd=cwd, capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode == 0 or not re.search("timed out|Unable to contact", done.stderr):
            break
        time.sleep(1)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@dataclass
class Job:
    """One submitted run."""

    cluster: Cluster
    number: str
    run_dir: Path
    log: Path
    layout: str
    steps: int
    bucket: Bucket | None = None  # of its checkpoints; None: they lie in the run directory
    own_disks: bool = (
        False  # each node keeps them on a disk of its own, which is emptied after every attempt
    )
    seen_commit: int = 0  # a step that was committed before the job was disturbed
    loss: float | None = None  # of the last step; this and the next two once it is found to be done
    loss_undisturbed: float | None = None
    difference: float | None = None  # the largest of any step's

    def state(self) -> str:
        shown = self.cluster.call("scontrol", "show", "job", self.number)
        return next(
            word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")
        )

    @property
    def hold(self) -> Path:
        """While it is there rank 0 goes no further than 30 steps, unless it is asked to stop: see faults/."""
        return self.run_dir.parent / "hold"

    def let_go(self) -> None:
        self.hold.unlink(missing_ok=True)

    def warn(self, task: str = "") -> None:
        """USR1 to the ranks, as before its time limit. Of an array's task scancel delivers it, and then retries for
        ever."""
        scancel = subprocess.Popen(
            ["scancel", "--signal=USR1", self.number + task], env=self.cluster.environ
        )
        try:
            self.wait(lambda: len(self.attempts()) > 0, "stopped")
        finally:
            scancel.kill()
            scancel.wait()

    def wait_for_attempts(self, number: int) -> None:
        """Until so many have ended."""
        self.wait(lambda: len(self.attempts()) >= number, f"the end of attempt {number}")

    def wait(self, until: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if until():
                return
            time.sleep(0.2)
        raise AssertionError(
            f"{what}: not within {timeout} s; the job is {self.state()}\n{self.told()}"
        )

    def wait_for_state(self, *states: str, timeout: float = PATIENCE) -> None:
        self.wait(lambda: self.state() in states, f"job {' or '.join(states)}", timeout)

    def wait_for_step(self, step: int, timeout: float = PATIENCE) -> None:
        self.wait(
            lambda: any(line["step"] >= step for line in metrics(self.run_dir)),
            f"step {step}",
            timeout,
        )

    def wait_for_commit(self, timeout: float = PATIENCE) -> None:
        """Until there is a checkpoint that survives the loss of every node."""
        self.wait(lambda: self.newest_commit() > 0, "a checkpoint", timeout)
        self.seen_commit = self.newest_commit()

    def newest_commit(self) -> int:
        if self.bucket is None:
            names = [file.name for file in (self.run_dir / "checkpoints" / "commit").glob("*.json")]
        else:
            names = self.bucket.keys("run/commit/")
        return max(
            (int(name.removesuffix(".json").rpartition("-s")[2]) for name in names), default=0
        )

    def gone(self) -> bool:
        return self.number not in self.cluster.call("squeue", "-h", "-o", "%A %F").split()

    def told(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def attempts(self) -> list[dict]:
        """The `end` lines of attempts.jsonl."""
        file = self.run_dir / "attempts.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in whole if line["event"] == "end"]

    def rank_pids(self) -> dict[int, int]:
        """rank -> process on this machine, of the ranks that run now."""
        return {
            int(env["SLURM_PROCID"]): pid
            for pid, line, env in running()
            if line[1:4] == ["-m", "launcher", "train"]
            and env.get("SLURM_JOB_ID") == str(self.number)
        }

    def verdict(self) -> str | None:
        found = read_verdict(self.run_dir)
        return found[0] if found else None
