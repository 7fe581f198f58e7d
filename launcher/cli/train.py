"""`clip-train train`: this rank, or one for each device; `--keys`: every key that a recipe can hold."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from typing import Any

from clip_train.errors import UserError
from clip_train.settings import allowed, as_yaml
from launcher.config.recipe import known_keys, load_config


def run(args: argparse.Namespace) -> int:
    if args.keys:
        return print_keys()
    if args.recipe is None:
        raise UserError("RECIPE is missing: clip-train train RECIPE.yaml; examples lie in recipes/")
    config = load_config(args.recipe, args.overrides)
    from launcher.runtime.launch import launch_local, local_ranks

    ranks = local_ranks(args.ranks, os.environ)
    if ranks > 1:
        return launch_local(ranks, args.arguments, args.stop)
    from launcher.train import train

    return train(config, args.outcome, args.stop, args.startup)


def print_keys() -> int:
    """key = default, what may stand there, and what it means; one line each where a program reads."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for key, field in known_keys():
        default: Any = None if field.is_required() else field.get_default(call_default_factory=True)
        value = "required" if field.is_required() else as_yaml(default)
        kind: Any = field.annotation
        for each in field.metadata:
            kind = _annotated(kind, each)
        text = f"{allowed(kind)}. {' '.join((field.description or '').split())}"
        if width:
            print(f"{key}: {value}\n{textwrap.indent(textwrap.fill(text, width - 4), '    ')}")
        else:
            print(f"{key}\t{value}\t{text}")
    return 0


def _annotated(kind: Any, metadata: Any) -> Any:
    from typing import Annotated

    return Annotated[kind, metadata]
