"""What an operator does to a run: a STOP file, the same line again, a dry run of it, a run directory that is
moved."""

from __future__ import annotations

import pytest

from launcher.runtime.verdict import read_verdict
from tests.launcher.conftest import ENDLESS, finish, metrics, run, start, wait_for_step

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_file_is_removed_once_it_was_obeyed(recipe, tmp_path, ranks):
    process = start(recipe, *ENDLESS, ranks=ranks)
    wait_for_step(tmp_path / "run", 3, process)
    (tmp_path / "run" / "STOP").touch()
    status, out = finish(process)
    assert status == 75 and not (tmp_path / "run" / "STOP").exists(), out
    assert "and the STOP file was removed; run the same command to continue" in out, out
    word, why = read_verdict(tmp_path / "run")
    assert word == "PREEMPTED" and str(tmp_path / "run" / "STOP") in why["reason"]
    step = why["step"]
    status, out = run(recipe, f"run.steps={step + 2}", "checkpoint.resume=must", ranks=ranks)
    assert status == 0 and metrics(tmp_path / "run")[-1]["step"] == step + 2, out


def test_a_stop_file_from_before_the_start_is_removed(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    status, out = run(recipe, "run.steps=1000")
    assert status == 75 and not (tmp_path / "run" / "STOP").exists(), out
    assert "and the STOP file was removed" in out, out


def test_a_dry_run_compares_the_recipe_with_the_checkpoint(recipe, tmp_path, model):
    line = ("run.steps=4", "schedule.warmup_steps=0")
    status, out = run(recipe, *line, f"checkpoint.remote={tmp_path / 'store'}")
    assert status == 0, out

    status, out = run(recipe, *line, "run.steps=9", "--dry-run")
    assert status == 0 and "resuming from step 4" in out, out

    other = model.with_name("other.json")
    other.write_text(model.read_text().replace('"embed_dim": 32', '"embed_dim": 16'))
    told = "belongs to another run: "
    for place in ([], ["run.dir=elsewhere", f"checkpoint.remote={tmp_path / 'store'}"]):
        status, out = run(recipe, *line, f"model.name={other}", *place, "--dry-run")
        assert status == 2 and told in out and "embed_dim was 32, is 16" in out, out

    fresh = "checkpoint.resume=never"
    status, out = run(recipe, *line, f"model.name={other}", fresh, "--dry-run")
    assert status == 0 and "resuming" not in out, out
