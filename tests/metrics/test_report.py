"""report.html: what it says of a run, that it is one file, and that it stays small however long the run is."""

import itertools
import json
import os
import time
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from clip_train.metrics.config import LogConfig
from clip_train.metrics.report import write_report
from clip_train.metrics.sinks import Sinks
from tests.metrics.pages import Page, start, step, write_jsonl, write_run

SECTIONS = [
    "Training", "Evaluation", "Attempts", "What it ran with", "What differs from the defaults",
]  # fmt: skip


def page_of(run: Path) -> Page:
    text = write_report(run).read_text()
    assert len(text) < 400_000
    page = Page(text)
    assert all(each.startswith("data:") for each in page.addresses), page.addresses
    return page


def test_a_run_that_trains(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<script>")
    page = page_of(run)
    assert [*page.sections][1:] == SECTIONS
    for text in (
        "training",
        "<script>",
        "step 120 of 200",
        "0:00:40 left",
        "no problems",
    ):
        assert text in page.sections[""], text
    for text in ("loss", "learning rate", "samples per second", "resumed"):
        assert text in page.sections["Training"], text
    assert "zero_shot_top1 0.5" in page.sections["Evaluation"]
    attempts = page.sections["Attempts"]
    assert "1 2026-11-23T10:00:00+0000 0 2 ranks on cpu" in attempts and attempts.endswith(
        "training"
    )
    assert "PREEMPTED stopped by SIGTERM after step 60" in attempts
    for text in (
        "clip-train train my.yaml",
        "0123abcd",
        "Python 3.11, torch 2.13",
        "n1: a processor",
    ):
        assert text in page.sections["What it ran with"], text
    assert "optim.lr 0.001 data.train a.tar" in page.sections["What differs from the defaults"]


def test_curves_are_where_their_numbers_are(tmp_path: Path) -> None:
    """The loss halves at each step: the line's heights between the axis' ends, worked out here."""
    write_jsonl(tmp_path / "metrics.jsonl", [step(i, loss=2.0 ** (3 - i)) for i in range(1, 5)])
    loss = page_of(tmp_path).points[0]
    assert [x for x, _ in loss] == [250, 500, 750, 1000]
    fall = [b[1] - a[1] for a, b in itertools.pairwise(loss)]
    assert fall[0] == pytest.approx(2 * fall[1], rel=0.01) and fall[1] == pytest.approx(
        2 * fall[2], rel=0.01
    )
    assert (
        fall[0] > 0 and 0 < loss[0][1] < loss[-1][1] < 1000
    )  # downwards, with room above and below


def test_what_speaks_against_it_comes_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_jsonl(
        run / "metrics.jsonl",
        [
            step(i, loss=3 + i / 100, samples_per_second=16.0 if i < 100 else 4.0)
            for i in range(1, 121)
        ]
        + [
            step(
                121, loss=None, samples_per_second=4.0, data_wait_seconds=0.4, checkpoint_failures=2
            )
        ],
    )
    (run / "invalid.json").write_text(
        json.dumps({
            "step": 120, "bad_samples": {"no caption\tshard-7.tar": 12, "truncated\ta.tar": 1},
            "bad_epochs": [{"epoch": 1, "step": 40, "bad_samples": 5}, {"epoch": 2, "step": 80, "bad_samples": 13}],
        })
    )  # fmt: skip
    page = page_of(run)
    for text in ("the last loss is not a number", "failed saves in a row: 2",
                 "13 invalid samples, 1.34% of all seen"):  # fmt: skip
        assert text in page.sections[""], text
    long_ago = time.time() - 3600
    os.utime(run / "metrics.jsonl", (long_ago, long_ago))
    page = page_of(run)
    assert "silent" in page.sections[""] and "no step for 1:00:0" in page.sections[""]
    (run / "VERDICT").write_text('FATAL\n{"step": 121, "reason": "the loss is not finite"}\n')
    page = page_of(run)
    assert (
        "FATAL: the loss is not finite" in page.sections[""] and "silent" not in page.sections[""]
    )


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    assert "No step has been recorded yet" in page_of(tmp_path).text
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert "step 1" in page_of(tmp_path).text
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    (tmp_path / "VERDICT").write_text("DO")
    (tmp_path / "recipe.yaml").write_text("run: [")
    assert "step 1" in page_of(tmp_path).text


def test_a_long_run_is_read_record_by_record_and_drawn_with_its_extremes(tmp_path: Path) -> None:
    write_run(tmp_path / "short")
    write_report(tmp_path / "short")  # so that imports and caches do not count
    odd = {1456: 100.0, 4345: -100.0}
    records = [step(i, loss=odd.get(i, i * 7919 % 1000 / 1000)) for i in range(1, 6001)]
    write_jsonl(tmp_path / "metrics.jsonl", records)
    del records
    tracemalloc.start()
    page = page_of(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 5 << 20  # with all records at once 10 MiB
    assert "6,000" in page.text
    assert all(100 < len(each) <= 330 for each in page.points)
    band = (
        (tmp_path / "report.html")
        .read_text()
        .split('<polygon class="band" points="')[1]
        .split('"')[0]
    )
    corners = [tuple(map(float, each.split(","))) for each in band.split()]
    highest, lowest = min(corners, key=lambda each: each[1]), max(corners, key=lambda each: each[1])
    assert highest[0] == pytest.approx(1000 * 1456 / 6000, abs=3) and highest[1] < 60
    assert lowest[0] == pytest.approx(1000 * 4345 / 6000, abs=3) and lowest[1] > 940


def test_the_samples_that_cannot_be_used_are_counted_on_the_page(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(1)])
    with closing(Sinks(LogConfig(tensorboard=False), tmp_path, resume_step=1)) as sinks:
        sinks.write({"step": 1, "bad_samples": {"no image\tb.tar": 3}}, "invalid")
    assert "3 invalid samples" in page_of(tmp_path).sections[""]


def test_the_first_step_of_each_attempt_does_not_count_in_the_eta(tmp_path: Path) -> None:
    """It holds the start of workers, allocators, compiled kernels."""
    seconds = {1: 600.0, 2: 2.0, 3: 900.0, 4: 2.0}
    write_jsonl(
        tmp_path / "metrics.jsonl", [step(i, step_seconds=each) for i, each in seconds.items()]
    )
    write_jsonl(tmp_path / "attempts.jsonl", [start(0, steps=10), start(2, steps=10)])
    assert "0:00:12 left" in page_of(tmp_path).text  # 6 steps of 2 s
