"""`clip-train report`: how a run goes, as a page."""

import argparse
from pathlib import Path

from clip_train.errors import UserError
from clip_train.metrics.report import write_report
from launcher.config.recipe import load_config
from launcher.runtime.log import log


def run(args: argparse.Namespace) -> int:
    """The page, anew. UserError where there is no run."""
    path = Path(args.run).expanduser()
    folder = load_config(args.run).run_dir if path.is_file() else path
    if not any((folder / name).exists() for name in ("recipe.yaml", "metrics.jsonl")):
        raise UserError(
            f"{folder} holds no run (no recipe.yaml, no metrics.jsonl): give a run's folder, or "
            "its recipe"
        )
    log(f"written: {write_report(folder)}")
    return 0
