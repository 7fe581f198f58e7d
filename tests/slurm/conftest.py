"""A real Slurm of three nodes and a real S3 server, up for the session, and jobs on them."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import lab
from tests.launcher.conftest import RECIPE, ROOT, metrics, run
from tests.s3.bucket import Bucket
from tests.s3.localstack import LocalStack
from tests.s3.server import Server
from tests.slurm.cluster import SETUP, Cluster, Job, call
from tests.slurm.evidence import keep

FAULTS = Path(__file__).parent / "faults"
STEPS = 60
MANY_STEPS = 180  # of the scenarios with several requeues
# The rate is the same whatever the length: one undisturbed run is the measure for all.
OVERRIDES = (
    "schedule.name=constant",
    "checkpoint.every_steps=20",
    "checkpoint.max_failed_saves=50",
    "launch.restart_wait_seconds=1",
)
OPTIONS = {
    "2x1": ["--nodes=2", "--ntasks-per-node=1"],
    "1x2": ["--nodes=1", "--ntasks-per-node=2"],
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with lab("SLURM", SETUP, tmp_path_factory.mktemp("slurm"), 3, GRACE="180") as folder:
        yield Cluster(folder)


@pytest.fixture(scope="session")
def server(cluster) -> Iterator[Server | None]:
    """Where the nodes reach it; None without one, and then checkpoints lie in the run directory."""
    if LocalStack.missing() is not None:
        yield None
        return
    up = LocalStack(cluster.gateway).start()
    yield up
    up.stop()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, data) -> list[dict]:
    """metrics.jsonl of the same recipe on two ranks that nobody disturbs, with its checkpoints on disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_recipe(folder, data)
    status, out = run(recipe, f"run.steps={MANY_STEPS}", *OVERRIDES, ranks=2)
    assert status == 0, out
    return metrics(folder / "run")


def write_recipe(folder: Path, data) -> Path:
    """tests/launcher's with the demo's model."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=data.train, model="tiny"))
    return recipe


Submit = Callable[..., Job]


def submitter(
    cluster: Cluster, server: Server | None, data, folder: Path, jobs: list[Job]
) -> Submit:
    recipe = write_recipe(folder, data)

    def submit(
        layout: str,
        *options: str,
        steps: int = STEPS,
        own_disks: bool = True,
        overrides=(),
        hold: bool = False,
        **environ: str,
    ) -> Job:
        script = options[0] if options and options[0].endswith(".sbatch") else "train.sbatch"
        options = tuple(option for option in options if not option.endswith(".sbatch"))
        bucket = None if server is None else Bucket(server, f"b{uuid.uuid4().hex[:12]}")
        clean = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "SLURM_CONF": str(cluster.lab / "slurm.conf"),
            "PYTHONPATH": f"{FAULTS}:{ROOT}",
            "CLIP_TRAIN_HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "STEP_SECONDS": "0.1",
            "HOLD": str(folder / "hold"),
            **(server.environment() if server else {}),
            **environ,
        }
        settings = [f"run.steps={steps}", *OVERRIDES, *overrides]
        settings += [f"checkpoint.remote={bucket.url}/run"] if bucket else []
        line = [
            "sbatch",
            "--parsable",
            "--hold",
            *OPTIONS[layout],
            "--gpus-per-node=0",
            "--cpus-per-task=1",
            *options,
        ]
        if hold:
            (folder / "hold").touch()
        line += [f"--output={folder}/job.log", str(ROOT / "slurm" / script), str(recipe), *settings]
        number = call(*line, environ=clean, cwd=folder).split(";")[0]
        job = Job(
            cluster,
            number,
            folder / "run",
            folder / "job.log",
            layout,
            steps,
            bucket,
            bool(bucket and own_disks),
        )
        jobs.append(job)
        if job.own_disks:
            job.run_dir.mkdir()
            (job.run_dir / "checkpoints").symlink_to(cluster.lab / "disk" / number)
        cluster.call("scontrol", "release", number)
        return job

    return submit


def end_all(jobs: list[Job], scenario: str, name: str) -> None:
    for job in jobs:
        subprocess.run(["scancel", job.number], check=False, env=job.cluster.environ)
        job.wait(job.gone, "the end of the job")
        keep(job, scenario, name)
        job.cluster.clear_disks(job.number)


@pytest.fixture
def submit(cluster, server, data, tmp_path, request) -> Iterator[Submit]:
    """submit(layout, *sbatch options, steps=, own_disks=, overrides=, hold=, environ=) -> Job, of slurm/train.sbatch
    itself (or another template, named first), under a clean environment. hold: see Job.hold."""
    jobs: list[Job] = []
    yield submitter(cluster, server, data, tmp_path, jobs)
    end_all(jobs, describe(request.node), request.node.name)


@pytest.fixture(scope="session", autouse=True)
def out_of_time(request) -> Iterator[Job | None]:
    """The job with the short time limit. It takes minutes and mostly sleeps: it runs beside the other tests."""
    item = next(
        (
            each
            for each in request.session.items
            if each.name == "test_time_limits_requeue_until_it_is_done"
        ),
        None,
    )
    if item is None:
        yield None
        return
    cluster, server, data, folders = map(
        request.getfixturevalue, ("cluster", "server", "data", "tmp_path_factory")
    )
    jobs: list[Job] = []
    submit = submitter(cluster, server, data, folders.mktemp("out-of-time"), jobs)
    # n3 is crashed by other tests. Slurm's signal comes 70 to 100 s after the start, the trainer's own clock rings
    # after 90: less than 90 steps in an attempt. One minute would leave 10 s, in which a busy machine is starting.
    limited = ("--time=2", "--signal=USR1@20", "--nodelist=n[1-2]")
    yield submit("2x1", *limited, steps=MANY_STEPS, STEP_SECONDS="1.0")
    end_all(jobs, describe(item), item.name)


def describe(item) -> str:
    """A scenario in words: the first line of its test."""
    return (item.function.__doc__ or item.name).strip().splitlines()[0].rstrip(".")
