"""The programs of docs/embedders.md run as they stand, and learn."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "embedders.md").read_text()
START = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = dict(re.findall(r"<!-- example: (\w+)\.py -->\n```python\n(.*?)```", PAGE, re.DOTALL))


def test_there_are_five():
    assert len(PROGRAMS) == 5


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_learns(name):
    assert START is not None
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(START[1] + PROGRAMS[name], {"__name__": "example"})
    losses = [float(line.rsplit(" ", 1)[1]) for line in printed.getvalue().splitlines()]
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0], losses
