"""`clip-train train`: this rank, or one for each device."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from clip_train.errors import UserError
from launcher.cli.keys import print_keys
from launcher.config.recipe import RunConfig, load_config

if TYPE_CHECKING:
    from clip_train.checkpoint.restore import Resumed


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


def would_resume(config: RunConfig) -> Resumed | None:
    """The checkpoint that `train` would resume from, only looked at; None: it would begin anew.
    UserError, CheckpointError."""
    from clip_train.checkpoint.inspect import open_to_look, places_of
    from clip_train.checkpoint.restore import Places, resolve
    from clip_train.storage.local import LocalStorage
    from clip_train.storage.urls import open_storage

    mode, remote, folder = (
        config.checkpoint.resume,
        config.checkpoint.remote,
        config.run_dir / "checkpoints",
    )
    if mode == "never":
        return None
    places = Places(
        LocalStorage(folder) if folder.is_dir() else None, open_storage(remote) if remote else None
    )
    found, _ = resolve(places) if any(places) else (None, [])
    if found is not None or mode == "auto":
        return found
    if mode == "must":
        raise UserError(
            f"checkpoint.resume (must): there is no checkpoint under {folder}; set it to auto to start fresh"
        )
    other, only = places_of(mode)
    return open_to_look(other, only=only)


def dry_run(config: RunConfig, ranks: int) -> int:
    """All checks before ranks meet, with the first shard and this machine's devices, the plan, and whether the
    checkpoint that would be resumed is one of this recipe's."""
    import torch

    from launcher.cli.plan import make_plan, show
    from launcher.config.validate import check

    checked = check(config, ranks, is_rank=True)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    show(config, make_plan(config, checked, device=device))
    assert checked.source is not None  # read_data
    from launcher.config.resume import compare_with

    resumed = would_resume(config)
    if resumed is not None:
        notes = compare_with(config, resumed, ranks, resumed.state.get("teacher"))
        print("\n".join([resumed.describe(), *notes]))
    print(
        f"data.train: {checked.source.index.describe()}; the first caption: {checked.source.first_caption!r}"
    )
    print("nothing was started or written: the same line without --dry-run trains")
    return 0
