"""`evaluate.sets` beside clip_benchmark: the same weights on shards that clip_benchmark exported.

A tiny CLIP is trained on the demo's shapes and exported for OpenCLIP. clip_benchmark's exporter writes three unbalanced
sets with classes (one with three of them, where its top-5 is NaN), and three with several captions of an image: of
different captions, of images that are resized, and of captions that other images have too. Then `clip-train evaluate`
scores all of them at once, and `clip_benchmark eval` one after another, in fp32. Run it with .venv-peers/bin/python.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, output_of, parser
from PIL import Image
from sklearn.datasets import load_digits

import tests.peers.torchvision_shim  # noqa: F401  before clip_benchmark
from clip_tools.demo import BACKGROUNDS, COLORS, SHAPES, SIZES, TEMPLATES, draw_shape

TARGETS = {
    "scores": "each equals clip_benchmark's to 1e-6, or to 0.01 with a reason",
    "means": "each is that of the scores above it",
}
REASONS = {  # of sets
    "resized": "pixels differ by at most 2 levels (pixels.json)",
    "repeated captions": "equal captions tie: sorted stably here, in any order by torch.topk",
}
SIDE = 64  # pixels
CLASSES = {"zero_shot_top1": "acc1", "zero_shot_top5": "acc5"}
CLASSES["zero_shot_mean_per_class_recall"] = "mean_per_class_recall"
RECALLS = [f"{kind}_retrieval_recall@{k}" for kind in ("text", "image") for k in (1, 5, 10)]


class Labeled(list[tuple[Image.Image, int]]):
    """As clip_benchmark's exporter takes a data set with classes."""

    classes: list[str]
    templates: list[str]


def shape(rng: random.Random, size: int = SIDE) -> tuple[Image.Image, tuple[str, str, str, str]]:
    combination = (
        rng.choice(list(SIZES)),
        rng.choice(list(COLORS)),
        rng.choice(SHAPES),
        rng.choice(list(BACKGROUNDS)),
    )
    return draw_shape(combination, size, rng), combination


def labeled(part: int, names: tuple[str, ...], templates: list[str], num: int) -> Labeled:
    """Shapes with the label of one part of their captions; of the last class the fewest images."""
    out, rng = Labeled(), random.Random(part)
    while len(out) < num:
        image, combination = shape(rng)
        if combination[part] in names:
            label = names.index(combination[part])
            if rng.random() > label / len(names):
                out.append((image, label))
    out.classes, out.templates = list(names), templates
    return out


def digits(num: int) -> Labeled:
    out, data = Labeled(), load_digits()
    for pixels, label in zip(data.images, data.target, strict=True):
        if len(out) < num and (label < 5 or len(out) % 3 == 0):
            image = Image.fromarray((pixels * 15.9).astype("uint8")).convert("RGB")
            out.append((image.resize((SIDE, SIDE)), int(label)))
    names = "zero one two three four five six seven eight nine"
    out.classes, out.templates = names.split(), ["a photo of the number {c}.", "the digit {c}"]
    return out


def captioned(num: int, *, unique: bool = True) -> list[tuple[Image.Image, list[str]]]:
    """Shapes with one to five captions. unique: they begin with the number of the image."""
    rng, out = random.Random(num), []
    for i in range(num):
        image, combination = shape(rng)
        texts = [template.format(*combination) for template in TEMPLATES[: 1 + i % 5]]
        if unique:
            texts = [f"{i} {text}" for text in texts]
        out.append((image, texts))
    return out


def resized(
    samples: list[tuple[Image.Image, list[str]]],
) -> list[tuple[Image.Image, list[str]]]:
    return [
        (image.resize((SIDE + 3 * (i % 30), SIDE + 2 * (i % 17))), texts)
        for i, (image, texts) in enumerate(samples)
    ]


def write_sets(folder: Path, num: int) -> list[str]:
    """By clip_benchmark's exporter. Returns the names of the sets, those with classes first."""
    from clip_benchmark.webdataset_builder import (
        PIL_to_bytes,
        convert_dataset,
        convert_retrieval_dataset,
    )

    options: dict[str, Any] = {
        "transform": PIL_to_bytes("webp"),
        "max_count": num // 3,
        "verbose": False,
    }
    with_classes = {
        "shapes": labeled(2, SHAPES, ["a photo of a {c}.", "a small {c}", "a large {c}"], num),
        "sizes and colors": labeled(1, ("red", "blue", "yellow"), ["a {c} circle", "{c}"], num),
        "digits": digits(num),
    }
    with_captions = {
        "captions": captioned(num),
        "resized": resized(captioned(num)),
        "repeated captions": captioned(num, unique=False),
    }
    for name, labels in with_classes.items():
        convert_dataset(labels, "test", str(folder / name.replace(" ", "_")), **options)
    for name, texts in with_captions.items():
        convert_retrieval_dataset(texts, "test", str(folder / name.replace(" ", "_")), **options)
    return [name.replace(" ", "_") for name in (*with_classes, *with_captions)]


def run(*line: str) -> str:
    """What a module prints."""
    return output_of("-m", *line)


def theirs(folder: Path, name: str, export: Path) -> dict[str, float]:
    kind = "zeroshot_retrieval" if (folder / name / "dataset_type.txt").exists() else "auto"
    output = folder / f"{name}.json"
    run(
        "tests.peers.clip_benchmark_cli", "eval", "--dataset", f"wds/{name}",
        "--dataset_root", str(folder / name), "--task", "zeroshot_classification" if kind == "auto" else kind,
        "--model", f"local-dir:{export}", "--pretrained", "", "--recall_k", "1", "5", "10", "--no_amp",
        "--batch_size", "64", "--num_workers", "0", "--output", str(output),
    )  # fmt: skip
    return json.loads(output.read_text())["metrics"]


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    num, steps = (60, 20) if args.quick else (600, 60)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with contextlib.redirect_stdout(sys.stderr):
            names = write_sets(folder, num)
        demo = ("demo", "--dir", str(folder / "demo"), f"run.steps={steps}")
        run("launcher", *demo, "schedule.warmup_steps=10", "log.tensorboard=false")
        export = folder / "export"
        run("launcher", "export", str(folder / "demo" / "demo-shapes"), "--output", str(export))
        keys = [f"evaluate.sets.{name}.data={folder / name}" for name in names]
        ours = json.loads(
            run("launcher", "evaluate", str(export), *keys, "--json").splitlines()[-1]
        )
        peers = {name: theirs(folder, name, export) for name in names}
    rows = []
    for name in names:
        mine = CLASSES if "acc1" in peers[name] else {each: each for each in RECALLS}
        for metric, peer in mine.items():
            rows.append(row(name, metric, ours[f"{name}/{metric}"], peers[name][peer]))
    missed = [f"scores: {each}" for each in rows if each["difference"] > limit(each["set"])]
    for metric in (*CLASSES, *RECALLS):
        of_metric = [each for each in rows if each["score"] == metric]
        mine, peer = (
            statistics.mean(each[program] for each in of_metric)
            for program in ("clip-train", "clip_benchmark")
        )
        rows.append(row("mean", metric, ours[f"mean/{metric}"], peer))
        if abs(ours[f"mean/{metric}"] - mine) > 1e-9:
            missed.append(f"means: {metric}")
    for each in rows:
        if math.isnan(each["clip_benchmark"]):
            each["clip_benchmark"] = "NaN"  # JSON has no such number
    return finish("clip_benchmark's sets", rows, TARGETS, [] if args.quick else missed, args)


def limit(name: str) -> float:
    return 0.01 if name in REASONS else 1e-6


def row(name: str, score: str, ours: float, theirs: float) -> dict[str, Any]:
    name = name.replace("_", " ")
    return {
        "set": name,
        "score": score,
        "clip-train": ours,
        "clip_benchmark": theirs,
        "difference": 0.0 if math.isnan(theirs) else abs(ours - theirs),
        "why": "fewer than five classes" if math.isnan(theirs) else REASONS.get(name, ""),
    }


if __name__ == "__main__":
    sys.exit(main())
