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
from clip_train.metrics.process import this_process
from clip_train.metrics.report import write_report
from clip_train.metrics.sinks import Sinks
from tests.metrics.pages import Page, evaluation, start, step, write_jsonl, write_run

SECTIONS = [
    "Scores", "All scores", "Training", "Evaluation", "What ran", "Attempts",
    "What differs from the defaults",
]  # fmt: skip


def age(run: Path, seconds: float) -> None:
    """Nothing was written for so long."""
    then = time.time() - seconds
    for path in run.glob("*.jsonl"):
        os.utime(path, (then, then))


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
    for text in ("loss", "learning rate", "logit scale", "gradient norm", "samples per second"):
        assert text in " ".join(page.titles), text
    assert "resumed" in page.sections["Training"]
    scores = "data set zero-shot top-1 validation 608 samples 50.00% best 50.00% at step 120"
    assert scores in page.sections["Scores"]
    assert "zero_shot_top1 50.00% 50.00% 120" in page.sections["All scores"]
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
        assert text in page.sections["What ran"], text
    assert "model ViT-B-32" in page.sections["What ran"]
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
    age(run, 3600)
    page = page_of(run)
    assert "silent" in page.sections[""]
    assert "last step 1:00:0" in page.sections[""] and "probably ended" in page.sections[""]
    (run / "VERDICT").write_text('FATAL\n{"step": 121, "reason": "the loss is not finite"}\n')
    page = page_of(run)
    assert (
        "FATAL: the loss is not finite" in page.sections[""] and "silent" not in page.sections[""]
    )


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    assert "No step has been recorded yet" in page_of(tmp_path).text
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    page = page_of(tmp_path)
    assert "step 1" in page.text
    # one value is a number, not a chart
    assert page.titles == [] and "loss 2" in page.sections["Training"]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    (tmp_path / "VERDICT").write_text("DO")
    (tmp_path / "recipe.yaml").write_text("run: [")
    assert "step 1" in page_of(tmp_path).text


def test_a_long_run_is_streamed_and_drawn_with_its_extremes(tmp_path: Path) -> None:
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
        .split('<polygon class="band c0" points="')[1]
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


def test_the_first_step_of_an_attempt_does_not_count_in_the_eta(tmp_path: Path) -> None:
    """It holds the start of workers, allocators, compiled kernels."""
    seconds = {1: 600.0, 2: 2.0, 3: 900.0, 4: 2.0}
    write_jsonl(
        tmp_path / "metrics.jsonl", [step(i, step_seconds=each) for i, each in seconds.items()]
    )
    write_jsonl(tmp_path / "attempts.jsonl", [start(0, steps=10), start(2, steps=10)])
    assert "0:00:12 left" in page_of(tmp_path).text  # 6 steps of 2 s


def test_scores_are_a_table_with_the_last_and_the_best_value(tmp_path: Path) -> None:
    recalls = {100: 0.2, 200: 0.5, 300: 0.4}
    write_jsonl(tmp_path / "metrics.jsonl", [step(i) for i in range(1, 301)])
    records = [evaluation(i, ["coco", "flickr"], recall) for i, recall in recalls.items()]
    records[-1] |= {"ema_coco/image_to_text_R@1": 0.61, "coco/width_32/val_loss": 1.75}
    records[-1] |= {"zero_shot_top1": 0.25, "zero_shot_samples": 50000.0}
    write_jsonl(tmp_path / "eval.jsonl", records)
    (tmp_path / "recipe.yaml").write_text(
        "data: {val: {coco: c.tar, flickr: f.tar}}\nevaluate: {zero_shot_data: imagenet}\n"
    )
    page = page_of(tmp_path)
    scores = page.sections["Scores"]
    expected = (
        "5,000 samples 40.00% best 50.00% at step 200 36.00% best 45.00% at step 200 "
        "- 1.6 best 1.5 at step 200"
    )
    assert f"coco {expected}" in scores and f"flickr {expected}" in scores
    assert "coco, moving average 61.00% - - -" in scores
    assert "coco, first 32 values - - - 1.75" in scores
    assert "zero-shot 50,000 samples - - 25.00% -" in scores
    assert "From the evaluation at step 300." in scores
    all_scores = page.sections["All scores"]
    names = "image_to_text_R@5 = dedup_image_to_text_R@5 = text_retrieval_recall@5"
    assert all_scores.count(f"{names} 50.00% 62.50% 200") == 2  # one number, once for each set
    for prefix in ("coco/", "flickr/", "ema_coco/", "coco/width_32/"):
        assert f"these names begin with {prefix} score" in all_scores
    assert page.titles == [
        "loss", "learning rate", "logit scale", "gradient norm before the clip",
        "samples per second", "data wait, share of the step",
        "coco: recall", "flickr: recall", "coco: validation loss", "flickr: validation loss",
    ]  # fmt: skip
    assert len(page.points) == 6 + 2 * 6 + 2


def test_one_evaluation_is_numbers_and_no_chart(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(i) for i in range(1, 11)])
    write_jsonl(tmp_path / "eval.jsonl", [evaluation(10, [""], 0.5)])
    page = page_of(tmp_path)
    assert "Evaluation" not in page.sections
    assert "50.00%" in page.sections["Scores"] and "best" not in page.sections["Scores"]
    assert not any("recall" in title or "loss" in title for title in page.titles[1:])


def test_rules_of_recall_that_differ_are_separate_scores(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(i) for i in range(1, 11)])
    record = evaluation(10, [""], 0.5) | {"text_retrieval_recall@1": 0.75}
    write_jsonl(tmp_path / "eval.jsonl", [record])
    scores = page_of(tmp_path).sections["All scores"]
    assert "text_retrieval_recall@1 75.00% 75.00% 10" in scores
    assert "image_to_text_R@1 = dedup_image_to_text_R@1 50.00%" in scores
    # equal, but not the same: a recall at 10, and the mean rank of the other direction
    assert "image_to_text_R@10 = dedup_image_to_text_R@10 = text_retrieval_recall@10 75" in scores
    assert "image_to_text_mean_rank 30.5 30.5" in scores


def test_own_scores_have_a_best_value_if_keep_best_says_which(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(i) for i in range(1, 11)])
    write_jsonl(
        tmp_path / "eval.jsonl",
        [{"step": i, "my_error": abs(4 - i), "my_other": i} for i in (2, 4, 6)],
    )
    (tmp_path / "recipe.yaml").write_text(
        "checkpoint: {keep_best: -my_error}\ndata: {val: v.tar}\n"
    )
    page = page_of(tmp_path)
    assert "my_error validation 2 best 0 at step 4" in page.sections["Scores"]
    assert "my_other 6 my" not in page.sections["All scores"]
    assert page.titles[-2:] == ["validation: my_error", "validation: my_other"]


def test_utilization_counts_padded_and_computed_work(tmp_path: Path) -> None:
    records = [
        step(
            i,
            mfu=0.4,
            mfu_computed=0.3,
            rounds=1 + (i % 4 == 0),
            grad_norm_image=0.5,
            clip_loss=1.0,
        )
        for i in range(1, 41)
    ]
    write_jsonl(tmp_path / "metrics.jsonl", records)
    page = page_of(tmp_path)
    training = page.sections["Training"]
    assert "as if padded 40% computed 30%" in training
    assert "whole model 1 image 0.5" in training and "loss 0.125 clip 1" in training
    assert "steps computed twice 10 (25.0%)" in page.sections["What ran"]


def test_what_ran(tmp_path: Path) -> None:
    records = [step(i, micro_size=4, accum_steps=2, step_seconds=9.0) for i in range(1, 401)]
    write_jsonl(tmp_path / "metrics.jsonl", records)
    details = {"device": "cuda", "ranks": 8, "parameters": 151_277_313, "train_samples": 1600}
    write_jsonl(tmp_path / "attempts.jsonl", [start(0, **details)])
    (tmp_path / "resolved.yaml").write_text(
        "model: {name: ViT-B-32}\nbatch: {global_size: 64}\noptim: {lr: 0.0005, name: adamw}\n"
        "schedule: {name: cosine, warmup_steps: 20}\ndata: {train: t.tar, val: {a: b.tar}}\n"
    )
    facts = page_of(tmp_path).sections["What ran"]
    for text in (
        "model ViT-B-32, 151.3M parameters",
        "batch 64 = 8 ranks x 2 micro-batches of at most 4",
        "learning rate 0.0005 at its peak, 20 warmup steps, cosine; adamw",
        "training data t.tar (1,600 samples)",
        "validation data a: b.tar",
        "samples seen 3,200, 2 epochs",
        "time 1:00:00 in steps, 8 GPU-hours",
    ):
        assert text in facts, (text, facts)


def test_examples_of_this_evaluation_and_earlier_ones(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(i) for i in range(1, 31)])
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "0.jpg").write_bytes(b"a picture")

    def record(i: int, key: str, *captions: str) -> dict:
        ranked = [
            {"caption": caption, "cosine": 0.5 - j / 10, "own": caption == "a fox"}
            for j, caption in enumerate(captions)
        ]
        return {"step": i, "images": [{"key": key, "captions": ["a fox"], "ranked": ranked}]}

    records = [record(5, "other", "another image"), record(10, "x", "an owl", "a cat"),
               record(20, "x", "<b>", "an owl"), record(30, "x", "a fox", "an owl")]  # fmt: skip
    write_jsonl(tmp_path / "examples.jsonl", records)
    page = page_of(tmp_path)
    assert "data:image/jpeg;base64,YSBwaWN0dXJl" in page.addresses
    shown = page.sections["Validation images"]
    assert "at step 30 and before" in shown
    assert (
        "a fox 0.500 an owl 0.400 first in earlier evaluations 20 <b> 0.500 10 an owl 0.500"
        in shown
    )
    assert "another image" not in shown and "its own" not in shown
    write_jsonl(tmp_path / "examples.jsonl", records[:2])
    assert "its own: a fox" in page_of(tmp_path).sections["Validation images"]
    (tmp_path / "examples.jsonl").write_text('{"step": 1, "images": [{"key": 3}]}\n')
    assert "Validation images" not in page_of(tmp_path).sections


def test_a_killed_run_has_ended_when_its_process_is_gone(tmp_path: Path) -> None:
    """On the machine that it ran on; a run that lives but makes no step is late."""
    run = write_run(tmp_path / "run")
    attempts = (run / "attempts.jsonl").read_text()

    def page_at(seconds: float, process: dict) -> str:
        write_attempts = attempts + json.dumps(start(60, process=process)) + "\n"
        (run / "attempts.jsonl").write_text(write_attempts)
        age(run, seconds)
        return page_of(run).sections[""]

    process = this_process()
    lives = page_at(5, process)
    assert "no problems" in lives and "0:00:40 left" in lives
    late = page_at(147, process)
    assert "last step 0:02:27 ago" in late and f"process {os.getpid()} still runs" in late
    assert "no problems" not in late and "left" not in late and "training" in late
    gone = page_at(147, process | {"started": "1"})  # another process has its number
    assert "ended without a verdict" in gone and "last step 0:02:27 ago" in gone
    assert "no problems" not in gone and "left" not in gone and "training" not in gone
    elsewhere = page_at(147, process | {"host": "n7"})
    assert "last step 0:02:27 ago" in elsewhere and "it runs on n7" in elsewhere
    assert "no problems" not in elsewhere and "left" not in elsewhere
    assert "probably ended" in page_at(3600, process | {"host": "n7"})
    (run / "VERDICT").write_text('DONE\n{"step": 120, "reason": "trained to the last step"}\n')
    assert "no problems" in page_at(3600, process | {"started": "1"})


def test_damaged_files_do_not_stop_the_page(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(1, rounds=None, mfu=None, loss="x")])
    write_jsonl(tmp_path / "eval.jsonl", [{"step": 1, "val_loss": None, "a": [1], "b": True}])
    (tmp_path / "recipe.yaml").write_text("data: 5\noptim: [1]\nbatch: {global_size: {a: b}}\n")
    assert "step 1" in page_of(tmp_path).text
    (tmp_path / "examples.jsonl").mkdir()
    assert "step 1" in page_of(tmp_path).text
    (tmp_path / "examples.jsonl").rmdir()
    os.mkfifo(tmp_path / "examples.jsonl")  # nobody writes to it: reading must not wait
    assert "step 1" in page_of(tmp_path).text


def test_a_batch_script_starting_an_attempt_is_not_a_dead_run(tmp_path: Path) -> None:
    """Its `begin` comes before the ranks' `start`: the process of the attempt before is gone."""
    run = write_run(tmp_path / "run")
    gone = start(60, process=this_process() | {"started": "1"})
    with (run / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(gone) + "\n")
    assert "ended without a verdict" in page_of(run).text
    with (run / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"event": "begin", "attempt": 2, "nodes": [], "step": 60}) + "\n")
    assert "ended without a verdict" not in page_of(run).text
