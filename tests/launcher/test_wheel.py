"""The wheel in an environment that holds nothing else, far from the checkout: README's first command, and what follows;
the library with few packages beside torch; the sdist.

Packages come from pip's index (TORCH, as in the Makefile, says which torch): some minutes, mostly of the network.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout, in which a build may write."""
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, tmp_path / "source", ignore=ignored))


def build_wheel(source: Path, folder: Path) -> Path:
    """source: a checkout or an sdist."""
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("clip_train-*.whl")
    return wheel


def test_the_wheel_alone_goes_through_the_demo(source, tmp_path):
    outside, fresh = tmp_path / "outside", tmp_path / "fresh"
    wheel = build_wheel(source, tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".c", ".cpp"))]  # pure Python
    top = {name.partition("/")[0] for name in names}
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


LIBRARY_NEEDS = ("torch", "numpy", "pydantic", "PyYAML")
LIBRARY_PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from clip_train import InfoNCE, contrastive_step
from clip_train.losses.maxsim import MaxSim
from clip_train.losses.ranking import Ranking
from clip_train.losses.views import matryoshka

class Towers(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.document = nn.Linear(5, 4), nn.Linear(6, 4)
        self.tokens = tokens

    def forward(self, queries, documents):
        query = F.normalize(self.query(queries), dim=-1)
        document = F.normalize(self.document(documents), dim=-1)
        if not self.tokens:
            query, document = query.sum(1), document.sum(1)
        return query, document, torch.ones(1)

torch.set_default_dtype(torch.float64)
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(8, 3, 5, generator=generator), torch.randn(8, 3, 6, generator=generator)
for loss in (InfoNCE(), Ranking(), MaxSim(), matryoshka({2: 1.0, 4: 1.0})):
    gradients = []
    for wrap in (nn.Identity, DistributedDataParallel, fully_shard):
        for micro_size in (8, 3):
            model = Towers(tokens=isinstance(loss, MaxSim))
            net = model if wrap is nn.Identity else wrap(model)
            contrastive_step(net, *inputs, micro_size=micro_size, loss=loss)
            grads = [p.grad for p in model.parameters()]
            gradients.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads])
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0], rtol=1e-11, atol=1e-14)
torch.distributed.destroy_process_group()
print(sorted({"clip_train", "deepspeed", "transformers", "webdataset"} & {*sys.modules}))
"""


def distributions(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """These and what they require, as they are installed here."""
    found: dict[str, metadata.Distribution] = {}
    left = [*names]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        requirements = [Requirement(line) for line in found[name].requires or ()]
        left += [
            r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})
        ]
    return found


def test_the_library_needs_few_packages_beside_torch(source, tmp_path):
    """`pip install --no-deps`, as into a container that has its own torch."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", fresh], check=True)
    [packages] = fresh.glob("lib/python*/site-packages")
    for distribution in distributions(LIBRARY_NEEDS).values():
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    pip(fresh / "bin" / "python", "install", "--no-deps", build_wheel(source, tmp_path))
    done = subprocess.run(
        [fresh / "bin" / "python", "-c", LIBRARY_PROGRAM],
        cwd=tmp_path, env=alone(), capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['clip_train']"


def test_the_sdist_builds_the_same_wheel(source, tmp_path):
    """In an environment that has setuptools alone."""
    python = tmp_path / "builder" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    pip(python, "install", "setuptools>=77")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([python, "-c", code, tmp_path], cwd=source, env=alone(), check=True)
    (sdist,) = tmp_path.glob("clip_train-*.tar.gz")
    wheels = [build_wheel(source, tmp_path / "a"), build_wheel(sdist, tmp_path / "b")]
    names = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    assert names[0] == names[1]
