"""The run's verdict: one word that a batch script can act on, because exit codes lie under launchers.

DONE        all steps are trained and committed
PREEMPTED   asked to stop; a checkpoint is committed; run the same line again
FAILED      ended by an error that may pass; running again may help
FATAL       ended by an error that will come again: a mistake in the recipe, a diverged loss
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from clip_train.errors import DivergedError, Preempted, UserError

FILE = "VERDICT"


def word_for(error: BaseException) -> str:
    if isinstance(error, Preempted):
        return "PREEMPTED"
    if isinstance(error, (UserError, DivergedError)):
        return "FATAL"
    return "FAILED"


def write_verdict(run_dir: Path, word: str, step: int, reason: str) -> None:
    """Atomically: the word, then a JSON line with step and reason."""
    # every rank of a preempted run has the same word to write: not through the same file
    temporary = run_dir / f"{FILE}.{socket.gethostname()}.{os.getpid()}.tmp"
    temporary.write_text(f"{word}\n{json.dumps({'step': step, 'reason': reason})}\n")
    os.replace(temporary, run_dir / FILE)


def clear_verdict(run_dir: Path) -> None:
    """An earlier attempt's word must not be taken for this one's."""
    (run_dir / FILE).unlink(missing_ok=True)


def read_verdict(run_dir: Path) -> tuple[str, dict[str, Any]] | None:
    """The word, and `step` and `reason`; None where there is none, or none that can be read: that says nothing."""
    try:
        word, _, line = (run_dir / FILE).read_text().partition("\n")
        why = json.loads(line)
        return word.strip(), {"step": int(why["step"]), "reason": str(why["reason"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
