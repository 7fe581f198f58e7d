"""`clip-train train`: run this rank, or without a launcher start one rank for each device."""

import argparse
import os

from launcher.cli.arguments import add_help, add_overrides, add_recipe
from launcher.cli.process import Process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Train the recipe; if its run directory has a checkpoint, resume from the newest complete
        one. Under torchrun, srun or another launcher, every rank runs this same line.
        """,
        """
        clip-train train recipes/vit_b32.yaml                   all GPUs; the same line again resumes
        clip-train train recipes/vit_b32.yaml run.name=try batch.global_size=8192 optim.lr=1e-3
        clip-train train recipes/vit_b32.yaml --ranks 2         two ranks, without a launcher
        """,
    )
    add_recipe(parser)
    add_overrides(parser)
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="without a launcher: ranks on this machine (default: GPUs, else 1)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check recipe, shards and devices, print the plan, and start nothing",
    )


def run(
    recipe: str, overrides: list[str], ranks: int | None, dry_run: bool, process: Process
) -> int:
    """torch is imported below, after the mistakes of a recipe."""
    from clip_train.recipe.recipe import load_config
    from launcher.runtime.launch import counted, launch_local, local_ranks

    config = load_config(recipe, overrides)
    if dry_run:
        from clip_tools.plan import dry_run as check

        return check(config, local_ranks(ranks, os.environ))
    config = counted(config, process)
    num_ranks = local_ranks(ranks, os.environ)
    if num_ranks > 1:
        return launch_local(
            num_ranks,
            [*process.arguments, *config.counted],
            process.stop,
            save_seconds=config.checkpoint.grace_seconds,
        )
    from launcher.train import train

    train(config, process.outcome, process.stop)
    return 0
