"""`clip-train demo`: data, training, zero-shot and the next command, in minutes on two CPU cores."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import Progress

from clip_train.demo.datasets import SyntheticData, digits, shapes
from clip_train.evaluate.zero_shot import ZeroShotClasses
from launcher.config.recipe import apply_overrides, check_config, read_recipe
from launcher.runtime.log import log
from launcher.train import train

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BUILDERS = {"shapes": shapes, "digits": digits}


def run(args: argparse.Namespace) -> int:
    """Build the data set under --dir (once), train recipes/demo_<data>.yaml on it, and print how good it is."""
    kind, folder = args.data, args.dir
    recipe = str(RECIPES / f"demo_{kind}.yaml")
    raw = read_recipe(recipe)
    # mistakes in the overrides, before minutes are spent on drawing
    check_config(apply_overrides(raw, args.overrides), recipe)
    data = build_data(kind, Path(folder) / "data" / kind)
    raw["run"]["dir"] = str(Path(folder) / f"demo-{kind}")
    raw["data"] |= {"train": data.train, "val": data.val, "num_samples": data.num_train}
    raw["evaluate"]["zero_shot_classes"] = data.classes
    config = check_config(apply_overrides(raw, args.overrides), recipe)
    status = train(config, args.outcome, args.stop, args.startup)
    num_classes = len(ZeroShotClasses.load(data.classes).classnames)
    what = (
        f"{num_classes} captions never seen in training"
        if kind == "shapes"
        else "held-out handwritten digits"
    )
    log(
        f"zero-shot is over {data.num_val} images and {num_classes} classes ({what}); chance is {1 / num_classes:.1%}"
    )
    log(
        "run the demo again with run.steps=<more> to go on from its last checkpoint, or batch.micro_size=16 to see"
    )
    log("that the loss curve does not care; report.html in the run directory shows the curves")
    return status


def build_data(kind: str, folder: Path) -> SyntheticData:
    """With a progress bar; at once where the folder is already complete."""
    with Progress(transient=True) as bar:
        task = bar.add_task(f"drawing {kind}", total=None)
        return BUILDERS[kind](
            folder, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
