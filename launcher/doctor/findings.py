"""What a check of `clip-train doctor` finds, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Literal["ok", "warning", "error"]
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warning", message, remedy)


def error(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "error", message, remedy)


def warning_if(wrong: bool, check: str, message: str, remedy: str) -> Finding:
    return warning(check, message, remedy) if wrong else ok(check, message)


def error_if(wrong: bool, check: str, message: str, remedy: str) -> Finding:
    return error(check, message, remedy) if wrong else ok(check, message)


Check = Callable[[], Iterator[Finding]]
