"""What only looks at a run cannot end it: it is skipped, and the end of the run says so. Mistakes show at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.runtime.verdict import read_verdict
from tests.data.shards import sample, write_shard
from tests.launcher.conftest import metrics, run

pytestmark = pytest.mark.engine

LENGTH = ("run.steps=12", "evaluate.every_steps=7")


def labelled(folder: Path, labels: list[str]) -> tuple[str, str]:
    """Overrides: validation data in which sample i has the `.cls` labels[i], and three classes."""
    members = []
    for i, label in enumerate(labels):
        members += [*sample(f"{i:06d}", i), (f"{i:06d}.cls", label.encode())]
    classes = folder / "classes.json"
    classes.write_text(json.dumps({"classnames": ["cat", "dog", "bird"]}))
    shard = write_shard(folder / "val.tar", members)
    return f"data.val={shard}", f"evaluate.zero_shot_classes={classes}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_that_fails_is_skipped_by_all_ranks(recipe, tmp_path, ranks):
    """On two ranks the second one alone meets the label that is not a class."""
    keys = labelled(tmp_path, ["0", "1", "2"] * 150 + ["99"])
    keep = "checkpoint.keep_best=zero_shot_top1"
    status, out = run(recipe, *LENGTH, *keys, keep, ranks=ranks)
    assert status == 0, out
    assert out.count("the evaluation failed after step 7, and the run continues") == 1, out
    assert "a sample's cls is 99" in out and "clip-train evaluate RECIPE" in out, out
    assert len(metrics(tmp_path / "run")) == 12
    word, why = read_verdict(tmp_path / "run")
    assert word == "DONE" and len(why["skipped"]) == 1
    assert why["skipped"][0].startswith("the evaluation after step 7, 12: ")
    saved = list((tmp_path / "run" / "checkpoints" / "commit").glob("*.json"))
    assert len(saved) == 2, saved  # of the step at which the evaluation failed, and of the last


def test_a_chart_and_a_report_that_fail_are_skipped(recipe, tmp_path):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    (tmp_path / "run" / "events").write_text("a file where TensorBoard wants a folder")
    status, out = run(recipe, "run.steps=3", "log.tensorboard=true", "schedule.warmup_steps=0")
    assert status == 0, out
    word, why = read_verdict(tmp_path / "run")
    assert word == "DONE" and [line.split(" after ")[0] for line in why["skipped"]] == [
        "tensorboard",
        "report.html",
    ]
    assert out.count("skipped: ") == 2, out


def test_a_label_that_is_not_a_class_is_found_before_training(recipe, tmp_path):
    keys = labelled(tmp_path, ["0", "1", "2", "cow"])
    told = (
        f"data.val: sample 000003 of {tmp_path / 'val.tar'} does not fit evaluate.zero_shot_classes "
        f"({tmp_path / 'classes.json'}): a sample's cls is 'cow', none of the 3 classes; correct the label"
    )
    for line, verb in ((["run.steps=3"], "train"), (["--dry-run"], "train"), ([], "doctor")):
        status, out = run(recipe, *line, *keys, "schedule.warmup_steps=0", verb=verb)
        assert told in " ".join(out.split()), out
        assert status == (1 if verb == "doctor" else 2)
    assert not (tmp_path / "run").exists()


def test_evaluation_data_without_labels_warn_before_training(recipe, tmp_path):
    classes = labelled(tmp_path, ["0", "1", "2"])[1]
    val = write_shard(
        tmp_path / "plain.tar", [each for i in range(3) for each in sample(f"{i:06d}", i)]
    )
    told = f"data.val: none of the first 3 samples of {val} has a label"
    steps = ("run.steps=1", "schedule.warmup_steps=0")
    for line, verb in ((steps, "train"), ((*steps, "--dry-run"), "train"), ((), "doctor")):
        status, out = run(recipe, *line, f"data.val={val}", classes, verb=verb)
        assert status == 0 and told in " ".join(out.split()), out
