"""batch.micro_size=auto under three memory limits, and memory that really ends: the curve does not show it.

`clip-train train` on captioned drawings, ZeRO 1, with three limits: other sizes each time, one curve. Then the
trainer's own step in a process whose address space is limited once it runs (plain torch and ZeRO 1), and a
run in which one of two ranks is made to run out of memory at step 7.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, finish, parser

TARGETS = {
    "loss": "every curve within 1e-5 of the first",
    "sizes": "another micro-batch size under each limit, and smaller ones after memory has ended",
    "crashes": "none",
}
LIMITS = (
    "225MiB",
    "228MiB",
    "400MiB",
)  # of which 223 MiB are fixed (191 of them DeepSpeed's bucket)
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def command(*line: str) -> subprocess.CompletedProcess[str]:
    hidden = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {k: v for k, v in os.environ.items() if k not in hidden}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environ["MALLOC_MMAP_THRESHOLD_"] = (
        "131072"  # fixed: a heap with holes would fill the limited address space
    )
    return subprocess.run(
        [sys.executable, *line],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def trained(folder: Path, name: str, data: str, steps: int, *overrides: str) -> dict[str, Any]:
    """A run of the command: its curve, its sizes, or why it ended."""
    recipe = {
        "run": {"name": name, "dir": str(folder / name), "steps": steps, "seed": 3},
        "model": {"name": str(folder / "model.json"), "dropout": 0.1, "patch_dropout": 0.25},
        "data": {"train": data, "workers": 0, "lanes": 4, "shuffle_block": 64},
        "batch": {"global_size": 64},
        "schedule": {"warmup_steps": 5},
        "log": {"tensorboard": False, "progress": False},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(recipe))
    done = command("-m", "launcher", "train", str(file), *overrides)
    if done.returncode:
        return {"crash": (done.stdout + done.stderr)[-400:]}
    records = [
        json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]
    plan = json.loads(command("-m", "launcher", "plan", "--json", str(file), *overrides).stdout)
    keys = ("micro_size", "accum_steps", "kept_graphs")
    return {
        "losses": [r["loss"] for r in records],
        "sizes": [r["micro_size"] for r in records],
        "kept": records[-1]["kept_graphs"],
        "planned": all(plan[key] == records[0][key] for key in keys),
    }


def limited(kind: str, spare_mib: int | None) -> dict[str, Any]:
    """tests/real_limit.py: the address space ends after the first step."""
    spare = [] if spare_mib is None else [str(spare_mib)]
    done = command("-m", "tests.real_limit", kind, *spare)
    return (
        json.loads(done.stdout.splitlines()[-1])
        if done.returncode == 0
        else {"crash": done.stderr[-400:]}
    )


def artificial(steps: int) -> list[tuple[str, dict[str, Any]]]:
    """Two ranks, plain torch: undisturbed, and with a rank out of memory at step 7 in each part of a step."""
    sys.path.insert(0, str(ROOT))
    from tests.ranks import run_ranks
    from tests.step_seven import PLACES, curves

    return list(zip(["undisturbed", *PLACES], run_ranks(curves, 2, steps)[0], strict=True))


def row(
    group: str, name: str, run: dict[str, Any], first: dict[str, Any], missed: list[str]
) -> dict[str, Any]:
    if "crash" in run or "crash" in first:
        missed.append(f"{group}, {name}: crashed: {run.get('crash', first.get('crash'))}")
        return {
            "group": group,
            "run": name,
            "micro-batch": "-",
            "kept": "-",
            "loss differs by": "-",
        }
    worst = max(abs(a - b) for a, b in zip(run["losses"], first["losses"], strict=True))
    if worst > 1e-5:
        missed.append(f"{group}, {name}: the loss differs by {worst:.1e}")
    sizes = " -> ".join(map(str, dict.fromkeys(run["sizes"])))
    return {
        "group": group,
        "run": name,
        "micro-batch": sizes,
        "kept": str(run.get("kept", 1)),
        "loss differs by": worst,
    }


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    steps, table, missed = (8 if args.quick else 20), [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        from clip_tools.demo import shapes

        data = shapes(folder / "shapes", 600, per_shard=150).train
        runs = [
            trained(
                folder,
                f"limit-{limit}",
                data,
                steps,
                "batch.micro_size=auto",
                f"batch.memory_limit={limit}",
            )
            for limit in LIMITS
        ]
    table += [
        row("auto", limit, run, runs[0], missed) for limit, run in zip(LIMITS, runs, strict=True)
    ]
    chosen = [run.get("sizes", [None])[0] for run in runs]
    if len(set(chosen)) < len(chosen):
        missed.append(f"the limits gave the sizes {chosen}")
    missed += [
        f"{limit}: not what plan predicts"
        for limit, run in zip(LIMITS, runs, strict=True)
        if not run.get("planned")
    ]
    for kind, what, spare in (("plain", "plain torch", 150), ("zero 1", "ZeRO 1", 320)):
        first, cut = limited(kind, None), limited(kind, spare)
        table += [
            row(f"address space, {what}", place, run, first, missed)
            for place, run in (("free", first), ("ends", cut))
        ]
        if not cut.get("log"):
            missed.append(f"{what}: the limited run never ran out of memory")
    told = artificial(max(steps, 8))
    table += [row("step 7", place, run, told[0][1], missed) for place, run in told]
    missed += [
        f"step 7, {place}: nothing was halved"
        for place, run in told[1:]
        if len(set(run["sizes"])) < 2
    ]
    return finish("auto", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
