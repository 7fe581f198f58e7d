"""The recorded results: a row for each case that ran, and the table that follows from them."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from scripts.attack.case import SECONDS, Case, Result
from scripts.attack.found import KNOWN, MENDED

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks" / "attack.jsonl"
CODE = ("clip_train", "launcher", "clip_tools", "scripts/attack")
Row = dict[str, Any]
Classes = dict[str, list[Case]]


def row(class_name: str, result: Result) -> Row:
    """What is kept of a result: no path of this machine, and one line of what was wrong."""
    commit = ["git", "log", "-1", "--format=%h", "--", *CODE]
    wrong = re.sub(rf"{tempfile.gettempdir()}/[\w./-]*", "...", result.wrong)
    return {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "commit": subprocess.check_output(commit, cwd=ROOT, text=True).strip(),
        "class": class_name,
        "case": result.case.name,
        "ending": result.ending,
        "wrong": "\n".join(wrong.strip().splitlines()[-1:])[-300:],
        "seconds": round(result.seconds, 1),
        "MiB": result.peak >> 20,
    }


def append(class_name: str, result: Result) -> None:
    """Several campaigns may do it at once: a row is one write."""
    with ROWS.open("a") as file:
        file.write(json.dumps(row(class_name, result)) + "\n")


def recorded(classes: Classes) -> dict[str, list[Row]]:
    """The last row of each listed case, by class, in the order of the list."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    last = {(each["class"], each["case"]): each for each in map(json.loads, lines)}
    return {
        name: [last[name, case.name] for case in cases if (name, case.name) in last]
        for name, cases in classes.items()
    }


def table(rows: dict[str, list[Row]]) -> str:
    """Markdown: a row for each class, and one for all."""
    lines = ["| class | cases tried | held | mended | known and left |"]
    lines.append("|---|---|---|---|---|")
    together = [each for found in rows.values() for each in found]
    for name, found in [*rows.items(), ("all", together)]:
        left = sum(bool(each["wrong"]) for each in found)
        well = [each["case"] for each in found if not each["wrong"]]
        count = sum(case in MENDED for case in well)
        lines.append(f"| {name} | {len(found)} | {len(well) - count} | {count} | {left} |")
    return "\n".join(lines) + "\n"


def remarks(classes: Classes, rows: dict[str, list[Row]]) -> str:
    """Markdown: what is known and left, how many cases wait on purpose, how many have no row."""
    together = [each for found in rows.values() for each in found]
    causes: dict[str, list[str]] = {}
    for each in together:
        if each["wrong"]:
            causes.setdefault(KNOWN.get(each["case"], each["wrong"]), []).append(each["case"])
    lines = [f"- {'; '.join(cases)}: {cause}." for cause, cases in causes.items()]
    late = [each for each in together if each["seconds"] > SECONDS and not each["wrong"]]
    if late:
        lines.append(f"- {len(late)} cases wait longer than {SECONDS:.0f} seconds, on purpose.")
    missing = sum(map(len, classes.values())) - len(together)
    if missing:
        lines.append(f"- {missing} listed cases have no recorded run.")
    return "\n".join(["", *lines]) + "\n" if lines else ""
