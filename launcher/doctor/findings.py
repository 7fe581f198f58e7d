"""What a check of `clip-train doctor` finds, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    told: str
    remedy: str = ""


def ok(check: str, told: str) -> Finding:
    return Finding(check, "ok", told)


def warning(check: str, told: str, remedy: str) -> Finding:
    return Finding(check, "warning", told, remedy)


def error(check: str, told: str, remedy: str) -> Finding:
    return Finding(check, "error", told, remedy)


Check = Callable[[], Iterator[Finding]]
