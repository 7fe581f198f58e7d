"""A real Slurm of three nodes, up for the session, and jobs on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.verdict import read_verdict
from tests.launcher.conftest import MODEL, RECIPE, ROOT, metrics, run

SETUP = ROOT / "scripts" / "setup_slurm.sh"
FAULTS = Path(__file__).parent / "faults"


def missing() -> str | None:
    """What this machine lacks for a Slurm of its own, or None."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        return "no slurmctld, and no apt-get to install it"
    if shutil.which("ip") is None and shutil.which("apt-get") is None:
        return "no iproute2"
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], check=False).returncode:
        return "no namespaces allowed"
    return None


@dataclass
class Cluster:
    """Nodes n1, n2, n3."""

    lab: Path

    def setup(self, *action: str) -> None:
        done = subprocess.run(
            [SETUP, action[0], self.lab, *action[1:]], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def call(self, *command: str) -> str:
        """One of Slurm's commands; its output."""
        environ = {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.lab / "slurm.conf")}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def warn(self, job: str) -> None:
        """USR1 to a job's batch script, as before its time limit. Of an array's task scancel delivers it, and then
        retries for ever."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            environ = {**os.environ, "SLURM_CONF": str(self.lab / "slurm.conf")}
            subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=environ, check=True, timeout=3)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    lack = missing()
    if lack is not None:
        pytest.skip(f"NO SLURM HERE, its tests do not run: {lack}")
    installed = subprocess.run([SETUP, "install"], capture_output=True, text=True, check=False, timeout=600)
    if installed.returncode:
        pytest.skip(f"NO SLURM HERE, its tests do not run: apt-get failed: {installed.stderr[-300:]}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.setup("up", "3")
        yield cluster
    finally:
        cluster.setup("down")


@dataclass
class Job:
    """One submitted run."""

    cluster: Cluster
    number: str
    run_dir: Path
    log: Path

    def state(self) -> str:
        shown = self.cluster.call("scontrol", "show", "job", self.number)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith("JobState="))

    def wait(self, until: Callable[[], bool], what: str, timeout: float = 150) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if until():
                return
            time.sleep(0.2)
        raise AssertionError(f"{what}: not within {timeout} s; the job is {self.state()}\n{self.told()}")

    def wait_for_state(self, *states: str, timeout: float = 150) -> None:
        self.wait(lambda: self.state() in states, f"job {' or '.join(states)}", timeout)

    def wait_for_step(self, step: int, timeout: float = 90) -> None:
        self.wait(lambda: any(line["step"] >= step for line in metrics(self.run_dir)), f"step {step}", timeout)

    def told(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def attempts(self) -> list[dict]:
        """The `end` lines of attempts.jsonl."""
        lines = (self.run_dir / "attempts.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == "end"]

    def rank_pids(self) -> dict[int, int]:
        """rank -> process on this machine, of the ranks that run now."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().split(b"\0")
                environ = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if line[1:4] == [b"-m", b"launcher", b"train"] and f"SLURM_JOB_ID={self.number}".encode() in environ:
                rank = next(e for e in environ if e.startswith(b"SLURM_PROCID="))
                found[int(rank.partition(b"=")[2])] = int(folder.name)
        return found

    def verdict(self) -> str | None:
        found = read_verdict(self.run_dir)
        return found[0] if found else None

    def losses(self) -> list[float]:
        return [line["loss"] for line in metrics(self.run_dir)]


STEPS = 60
OPTIONS = {
    "2x1": ["--nodes=2", "--ntasks-per-node=1"],
    "1x2": ["--nodes=1", "--ntasks-per-node=2"],
}


@pytest.fixture
def submit(cluster, data, tmp_path, request) -> Iterator[Callable[..., Job]]:
    """submit(layout, *sbatch options, overrides=, environ=) -> Job, of slurm/train.sbatch itself, under a clean
    environment. Logs are copied to $SLURM_LOGS, if set."""
    jobs: list[Job] = []
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=tmp_path / "run", train=data.train, model=tmp_path / "model.json"))

    def submit(layout: str, *options: str, overrides: tuple[str, ...] = (), **environ: str) -> Job:
        script = options[0] if options and options[0].endswith(".sbatch") else "train.sbatch"
        options = tuple(option for option in options if not option.endswith(".sbatch"))
        clean = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(tmp_path),
            "SLURM_CONF": str(cluster.lab / "slurm.conf"),
            "PYTHONPATH": f"{FAULTS}:{ROOT}",
            "CLIP_TRAIN_HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            **environ,
        }
        line = ["sbatch", "--parsable", *OPTIONS[layout], "--gpus-per-node=0", "--cpus-per-task=1", *options]
        sent = subprocess.run(
            [*line, f"--output={tmp_path}/job.log", ROOT / "slurm" / script, recipe, f"run.steps={STEPS}", *overrides],
            env=clean,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert sent.returncode == 0, sent.stderr
        job = Job(cluster, sent.stdout.strip().split(";")[0], tmp_path / "run", tmp_path / "job.log")
        jobs.append(job)
        return job

    yield submit
    for job in jobs:
        subprocess.run(
            ["scancel", job.number], check=False, env={**os.environ, "SLURM_CONF": str(cluster.lab / "slurm.conf")}
        )
        job.wait(lambda job=job: job.cluster.call("squeue", "-h", "-o", "%i") == "", "the end of all jobs", 60)
        keep = os.environ.get("SLURM_LOGS")
        if keep:
            folder = Path(keep) / request.node.name
            folder.mkdir(parents=True, exist_ok=True)
            for file in (job.log, job.run_dir / "attempts.jsonl"):
                if file.exists():
                    shutil.copy(file, folder)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, data) -> list[float]:
    """The losses of the same recipe on two ranks, undisturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "model.json").write_text(json.dumps(MODEL))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=data.train, model=folder / "model.json"))
    status, out = run(recipe, f"run.steps={STEPS}", ranks=2)
    assert status == 0, out
    return [line["loss"] for line in metrics(folder / "run")]
