"""`clip-train watch`: runs in a terminal, live."""

import argparse
import os
import time
from contextlib import suppress

from launcher.cli.arguments import add_help, path_or_url

# between two refreshes; if a refresh takes long, four times its duration
LOOK_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Show progress, health, the latest metrics, scores, attempts and GPU-hours until all runs are
        done, or Ctrl-C.
        """,
        """
        clip-train watch runs/clip
        clip-train watch runs/clip --once                       print it and end
        """,
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=path_or_url,
        nargs="+",
        help="runs' folders, or their recipes",
    )
    parser.add_argument("--once", action="store_true", help="print it and end")


def run(runs: list[str], once: bool) -> int:
    """Show the runs until all are done, or Ctrl-C; once if the output is not a terminal."""
    from rich.console import Console, Group
    from rich.live import Live

    from clip_tools.verbs.report import folder_of
    from clip_tools.watch import PIPED_WIDTH, view
    from clip_train.metrics.run import Run

    folders = [folder_of(place) for place in runs]
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    if once or not console.is_terminal:
        for folder in folders:
            console.print(Group(*view(Run(folder), console)))
        return 0
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            started = time.monotonic()
            shown = [Run(folder) for folder in folders]
            parts = [part for each in shown for part in view(each, console)]
            live.update(Group(*parts), refresh=True)
            if all(each.state == "DONE" for each in shown):
                break
            time.sleep(max(LOOK_SECONDS, 4 * (time.monotonic() - started)))
    return 0
