"""What a check of `clip-train doctor` finds, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from launcher.versions import installed, too_old, untested


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


def check_range(check: str, name: str) -> Iterator[Finding]:
    """The installed version of `name`, which is Python or a package, against the supported ones."""
    for problem in too_old(name):
        message, _, remedy = problem.partition(": ")
        yield error(check, message, remedy)
        return
    note = untested(name)
    remedy = "docs/versions.md names the tested versions; install one of them if something fails"
    yield warning_if(note is not None, check, note or f"{name} {installed(name)}", remedy)


def warning_if(wrong: bool, check: str, message: str, remedy: str) -> Finding:
    return warning(check, message, remedy) if wrong else ok(check, message)
