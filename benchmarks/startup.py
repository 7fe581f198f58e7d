"""From the start of the process to the first step, by phase; and what our imports cost beside the packages' own.

Imports are compared in CPU seconds of a fresh Python, in turn; phases are as a run tells them, on 1 and 2 ranks.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import finish, parser

from clip_train.demo.datasets import shapes

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"imports": "at most 1.2 times the CPU seconds of `import torch, deepspeed`"}
THEIRS = "import torch, deepspeed"
OURS = "import launcher.cli.main, launcher.train, launcher.engines.deepspeed.engine"
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], env=ENVIRON, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def phases(folder: Path, ranks: int) -> dict[str, float]:
    """Seconds of each phase of a small run."""
    data = shapes(folder / "data", 600, per_shard=150)
    recipe = ROOT / "recipes" / "demo_shapes.yaml"
    line = [f"run.dir={folder / str(ranks)}", f"data.train={data.train}", "run.steps=41", "batch.global_size=32"]
    line += ["data.workers=0", "data.val=null", "evaluate.zero_shot_classes=null"]
    verb = ["-m", "launcher", "train", str(recipe), *line]
    done = subprocess.run(
        [sys.executable, *verb, f"--ranks={ranks}"], env=ENVIRON, check=False, capture_output=True, text=True
    )
    told = re.search(r"first step after ([\d.]+) s: (.*)", done.stderr)
    assert told is not None, done.stdout + done.stderr
    found = {name: float(value) for name, value in re.findall(r"([a-z][a-z, ]*?) ([\d.]+)(?:,|$)", told[2])}
    return {"first step after": float(told[1]), **found}


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    pairs = [(cpu_seconds(THEIRS), cpu_seconds(OURS)) for _ in range(3 if args.quick else 7)]
    ratio = median(ours / theirs for theirs, ours in pairs)
    table = [
        {"what": THEIRS, "seconds": round(median(theirs for theirs, _ in pairs), 2), "ratio": 1.0},
        {"what": OURS, "seconds": round(median(ours for _, ours in pairs), 2), "ratio": round(ratio, 3)},
    ]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            for name, seconds in phases(Path(folder), ranks).items():
                table.append(
                    {"what": f"{ranks} rank{'s' if ranks > 1 else ''}: {name}", "seconds": seconds, "ratio": ""}
                )
    missed = [f"imports: {ratio:.2f} times"] if ratio > 1.2 else []
    return finish("startup", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
