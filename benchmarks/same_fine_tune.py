"""The same fine-tune in OpenCLIP and here: the same weights, shards and hyperparameters, three seeds each.

A small ViT begins with 60 steps of the sigmoid loss on drawn shapes, and is exported for OpenCLIP. Both programs then
fine-tune the export with the sigmoid loss for 60 steps of 128 on other captions of other shapes, in images of 96 x 64
pixels, which evaluation squashes to 32 x 32: AdamW, cosine after 10 steps, crops of 0.9 to 1.0, fp32. One evaluator
(`clip-train evaluate`) scores all weights on 304 images of 76 captions that neither saw. The loss of a row is the mean
over ten steps. A difference is within the noise of seeds if it is at most 2.78 standard errors, which is 95% of
Student's t for three seeds each. Run it with .venv-peers/bin/python.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from command import OPENCLIP
from common import finish, output_of, parser

from clip_tools.demo import (
    BACKGROUNDS,
    COLORS,
    EVAL_TEMPLATE,
    PHRASE,
    SHAPES,
    SIZES,
    TEMPLATES,
    Combination,
    draw_shape,
)
from clip_train.data.tar import write_shards

TARGETS = {"seeds": "losses, temperature and scores differ by at most 2.78 standard errors"}
T = 2.78  # Student's t, 95%, of 4 degrees of freedom
GLOBAL, HELD_OUT, PER_CAPTION = 128, 76, 4
WINDOW = 10  # steps
MODEL = {
    "embed_dim": 96,
    "init_logit_scale": 2.302585,
    "init_logit_bias": -10.0,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 96, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
OPTIONS = {
    "lr": "1e-3",
    "warmup": "10",
    "wd": "0.2",
    "beta1": "0.9",
    "beta2": "0.98",
    "eps": "1e-6",
}
SCORES = ("zero_shot_top1", "zero_shot_top5", "val_loss")


def samples(items: Iterable[tuple[Combination, str]], seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for i, (combination, template) in enumerate(items):
        file = io.BytesIO()
        draw_shape(combination, 64, rng).resize((96, 64)).save(file, "JPEG", quality=90)
        text = template.format(*combination)
        labels = json.dumps({"label": PHRASE.format(*combination)})
        yield {
            "__key__": f"{i:06d}", "jpg": file.getvalue(), "txt": text.encode(), "json": labels.encode(),
        }  # fmt: skip


def write_data(folder: Path, num: int) -> None:
    """base/ has four colors and one template; tune/ has all of them; val/ has captions of neither."""
    combinations = list(itertools.product(SIZES, COLORS, SHAPES, BACKGROUNDS))
    random.Random(0).shuffle(combinations)
    held_out, seen = combinations[:HELD_OUT], combinations[HELD_OUT:]
    few = [each for each in seen if each[1] in list(COLORS)[:4]]
    rng = random.Random(1)
    base = [(rng.choice(few), TEMPLATES[0]) for _ in range(num)]
    tune = [(rng.choice(seen), rng.choice(TEMPLATES)) for _ in range(num)]
    val = [(each, EVAL_TEMPLATE) for each in held_out for _ in range(PER_CAPTION)]
    for seed, (name, items) in enumerate({"base": base, "tune": tune, "val": val}.items()):
        write_shards(folder / name, samples(items, seed), 1024)
    classes = {
        "classnames": [PHRASE.format(*each) for each in held_out],
        "templates": [EVAL_TEMPLATE.replace(PHRASE, "{}")],
    }
    (folder / "classes.json").write_text(json.dumps(classes))
    (folder / "small.json").write_text(json.dumps(MODEL))


def run(*line: str) -> str:
    """What a command prints."""
    return output_of(*line, threads=1)


def train(folder: Path, name: str, data: str, steps: int, *more: str) -> list[dict[str, float]]:
    """`clip-train train`. Returns the records of its steps."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(f"run: {{name: {name}, steps: {steps}, dir: {folder / name}}}\n")
    run(
        "-m", "launcher", "train", str(recipe),
        f"model.name={folder / 'small.json'}", f"data.train={folder / data}/*.tar", "data.workers=1",
        "data.resize=squash", "loss.kind=sigmoid",
        f"batch.global_size={GLOBAL}", f"batch.micro_size={GLOBAL}", "engine.precision=fp32",
        f"optim.lr={OPTIONS['lr']}", f"optim.weight_decay={OPTIONS['wd']}", f"optim.beta1={OPTIONS['beta1']}",
        f"optim.beta2={OPTIONS['beta2']}", f"optim.eps={OPTIONS['eps']}", "optim.grad_clip_norm=null",
        f"schedule.warmup_steps={OPTIONS['warmup']}", "log.every_steps=1", "log.progress=false",
        "log.tensorboard=false", *more,
    )  # fmt: skip
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def openclip(folder: Path, name: str, steps: int, seed: int) -> list[dict[str, float]]:
    shards = sorted((folder / "tune").glob("*.tar"))
    options = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    run(
        "-c", OPENCLIP, str(folder / "small.json"), "--model", "small", "--siglip",
        "--pretrained", str(folder / "export" / "open_clip_model.safetensors"), "--image-resize-mode", "squash",
        "--train-data", f"{folder}/tune/{{{shards[0].stem}..{shards[-1].stem}}}.tar",
        "--train-num-samples", str(steps * GLOBAL), "--dataset-type", "webdataset", "--epochs", "1",
        "--batch-size", str(GLOBAL), "--workers", "1", "--precision", "fp32", *options,
        "--seed", str(seed), "--log-every-n-steps", "1", "--logs", str(folder / "logs"), "--name", name,
    )  # fmt: skip
    log = (folder / "logs" / name / "out.log").read_text()
    found = re.findall(r"Train Epoch.* Logit Scale: ([\d.]+).* Loss: ([\d.]+) \(", log)
    return [{"logit_scale": float(scale), "loss": float(loss)} for scale, loss in found]


def scores(folder: Path, weights: Path) -> dict[str, float]:
    found = run(
        "-m", "launcher", "evaluate", str(weights), f"model.name={folder / 'small.json'}", "data.resize=squash",
        f"data.val={folder / 'val'}/*.tar", f"evaluate.zero_shot_classes={folder / 'classes.json'}",
        "evaluate.retrieval=false", "--json",
    )  # fmt: skip
    return json.loads(found.splitlines()[-1])


def summary(steps: list[dict[str, float]], scored: dict[str, float]) -> dict[str, float]:
    """The rows of one run."""
    out = {}
    for end in range(WINDOW, len(steps) + 1, WINDOW):
        part = steps[end - WINDOW : end]
        out[f"loss, steps {end - WINDOW + 1} to {end}"] = statistics.mean(x["loss"] for x in part)
    out["logit_scale at the end"] = steps[-1]["logit_scale"]
    return out | {name: scored[name] for name in SCORES}


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, default=3)
    args = arguments.parse_args()
    seeds, steps = (1, 20) if args.quick else (args.seeds, 60)
    programs: dict[str, list[dict[str, float]]] = {"clip-train": [], "OpenCLIP": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder, steps * GLOBAL)
        train(folder, "begun", "base", steps, "run.seed=100")
        export = folder / "export"
        run("-m", "launcher", "export", str(folder / "begun"), "--output", str(export))
        before = scores(folder, export / "open_clip_model.safetensors")
        for seed in range(seeds):
            name = f"ours{seed}"
            curve = train(
                folder, name, "tune", steps, f"model.init_from={export}", f"run.seed={seed}"
            )
            end = folder / f"{name}-export" / "open_clip_model.safetensors"
            run("-m", "launcher", "export", str(folder / name), "--output", str(end.parent))
            programs["clip-train"].append(summary(curve, scores(folder, end)))
            curve = openclip(folder, f"theirs{seed}", steps, seed)
            end = folder / "logs" / f"theirs{seed}" / "checkpoints" / "epoch_1.pt"
            programs["OpenCLIP"].append(summary(curve, scores(folder, end)))
            print(
                f"seed {seed}: {programs['clip-train'][-1]} {programs['OpenCLIP'][-1]}",
                file=sys.stderr,
            )
    rows = [row(name, before.get(name), programs) for name in programs["OpenCLIP"][0]]
    missed = [
        f"seeds: {each['measured']}: {each['clip-train']} and {each['OpenCLIP']}"
        for each in rows
        if not args.quick and each["standard errors apart"] > T
    ]
    return finish("the same fine-tune in both programs", rows, TARGETS, missed, args)


def row(
    name: str, before: float | None, programs: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    values = {program: [each[name] for each in runs] for program, runs in programs.items()}
    ours, theirs = values.values()
    apart = 0.0
    if len(ours) > 1:
        error = ((statistics.variance(ours) + statistics.variance(theirs)) / len(ours)) ** 0.5
        apart = abs(statistics.mean(ours) - statistics.mean(theirs)) / max(error, 1e-9)
    shown = {
        program: f"{statistics.mean(each):.4g} ({min(each):.4g} to {max(each):.4g})"
        for program, each in values.items()
    }
    start = "" if before is None else f"{before:.4g}"
    return {"measured": name, "before": start, **shown, "standard errors apart": apart}


if __name__ == "__main__":
    sys.exit(main())
