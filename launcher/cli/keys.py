"""`clip-train train --keys`: every key of a recipe, its default and what it means."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from launcher.config.recipe import known_keys


def print_keys() -> int:
    table = Table(show_lines=False, box=None, pad_edge=False)
    for column in ("key", "default", "meaning"):
        table.add_column(column, no_wrap=column == "key", overflow="fold")
    for key, field in known_keys():
        default = "(required)" if field.is_required() else repr(field.get_default(call_default_factory=True))
        table.add_row(key, default, " ".join((field.description or "").split()))
    Console().print(table, markup=False)
    return 0
