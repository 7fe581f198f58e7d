"""`clip-train doctor [RECIPE]`: what will go wrong, before it does. Each line ok, warning or error, with the remedy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from clip_train.errors import UserError
from launcher.doctor.findings import Check, Finding, error

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def guarded(name: str, check: Check) -> Iterator[Finding]:
    """A check that fails itself is a finding, and not the end of the others."""
    try:
        yield from check()
    except UserError as e:
        yield error(name, str(e), "see the message")
    except Exception as e:
        yield error(name, f"{type(e).__name__}: {e}", "mend it, or report it if it is no fault of this machine")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if there is an error, else 0."""
    recipe, overrides, as_json = args.recipe, args.overrides, args.json
    from launcher import engines
    from launcher.config.recipe import RunConfig, load_config
    from launcher.doctor import machine
    from launcher.doctor import recipe as recipe_checks
    from launcher.engines.config import EngineConfig

    config: RunConfig | None = None
    findings: list[Finding] = []
    console = Console()

    def tell(found: Iterator[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            if not as_json:
                console.print(line(finding), soft_wrap=True)

    for name, check in machine.MACHINE:
        tell(guarded(name, check))
    if recipe is not None:
        try:
            config = load_config(recipe, overrides)
        except UserError as e:
            tell(iter([error("recipe", str(e), "see the message; clip-train train --keys lists all keys")]))
    kind = (config.engine if config else EngineConfig()).kind
    for name, check in engines.package(kind).CHECKS:
        tell(guarded(name, check))
    if config is not None:
        for name, check_config in recipe_checks.RECIPE:
            tell(guarded(name, lambda check_config=check_config: check_config(config)))  # type: ignore[misc]
    worst = next((level for level in ("error", "warning") if any(f.level == level for f in findings)), "ok")
    if as_json:
        print(json.dumps({"worst": worst, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        counts = ", ".join(f"{sum(f.level == level for f in findings)} {level}" for level in ("ok", "warning", "error"))
        console.print(f"{counts}" + ("" if recipe else "; with a recipe also shards, captions, S3 and disk"))
    return 1 if worst == "error" else 0


def line(finding: Finding) -> Text:
    text = Text(f"{finding.level:8}", style=COLOURS[finding.level])
    text.append(f"{finding.check}: {finding.message}", style="default")
    if finding.remedy:
        text.append(f" -> {finding.remedy}", style="bold")
    return text
