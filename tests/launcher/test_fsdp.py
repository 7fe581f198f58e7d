"""FSDP through the real command: DeepSpeed's curve, killed and resumed on either engine, and how it ends."""

from __future__ import annotations

import signal

import pytest

from launcher.runtime.verdict import read_verdict
from tests import tolerances
from tests.launcher.conftest import (
    ENDLESS,
    RECIPE,
    finish,
    kill,
    metrics,
    run,
    start,
    wait_for_commit,
    wait_for_step,
)
from tests.launcher.test_resume import told

pytestmark = pytest.mark.engine
FSDP = "engine.kind=fsdp"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data, model):
    """On one rank, on DeepSpeed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=data.train, model=model))
    status, out = run(recipe, "run.steps=24")
    assert status == 0, out
    return metrics(folder / "run")


@pytest.mark.parametrize(
    "ranks, first, then",
    [
        (2, [FSDP, "engine.zero_stage=3"], [FSDP, "engine.zero_stage=3"]),
        (2, ["engine.zero_stage=3"], [FSDP, "engine.zero_stage=1"]),
        (1, [FSDP, "engine.zero_stage=0"], ["engine.zero_stage=2"]),
    ],
)
def test_killed_and_resumed_on_either_engine(recipe, tmp_path, uninterrupted, ranks, first, then):
    process = start(recipe, "run.steps=24", *first, ranks=ranks, fault="hold:0:16")
    wait_for_step(tmp_path / "run", 9, process)
    wait_for_commit(tmp_path / "run", process)
    kill(process)
    status, out = run(recipe, "run.steps=24", *then, ranks=2)
    assert status == 0 and "resuming from step" in out, out
    lines = metrics(tmp_path / "run")
    assert [line["batch_digest"] for line in lines] == [
        line["batch_digest"] for line in uninterrupted
    ]
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in uninterrupted], rel=tolerances.loss(24)
    )


def test_a_resume_on_the_same_layout_is_bitwise(recipe, tmp_path):
    layout = (FSDP, "engine.zero_stage=2", "batch.kept_graphs=2")
    curves = []
    for place, lengths in (("straight", (12,)), ("resumed", (7, 12))):
        for steps in lengths:
            constant = (
                "schedule.name=constant",
                f"run.steps={steps}",
                f"run.dir={tmp_path / place}",
            )
            status, out = run(recipe, *layout, *constant, ranks=2)
            assert status == 0, out
        curves.append(told(metrics(tmp_path / place)))
    assert curves[0] == curves[1]


@pytest.mark.full
def test_a_signal_is_a_commit(recipe, tmp_path):
    process = start(recipe, *ENDLESS, FSDP, ranks=2)
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGTERM)
    status, out = finish(process)
    word, why = read_verdict(tmp_path / "run")
    assert (status, word) == (75, "PREEMPTED"), out
    status, out = run(recipe, FSDP, f"run.steps={why['step'] + 2}", ranks=2)
    assert status == 0 and f"resuming from step {why['step']}" in out, out


@pytest.mark.full
def test_a_dead_rank_ends_the_other(recipe, tmp_path):
    process = start(recipe, *ENDLESS, FSDP, "engine.zero_stage=3", ranks=2)
    wait_for_step(tmp_path / "run", 3, process)
    process.ranks[1].kill()
    status, out = finish(process)
    assert status != 0 and "rank 1 on" in out, out
    assert read_verdict(tmp_path / "run")[0] == "FAILED"


@pytest.mark.full
def test_a_loss_that_is_not_finite_stops_all_ranks(recipe, tmp_path):
    far = ("optim.lr=1e17", "optim.grad_clip_norm=null", "checkpoint.every_steps=1")
    status, out = run(recipe, FSDP, *far, ranks=2)
    assert status != 0 and out.count("error: step") == 1, out
    assert "the last good checkpoint is that of step" in out
    assert read_verdict(tmp_path / "run")[0] == "FATAL"


@pytest.mark.full
def test_out_of_memory_on_one_rank(recipe, tmp_path):
    """Others wait within the forward: all end, with the remedy. Alone it goes on with smaller micro-batches."""
    status, out = finish(start(recipe, FSDP, "run.steps=8", ranks=2, fault="memory:1"))
    assert status != 0 and "on rank 1" in out and "Set a smaller batch.micro_size" in out, out
    assert read_verdict(tmp_path / "run")[0] == "FATAL"  # the same sizes would fail again
    alone = f"run.dir={tmp_path / 'alone'}"
    status, out = finish(start(recipe, FSDP, "run.steps=8", alone, fault="memory:0"))
    assert status == 0 and "batch.micro_size is 6 instead of 12" in out, out
    status, out = run(recipe, "run.steps=8", f"run.dir={tmp_path / 'undisturbed'}")
    assert status == 0, out
    losses = [
        [line["loss"] for line in metrics(tmp_path / name)] for name in ("alone", "undisturbed")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=tolerances.loss(8))
