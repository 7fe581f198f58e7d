"""`clip-train train --dry-run`: all checks, the plan, and the checkpoint that would be resumed; nothing is started."""

from __future__ import annotations

import argparse
import os

import torch

from clip_tools.plan import make_plan, show
from clip_train.checkpoint import restore
from clip_train.checkpoint.inspect import open_to_look, places_of
from clip_train.errors import UserError
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage
from launcher.checks import require_places
from launcher.config.recipe import RunConfig, load_config
from launcher.config.resolve import resolve
from launcher.config.resume import compare_with
from launcher.runtime.launch import local_ranks


def run(args: argparse.Namespace) -> int:
    """Check what can be checked before ranks meet, with the first shard and this machine's devices, and print it."""
    config = load_config(args.recipe, args.overrides)
    ranks = local_ranks(args.ranks, os.environ)
    resolved = resolve(config, ranks, is_rank=True)
    require_places(config)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    show(make_plan(resolved, device=device))
    precision = resolved.config.engine.precision
    config = resolved.given.updated("engine", precision=precision)
    resumed = would_resume(config)
    if resumed is not None:
        notes = compare_with(config, resumed, ranks, resumed.state.get("teacher"))
        print("\n".join([resumed.describe(), *notes]))
    source = resolved.source
    assert source is not None  # read_data
    print(f"data.train: {source.index.describe()}; the first caption: {source.first_caption!r}")
    print("nothing was started or written: the same line without --dry-run trains")
    return 0


def would_resume(config: RunConfig) -> restore.Resumed | None:
    """The checkpoint that `train` would resume from, only looked at; None: it would start fresh.

    UserError, CheckpointError."""
    mode, remote = config.checkpoint.resume, config.checkpoint.remote
    folder = config.run_dir / "checkpoints"
    if mode == "never":
        return None
    local = LocalStorage(folder) if folder.is_dir() else None
    places = restore.Places(local, open_storage(remote) if remote else None)
    found = restore.resolve(places)[0] if any(places) else None
    if found is not None or mode == "auto":
        return found
    if mode == "must":
        raise UserError(
            f"checkpoint.resume (must): there is no checkpoint under {folder}; set it to auto to "
            "start fresh"
        )
    other, only = places_of(mode)
    return open_to_look(other, only=only)
