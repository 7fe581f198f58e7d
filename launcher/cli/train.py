"""`clip-train train`: this rank, or one for each device."""

from __future__ import annotations

import argparse
import os

from clip_train.errors import UserError
from launcher.cli.keys import print_keys
from launcher.config.recipe import RunConfig, load_config


def run(args: argparse.Namespace) -> int:
    if args.keys:
        return print_keys("")
    if args.recipe is None:
        raise UserError("RECIPE is missing: clip-train train RECIPE.yaml; examples lie in recipes/")
    config = load_config(args.recipe, args.overrides)
    from launcher.runtime.launch import launch_local, local_ranks

    ranks = local_ranks(args.ranks, os.environ)
    if args.dry_run:
        return dry_run(config, ranks)
    if ranks > 1:
        return launch_local(ranks, [*args.arguments, *config.counted], args.stop)
    from launcher.train import train

    return train(config, args.outcome, args.stop, args.startup)


def dry_run(config: RunConfig, ranks: int) -> int:
    """All that is checked before ranks meet, the first shard and this machine's devices included, and the plan."""
    import torch

    from launcher.cli.plan import make_plan, show
    from launcher.config.validate import check

    checked = check(config, ranks, is_rank=True)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    show(config, make_plan(config, checked, device=device))
    assert checked.source is not None  # read_data
    print(
        f"data.train: {checked.source.index.describe()}; the first caption: {checked.source.first_caption!r}"
    )
    print("nothing was started or written: the same line without --dry-run trains")
    return 0
