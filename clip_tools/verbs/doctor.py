"""`clip-train doctor [RECIPE]`: find problems before a run does."""

import argparse
import json
from collections import Counter
from dataclasses import asdict

from launcher.cli.arguments import add_help, add_json, add_overrides, add_recipe, path_or_url

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        One line for each thing that can go wrong: ok, warning or error, with the remedy. Exit
        status 1 with an error. Nothing is changed: test files on a disk or in a bucket are removed.
        """,
        """
        clip-train doctor                                       this machine and its cluster
        clip-train doctor my.yaml checkpoint.remote=s3://bucket/run   its shards, S3, disk too
        salloc --nodes 4 clip-train doctor --all-nodes          all pairs of nodes
        clip-train doctor --hang runs/my-run                    why a run makes no progress
        """,
    )
    add_recipe(parser, nargs="?")
    add_overrides(parser)
    parser.add_argument(
        "--all-nodes", action="store_true", help="measure all pairs of nodes of this job"
    )
    parser.add_argument(
        "--hang",
        metavar="RUN",
        type=path_or_url,
        help="ask all ranks of a run where they are; RUN is its folder or its recipe",
    )
    add_json(parser)


def run(
    recipe: str | None, overrides: list[str], all_nodes: bool, hang: str | None, as_json: bool
) -> int:
    """Returns 1 if there is an error, else 0."""
    if hang is not None:
        from clip_tools.hang import explain

        report = explain(hang, overrides)
        print(json.dumps(report.values(), indent=2) if as_json else report.page())
        return int(report.hangs)
    from rich.console import Console
    from rich.text import Text

    from clip_tools.doctor import look

    findings, console = [], Console()
    for finding in look(recipe, overrides, all_nodes):
        findings.append(finding)
        if not as_json:
            text = Text(f"{finding.level:8}", style=COLOURS[finding.level])
            text.append(f"{finding.check}: {finding.message}", style="default")
            if finding.remedy:
                text.append(f" -> {finding.remedy}", style="bold")
            console.print(text, soft_wrap=True)
    counts: Counter[str] = Counter(finding.level for finding in findings)
    worst = max(counts, key=[*COLOURS].index)
    if as_json:
        print(json.dumps({"worst": worst, "findings": [*map(asdict, findings)]}, indent=2))
    else:
        more = "" if recipe else "; with a recipe also shards, captions, disk and stores"
        console.print(", ".join(f"{counts[level]} {level}" for level in COLOURS) + more)
    return int(worst == "error")
