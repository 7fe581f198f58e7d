"""What runs without a heavy dependency. The contracts of imports (pyproject.toml) are looked at by `make check`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_clip_train_runs_without_deepspeed():
    code = "import sys; sys.modules['deepspeed'] = None; import clip_train.trainer, clip_train.plain_engine"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_saver_runs_without_torch():
    """It starts beside every run: torch would cost a second of that start, and 200 MiB on each node."""
    code = "import sys; sys.modules['torch'] = None; import clip_train.checkpoint.saver"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
