"""Several named sets in `data.val`: their numbers are those that each set has alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from launcher.cli.main import main
from tests.launcher.conftest import run

OWN = "evaluate.functions=[tests.launcher.test_own_code.own_numbers]"


def answer(out: str) -> dict:
    return json.loads(next(line for line in out.splitlines() if line.startswith('{"')))


@pytest.mark.engine
def test_each_set_has_the_numbers_that_it_has_alone(recipe, data, tmp_path):
    """In a run on two ranks, with its moving average; in `evaluate`; and in `embed`, in a folder of its own."""
    seen = str(Path(data.train).parent / "*00000.tar")
    sets = f"data.val={{test: {data.val}, seen-1: {seen}}}"
    labelled = (
        f"evaluate.zero_shot_data={data.val}",
        f"evaluate.zero_shot_classes={data.classes}",
    )
    keep = ("checkpoint.keep_best=seen-1/image_to_text_R@10", "optim.ema_decay=0.1")
    common = ("run.steps=2", "schedule.warmup_steps=0", OWN, *labelled)
    status, out = run(recipe, *common, *keep, sets, ranks=2)
    assert status == 0, out
    assert "test/image-to-text R@1" in out and "keep_best" not in out, out
    told = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert "ema_test/val_loss" in told and "ema_test/num_samples" not in told
    page = (tmp_path / "run" / "report.html").read_text()
    assert "seen-1/num_samples" not in page and "seen-1/val_loss" in page
    assert told["test/samples_seen_by_own"] == data.num_val
    for name, place in (("test", data.val), ("seen-1", seen)):
        status, out = run(tmp_path / "run", *common, f"data.val={place}", "--json", verb="evaluate")
        assert status == 0, out
        alone = answer(out)
        for key in ("num_samples", "val_loss", "image_to_text_R@10", "dedup_text_to_image_R@10"):
            assert told[f"{name}/{key}"] == pytest.approx(alone[key], abs=2e-3), key
        assert told["zero_shot_samples"] == alone["zero_shot_samples"] == data.num_val
    status, out = run(tmp_path / "run", *common, sets, "--json", verb="evaluate")
    assert status == 0, out
    once = {name for name in told if not name.startswith("ema_")}
    assert answer(out).keys() - {"name", "weights"} == once - {"step"}
    status, out = run(tmp_path / "run", sets, "--output", str(tmp_path / "out"), verb="embed")
    assert status == 0, out
    for name in ("test", "seen-1"):
        rows = len(np.load(tmp_path / "out" / name / "image-00000-00000.npy"))
        assert rows == told[f"{name}/num_samples"]


def test_other_verbs_look_at_each_set(recipe, data, capsys):
    good = [f"data.val={{test: {data.val}, other: {data.train}}}"]
    assert main(["plan", str(recipe), *good]) == 0, capsys.readouterr()
    assert main(["train", "--dry-run", str(recipe), *good]) == 0, capsys.readouterr()
    bad = [*good, "data.val.other=nowhere.tar", "evaluate.sets.last.data=nowhere.tar"]
    messages = [
        f"{key} (nowhere.tar): 1 of 1 shards do not exist"
        for key in ("data.val.other", "evaluate.sets.last.data")
    ]
    assert main(["train", "--dry-run", str(recipe), *bad]) == 2
    printed = capsys.readouterr().err
    assert all(message in printed for message in messages)
    assert main(["doctor", str(recipe), *bad]) == 1
    printed = capsys.readouterr().out
    assert all(message in printed for message in messages)


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["data.val={a/b: x.tar}"], "data.val"),
        (["data.val={a: ''}"], "data.val"),
        (["data.val=[x.tar]"], "must be text, or texts by names of letters, digits"),
        (
            ["data.val={a: x.tar, b: y.tar}", "evaluate.zero_shot_classes=imagenet"],
            "with several sets in data.val (a, b): set evaluate.zero_shot_data to the one with",
        ),
    ],
)
def test_mistakes(recipe, overrides, said, capsys):
    assert main(["plan", str(recipe), *overrides]) == 2
    assert said in capsys.readouterr().err
