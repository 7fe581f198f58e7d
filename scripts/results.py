"""Writes docs/results.md: the worst row of each table in benchmarks/results/*.json.

    python scripts/results.py            writes the page
    python scripts/results.py --check    exit status 1 if the page differs from the files

A file is what a benchmark writes with `--json benchmarks/results/NAME.json`. To add a table, add its
file and a line to `TABLES`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """How the worst row of a file is found."""

    file: str
    worst: str | None = None
    """The column that ranks the rows; None: the rows are few texts without an order, and the first is shown."""
    lowest: bool = False
    """Whether the smallest number is the worst."""
    only: tuple[str, ...] = ()
    """A row counts if a cell begins with one of these; all rows if empty."""
    without: tuple[str, ...] = ()
    """A row does not count if a cell begins with one of these."""
    show: tuple[str, ...] = ()
    """The columns that the page shows; all if empty."""


HEAD = """# Results

For readers who want to know how far a promise was measured: the worst row of each recorded table. A link leads to all
rows. A command records them again with `--json benchmarks/results/NAME.json`, and `python scripts/results.py` then
renews this page. A date is the day of the measurement or of its commit; the device is a CPU with two cores unless one
is named. Errors are relative to float64, and ranked by that of the gradient norm. Rows from GPUs are in
[gpu.jsonl](../benchmarks/gpu.jsonl).
"""
ERRORS = ("loss", "grad norm", "update")

# Title of a part of the page -> its tables.
PARTS: dict[str, tuple[Table, ...]] = {
    "Exactness": (
        Table("invariance", "grad norm", only=("fp32",), show=("precision", "engine", *ERRORS)),
        Table("invariance", "grad norm", only=("bf16",), show=("precision", "engine", *ERRORS)),
        Table("invariance_variants", "grad norm", show=("what", *ERRORS)),
        Table("invariance_towers", "grad norm", show=("what", "engine", *ERRORS)),
        Table("exactness", "grad norm", without=("fp16", "Muon"), show=("what", "engine", *ERRORS)),
        Table("exactness", "grad norm", only=("fp16",), show=("what", "engine", *ERRORS)),
        Table(
            "exactness",
            "grad norm",
            only=("Muon",),
            without=("Muon, bf16",),
            show=("what", "engine", *ERRORS),
        ),
        Table("exactness", "grad norm", only=("Muon, bf16",), show=("what", "engine", *ERRORS)),
        Table("exactness_groups", "grad norm", show=("what", "engine", *ERRORS)),
        Table(
            "exactness_embedders",
            "gradient error",
            only=("float32",),
            show=("loss", "scores", "loss error", "gradient error", "plain fp32"),
        ),
        Table(
            "combinations",
            "norm",
            only=("fp32",),
            show=("rounding", "loss", "norm"),
        ),
        Table(
            "combinations",
            "norm",
            only=("bf16",),
            show=("rounding", "loss", "norm"),
        ),
        Table("usual_ways", "towers", only=("contrastive_step",)),
        Table("tolerances", "40 steps", show=("optimizer", "40 steps", "norm, 12 steps")),
        Table("loss_tf32", "tf32", show=("loss", "scale", "tf32")),
        Table("sets", "difference", show=("set", "score", "clip-train", "clip_benchmark")),
        Table("pixels", show=("files", "OpenCLIP, RGB", "transformers 5 Pillow")),
        Table(
            "linear", "error, text", only=("fp32", "bf16"), show=("engine.linear", "error, text")
        ),
    ),
    "Speed and memory": (
        Table(
            "step",
            "x OpenCLIP's speed",
            lowest=True,
            show=("trainer", "k", "x own k=1", "x OpenCLIP's speed"),
        ),
        Table("loss", "x bare", only=("clip_train",), show=("N", "method", "x bare", "peak MiB")),
        Table(
            "timeline",
            "idle %",
            only=("present",),
            without=("present, with", "present, read"),
            show=("model", "blocks", "step ms", "idle %"),
        ),
        Table("census", "Triton kernels", show=("part", "pass", "Triton kernels")),
        Table("engines", "CPU s, 1 of 4 kept", show=("engine", "x ZeRO 1, 1 kept")),
        Table("host_cost", "whole step", show=("engine", "whole step", "own")),
        Table("graphs", "frozen blocks", show=("model", "a step", "frozen blocks", "fallbacks")),
        Table(
            "ring",
            "ring / gather",
            without=("sigmoid",),
            show=("measured", "ranks", "samples", "ring / gather"),
        ),
        Table("order", only=("1e+09 rows",), show=("what", "layout", "digest")),
        Table("maxsim", "MiB", only=("ours",), show=("N", "L", "CPU s", "MiB")),
        Table("ring", only=("sigmoid",), show=("ranks", "samples", "way", "memory", "sent")),
        Table("startup_memory", "x share", only=("now",), show=("a tenth of", "x share")),
        Table("startup", only=("8 ranks",)),
        Table("scaled_decode", "px", show=("px", "scaled", "of the crop that was drawn, dB")),
        Table(
            "cached_ranking",
            "ratio, one direction",
            show=("hard negatives", "chunk", "ratio, one direction", "ours, MiB", "theirs, MiB"),
        ),
        Table(
            "embedders",
            "CPU s",
            only=("contrastive_step",),
            show=("case", "way", "error", "CPU s", "MiB"),
        ),
        Table("cached_ranking_loss", only=("a function",)),
        Table(
            "native_command",
            "x OpenCLIP",
            only=("ours",),
            show=("way", "CPU ms a sample", "x OpenCLIP"),
        ),
        Table(
            "native",
            "CPU s per TFLOP",
            without=("NaFlexVit",),
            show=("way", "CPU s per 1,000 patches", "CPU s per TFLOP"),
        ),
    ),
    "What a feature gives": (
        Table("fine_tuning", "zero-shot top-1", lowest=True, show=("trained", "zero-shot top-1")),
        Table("same_fine_tune", "standard errors apart"),
        Table("native_scores", "top-1 %", lowest=True, only=("native",)),
        Table("lora", "zero-shot top-1", lowest=True, show=("trained", "zero-shot top-1")),
        Table("muon", "zero-shot top-1", lowest=True, show=("optim.name", "zero-shot top-1")),
        Table(
            "branch_average", "zero-shot top-1", lowest=True, show=("weights", "zero-shot top-1")
        ),
        Table("several_texts", "zero-shot top-1", lowest=True),
        Table("reinforced", "mean", lowest=True, show=("Student", "mean")),
        Table("groups", "top-1, top-5 after 40 steps", lowest=True),
        Table("widths", "4", lowest=True, show=("loss.widths", "128 (all)", "8", "4")),
        Table("keep_positions", "zero-shot top-1", lowest=True),
        Table("long_texts", "long, after", lowest=True, only=("256",)),
        Table("coca", "shape", lowest=True, show=("steps", "shape")),
    ),
    "Stops, faults and slow ranks": (
        Table("stop", "s", show=("during", "signal", "s", "status")),
        Table("hang", "after s", show=("cause", "after s")),
        Table("survive", only=("every rank 1",), show=("scenario", "verdict")),
        Table("checkpoint_faults", only=("disk full",), show=("fault", "what happened")),
        Table("checkpoint_kills", "wrong", show=("store", "kills", "in_a_save", "wrong")),
        Table("checkpoint_storm", "worst loss", show=("store", "layouts", "worst loss", "wrong")),
        Table(
            "stores",
            "ours / its own",
            lowest=True,
            show=("store", "what", "ours / its own"),
        ),
        Table("failed_starts", "after", show=("cause", "after", "all ended")),
        Table("slow_rank", "after", show=("disturbance of rank 5", "after")),
    ),
}


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() != text:
        print("docs/results.md is not what scripts/results.py writes: run it")
        return 1
    return 0


def page() -> str:
    parts = [HEAD]
    for title, tables in PARTS.items():
        lines = [f"## {title}\n", "| Table | When, where | Worst row |", "|---|---|---|"]
        lines += [line(table) for table in tables]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def line(table: Table) -> str:
    content = json.loads((FOLDER / f"{table.file}.json").read_text())
    where = content["environment"]
    row = worst(table, content["rows"])
    shown = [key for key in row if not table.show or key in table.show]
    first, *others = shown
    name = f"{first} " if isinstance(row[first], int | float) else ""
    cells = "; ".join([name + cell(row[first]), *(f"{key} {cell(row[key])}" for key in others)])
    device = "" if where["device"].startswith("CPU") else f", {where['device']}"
    link = f"[{plain(content['name'])}](../benchmarks/results/{table.file}.json)"
    return f"| {link} | {where['date']}{device} | {plain(cells)} |"


def worst(table: Table, rows: list[Row]) -> Row:
    counted = [row for row in rows if counts(table, row)]
    if table.worst is not None:
        counted = [row for row in counted if table.worst in row]
    if not counted:
        raise SystemExit(f"{table.file}.json has no row that scripts/results.py looks for")
    if table.worst is None:
        return counted[0]
    if table.lowest:
        return min(counted, key=lambda row: first_number(row[table.worst]))
    return max(counted, key=lambda row: first_number(row[table.worst]))


def counts(table: Table, row: Row) -> bool:
    cells = [str(value) for value in row.values()]
    if table.only and not any(text.startswith(table.only) for text in cells):
        return False
    return not any(text.startswith(table.without) for text in cells)


def first_number(value: Any) -> float:
    """Of a cell such as `31.7, 23.0` or `195 s`; a cell without a number ranks last."""
    for word in str(value).replace(",", " ").replace("%", " ").split():
        try:
            return float(word)
        except ValueError:
            continue
    return float("-inf")


def cell(value: Any) -> str:
    if not isinstance(value, float) or value == 0:
        return str(value)
    if abs(value) < 1e-2 or abs(value) >= 1e4:
        return f"{value:.1e}"
    return f"{value:.4g}"


def plain(text: str) -> str:
    """Text within a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("`", "")


if __name__ == "__main__":
    sys.exit(main())
