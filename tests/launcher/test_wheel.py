"""The wheel in an environment that holds nothing else, far from the checkout: README's first command, and what follows.

Packages come from pip's index (TORCH, as in the Makefile, says which torch): some minutes, mostly of the network.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.runtime.verdict import read_verdict
from tests.documents import ROOT, commands
from tests.launcher.conftest import clean_environment, metrics

pytestmark = [pytest.mark.full, pytest.mark.engine]
NO_NETWORK = (
    "Temporary failure in name resolution",
    "Failed to establish a new connection",
    "Network is unreachable",
)
SHORT = ("run.steps=6", "schedule.warmup_steps=1")
TYPED = (
    "clip-train demo",
    "clip-train checkpoints runs/demo-shapes",
    "clip-train export runs/demo-shapes",
)


def alone() -> dict[str, str]:
    """Without PYTHONPATH: pip takes what lies in the checkout, an egg-info too, for installed."""
    return {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}


def pip(python: Path | str, *line: str | Path) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *line],
        cwd="/", env=alone(), capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    if done.returncode and any(each in done.stdout + done.stderr for each in NO_NETWORK):
        pytest.skip("pip's index cannot be reached from here")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_alone_goes_through_the_demo(tmp_path):
    source, outside, fresh = tmp_path / "source", tmp_path / "outside", tmp_path / "fresh"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__"),
    )
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("clip_train-*.whl")
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "clip_train",
        "launcher",
        "clip_tools",
    }
    subprocess.run([sys.executable, "-m", "venv", fresh], check=True)
    pip(
        fresh / "bin" / "python",
        "install",
        *shlex.split(os.environ.get("TORCH", "torch==2.13.0")),
        wheel,
    )

    outside.mkdir()
    environ = alone()
    environ["PATH"] = f"{fresh / 'bin'}{os.pathsep}{environ['PATH']}"  # as `activate` sets it

    def type_(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=outside,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    places = type_(
        "python -c 'import clip_train, launcher; print(clip_train.__file__, launcher.__file__)'"
    ).split()
    assert all(Path(place).is_relative_to(fresh) for place in places)
    shown = {line for _, line in commands()}
    assert set(TYPED) <= shown, shown
    out = type_(" ".join([TYPED[0], *SHORT]))
    assert "top-1" in out and "chance is 1.3%" in out
    assert read_verdict(outside / "runs" / "demo-shapes")[0] == "DONE"
    assert len(metrics(outside / "runs" / "demo-shapes")) == 6
    assert "complete" in type_(TYPED[1])
    assert "open_clip.create_model_and_transforms" in type_(TYPED[2])
    assert (outside / "runs" / "demo-shapes" / "report.html").stat().st_size > 10_000
