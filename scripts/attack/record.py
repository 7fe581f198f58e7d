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
    lines = ["| class | cases tried | held | mended (with the commit) | known and left |"]
    lines.append("|---|---|---|---|---|")
    together = [each for found in rows.values() for each in found]
    for name, found in [*rows.items(), ("all", together)]:
        left = sum(bool(each["wrong"]) for each in found)
        well = [each["case"] for each in found if not each["wrong"]]
        mended = sorted({MENDED[case] for case in well if case in MENDED})
        count = sum(case in MENDED for case in well)
        commits = f" ({', '.join(mended)})" if mended and name != "all" else ""
        lines.append(f"| {name} | {len(found)} | {len(well) - count} | {count}{commits} | {left} |")
    return "\n".join(lines) + "\n"


def remarks(classes: Classes, rows: dict[str, list[Row]]) -> str:
    """Markdown: what is known, what waits, and how many listed cases have no row."""
    waits = {case.name: case.waits for cases in classes.values() for case in cases}
    together = [each for found in rows.values() for each in found]
    lines = [
        f"- {each['case']}: {KNOWN.get(each['case'], each['wrong'])}."
        for each in together
        if each["wrong"]
    ]
    for each in together:
        key = waits[each["case"]]
        if each["seconds"] > SECONDS and not each["wrong"]:
            why = f"its runs together, with {key}" if " " in key else f"waits on purpose ({key})"
            lines.append(f"- {each['case']}: {why}, {each['seconds']:.0f} s.")
    missing = sum(map(len, classes.values())) - len(together)
    lines += [f"- {missing} listed cases have no recorded run."] * bool(missing)
    return "\n".join(["", *lines]) + "\n" if lines else ""
