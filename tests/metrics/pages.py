"""A run's folder with made-up numbers, and what a page says, read by Python's own parser."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

TEN = datetime(2026, 11, 23, 10, tzinfo=timezone.utc).timestamp()  # when a made-up run began
VOID = {
    "meta",
    "link",
    "br",
    "img",
    "input",
    "path",
    "polygon",
    "polyline",
}  # of SVG, those that are closed by />


class Page(HTMLParser):
    """Refuses tags that do not nest; collects text by the heading that it stands under, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, str] = {"": ""}
        self.addresses: list[str] = []
        self.points: list[list[tuple[float, float]]] = []
        self.titles: list[str] = []  # of the charts
        self.feed(text)
        self.close()
        assert self.open == [], self.open
        self.sections = {name: " ".join(found.split()) for name, found in self.sections.items()}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [
            str(given[name])
            for name in ("src", "href", "action", "data", "srcset")
            if name in given
        ]
        if tag == "polyline":
            self.points.append(
                [tuple(map(float, each.split(","))) for each in str(given["points"]).split()]
            )
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "script" in self.open:
            assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", data)
        elif {"h2", "summary"} & {*self.open}:
            self.sections[data] = ""
        else:
            if "figcaption" in self.open and "span" in self.open:
                self.titles.append(data)
            name = list(self.sections)[-1]
            self.sections[name] += f" {data}"

    @property
    def text(self) -> str:
        return " ".join(self.sections.values())


def write_jsonl(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step(i: int, **more: float | None) -> dict:
    return {
        "step": i, "samples": 8 * i, "loss": 5.0 / i, "grad_norm": 1.0,
        "logit_scale": 14.0, "lr": 1e-3, "samples_per_second": 16.0, "step_seconds": 0.5,
        "data_wait_seconds": 0.02, "peak_memory_bytes": 2**30, **more,
    }  # fmt: skip


def start(at: int, previous: tuple[str, str] | None = None, **more: object) -> dict:
    return {
        "event": "start", "time": "2026-11-23T10:00:00+0000", "step": at, "previous": previous, "steps": 200,
        "command": "clip-train train my.yaml", "commit": "0123abcd", "hardware": "2 ranks on cpu; n1: a processor",
        "versions": {"Python": "3.11", "torch": "2.13"}, "changed": {"optim.lr": 0.001, "data.train": "a.tar"}, **more,
    }  # fmt: skip


def evaluation(i: int, names: list[str], recall: float) -> dict:
    """A record of eval.jsonl: recall under three rules that agree, ranks and a loss of each set."""
    record: dict[str, float] = {"step": i}
    for name in names:
        prefix = f"{name}/" if name else ""
        record[f"{prefix}num_samples"] = 5000.0
        record[f"{prefix}val_loss"] = 2 - recall
        for one, other in (
            ("image_to_text", "text_retrieval"),
            ("text_to_image", "image_retrieval"),
        ):
            record[f"{prefix}{one}_mean_rank"] = 30.5
            record[f"{prefix}{one}_median_rank"] = 12.0
            for k, factor in ((1, 1.0), (5, 1.25), (10, 1.5)):
                value = recall * factor * (1 if one == "image_to_text" else 0.9)
                record[f"{prefix}{one}_R@{k}"] = value
                record[f"{prefix}dedup_{one}_R@{k}"] = value
                record[f"{prefix}{other}_recall@{k}"] = value
    return record


def write_run(folder: Path, steps: int = 120, *, lr: float = 1e-3, loss: float = 5.0) -> Path:
    """A run of two attempts that goes on: preempted after step 60, saved there, evaluated twice.

    A step every 30 s; the first attempt began at ten, the other at twelve.
    """
    folder.mkdir(parents=True)
    half = steps // 2
    records = [
        step(i, loss=loss / i, lr=lr, time=TEN + 30 * i + (7200 - 30 * half) * (i > half))
        for i in range(1, steps + 1)
    ]
    records[half] |= {"checkpoint_step": half, "checkpoint_seconds": 1.0, "checkpoint_failures": 0}
    write_jsonl(folder / "metrics.jsonl", records)
    evals = [
        {"step": s, "zero_shot_top1": s / 2 / steps, "num_samples": 608.0} for s in (half, steps)
    ]
    write_jsonl(folder / "eval.jsonl", evals)
    ended = ("PREEMPTED", f"stopped by SIGTERM after step {half}")
    starts = [start(0), start(half, ended, time="2026-11-23T12:00:00+0000")]
    write_jsonl(
        folder / "attempts.jsonl",
        [{"event": "begin", "attempt": 1, "nodes": [], "step": 0}, *starts],
    )
    recipe = (
        f'run: {{name: "<script>", steps: 200}}\noptim: {{lr: {lr}}}\nmodel: {{name: ViT-B-32}}\n'
    )
    (folder / "recipe.yaml").write_text(recipe)
    return folder
