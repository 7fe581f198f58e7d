"""A line of this process's log: on stderr, with the time, in one piece."""

from __future__ import annotations

import sys
import time


def log(message: str) -> None:
    """message: begins with `error: ` or `warning: ` where it is one."""
    print(f"{time.strftime('%H:%M:%S')} clip-train: {message}", file=sys.stderr, flush=True)
