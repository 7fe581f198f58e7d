"""A schedule of global batch sizes through the real command: uneven ranks, kills and resumes change nothing."""

from __future__ import annotations

import json

import pytest

from clip_train.processes import node_name
from clip_train.recipe.recipe import load_config
from launcher.cli.main import main
from launcher.runtime.verdict import read_verdict
from tests import tolerances
from tests.launcher.conftest import (
    finish,
    kill,
    metrics,
    run,
    start,
    wait_for_commit,
)

STAGES = ((4, 7), (9, 18), (14, 27))
SCHEDULE = f"batch.schedule=[{', '.join(f'{{until_step: {end}, global_size: {size}}}' for end, size in STAGES)}]"
VARYING = (
    SCHEDULE,
    "batch.global_size=23",
    "run.steps=24",
    "optim.lr=2e-4",  # smooth: what layouts differ by does not grow faster than the rule
)
SIZES = [7] * 4 + [18] * 5 + [27] * 5 + [23] * 10
OURS = (
    "step",
    "samples",
    "loss",
    "grad_norm",
    "batch_digest",
    "lr",
    "logit_scale",
    "micro_size",
    "accum_steps",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data, model):
    from tests.launcher.conftest import RECIPE

    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=data.train, model=model))
    status, out = run(recipe, *VARYING)
    assert status == 0, out
    assert (
        "global batch 7 until step 4, 18 until step 9, 27 until step 14, then 23; the largest, 27 = 1 ranks"
        in out
    )
    return metrics(folder / "run")


@pytest.mark.engine
def test_metrics_tell_each_steps_own(uninterrupted):
    assert [line["samples"] for line in uninterrupted] == [sum(SIZES[: i + 1]) for i in range(24)]
    assert [line["accum_steps"] for line in uninterrupted] == [-(-size // 12) for size in SIZES]
    assert [line["micro_size"] for line in uninterrupted] == [min(12, size) for size in SIZES]
    rates = [line["samples_per_second"] * line["step_seconds"] for line in uninterrupted]
    assert rates == pytest.approx(SIZES, rel=0.01)
    for i in range(5):  # in the warm-up
        assert uninterrupted[i]["lr"] == pytest.approx(2e-4 * (i + 1) / 5)


@pytest.mark.engine
@pytest.mark.parametrize(
    "layout, ranks",
    [
        (("engine.zero_stage=3", "data.workers=2", "batch.micro_size=2"), 3),
        (("engine.zero_stage=2", "batch.micro_size=5", "batch.kept_graphs=2"), 2),
    ],
)
def test_a_killed_run_goes_on_on_ranks_that_divide_nothing(
    recipe, tmp_path, uninterrupted, layout, ranks
):
    process = start(recipe, *VARYING, "data.workers=1", ranks=ranks - 1, fault="hold:0:20")
    wait_for_commit(tmp_path / "run", process)
    kill(process)
    status, out = run(recipe, *VARYING, *layout, ranks=ranks)
    assert status == 0 and "resuming from step" in out, out
    lines = metrics(tmp_path / "run")
    for name in ("step", "samples", "batch_digest", "lr"):
        assert [line[name] for line in lines] == [line[name] for line in uninterrupted], name
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in uninterrupted], rel=tolerances.loss(24)
    )


@pytest.mark.engine
def test_a_loader_failing_as_the_batch_grows_ends_both_ranks(recipe, tmp_path):
    """Rank 1 has no batch of step 5, which is larger than that of step 4: the last one, repeated, stands in."""
    fault = "loader:1:1"  # of its samples 3 are in each of four steps, and 9 in the next
    status, out = finish(start(recipe, *VARYING, "data.workers=1", ranks=2, fault=fault))
    assert status == 1 and "RuntimeError: broken on purpose" in out, out
    word, why = read_verdict(tmp_path / "run")
    assert (word, why["step"]) == ("FAILED", 4)
    assert why["reason"] == f"rank 1 on {node_name()}: RuntimeError: broken on purpose"
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.engine
def test_another_schedule_is_another_run(recipe, tmp_path, uninterrupted):
    assert run(recipe, *VARYING, "run.steps=6")[0] == 0
    status, out = run(recipe, *VARYING, "batch.schedule=[{until_step: 5, global_size: 7}]")
    assert status == 2 and "batch.schedule was [" in out, out
    status, out = run(recipe, *VARYING, "checkpoint.keep_last=3", ranks=2)
    assert status == 0, out
    digests = [line["batch_digest"] for line in metrics(tmp_path / "run")]
    assert digests == [line["batch_digest"] for line in uninterrupted]


def test_a_plan_tells_the_schedule(recipe, capsys):
    assert main(["plan", str(recipe), *VARYING, "--world-size", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["schedule"] == "7 until step 4, 18 until step 9, 27 until step 14, then 23"
    assert (plan["global_size"], plan["per_rank"], plan["accum_steps"], plan["samples"]) == (
        27,
        14,
        2,
        sum(SIZES),
    )
    assert main(["plan", str(recipe), *VARYING, "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "7 until step 4" in out and "27 = 2 ranks x 13 or 14" in out


def test_epochs_count_the_samples_of_the_schedule(recipe):
    overrides = [
        SCHEDULE,
        "batch.global_size=23",
        "run.steps=null",
        "run.epochs=2",
        "data.num_samples=300",
    ]
    assert load_config(str(recipe), overrides).steps == 14 + round((600 - sum(SIZES[:14])) / 23)
