"""From the start of the process to the first step; and what our imports cost beside the packages' own.

Imports are compared in CPU seconds of a fresh Python, in turn; the first step on 1 and 2 ranks.

--before FOLDER: instead, what imports cost beside those of another checkout of this project (`git worktree add`).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import finish, parser

from clip_tools.demo import shapes

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"imports": "at most 1.2 times the CPU seconds of `import torch, deepspeed`"}
MOST_OF_BEFORE = 1.05
THEIRS = "import torch, deepspeed"
OURS = "import launcher.cli.main, launcher.train, launcher.engines.deepspeed.engine"
PARTS = {  # what somebody imports
    "clip_train": "import clip_train",
    "clip_train.library": "import clip_train.library",
    "a rank's": OURS,
}
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def cpu_seconds(code: str, root: Path = ROOT) -> float:
    """root: whose packages are imported."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**ENVIRON, "PYTHONPATH": str(root)}
    subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=root, check=True, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step(folder: Path, ranks: int) -> float:
    """Seconds from the start of the process to the record of a small run's first step."""
    data = shapes(folder / "data", 600, per_shard=150)
    recipe = ROOT / "recipes" / "demo_shapes.yaml"
    line = [
        f"run.dir={folder / str(ranks)}",
        f"data.train={data.train}",
        "run.steps=41",
        "batch.global_size=32",
    ]
    line += ["data.workers=0", "data.val=null", "evaluate.zero_shot_classes=null"]
    verb = ["-m", "launcher", "train", str(recipe), *line]
    started = time.time()
    done = subprocess.run(
        [sys.executable, *verb, f"--ranks={ranks}"],
        env=ENVIRON,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = (folder / str(ranks) / "metrics.jsonl").read_text().splitlines()[0]
    return json.loads(first)["time"] - started


def compare(before: Path, args: Any) -> int:
    rows, missed = [], []
    for what, code in PARTS.items():
        pairs = [
            (cpu_seconds(code, before), cpu_seconds(code)) for _ in range(3 if args.quick else 5)
        ]
        ratio = median(now / then for then, now in pairs)
        then, now = (round(median(each), 2) for each in zip(*pairs, strict=True))
        rows.append(
            {"imports": what, "before, CPU s": then, "now, CPU s": now, "ratio": round(ratio, 3)}
        )
        if ratio > MOST_OF_BEFORE:
            missed.append(f"{what}: {ratio:.2f} times")
    return finish(
        "startup",
        rows,
        {"imports": f"at most {MOST_OF_BEFORE} times what they cost before"},
        missed,
        args,
    )


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--before", type=Path, metavar="FOLDER", help="another checkout, whose imports to compare"
    )
    args = arguments.parse_args()
    if args.before is not None:
        return compare(args.before.resolve(), args)
    pairs = [(cpu_seconds(THEIRS), cpu_seconds(OURS)) for _ in range(3 if args.quick else 7)]
    ratio = median(ours / theirs for theirs, ours in pairs)
    table = [
        {"what": THEIRS, "seconds": round(median(theirs for theirs, _ in pairs), 2), "ratio": 1.0},
        {
            "what": OURS,
            "seconds": round(median(ours for _, ours in pairs), 2),
            "ratio": round(ratio, 3),
        },
    ]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            seconds = round(first_step(Path(folder), ranks), 1)
            what = f"{ranks} rank{'s' if ranks > 1 else ''}: first step after"
            table.append({"what": what, "seconds": seconds, "ratio": ""})
    missed = [f"imports: {ratio:.2f} times"] if ratio > 1.2 else []
    return finish("startup", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
