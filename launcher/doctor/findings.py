"""What a check of `clip-train doctor` finds, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Literal["ok", "warning", "error"] = field(kw_only=True)
    message: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]
ok = partial(Finding, level="ok")
warning = partial(Finding, level="warning")
error = partial(Finding, level="error")


def warning_if(wrong: bool, check: str, message: str, remedy: str) -> Finding:
    return warning(check, message, remedy) if wrong else ok(check, message)
