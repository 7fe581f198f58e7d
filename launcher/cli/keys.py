"""`clip-train keys [PREFIX]`: every key that a recipe can hold, one line each where a program reads."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap

from clip_train.errors import UserError
from clip_train.settings import allowed, as_yaml, schema_of
from launcher.config.recipe import RunConfig, nearest


def run(args: argparse.Namespace) -> int:
    return print_keys(args.prefix or "")


def print_keys(prefix: str) -> int:
    """key = default, what may stand there, and what it means. UserError where no key begins so."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    found = False
    for section, keys in schema_of(RunConfig)["properties"].items():
        for name, field in keys["properties"].items():
            key, value = f"{section}.{name}", as_yaml(field["default"]) if "default" in field else "required"
            if not key.startswith(prefix):
                continue
            found = True
            text = f"{allowed(field)}. {' '.join(field.get('description', '').split())}"
            if width:
                print(f"{key}: {value}\n{textwrap.indent(textwrap.fill(text, width - 4), '    ')}")
            else:
                print(f"{key}\t{value}\t{text}")
    if not found:
        raise UserError(f"no key begins with {prefix}; {nearest(prefix)}")
    return 0
