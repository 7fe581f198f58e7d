"""`data.kind: synthetic` through the real command: no data.train, and a recipe whose shards are elsewhere."""

from __future__ import annotations

import json

import pytest
import yaml

from launcher.cli.main import main
from tests.launcher.conftest import metrics, run

pytestmark = pytest.mark.engine


def test_it_trains_and_resumes_without_a_file(recipe, tmp_path):
    raw = yaml.safe_load(recipe.read_text())
    raw["data"] = {"kind": "synthetic", "workers": 1, "lanes": 4}
    recipe.write_text(yaml.safe_dump(raw))
    status, out = run(recipe, "run.steps=8")
    assert (
        status == 0
        and "data.train: synthetic: noise, without files, 1,000,000 samples in an epoch" in out
    ), out
    status, out = run(recipe, "run.steps=10", ranks=2)
    assert status == 0 and "resuming from step 8" in out, out
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 11))


def test_it_is_planned_and_checked(recipe, capsys):
    line = [
        "data.train=/nowhere/{0..9}.tar",
        "data.kind=synthetic",
        "run.steps=null",
        "run.epochs=2",
    ]
    assert main(["train", str(recipe), *line, "--dry-run"]) == 0
    assert "synthetic: noise" in capsys.readouterr().out
    assert main(["plan", str(recipe), *line, "data.num_samples=6400", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["steps"], plan["epochs"]) == (400, 2)
