"""Versions that are too old are refused in one line, newer ones than tested are a note of `doctor`; pages name them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from clip_tools.doctor import check_versions
from clip_train import versions
from tests.documents import ROOT


def pretend(folder: Path, name: str, version: str) -> Path:
    """For PYTHONPATH: what pip leaves of an installed package, and nothing of the package."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def plan(recipe: Path, folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-X", "importtime", "-m", "launcher", "plan", str(recipe), *overrides]
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(line, env=environ, capture_output=True, text=True, check=False)


def test_an_old_torch_is_one_line_before_it_is_imported(recipe, tmp_path):
    done = plan(recipe, pretend(tmp_path / "old", "torch", "2.12.1+cu128"))
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(lines) == 1 and lines[0].endswith(
        "torch (2.12.1+cu128) is too old, clip-train needs 2.13 or newer: pip install -U 'torch>=2.13'"
    )
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_an_old_deepspeed_is_a_mistake_of_its_engine_alone(recipe, tmp_path):
    folder = pretend(tmp_path / "old", "deepspeed", "0.18.9")
    done = plan(recipe, folder, "engine.kind=deepspeed")
    assert done.returncode == 2
    assert "deepspeed (0.18.9) is too old, clip-train needs 0.19.8 or newer" in done.stderr
    assert plan(recipe, folder, "engine.kind=fsdp").returncode == 0


def test_an_old_python_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("platform.python_version", lambda: "3.9.18")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("launcher", run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "Python (3.9.18) is too old" in line
    assert "python3.13 -m venv .venv" in line


def test_a_newer_torch_is_a_note_of_doctor(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    levels = {finding.message: finding.level for finding in check_versions()}
    note = "torch 99.0 (the newest tested version is 2.15)"
    assert (
        levels[note] == "warning" and list(levels.values()).count("warning") == 2
    )  # DeepSpeed's, too


def test_pages_name_the_ranges():
    ranges = {name: (versions.OLDEST[name], versions.NEWEST[name]) for name in versions.OLDEST}
    python, torch = (" to ".join(ranges[name]) for name in ("Python", "torch"))
    said = f"Python {python}, torch {torch} and DeepSpeed {ranges['deepspeed'][0]}"
    for page in ("README.md", "docs/running.md", "docs/versions.md"):
        assert said in (ROOT / page).read_text(), page
    assert f"Python {python} is needed" in (ROOT / "Makefile").read_text()


def test_an_installation_asks_for_the_oldest_versions():
    project = (ROOT / "pyproject.toml").read_text()
    oldest = versions.OLDEST
    assert f'requires-python = ">={oldest["Python"]}"' in project
    assert f'    "torch>={versions.OLDEST_FOR_LIBRARY},<' in project
    assert f'    "deepspeed>={oldest["deepspeed"]},<' in project
