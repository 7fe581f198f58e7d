"""A stop request is obeyed whatever a run is doing, and costs no step.

What would take 1,000 s is never waited for, so a request that is not obeyed is a test that does not end in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clip_train.storage.remote import RemoteStorage
from launcher.runtime.verdict import read_verdict
from tests.launcher.conftest import ENDLESS, finish, metrics, run, start, wait_for, wait_for_step
from tests.launcher.slow import SLEEPS, sleep

pytestmark = pytest.mark.engine

ENDS_WITHIN = 120.0  # of 1,000: on a machine that is busy


def slow_numbers(encoded: Any) -> dict[str, float]:
    """`evaluate.functions`: on rank 0 only."""
    sleep()
    return {"slow": 1.0}


def slow_stage(samples: Iterator[dict]) -> Iterator[dict]:
    """`data.stages`: the data of one rank no longer comes, once it may not."""
    for sample in samples:
        if Path(os.environ[SLEEPS]).with_name("hold").exists():
            sleep()
        yield sample


def slow_loss(image, text, scale, bias, rows):
    """`loss.kind`: as a first step that compiles for long. It is tried on four samples before."""
    if len(image) > 4:
        sleep()
    return (image - text).square().sum() * scale.sum()


class SlowStore(RemoteStorage):
    """As a store that takes very long to list or to read."""

    def __init__(self, url: str, **limits: Any) -> None:
        super().__init__(url, url.partition("://")[2], request_seconds=1000, patience_seconds=1000)

    async def head(self, *args: Any) -> Any:
        Path(os.environ[SLEEPS]).touch()
        await asyncio.sleep(1000)

    get = listing = put = remove = head


def started(recipe: Path, *overrides: str, ranks: int = 1, **environ: str):
    environ = {SLEEPS: str(recipe.parent / "sleeps"), **environ}
    return start(recipe, *ENDLESS, *overrides, ranks=ranks, environ=environ)


def sleeps(recipe: Path) -> bool:
    return (recipe.parent / "sleeps").exists()


def preempted(recipe: Path, process) -> tuple[str, dict]:
    """What the run prints and its verdict, after it has ended as a preempted one."""
    status, out = finish(process, ENDS_WITHIN)
    assert status == 75, out
    word, why = read_verdict(recipe.parent / "run")
    assert word == "PREEMPTED" and "Traceback" not in out, out
    return out, why


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR2", "SIGXCPU", "STOP", "rank 1"])
def test_an_evaluation_that_does_not_end_is_left(recipe, tmp_path, data, how):
    """The request reaches one rank only in two of the cases. The steps since the last save are kept."""
    every = (f"data.val={data.val}", "evaluate.every_steps=5", "checkpoint.every_steps=1000")
    function = f"evaluate.functions=[{__name__}.slow_numbers]"
    ranks = 2 if how in ("STOP", "rank 1") else 1
    process = started(recipe, *every, function, ranks=ranks)
    wait_for(lambda: sleeps(recipe), "the evaluation does not begin", process)
    if how == "STOP":
        (tmp_path / "run" / "STOP").touch()
    elif how == "rank 1":
        process.ranks[1].send_signal(signal.SIGTERM)
    else:
        process.send_signal(signal.Signals[how])
    out, why = preempted(recipe, process)
    assert "step 5 is committed" in out and why["step"] == 5, out
    assert (tmp_path / "run" / "PROGRESS").read_text() == "5\n"
    assert not (tmp_path / "run" / "STOP").exists()
    status, out = run(recipe, "run.steps=7", *every)
    assert status == 0 and "resuming from step 5" in out, out


@pytest.mark.parametrize("how, workers", [("SIGTERM", 0), ("STOP", 2)])
def test_data_that_does_not_come_is_not_waited_for(recipe, tmp_path, how, workers):
    """Both ranks wait for data, and a STOP file is seen by rank 0 alone."""
    same = (
        f"data.stages=[{__name__}.slow_stage]",
        f"data.workers={workers}",
        "checkpoint.every_steps=1000",
        "schedule.name=constant",
    )
    process = started(recipe, *same, ranks=2)
    wait_for_step(tmp_path / "run", 3, process)
    (tmp_path / "hold").touch()
    wait_for(lambda: sleeps(recipe), "the data still comes", process)
    last = still(tmp_path / "run")
    if how == "STOP":
        (tmp_path / "run" / "STOP").touch()
    else:
        process.send_signal(signal.SIGTERM)
    out, why = preempted(recipe, process)
    assert why["step"] == last and f"step {last} is committed" in out, out
    (tmp_path / "hold").unlink()
    for name in ("run", "whole"):
        again = started(
            recipe, *same, f"run.steps={last + 2}", f"run.dir={tmp_path / name}", ranks=2
        )
        status, out = finish(again)
        assert status == 0 and (f"resuming from step {last}" in out) == (name == "run"), out
    curves = [
        {line["step"]: line["loss"] for line in metrics(tmp_path / name)}
        for name in ("run", "whole")
    ]
    assert curves[0] == curves[1]  # to the bit: the discarded step has changed nothing


def still(run_dir: Path) -> int:
    """The last step, once no more come."""
    before, now = -1, metrics(run_dir)[-1]["step"]
    while before != now:
        time.sleep(2.0)
        before, now = now, metrics(run_dir)[-1]["step"]
    return now


def test_a_first_step_that_does_not_end_is_left(recipe, tmp_path):
    process = started(recipe, f"loss.kind={__name__}.slow_loss")
    wait_for(lambda: sleeps(recipe), "the first step does not begin", process)
    process.send_signal(signal.SIGUSR2)
    status, out = finish(process, ENDS_WITHIN)
    assert status == 75 and "stopped by SIGUSR2 before the first step" in out, out


@pytest.mark.parametrize(
    "key, epochs",
    [
        ("data.train", ()),
        ("data.train", ("run.steps=null", "run.epochs=2")),
        ("checkpoint.remote", ()),
    ],
)
def test_a_listing_that_does_not_end_is_left(recipe, tmp_path, key, epochs):
    """Epochs are counted before there are ranks."""
    url = f"{__name__}.SlowStore://{tmp_path}/store"
    process = started(recipe, f"{key}={url}" + "/{0..3}.tar" * (key == "data.train"), *epochs)
    wait_for(lambda: sleeps(recipe), "nothing is listed", process)
    process.send_signal(signal.SIGTERM)
    status, out = finish(process, ENDS_WITHIN)
    assert status == 75 and "stopped by SIGTERM before the first step" in out, out


@pytest.mark.full
def test_a_save_is_finished(recipe, tmp_path):
    """The request comes while a rank is in its save."""
    process = start(recipe, *ENDLESS, "checkpoint.every_steps=5", ranks=2, fault="slow:1")
    wait_for_step(tmp_path / "run", 5, process)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    out, why = preempted(recipe, process)
    assert f"step {why['step']} is committed" in out, out


def test_a_model_whose_building_does_not_end_is_left(recipe):
    own = ("model.name=tests.launcher.slow.SlowTowers", "model.dropout=0")
    process = started(recipe, *own, "model.patch_dropout=null")
    wait_for(lambda: sleeps(recipe), "the model is not built", process)
    process.send_signal(signal.SIGTERM)
    status, out = finish(process, ENDS_WITHIN)
    assert status == 75 and "stopped by SIGTERM before the first step" in out, out


@pytest.mark.parametrize("steps", [6, 100000])
def test_a_callback_that_does_not_close_is_left(recipe, tmp_path, steps):
    """After the last step, and after a stop request in a step, as where a logging service does not answer."""
    callback = "log.callbacks=[tests.launcher.slow.SlowClose]"
    process = started(recipe, f"run.steps={steps}", "schedule.name=constant", callback)
    wait_for_step(tmp_path / "run", 6, process)
    if steps == 6:
        wait_for(lambda: sleeps(recipe), "the run is not closed", process)
    process.send_signal(signal.SIGTERM)
    out, why = preempted(recipe, process)
    assert f"step {why['step']} is committed" in out, out
    more = ("schedule.name=constant", f"run.steps={max(why['step'], 6)}")
    status, out = run(recipe, *more)
    assert status == 0 and read_verdict(tmp_path / "run")[0] == "DONE", out
