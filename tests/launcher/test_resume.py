"""Kill and resume through the real command: on the same layout bitwise, on another within rounding."""

from __future__ import annotations

import signal
import time

import pytest

from launcher.runtime.verdict import read_verdict
from tests import tolerances
from tests.launcher.conftest import ENDLESS, finish, kill, metrics, run, start, wait_for_step

pytestmark = pytest.mark.engine
SAME = ("step", "loss", "grad_norm", "batch_digest", "lr", "logit_scale", "samples")


def told(lines: list[dict]) -> list[tuple]:
    return [tuple(line[key] for key in SAME) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data, model):
    from tests.launcher.conftest import RECIPE

    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=data.train, model=model))
    status, out = run(recipe)
    assert status == 0, out
    assert read_verdict(folder / "run")[0] == "DONE"
    return metrics(folder / "run")


def test_a_run_killed_with_sigkill_goes_on_bitwise(recipe, tmp_path, uninterrupted):
    process = start(recipe, fault="hold:0:33")
    wait_for_step(
        tmp_path / "run", 17, process
    )  # checkpoints are at 7, 14, ...: some steps are lost
    kill(process)
    assert read_verdict(tmp_path / "run") is None
    status, out = run(recipe)
    assert status == 0, out
    assert "resuming from step" in out
    assert told(metrics(tmp_path / "run")) == told(uninterrupted)


def test_other_ranks_stage_workers_and_b_change_only_rounding(recipe, tmp_path, uninterrupted):
    process = start(recipe, fault="hold:0:33")
    wait_for_step(tmp_path / "run", 9, process)
    kill(process)
    layout = ("engine.zero_stage=3", "data.workers=2", "batch.micro_size=5", "batch.kept_graphs=2")
    status, out = run(recipe, *layout, ranks=2)
    assert status == 0, out
    lines = metrics(tmp_path / "run")
    assert [line["batch_digest"] for line in lines] == [
        line["batch_digest"] for line in uninterrupted
    ]
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in uninterrupted], rel=tolerances.loss(40)
    )
    assert lines[-1]["accum_steps"] == 4 and lines[-1]["kept_graphs"] == 2


def test_sigterm_saves_at_the_next_step_and_exits_75(recipe, tmp_path, uninterrupted):
    process = start(recipe, "data.workers=1", ranks=2, fault="hold:0:33")
    wait_for_step(tmp_path / "run", 10, process)
    process.send_signal(signal.SIGTERM)  # torchrun hands it to both ranks
    _, out = finish(process)
    word, why = read_verdict(tmp_path / "run")
    assert word == "PREEMPTED", out
    assert out.count("stopped by SIGTERM after step") == 1
    assert (
        "state PREEMPTED" in (tmp_path / "run" / "report.html").read_text()
    )  # it is written behind the verdict
    assert metrics(tmp_path / "run")[-1]["step"] == why["step"] < 40
    status, out = run(recipe)
    assert status == 0, out
    assert f"resuming from step {why['step']}" in out
    lines = metrics(tmp_path / "run")
    assert [line["batch_digest"] for line in lines] == [
        line["batch_digest"] for line in uninterrupted
    ]
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in uninterrupted], rel=tolerances.loss(40)
    )


def test_one_process_exits_75_itself(recipe, tmp_path):
    process = start(recipe, fault="hold:0:33")
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    status, out = finish(process)
    assert status == 75, out


def test_ctrl_c_twice_ends_at_once_and_names_what_is_committed(recipe, tmp_path):
    process = start(
        recipe, *ENDLESS, "checkpoint.every_steps=100000", fault="slow:0"
    )  # its save takes 13 s
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    time.sleep(4)  # it saves by now; where it does not, the second one interrupts a step
    process.send_signal(signal.SIGINT)
    status, out = finish(process)
    assert status == 130, out
    assert (
        "without a save: nothing is committed; run the same command to continue" in out
        and "Traceback" not in out
    ), out
    word, why = read_verdict(tmp_path / "run")
    assert word == "FAILED" and why["step"] >= 3 and "interrupted" in why["reason"]


def test_resuming_from_what_a_resumed_run_has_saved(recipe, tmp_path, uninterrupted):
    """Two ranks, three attempts: each saves its own lanes' positions, not those it was given of the others."""
    for last in (6, 13):
        status, out = run(recipe, f"run.steps={last}", ranks=2)
        assert status == 0, out
    status, out = run(recipe, "run.steps=40", "data.workers=1", ranks=2)
    assert status == 0 and "resuming from step 13" in out, out
    digests = [line["batch_digest"] for line in metrics(tmp_path / "run")]
    assert digests == [line["batch_digest"] for line in uninterrupted]


def test_another_recipe_is_not_gone_on_with(recipe, tmp_path):
    assert run(recipe, "run.steps=8")[0] == 0
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    status, out = run(recipe, "batch.global_size=64", "run.seed=4", ranks=2)
    assert status != 0
    assert out.count("batch.global_size was 32, is 64") == 1
    assert "run.seed was 3, is 4" in out and "checkpoint.resume=never" in out
    assert read_verdict(tmp_path / "run")[0] == "DONE"  # the run that is there is left as it was
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


def test_a_diverging_loss_stops_all_ranks_and_names_a_checkpoint(recipe, tmp_path):
    status, out = run(
        recipe, "optim.lr=1e17", "optim.grad_clip_norm=null", "checkpoint.every_steps=1", ranks=2
    )
    assert status != 0
    assert out.count("error: step") == 1, out
    assert "the last good checkpoint is that of step" in out
    word, why = read_verdict(tmp_path / "run")
    assert word == "FATAL" and "step" in why["reason"]


def test_the_same_line_in_a_second_terminal_takes_over(recipe, tmp_path):
    """The first ends at its next save."""
    first = start(recipe, *ENDLESS)
    wait_for_step(tmp_path / "run", 3, first)
    status, out = run(recipe, "run.steps=20")
    assert status == 0, out
    status, out = finish(first)
    assert status == 1 and "writes to" in out and "stop one of the two" in out, out
