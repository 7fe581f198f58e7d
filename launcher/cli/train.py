"""`clip-train train`: this rank, or one for each device; `--keys`: every key that a recipe can hold."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap

from clip_train.errors import UserError
from clip_train.settings import allowed, as_yaml, schema_of
from launcher.config.recipe import RunConfig, load_config


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
    for section, keys in schema_of(RunConfig)["properties"].items():
        for name, field in keys["properties"].items():
            key, value = f"{section}.{name}", as_yaml(field["default"]) if "default" in field else "required"
            text = f"{allowed(field)}. {' '.join(field.get('description', '').split())}"
            if width:
                print(f"{key}: {value}\n{textwrap.indent(textwrap.fill(text, width - 4), '    ')}")
            else:
                print(f"{key}\t{value}\t{text}")
    return 0
