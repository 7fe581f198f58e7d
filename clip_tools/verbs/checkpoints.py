"""`clip-train checkpoints`: the checkpoints of a run, and their state."""

import argparse
import json
import sys

from launcher.cli.arguments import add_help, add_json, add_overrides, add_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        List the checkpoints of a run, on its disk and in checkpoint.remote. Exit status 1 if a
        committed checkpoint is damaged.
        """,
        """
        clip-train checkpoints runs/clip
        clip-train checkpoints s3://bucket/run --verify         read all of them
        """,
    )
    add_place(parser)
    add_overrides(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every byte and compare it with its sha256",
    )
    add_json(parser)


def run(place: str, overrides: list[str], verify: bool, as_json: bool) -> int:
    """Print a run's committed checkpoints, here and in the remote store. 1 if one is not whole."""
    from rich.console import Console
    from rich.table import Table

    from clip_train.checkpoint.restore import list_checkpoints
    from clip_train.engines.config import describe_sharding
    from clip_train.recipe.weights import find_run

    _, places, _ = find_run(place, overrides)
    lines = list_checkpoints(places, verify=verify)
    status = 1 if any(line["problem"] for line in lines) else 0
    urls = [storage.url for storage in places if storage is not None]
    if as_json:
        print(json.dumps({"places": urls, "checkpoints": lines}))
        return status
    console = Console(width=None if sys.stdout.isatty() else 160)
    if not lines:
        console.print("no checkpoints")
        return status
    table = Table(box=None, pad_edge=False)
    columns = ("step", "lease", "written (UTC)", "MB", "layout", "where", "state")
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("step", "MB") else "left", overflow="fold"
        )
    for line in lines:
        layout = "?"
        if line["engine"] is not None:
            sharding = describe_sharding(line["engine"])
            layout = f"{line['ranks']} x {sharding}, {line['engine'].get('precision')}"
        complete = "complete, every byte verified" if verify else "complete"
        cells = {
            "step": str(line["step"]),
            "lease": str(line["epoch"]),
            "written (UTC)": line["created"].removesuffix("+00:00").replace("T", " "),
            "MB": f"{line['num_bytes'] / 1e6:,.1f}",
            "layout": layout,
            "where": line["where"],
            "state": line["problem"] or complete,
        }
        table.add_row(*[cells[column] for column in columns])
    console.print(table)
    console.print(" ".join(["in", *urls]), soft_wrap=True)
    return status
