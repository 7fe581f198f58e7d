"""`submit --container` on a real Slurm: the signal reaches the ranks inside, and the requeued job resumes.

The runtime is a stand-in for Apptainer that runs the command outside. With CLIP_TRAIN_IMAGE=IMAGE it is the Apptainer
of PATH, and the image must have this project's dependencies.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from launcher.cli.main import main
from tests.launcher.conftest import ROOT
from tests.slurm.cluster import Job
from tests.slurm.conftest import FAULTS, OVERRIDES, STEPS, write_recipe
from tests.slurm.evidence import check_story, finished_like
from tests.slurm.test_survive import DONE, PREEMPTED

pytestmark = pytest.mark.slurm
IMAGE = os.environ.get("CLIP_TRAIN_IMAGE", "")
# It records its words, and replaces itself by what comes behind the image, as Apptainer does.
STAND_IN = """\
#!/bin/bash
printf '%q ' "$@" >>"{log}"; echo >>"{log}"
while [ "$1" != "{image}" ]; do shift; done
shift; export APPTAINER_CONTAINER={image}; exec "$@"
"""


def test_a_signal_reaches_ranks_in_a_container(
    cluster, data, tmp_path, monkeypatch, capsys, undisturbed
):
    """USR1 to ranks in a container"""
    image = Path(IMAGE or tmp_path / "image.sif")
    bin, log = tmp_path / "bin", tmp_path / "words"
    bin.mkdir()
    if not IMAGE:
        image.touch()
        (bin / "apptainer").write_text(STAND_IN.format(log=log, image=image))
        (bin / "apptainer").chmod(0o755)
    (tmp_path / "site.yaml").write_text(
        "{gpus_per_node: 0, cpus_per_task: 1, warn_seconds: 20, local_paths: [],"
        f" container_runtime: apptainer, container: {image}}}\n"
    )
    (tmp_path / "hold").touch()
    own = os.environ.get("PYTHONPATH", "")
    for name, value in {
        "SLURM_CONF": str(cluster.lab / "slurm.conf"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
        "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": f"{FAULTS}:{ROOT}:{own}",
        "STEP_SECONDS": "0.1", "HOLD": str(tmp_path / "hold"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    line = ["submit", str(write_recipe(tmp_path, data)), f"run.steps={STEPS}", *OVERRIDES]
    line += ["--site", str(tmp_path / "site.yaml"), "--nodes=2", "--tasks-per-node=1", "--time=10"]
    with cluster.paused():
        assert main([*line, "--", "--nodelist=n[1-2]"]) == 0
        number = capsys.readouterr().out.split()[1].rstrip(":")
    folder = tmp_path / "run" / "submit" / "0001"
    job = Job(cluster, number, tmp_path / "run", folder / f"small-{number}.log", "2x1", STEPS)
    try:
        job.wait_for_step(10)
        inside = [Path(f"/proc/{pid}/environ").read_bytes() for pid in job.rank_pids().values()]
        assert len(inside) == 2
        assert all(f"APPTAINER_CONTAINER={image}".encode() in each for each in inside)
        job.warn()
        job.wait_for_attempts(1)
        job.let_go()
        finished_like(job, undisturbed)
        first, _ = check_story(job, PREEMPTED, DONE)
        assert "SIGUSR1" in first.end["reason"]
    finally:
        cluster.call("scancel", number)
    if not IMAGE:
        told = log.read_text().splitlines()
        assert len(told) == 4  # two ranks, two attempts
        words = shlex.split(told[0])
        assert words[:2] == ["exec", "--bind"] and words[3] == str(image)
        assert {str(tmp_path / "run"), str(Path(data.train).parent)} <= set(words[2].split(","))
        assert words[-4:] == ["-m", "launcher", "train", str(folder / "recipe.yaml")]
