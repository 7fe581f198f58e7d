"""`clip-train train`: this rank, or one for each device."""

from __future__ import annotations

import argparse
import os

from clip_train.errors import UserError
from launcher.cli.keys import print_keys
from launcher.config.recipe import load_config


def run(args: argparse.Namespace) -> int:
    if args.keys:
        return print_keys("")
    if args.recipe is None:
        raise UserError("RECIPE is missing: clip-train train RECIPE.yaml; examples lie in recipes/")
    config = load_config(args.recipe, args.overrides)
    from launcher.runtime.launch import launch_local, local_ranks

    ranks = local_ranks(args.ranks, os.environ)
    if ranks > 1:
        return launch_local(ranks, args.arguments, args.stop)
    from launcher.train import train

    return train(config, args.outcome, args.stop, args.startup)
