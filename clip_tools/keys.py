"""`clip-train keys [PREFIX]`: every key that a recipe can hold, one line each where a program reads, or as a page."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from clip_train.errors import UserError
from clip_train.settings import allowed, as_yaml, schema_of
from launcher.config.recipe import RunConfig, nearest

PAGE = """\
# Every key of a recipe

Printed by `clip-train keys --markdown`, from the code that checks recipes. On a command line: `section.key=value`.
"""


class Key(NamedTuple):
    """One key of a recipe, in words."""

    name: str
    default: str  # as YAML, or "required"
    allowed: str  # what may stand there
    meaning: str


def run(args: argparse.Namespace) -> int:
    return print_page(args.prefix or "") if args.markdown else print_keys(args.prefix or "")


def all_keys(prefix: str) -> Iterator[tuple[str, str, list[Key]]]:
    """(section, what it is, its keys that begin with `prefix`); sections without one are left out.

    UserError where no key begins so.
    """
    found = False
    for section, schema in schema_of(RunConfig)["properties"].items():
        keys = [
            Key(
                f"{section}.{name}",
                as_yaml(field["default"]) if "default" in field else "required",
                allowed(field),
                " ".join(field.get("description", "").split()),
            )
            for name, field in schema["properties"].items()
            if f"{section}.{name}".startswith(prefix)
        ]
        if keys:
            found = True
            yield section, schema.get("description", "").partition("\n\n")[0], keys
    if not found:
        raise UserError(f"no key begins with {prefix}; {nearest(prefix)}")


def print_keys(prefix: str) -> int:
    """key = default, what may stand there, and what it means."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for _, _, keys in all_keys(prefix):
        for key in keys:
            text = f"{key.allowed}. {key.meaning}"
            if width:
                print(
                    f"{key.name}: {key.default}\n{textwrap.indent(textwrap.fill(text, width - 4), '    ')}"
                )
            else:
                print(f"{key.name}\t{key.default}\t{text}")
    return 0


def print_page(prefix: str) -> int:
    """The same in Markdown, for docs/recipe.md."""
    print(PAGE, end="")
    for section, what, keys in all_keys(prefix):
        print(
            f"\n## {section}\n\n{' '.join(what.split())}\n\n| Key | Default | May be | Meaning |\n|---|---|---|---|"
        )
        for key in keys:
            words = [
                text.replace("<", "&lt;").replace("*", "\\*") for text in (key.allowed, key.meaning)
            ]
            cells = [
                each.replace("|", "\\|") for each in (f"`{key.name}`", f"`{key.default}`", *words)
            ]
            print(f"| {' | '.join(cells)} |")
    return 0
