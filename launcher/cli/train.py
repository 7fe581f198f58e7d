"""`clip-train train`: this rank, or one for each device."""

import argparse
import os

from launcher.config.recipe import load_config
from launcher.config.samples import with_samples


def run(args: argparse.Namespace) -> int:
    config = with_samples(load_config(args.recipe, args.overrides))
    # torch is imported here and below, after the mistakes of a recipe
    from launcher.runtime.launch import launch_local, local_ranks

    ranks = local_ranks(args.ranks, os.environ)
    if ranks > 1:
        return launch_local(ranks, [*args.arguments, *config.counted], args.stop)
    from launcher.train import train

    return train(config, args.outcome, args.stop, args.startup)
