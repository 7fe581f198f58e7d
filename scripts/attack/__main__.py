"""Attacks the real command, case by case, and prints what became of each class.

    python -m scripts.attack [--cheap] [--missing] [--write] [--minutes N] [--list] [WORDS ...]

WORDS: only cases whose class or name holds one. --missing: only cases without a recorded result.
--write: each result is recorded in benchmarks/attack.jsonl as soon as it is known. At the end, the
table of all recorded results goes into docs/tests.md. Exit status 1 if a case has no allowed
ending and is not a known one. --minutes: no case begins later; the same line with --missing and
--write continues.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time

from scripts.attack import corruption, inputs, processes, record, resources, secrets, soak
from scripts.attack.case import Case, Result, campaign
from scripts.attack.found import KNOWN

PAGE = record.ROOT / "docs" / "tests.md"
MARKS = re.compile("(<!-- attacks -->\n).*(<!-- /attacks -->)", re.DOTALL)
CLASSES = {
    "processes": processes.CASES,
    "resources": resources.CASES,
    "corruption": corruption.CASES,
    "hostile input": inputs.CASES,
    "secrets": secrets.CASES,
    "soak": soak.CASES,
}


def tell(result: Result) -> None:
    peak = f"{result.peak >> 20:5} MiB"
    ending = result.wrong or result.ending
    mark = "WRONG" if result.wrong else "     "
    print(f"{mark} {result.seconds:5.1f} s {peak}  {result.case.name}: {ending}", flush=True)


def chosen(words: list[str], cheap: bool, missing: bool) -> list[tuple[str, Case]]:
    """The cases to run, each with its class."""
    rows = record.recorded(CLASSES) if missing else {}
    done = {(name, row["case"]) for name, found in rows.items() for row in found}
    return [
        (name, case)
        for name, cases in CLASSES.items()
        for case in cases
        if (case.cheap or not cheap)
        and (name, case.name) not in done
        and (not words or any(word in f"{name}: {case.name}" for word in words))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    for flag in ("--cheap", "--missing", "--write", "--list"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf)
    given = parser.parse_args()
    cases = chosen(given.words, given.cheap, given.missing)
    if given.list:
        print("\n".join(case.name for _, case in cases))
        return 0
    wrong, end = False, time.monotonic() + 60 * given.minutes
    for class_name, result in campaign(cases):
        tell(result)
        wrong |= bool(result.wrong) and result.case.name not in KNOWN
        if given.write:
            record.append(class_name, result)
        if time.monotonic() > end:
            break
    if given.write:
        rows = record.recorded(CLASSES)
        text = record.table(rows) + record.remarks(CLASSES, rows)
        PAGE.write_text(MARKS.sub(lambda found: f"{found[1]}{text}{found[2]}", PAGE.read_text()))
        print(text)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
