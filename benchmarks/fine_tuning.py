"""What fine-tuning buys and costs: handwritten digits, from a model that knows coloured shapes.

The tiny CLIP learns the demo's shapes (recipes/demo_shapes.yaml), once; then `clip-train train` fine-tunes it on
scikit-learn's digits (benchmarks/fine_tuning.yaml) with `model.init_from`, all of it or a part, beside random weights.
Zero-shot top-1 is over 360 digits held out (chance 10%), mean and range over the seeds. A step's milliseconds are the
median over its run, without waiting for data; the rows take turns, and `x full` is the median of the ratios within
a round. Trained parameters and bytes (fp32 weights, gradients and AdamW's moments) are `clip-train plan`'s.
"""

from __future__ import annotations

import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, finish, parser
from PIL import Image
from sklearn.datasets import load_digits

from clip_train.data.tar import write_shards

VARIANTS = {
    "random weights, all trained": [],
    "random weights, image tower locked": ["model.lock_image=true"],
    "full": ["model.init_from={shapes}"],
    "full, layer decay 0.7": ["model.init_from={shapes}", "optim.layer_decay=0.7"],
    "LiT (image tower locked)": ["model.init_from={shapes}", "model.lock_image=true"],
    "LiT, one group unlocked": [
        "model.init_from={shapes}", "model.lock_image=true", "model.lock_image_unlocked_groups=1",
    ],
    "text tower locked": ["model.init_from={shapes}", "model.lock_text=true"],
}  # fmt: skip
RECIPE = ROOT / "benchmarks/fine_tuning.yaml"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = [
    "a photo of the handwritten digit {}",
    "the digit {}",
    "a scan of a handwritten {}",
    "the number {} written by hand",
    "{}",
]
STATES = ("parameters", "gradients", "optimizer")
TARGETS = {"cost": "a locked tower's step at most 0.95 of the full one's, and fewer bytes"}


def write_digits(folder: Path) -> None:
    """1,797 images of 32 pixels as shards, 36 of each digit in `val`, with classes.json."""
    data, rng = load_digits(), random.Random(0)
    order = rng.sample(range(len(data.target)), len(data.target))
    by_class = [[i for i in order if data.target[i] == digit] for digit in range(10)]
    val = {i for members in by_class for i in members[:36]}

    def samples(indices: list[int], templates: list[str]) -> Iterator[dict[str, Any]]:
        for i in indices:
            name, buffer = DIGITS[data.target[i]], io.BytesIO()
            image = Image.fromarray(np.round(data.images[i] * (255 / 16)).astype(np.uint8), "L")
            image.resize((32, 32), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
            yield {
                "__key__": f"digit{i:05d}",
                "jpg": buffer.getvalue(),
                "txt": rng.choice(templates).format(name),
                "json": {"classname": name},
            }

    write_shards(folder / "train", samples([i for i in order if i not in val], TEMPLATES), 500)
    write_shards(folder / "val", samples(sorted(val), TEMPLATES[:1]), 500)
    classes = {"classnames": DIGITS, "templates": TEMPLATES}
    (folder / "classes.json").write_text(json.dumps(classes))


def clip_train(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "launcher", *arguments]
    done = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(arguments)} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout


def fine_tune(
    folder: Path, name: str, keys: list[str], steps: int, seed: int
) -> tuple[float, float]:
    """Zero-shot top-1 and the median step's milliseconds."""
    run = folder / name
    data = [f"data.train={folder}/digits/train/*.tar", f"data.val={folder}/digits/val/*.tar"]
    data.append(f"evaluate.zero_shot_classes={folder}/digits/classes.json")
    settings = [f"run.dir={run}", f"run.steps={steps}", f"run.seed={seed}", *data, *keys]
    clip_train("train", str(RECIPE), *settings)
    steps_of, evaluated = (
        [json.loads(line) for line in (run / file).read_text().splitlines()]
        for file in ("metrics.jsonl", "eval.jsonl")
    )
    took = [record["step_seconds"] - record["data_wait_seconds"] for record in steps_of]
    return evaluated[-1]["zero_shot_top1"], 1e3 * statistics.median(took[len(took) // 4 :])


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, default=3)
    args = arguments.parse_args()
    seeds, shapes_steps, steps = (1, 45, 25) if args.quick else (args.seeds, 450, 60)
    accuracy: dict[str, list[float]] = {name: [] for name in VARIANTS}
    took: dict[str, list[float]] = {name: [] for name in VARIANTS}
    plans: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_digits(folder / "digits")
        clip_train("demo", "--dir", str(folder / "shapes"), f"run.steps={shapes_steps}")
        shapes = folder / "shapes" / "demo-shapes"
        for seed in range(seeds):
            for i, (variant, keys) in enumerate(VARIANTS.items()):
                filled = [key.format(shapes=shapes) for key in keys]
                top1, ms = fine_tune(folder, f"digits-{i}-{seed}", filled, steps, seed)
                accuracy[variant].append(top1)
                took[variant].append(ms)
                print(f"{variant}, seed {seed}: {top1:.3f}, {ms:.0f} ms", file=sys.stderr)
        for variant, keys in VARIANTS.items():
            filled = [key.format(shapes=shapes) for key in keys]
            plan = clip_train("plan", str(RECIPE), "--json", *filled)
            plans[variant] = json.loads(plan)
    rows = [
        {
            "trained": variant,
            "parameters": plans[variant]["trained_parameters"],
            "MB": sum(plans[variant]["memory_bytes"][what] for what in STATES) / 1e6,
            "top-1": statistics.mean(accuracy[variant]),
            "range": f"{min(accuracy[variant]):.3f} to {max(accuracy[variant]):.3f}",
            "ms/step": statistics.median(took[variant]),
            "x full": statistics.median(
                a / b for a, b in zip(took[variant], took["full"], strict=True)
            ),
        }
        for variant in VARIANTS
    ]
    missed = [] if args.quick else check({row["trained"]: row for row in rows})
    return finish("fine_tuning", rows, TARGETS, missed, args)


def check(rows: dict[str, dict[str, Any]]) -> list[str]:
    out, full = [], rows["full"]
    for name in ("LiT (image tower locked)", "text tower locked"):
        if rows[name]["x full"] > 0.95 or rows[name]["MB"] >= full["MB"]:
            out.append(
                f"cost: {name}: {rows[name]['x full']:.2f} of the full step, {rows[name]['MB']:.1f} MB"
            )
    return out


if __name__ == "__main__":
    sys.exit(main())
