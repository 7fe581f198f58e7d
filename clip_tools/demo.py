"""`clip-train demo`: data, training, zero-shot and the next command, in minutes on two CPU
cores.
"""

import argparse
from functools import partial
from pathlib import Path

from rich.progress import Progress

from clip_tools.shapes import NUM_VAL, shapes
from clip_train.evaluate.zero_shot import ZeroShotClasses
from launcher.config.recipe import apply_overrides, check_config, read_recipe
from launcher.runtime.log import log
from launcher.train import train

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def run(args: argparse.Namespace) -> int:
    """Build the data set under --dir (once), train recipes/demo_shapes.yaml on it, and print how
    good it is.
    """
    recipe = str(RECIPES / "demo_shapes.yaml")
    raw = read_recipe(recipe)
    # mistakes in the overrides, before minutes are spent on drawing
    asked = check_config(apply_overrides(raw, args.overrides), recipe)
    assert asked.data.num_samples is not None  # the recipe has it
    with Progress(transient=True) as bar:
        task = bar.add_task("drawing shapes", total=asked.data.num_samples + NUM_VAL)
        folder = Path(args.dir) / "data" / "shapes"
        data = shapes(folder, asked.data.num_samples, progress=partial(bar.advance, task))
    raw["run"]["dir"] = str(Path(args.dir) / "demo-shapes")
    raw["data"] |= {"train": data.train, "val": data.val}
    raw["evaluate"]["zero_shot_classes"] = data.classes
    config = check_config(apply_overrides(raw, args.overrides), recipe)
    status = train(config, args.outcome, args.stop, args.startup)
    num_classes = len(ZeroShotClasses.load(data.classes).classnames)
    log(
        f"zero-shot is over {data.num_val} images of {num_classes} captions never seen in "
        f"training; chance is {1 / num_classes:.1%}"
    )
    log(
        "run the demo again with run.steps=<more> to go on from its last checkpoint, or "
        "batch.micro_size=16 to see"
    )
    log("that the loss curve does not care; report.html in the run directory shows the curves")
    return status
