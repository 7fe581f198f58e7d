"""The documentation as a site, built as `make docs-build` builds it, into a folder of a test's own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

MISSING = [
    name
    for name in ("mkdocs", "material", "mkdocstrings")
    if importlib.util.find_spec(name) is None
]


def build(folder: Path) -> Path:
    """`folder`, with the pages in it; skips the test where mkdocs is not installed."""
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} missing: pip install 'clip-train[docs]'")
    line = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
