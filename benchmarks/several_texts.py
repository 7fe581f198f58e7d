"""What several texts of an image buy and cost: the demo's coloured shapes, with a second caption and a hard negative.

Each image gets a second caption of the same words by another of the demo's templates, and a caption in which one of
size, colour, shape and background is another. Zero-shot top-1 is over 608 images of 76 captions never seen in training
(chance 1.3%), mean and range over the seeds. `FLOPs` are those of a step by `clip-train plan`, as a multiple of the
first row's.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, finish, parser
from fine_tuning import clip_train

from clip_tools.demo import BACKGROUNDS, COLORS, SHAPES, SIZES, TEMPLATES, shapes
from clip_train.data.tar import iter_samples, write_shards

TWO = ["data.texts_per_image=2", "data.caption_key=[txt, json.other]"]
NEGATIVE = ["data.negative_texts={json.negative: 1}"]
VARIANTS = {
    "one text": [],
    "two texts": TWO,
    "one text, one hard negative": NEGATIVE,
    "two texts, one hard negative": [*TWO, *NEGATIVE],
}
RECIPE = str(ROOT / "recipes/demo_shapes.yaml")
KINDS = {"size": [*SIZES], "color": [*COLORS], "shape": [*SHAPES], "background": [*BACKGROUNDS]}
TARGETS = {
    "cost": "two texts take less than twice the FLOPs of a step: the image goes forward once"
}


def with_texts(folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """The training images of the demo, each with `other` and `negative` in its .json."""
    rng = random.Random(seed)
    for shard in sorted(folder.glob("*.tar")):
        with shard.open("rb") as file:
            for sample in iter_samples(file):
                meta = json.loads(sample.members["json"])
                words = [meta[kind] for kind in KINDS]
                texts = [template.format(*words) for template in TEMPLATES]
                meta["other"] = rng.choice(
                    [t for t in texts if t.encode() != sample.members["txt"]]
                )
                which = rng.randrange(len(KINDS))
                words[which] = rng.choice(
                    [w for w in [*KINDS.values()][which] if w != words[which]]
                )
                meta["negative"] = rng.choice(TEMPLATES).format(*words)
                yield {"__key__": sample.key, **sample.members, "json": json.dumps(meta).encode()}


def measure(folder: Path, name: str, keys: list[str], steps: int, seed: int) -> float:
    """Zero-shot top-1."""
    run = folder / name
    clip_train(
        "train", RECIPE, f"run.dir={run}", f"run.steps={steps}",
        f"run.seed={seed}", f"data.train={folder}/texts/*.tar", f"data.val={folder}/shapes/val/*.tar",
        f"evaluate.zero_shot_classes={folder}/shapes/classes.json", "batch.global_size=128",
        "schedule.warmup_steps=10", f"checkpoint.every_steps={steps}", "data.lanes=8", *keys,
    )  # fmt: skip
    return json.loads((run / "eval.jsonl").read_text().splitlines()[-1])["zero_shot_top1"]


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, default=2)
    args = arguments.parse_args()
    seeds, images, steps = (1, 400, 12) if args.quick else (args.seeds, 6000, 150)
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes(folder / "shapes", images)
        write_shards(folder / "texts", with_texts(folder / "shapes/train", 0), 1000)
        for seed in range(seeds):
            for i, (variant, keys) in enumerate(VARIANTS.items()):
                found[variant].append(measure(folder, f"{i}-{seed}", keys, steps, seed))
                print(f"{variant}, seed {seed}: {found[variant][-1]}", file=sys.stderr)
    plans = {
        name: json.loads(clip_train("plan", RECIPE, "--json", *keys))
        for name, keys in VARIANTS.items()
    }
    flops = {name: plan["flops_per_step"] for name, plan in plans.items()}
    missed = []
    if flops["two texts"] >= 2 * flops["one text"]:
        missed.append(f"cost: {flops}")
    rows = [
        {
            "texts": variant,
            "top-1": statistics.mean(each),
            "range": f"{min(each):.3f} to {max(each):.3f}",
            "FLOPs": flops[variant] / flops["one text"],
        }
        for variant, each in found.items()
    ]
    return finish("several_texts", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
