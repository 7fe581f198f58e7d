"""`clip-train demo`: data, training, zero-shot and the next command, in minutes on two CPU cores."""

import argparse
from functools import partial
from pathlib import Path

from launcher.cli.arguments import add_help, add_overrides, path_or_url
from launcher.cli.process import Process
from launcher.runtime.log import log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Build a small data set, train on it with micro-batches and the feature cache, and evaluate
        zero-shot. It draws captioned shapes, and tests on color-shape-size-background combinations
        never seen in training.
        """,
        """
        clip-train demo
        clip-train demo run.steps=100 data.num_samples=5000     shorter
        """,
    )
    add_overrides(parser)
    parser.add_argument(
        "--dir",
        dest="folder",
        metavar="DIR",
        type=path_or_url,
        default="runs",
        help="folder for data and runs (default: runs)",
    )


def run(overrides: list[str], folder: str, process: Process) -> int:
    """Build the data set under --dir (once), train recipes/demo_shapes.yaml on it, and print the
    accuracy.
    """
    from rich.progress import Progress

    from clip_tools.demo import HELD_OUT, NUM_VAL, RECIPES, shapes
    from clip_train.recipe.recipe import apply_overrides, check_config, read_recipe
    from launcher.train import train

    recipe = str(RECIPES / "demo_shapes.yaml")
    raw = read_recipe(recipe)
    # report mistakes in the overrides before minutes of drawing
    asked = check_config(apply_overrides(raw, overrides), recipe)
    assert asked.data.num_samples is not None  # the recipe has it
    with Progress(transient=True) as bar:
        task = bar.add_task("drawing shapes", total=asked.data.num_samples + NUM_VAL)
        data = shapes(
            Path(folder) / "data" / "shapes",
            asked.data.num_samples,
            progress=partial(bar.advance, task),
        )
    raw["run"]["dir"] = str(Path(folder) / asked.run.name)
    raw["data"] |= {"train": data.train, "val": data.val}
    raw["evaluate"]["zero_shot_classes"] = data.classes
    config = check_config(apply_overrides(raw, overrides), recipe)
    train(config, process.outcome, process.stop)
    log(
        f"zero-shot accuracy is over {data.num_val} images of {HELD_OUT} captions never seen in "
        f"training; chance is {1 / HELD_OUT:.1%}\n"
        "Run the demo again with run.steps=<more> to continue from its last checkpoint.\n"
        "With batch.micro_size=16 the loss curve is the same. See report.html in the run directory."
    )
    return 0
