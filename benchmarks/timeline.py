"""When does the GPU wait for the host? A step's launches against its kernels' times, predicted without a GPU.

    python benchmarks/timeline.py [--before FOLDER] [--markdown] [--quick] [MODEL ...]

The host's seconds are measured here, part by part (`timeline_step.py host`): a step of a model that has all
blocks, but small tensors, so that nearly only Python, autograd and dispatch are left. LAUNCH is added for each
kernel, LOOP and VOTE between two steps. The kernels are those of the full model on the pretended GPU, each with
the seconds of an H100's roofline (`timeline_step.py device`). Launches are evenly spaced within a part. A kernel
begins when it has been launched and the one before is done; a read waits for all. Collectives count as hidden:
they cost the host's seconds only. The device is idle while no kernel runs.

--before FOLDER: another checkout of this project (`git worktree add`), as rows of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import ROOT, finish, parser

from clip_train.models.clip import flops_per_sample
from clip_train.models.config import load_architecture

TARGETS = {"idle": "at most 2% of ViT-B/32's step, eager, in the present code"}
MOST_IDLE = 2.0  # percent
MODELS = {"ViT-B-32": 2048, "ViT-L-14": 384, "ViT-H-14": 192}  # samples of a GPU, one micro-batch
PEAK = 989e12  # FLOP/s of an H100, dense bf16
LAUNCH = 2.5e-6  # seconds of the host in CUDA's own launch of a kernel
READ = 10e-6  # seconds from the last kernel's end until the host continues
QUEUE = 1024  # launches that may wait
LOOP = 0.7e-3  # seconds between two steps: record, callbacks, next batch; measured with `train`, one rank
VOTE = 2.8e-3  # seconds in which 8 ranks agree on a number over gloo, once a step
Parts = list[
    list[Any]
]  # of a step: name, and seconds of the host or kernels as (seconds, launches)


def recorded(tree: Path, way: str, model: str, compiled: bool) -> Parts:
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("timeline_step.py")
    command = [sys.executable, "-W", "ignore", str(script), way, model, str(MODELS[model])]
    command += ["compile"] * compiled
    done = subprocess.run(
        command, cwd=tree, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def simulate(
    host: Parts, device: Parts, between: float, late: bool = False
) -> tuple[float, dict[str, float]]:
    """Seconds of a step in the long run, and how many of them the device is idle, by the part that it waits for.

    between: seconds of the host between two steps. late: a read is that of the step before.
    """
    names = [name for name, _ in host]
    assert names == [name for name, _ in device], "the host and the device took different ways"
    now = free = began = 0.0
    idle: dict[str, float] = {}
    ends: list[float] = []
    for _ in range(4):
        began, idle = free, defaultdict(float)
        for (name, seconds), (_, kernels) in zip(host, device, strict=True):
            if name == "read" and not late:
                now = max(now, free) + READ
            pause = seconds / (len(kernels) + 1)
            for length, launches in kernels:
                now += pause + LAUNCH * launches
                if len(ends) >= QUEUE:
                    now = max(now, ends[-QUEUE])
                idle[name] += max(0.0, now - free)
                free = max(now, free) + length
                ends.append(free)
            now += pause
        now += between
    return free - began, idle


def rows_of(what: str, tree: Path, model: str, compiled: bool) -> list[dict[str, Any]]:
    host, device = (recorded(tree, way, model, compiled) for way in ("host", "device"))
    kernels = [kernel for _, launched in device for kernel in launched]
    names = [name for name, _ in host]
    after = sum(seconds for _, seconds in host[names.index("read") :])
    launching = LAUNCH * sum(launches for _, launches in kernels)
    flops = 3 * MODELS[model] * flops_per_sample(load_architecture(model))
    if tree == ROOT:
        ways = {
            what: (LOOP, False),
            f"{what}, with a vote in each step": (LOOP + VOTE, False),
            f"{what}, read a step late": (LOOP, True),
        }
    else:
        ways = {what: (LOOP + VOTE, False)}
    rows = []
    for way, (between, late) in ways.items():
        seconds, idle = simulate(host, device, between, late)
        worst = sorted(idle, key=idle.__getitem__, reverse=True)[:2]
        rows.append(
            {
                "code": way,
                "model": model,
                "blocks": "compiled" if compiled else "eager",
                "kernels": len(kernels),
                "reads": names.count("read"),
                "host ms": 1e3 * (sum(s for _, s in host) + launching + between),
                "after the read": 1e3 * (after + between),
                "kernels ms": 1e3 * sum(length for length, _ in kernels),
                "step ms": 1e3 * seconds,
                "idle %": 100 * sum(idle.values()) / seconds,
                "MFU %": 100 * flops / PEAK / seconds,
                "idle in": ", ".join(f"{name} {1e3 * idle[name]:.1f} ms" for name in worst),
            }
        )
    return rows


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--before", type=Path, metavar="FOLDER")
    arguments.add_argument("models", nargs="*", metavar="MODEL", help=f"of {' '.join(MODELS)}")
    args = arguments.parse_args()
    trees = {"before": args.before.resolve()} if args.before else {}
    rows = []
    for model in args.models or list(MODELS)[: 1 if args.quick else None]:
        for what, tree in (trees | {"present": ROOT}).items():
            rows += rows_of(what, tree, model, compiled=False)
        if not args.quick:
            rows += rows_of("present", ROOT, model, compiled=True)
    wanted = next(row for row in rows if row["code"] == "present")
    missed = [f"idle: {wanted['idle %']:.1f}%"] if wanted["idle %"] > MOST_IDLE else []
    return finish("timeline", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
