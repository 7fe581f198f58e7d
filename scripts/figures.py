"""Draws the figures of the documents: docs/images/*.svg, each for light and dark pages.

    python scripts/figures.py            writes them all
    python scripts/figures.py --check    exit status 1 if a file differs from what this script draws

A figure is a list of boxes, arrows and labels on a grid of pixels. Colors are classes of `STYLE`,
which follows the reader's color scheme.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 14px; }
.small { font-size: 12px; fill: #59636e; }
.code { font: 12px ui-monospace, monospace; }
rect { stroke-width: 1.2; rx: 5px; }
.compute { fill: #ddf4ff; stroke: #0969da; }
.keep { fill: #dafbe1; stroke: #1a7f37; }
.replay { fill: #fff8c5; stroke: #9a6700; }
.send { fill: #fbefff; stroke: #8250df; }
.plain { fill: #f6f8fa; stroke: #818b98; }
.arrow { stroke: #59636e; stroke-width: 1.4; fill: none; marker-end: url(#head); }
#head path { fill: #59636e; }
.page { fill: #ffffff; stroke: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .small { fill: #9198a1; }
  .compute { fill: #0c2d6b; stroke: #4493f8; }
  .keep { fill: #033a16; stroke: #3fb950; }
  .replay { fill: #4b2900; stroke: #d29922; }
  .send { fill: #3c1e70; stroke: #ab7df8; }
  .plain { fill: #212830; stroke: #656c76; }
  .arrow { stroke: #9198a1; }
  #head path { fill: #9198a1; }
  .page { fill: #0d1117; }
}
"""
KINDS = {
    "compute": "computed",
    "keep": "kept in memory",
    "replay": "computed again",
    "send": "sent between ranks",
}


class Figure:
    """An SVG of width x height pixels; `alt` describes it to those who cannot see it."""

    def __init__(self, width: int, height: int, alt: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(alt)}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<rect class="page" width="{width}" height="{height}"/>',
        ]

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x: int, y: int, width: int, height: int, kind: str, *lines: str) -> None:
        """Lines are centered; the second and later ones are small."""
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'
        )
        top = y + height / 2 - 8 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * i, line, "small" if i else "", "middle")

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="arrow" d="M{path}"/>')

    def legend(self, x: int, y: int, kinds: dict[str, str]) -> None:
        for kind, text in kinds.items():
            self.parts.append(f'<rect class="{kind}" x="{x}" y="{y - 11}" width="14" height="14"/>')
            self.text(x + 20, y, text, "small")
            x += 40 + 7 * len(text)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def step() -> Figure:
    figure = Figure(
        860,
        430,
        "One training step: every micro-batch is encoded, features are gathered, the loss is "
        "computed once, each micro-batch is replayed with its cached gradient, gradients are summed",
    )
    figure.text(20, 28, "One step of one rank, with 4 micro-batches and 1 retained graph", "title")
    for row, text in ((70, "Pass 1"), (170, "Loss"), (270, "Pass 2"), (365, "Update")):
        figure.text(20, row + 26, text, "title")
    for i in range(4):
        x = 110 + 125 * i
        last = i == 3
        figure.box(
            x, 64, 110, 46, "compute", f"encode {i + 1}", "with graph" if last else "no graph"
        )
        figure.arrow((x + 55, 110), (x + 55, 158))
        figure.arrow((x + 55, 218), (x + 55, 262))
        kind, text = ("keep", "retained graph") if last else ("replay", "forward again")
        figure.box(x, 264, 110, 46, kind, f"backward {i + 1}", text)
        figure.arrow((x + 55, 310), (x + 55, 354))
    figure.box(
        110,
        160,
        485,
        56,
        "keep",
        "feature cache [n, D], then its gradient [n, D]",
        "rows in the batch's order",
    )
    figure.box(650, 64, 190, 46, "send", "all-gather of features", "2 N D values, once")
    figure.box(
        650, 160, 190, 56, "compute", "loss of the global batch", "closed form, in tiles, no graph"
    )
    figure.arrow((595, 174), (624, 174), (624, 87), (648, 87))
    figure.arrow((745, 110), (745, 158))
    figure.arrow((650, 202), (597, 202))
    figure.box(
        110,
        356,
        485,
        46,
        "send",
        "sum of gradients over ranks",
        "once a step at stages 0 and 1",
    )
    figure.box(650, 356, 190, 46, "compute", "clip, update, clamp")
    figure.arrow((595, 379), (648, 379))
    figure.text(650, 272, "Each micro-batch gets back its", "small")
    figure.text(650, 288, "random state of pass 1, so both", "small")
    figure.text(650, 304, "passes draw the same masks.", "small")
    figure.legend(110, 425, KINDS)
    return figure


def sample() -> Figure:
    figure = Figure(860, 250, "The path of a sample from a shard to the device")
    figure.text(20, 28, "The path of a sample", "title")
    stages = (
        ("plain", "shard (tar)", "S3, GCS or disk"),
        ("compute", "range reader", "verified blocks"),
        ("compute", "decode", "tokens and pixels"),
        ("compute", "crop, augment", "seeded by sample"),
        ("keep", "shared memory", "the rank's batch"),
        ("compute", "device", "normalized there"),
    )
    for i, (kind, *lines) in enumerate(stages):
        figure.box(14 + 140 * i, 120, 126, 56, kind, *lines)
        if i:
            figure.arrow((140 * i, 148), (140 * i + 13, 148))
    figure.box(
        160,
        52,
        260,
        42,
        "plain",
        "order.py: position of step s in stream l",
        "a function of recipe and seed",
    )
    figure.arrow((220, 94), (220, 118))
    figure.text(160, 200, "loader workers: any number, the same samples", "small")
    figure.text(580, 200, "pinned copy on its own stream,", "small")
    figure.text(580, 216, "while the previous step computes", "small")
    figure.text(
        20, 238, "An unusable sample is replaced by another one of its block, and counted.", "small"
    )
    return figure


def checkpoint() -> Figure:
    figure = Figure(
        860, 300, "The life of a checkpoint: snapshot, local commit, upload, commit, resume"
    )
    figure.text(20, 28, "The life of a checkpoint", "title")
    figure.text(20, 72, "Rank", "title")
    figure.text(20, 152, "Writer process", "title")
    figure.text(20, 232, "Store", "title")
    figure.box(150, 48, 160, 46, "compute", "snapshot", "a copy in host memory")
    figure.arrow((310, 71), (338, 71))
    figure.box(340, 48, 490, 46, "compute", "training continues")
    figure.box(150, 128, 160, 46, "keep", "file on disk", "hashed, then renamed")
    figure.arrow((225, 94), (225, 126))
    figure.box(340, 128, 150, 46, "keep", "local commit", "when all ranks wrote")
    figure.arrow((310, 151), (338, 151))
    figure.arrow((350, 174), (350, 206))
    uploads = ("data", "rank manifests", "manifest", "fence check", "marker")
    for i, name in enumerate(uploads):
        figure.box(300 + 112 * i, 208, 98, 40, "keep" if i == 4 else "send", name)
        if i:
            figure.arrow((300 + 112 * i - 14, 228), (300 + 112 * i - 1, 228))
    figure.text(130, 222, "A checkpoint without its", "small")
    figure.text(130, 238, "marker does not exist.", "small")
    figure.text(
        150,
        280,
        "Resume: the newest commit, on the disk or in the store, whose files match their sha256.",
        "small",
    )
    return figure


def run_directory() -> Figure:
    files = (
        ("recipe.yaml", "every key as given: starts the run anywhere"),
        ("resolved.yaml", "the values that ran; ds_config.json: DeepSpeed's"),
        ("metrics.jsonl", "one line for each step"),
        ("eval.jsonl", "one line for each evaluation"),
        ("events/", "TensorBoard"),
        ("report.html", "scores, curves, images with captions, health, attempts"),
        ("examples/", "the validation images there; examples.jsonl: their captions"),
        ("attempts.jsonl", "begin and end of each attempt: nodes, verdict, GPU-hours"),
        ("VERDICT", "DONE, PREEMPTED, FAILED or FATAL, with the reason"),
        ("checkpoints/", "ckpt/: data and manifests; commit/: what exists; lease/: who may write"),
        ("submit/", "frozen recipe and code of SLURM jobs"),
    )
    figure = Figure(860, 60 + 28 * len(files), "The files in a run directory")
    figure.text(20, 28, "runs/my-run", "title")
    for i, (name, meaning) in enumerate(files):
        y = 58 + 28 * i
        figure.parts.append(
            f'<path class="arrow" style="marker-end:none" d="M30 {y - 18} V{y - 4} H44"/>'
        )
        figure.text(52, y, name, "code")
        figure.text(200, y, meaning, "small")
    return figure


FIGURES = {"step": step, "sample": sample, "checkpoint": checkpoint, "run_directory": run_directory}


def main() -> int:
    drawn = {FOLDER / f"{name}.svg": draw().svg() for name, draw in FIGURES.items()}
    if "--check" in sys.argv:
        stale = [p.name for p, text in drawn.items() if not p.exists() or p.read_text() != text]
        print(f"run python scripts/figures.py: {stale} differ" if stale else "figures: up to date")
        return 1 if stale else 0
    for path, text in drawn.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
