"""The house: imports point one way, and each heavy dependency has one door (contracts in pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_import_contracts_hold():
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_clip_train_runs_without_deepspeed():
    code = "import sys; sys.modules['deepspeed'] = None; import clip_train.trainer, clip_train.plain_engine"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_saver_runs_without_torch():
    """It starts beside every run: torch would cost a second of that start, and 200 MiB on each node."""
    code = "import sys; sys.modules['torch'] = None; import clip_train.checkpoint.saver"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
