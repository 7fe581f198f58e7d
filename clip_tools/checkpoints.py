"""`clip-train checkpoints`: the committed checkpoints of a run, here and in the remote store."""

import argparse
import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from clip_train.checkpoint.inspect import list_checkpoints
from launcher.engines import describe
from launcher.weights import find_run


def run(args: argparse.Namespace) -> int:
    """0, or 1 where a committed checkpoint is not whole."""
    _, places, _ = find_run(args.place, args.overrides)
    lines = list_checkpoints(places, verify=args.verify)
    status = 1 if any(line.problem for line in lines) else 0
    if args.json:
        print(
            json.dumps(
                {
                    "places": [each.url for each in places[:2] if each],
                    "checkpoints": [*map(asdict, lines)],
                }
            )
        )
        return status
    console = Console(width=None if sys.stdout.isatty() else 160)
    if not lines:
        console.print("no checkpoints")
        return status
    table = Table(box=None, pad_edge=False)
    for column in ("step", "epoch", "written (UTC)", "MB", "layout", "where", "state"):
        table.add_column(
            column, justify="right" if column in ("step", "MB") else "left", overflow="fold"
        )
    for line in lines:
        held = "?"
        if line.engine is not None:
            held = f"{line.ranks} x {describe(line.engine)}, {line.engine.get('precision')}"
        table.add_row(
            str(line.step),
            str(line.epoch),
            line.created.removesuffix("+00:00").replace("T", " "),
            f"{line.num_bytes / 1e6:,.1f}",
            held,
            line.where,
            line.problem or ("complete, every byte verified" if args.verify else "complete"),
        )
    console.print(table)
    console.print(
        " ".join(["in", *(each.url for each in places[:2] if each is not None)]), soft_wrap=True
    )
    return status
