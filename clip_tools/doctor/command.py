"""`clip-train doctor [RECIPE]`: what will go wrong, before it does. Each line ok, warning or error, with the remedy."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.text import Text

from clip_tools.doctor.machine import MACHINE
from clip_tools.doctor.recipe import RECIPE
from clip_train.errors import UserError
from launcher.checks import Check, Finding, error
from launcher.config.recipe import load_config
from launcher.engines import find_engine
from launcher.engines.config import EngineConfig

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def look(recipe: str | None, overrides: list[str]) -> Iterator[Finding]:
    """At the machine, the recipe's engine, and the recipe where there is one that can be read."""
    yield from guarded(MACHINE)
    config = None
    if recipe is not None:
        try:
            config = load_config(recipe, overrides)
        except UserError as e:
            yield error("recipe", str(e), "see the message; clip-train keys lists all keys")
    engine = config.engine if config else EngineConfig()
    yield from guarded(find_engine(engine.kind).checks)
    if config is not None:
        yield from guarded(tuple((name, partial(check, config)) for name, check in RECIPE))


def guarded(checks: tuple[tuple[str, Check], ...]) -> Iterator[Finding]:
    """A check that fails itself is a finding, and not the end of the others."""
    for name, check in checks:
        try:
            yield from check()
        except UserError as e:
            yield error(name, str(e), "see the message")
        except Exception as e:
            yield error(
                name,
                f"{type(e).__name__}: {e}",
                "mend it, or report it if it is no fault of this machine",
            )


def run(args: argparse.Namespace) -> int:
    """Returns 1 if there is an error, else 0."""
    findings, console = [], Console()
    for finding in look(args.recipe, args.overrides):
        findings.append(finding)
        if not args.json:
            text = Text(f"{finding.level:8}", style=COLOURS[finding.level])
            text.append(f"{finding.check}: {finding.message}", style="default")
            if finding.remedy:
                text.append(f" -> {finding.remedy}", style="bold")
            console.print(text, soft_wrap=True)
    counts: Counter[str] = Counter(finding.level for finding in findings)
    worst = "error" if counts["error"] else "warning" if counts["warning"] else "ok"
    if args.json:
        print(
            json.dumps(
                {"worst": worst, "findings": [asdict(finding) for finding in findings]}, indent=2
            )
        )
    else:
        line = ", ".join(f"{counts[level]} {level}" for level in COLOURS)
        console.print(
            line + ("" if args.recipe else "; with a recipe also shards, captions, S3 and disk")
        )
    return int(worst == "error")
