"""Attacks the real command, case by case, and prints what became of each class.

    python -m scripts.attack [--cheap] [--write] [--list] [WORDS ...]

WORDS: only cases whose class or name holds one. --write: the table goes into docs/reliability.md.
Exit status 1 if a case has no allowed ending.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from scripts.attack import corruption, inputs, processes, resources, secrets, soak
from scripts.attack.case import SECONDS, Case, Result, campaign
from scripts.attack.found import KNOWN, MENDED

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
MARKS = re.compile("(<!-- attacks -->\n).*(<!-- /attacks -->)", re.DOTALL)
CLASSES = {
    "processes": processes.CASES,
    "resources": resources.CASES,
    "corruption": corruption.CASES,
    "hostile input": inputs.CASES,
    "secrets": secrets.CASES,
    "soak": soak.CASES,
}


def table(results: list[Result]) -> str:
    """Markdown: a row for each class, and one for all."""
    rows = ["| class | cases tried | held | mended (with the commit) | known and left |"]
    rows.append("|---|---|---|---|---|")
    by_class = {name: [r for r in results if r.case in cases] for name, cases in CLASSES.items()}
    for name, found in [*by_class.items(), ("all", results)]:
        left = sum(bool(r.wrong) for r in found)
        well = [r.case.name for r in found if not r.wrong]
        mended = sorted({MENDED[case] for case in well if case in MENDED})
        count = sum(case in MENDED for case in well)
        commits = f" ({', '.join(mended)})" if mended and name != "all" else ""
        rows.append(f"| {name} | {len(found)} | {len(well) - count} | {count}{commits} | {left} |")
    return "\n".join(rows) + "\n"


def left(results: list[Result]) -> str:
    """Markdown: what is known, and what waits."""
    known = [
        f"- {r.case.name}: {KNOWN.get(r.case.name, r.wrong.splitlines()[0])}."
        for r in results
        if r.wrong and not r.case.waits
    ]
    waits = [
        f"- {r.case.name}: waits on purpose ({r.case.waits}), {r.seconds:.0f} s."
        for r in results
        if r.case.waits and r.seconds > SECONDS
    ]
    return "\n".join(["", *known, *waits]) + "\n" if known or waits else ""


def tell(result: Result) -> None:
    peak = f"{result.peak >> 20:5} MiB"
    ending = result.wrong or result.ending
    mark = "WRONG" if result.wrong else "     "
    print(f"{mark} {result.seconds:5.1f} s {peak}  {result.case.name}: {ending}", flush=True)


def chosen(words: list[str], cheap: bool) -> list[Case]:
    return [
        case
        for name, cases in CLASSES.items()
        for case in cases
        if (case.cheap or not cheap)
        and (not words or any(word in f"{name}: {case.name}" for word in words))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    for flag in ("--cheap", "--write", "--list"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    cases = chosen(given.words, given.cheap)
    if given.list:
        print("\n".join(case.name for case in cases))
        return 0
    results = campaign(cases, tell)
    text = table(results) + left(results)
    print(text)
    if given.write:
        PAGE.write_text(MARKS.sub(lambda found: f"{found[1]}{text}{found[2]}", PAGE.read_text()))
    return int(any(r.wrong and r.case.name not in KNOWN for r in results))


if __name__ == "__main__":
    sys.exit(main())
