"""`clip-train train`: run this rank, or without a launcher start one rank for each device."""

import argparse
import os

from clip_train.errors import UserError
from launcher.cli.arguments import add_help, add_overrides, add_recipe, path_or_url
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
        clip-train train recipes/vit_b32.yaml --hostfile hosts   several hosts, over ssh
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
        "--hostfile",
        metavar="FILE",
        type=path_or_url,
        help="train on several hosts over ssh; a line for each: NAME, or NAME slots=RANKS. This "
        "machine must be one of them",
    )
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=int,
        help="without ssh: the number of machines, each of which runs this line with its own "
        "--node-rank",
    )
    parser.add_argument(
        "--node-rank", metavar="I", type=int, help="number of this machine, 0 to N - 1"
    )
    parser.add_argument(
        "--master", metavar="HOST:PORT", help="name of node 0, and a port that is free there"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check recipe, shards and devices, print the plan, and start nothing",
    )


def run(
    recipe: str,
    overrides: list[str],
    ranks: int | None,
    hostfile: str | None,
    nodes: int | None,
    node_rank: int | None,
    master: str | None,
    dry_run: bool,
    process: Process,
) -> int:
    """torch is imported below, after the mistakes of a recipe."""
    from clip_train.recipe.recipe import load_config
    from launcher.runtime.hosts import read_hostfile
    from launcher.runtime.launch import (
        counted,
        is_rank,
        launch_hosts,
        launch_local,
        local_ranks,
        place,
    )

    config = load_config(recipe, overrides)
    node = place(nodes, node_rank, master)
    hosts = []
    if hostfile is not None and node is None and not is_rank(os.environ):
        hosts = read_hostfile(hostfile)
        slots = hosts[0].slots
        if None not in (slots, ranks) and slots != ranks:
            raise UserError(
                f"--ranks ({ranks}) and the slots of --hostfile ({slots}) differ; leave --ranks out"
            )
        ranks = slots or ranks
    if dry_run:
        from clip_tools.plan import dry_run as check

        return check(config, local_ranks(ranks, os.environ) * (nodes or len(hosts) or 1))
    config = counted(config, process)
    num_ranks = local_ranks(ranks, os.environ)
    line = [*process.arguments, *config.counted]
    save_seconds = config.checkpoint.grace_seconds
    if len(hosts) > 1:
        return launch_hosts(hosts, num_ranks, line, process.stop, save_seconds=save_seconds)
    if num_ranks > 1 or (node is not None and not is_rank(os.environ)):
        return launch_local(num_ranks, line, process.stop, save_seconds=save_seconds, node=node)
    from launcher.train import train

    train(config, process.outcome, process.stop)
    return 0
