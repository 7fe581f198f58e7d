"""Runs the tests as other machines would, and appends a row for each run to benchmarks/stress.jsonl.

    python scripts/stress.py numerics [--quick] [SETTING ...]        # under each of SETTINGS, or these
    python scripts/stress.py suite [--times 3] [TEST ...]  # `make test`, or these, shuffled, with delays
    python scripts/stress.py suite --rest            # `make test-rest` in the same way
    python scripts/stress.py table                        # the rows

A failure is repeated with the row's seed: CLIP_TRAIN_TEST_ORDER=SEED CLIP_TRAIN_TEST_JITTER=SEED pytest ...
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from common import processor  # noqa: E402

ROWS = ROOT / "benchmarks" / "stress.jsonl"
SELECTION = "not (full or acceptance or slurm or hosts or peer or browser)"
REST = "full or browser or slurm or hosts"
NUMERICS = [
    "tests/losses",
    "tests/optim",
    "tests/models",
    "tests/engine",
    "tests/test_step.py",
    "tests/test_objectives.py",
    "tests/test_uneven.py",
    "tests/test_recovery.py",
    *(f"tests/launcher/test_{name}.py" for name in ("fine_tuning", "optimizers", "resume", "ema")),
    *(f"tests/launcher/test_{name}.py" for name in ("schedule", "objectives", "fsdp", "auto")),
]
QUICK = [
    *NUMERICS[:2],
    "tests/engine/test_engines.py",
    "tests/engine/test_linear.py",
    *NUMERICS[8:10],
]
SETTINGS = {
    "native": {},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "oneDNN without AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    "two threads": {"OMP_NUM_THREADS": "2", "CLIP_TRAIN_TEST_THREADS": "2"},
}  # fmt: skip


def run(
    label: str, tests: list[str], workers: int, setting: str, seed: int | None, marks: str
) -> dict[str, Any]:
    """One run of pytest as a row; the names of failed tests, at most 20."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **SETTINGS[setting]}
    if seed is not None:
        environment |= {"CLIP_TRAIN_TEST_ORDER": str(seed), "CLIP_TRAIN_TEST_JITTER": str(seed)}
    # as the Makefile does: tests of one file run on one worker, because they share what is slow to set up
    how = ["worksteal"] if marks == SELECTION else ["loadfile", "--no-loadscope-reorder"]
    more = ["-n", str(workers), "--dist", *how] if workers > 1 else []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.xml")
        line = [sys.executable, "-m", "pytest", "-m", marks, f"--junitxml={file}", *more]
        subprocess.run([*line, *tests], cwd=ROOT, env=environment, check=False)
        cases = list(ElementTree.parse(file).iter("testcase"))
    bad = [x for x in cases if x.find("failure") is not None or x.find("error") is not None]
    skipped = [x for x in cases if x.find("skipped") is not None]
    commit = ["git", "describe", "--always", "--dirty"]
    return {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "commit": subprocess.check_output(commit, cwd=ROOT, text=True).strip(),
        "cpu": processor()[0],
        "setting": setting,
        "seed": seed,
        "jitter": seed is not None,
        "tests": label,
        "passed": len(cases) - len(bad) - len(skipped),
        "failed": len(bad),
        "seconds": round(time.monotonic() - start),
        "failures": [f"{x.get('classname')}::{x.get('name')}" for x in bad[:20]],
    }


def table(rows: list[dict[str, Any]]) -> str:
    columns = ["date", "commit", "cpu", "setting", "seed", "tests", "passed", "failed", "seconds"]
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row[name]) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["numerics", "suite", "table"])
    parser.add_argument("what", nargs="*", metavar="SETTING or TEST")
    parser.add_argument("--times", type=int, default=3, help="runs of the suite")
    parser.add_argument("--seed", type=int, help="of the first run; random by default")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    parser.add_argument("--tests", nargs="+", help="instead of the numerics tests")
    parser.add_argument("--rest", action="store_true", help="the tests of `make test-rest`")
    parser.add_argument("--quick", action="store_true", help="a third of the numerics tests")
    args = parser.parse_args()
    first = secrets.randbelow(10**6) if args.seed is None else args.seed
    if args.mode == "numerics":
        unknown = set(args.what) - set(SETTINGS)
        if unknown:
            parser.error(f"unknown settings {sorted(unknown)}; known are {list(SETTINGS)}")
        has_amx = "amx_tile" in processor()[1]
        default = [name for name in SETTINGS if has_amx or name != "oneDNN without AMX"]
        label, tests = ("numerics, quick", QUICK) if args.quick else ("numerics", NUMERICS)
        if args.tests:
            label, tests = " ".join(args.tests), args.tests
        runs = [(label, tests, name, None) for name in args.what or default]
        if not has_amx:
            print("this processor has no AMX: AMX on and off cannot be compared here")
    elif args.mode == "suite":
        tests = args.what or ["tests"]
        label = " ".join(tests) + (", rest" if args.rest else "")
        runs = [(label, tests, "native", first + i) for i in range(args.times)]
    else:
        runs = []
    rows = []
    marks = REST if args.rest else SELECTION
    for label, tests, setting, seed in runs:
        rows.append(run(label, tests, args.workers, setting, seed, marks))
        with ROWS.open("a") as f:
            f.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps(rows[-1], indent=1))
    print(table(rows or [json.loads(line) for line in ROWS.read_text().splitlines()]))
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
