"""Every optimizer through the real command: killed, and resumed under another engine on other ranks."""

from __future__ import annotations

import pytest

from tests import tolerances
from tests.launcher.conftest import (
    finish,
    kill,
    metrics,
    run,
    start,
    wait_for_commit,
    wait_for_step,
)

FULL = (
    pytest.mark.full
)  # held to their definitions on other layouts, without the command: tests/engine/test_groups.py
ADAMW = ("optim.name=adamw", "optim.lr=1e-3")
SGD = ("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.3")
LION = ("optim.name=lion_pytorch.Lion", "optim.options={betas: [0.9, 0.98]}", "optim.lr=1e-4")
LAMB = ("optim.name=examples.lamb.Lamb", "optim.lr=5e-3")
RMSPROP = ("optim.name=torch.optim.RMSprop", "optim.options={alpha: 0.5}", "optim.lr=1e-4")


def layout(name: str) -> tuple[str, ...]:
    kind, stage = name.split()
    return f"engine.kind={'deepspeed' if kind == 'zero' else kind}", f"engine.zero_stage={stage}"


@pytest.mark.engine
@pytest.mark.parametrize(
    "name, optim, before, ranks, after, then",
    [
        ("adamw", ADAMW, "zero 1", 2, "fsdp 3", 1),
        ("sgd with momentum", SGD, "fsdp 2", 1, "zero 3", 2),
        pytest.param("lion_pytorch.Lion", LION, "zero 3", 2, "fsdp 2", 1, marks=FULL),
        pytest.param("muon", ("optim.name=muon",), "zero 1", 2, "fsdp 3", 3, marks=FULL),
        pytest.param("examples.lamb.Lamb", LAMB, "zero 0", 2, "fsdp 0", 3, marks=FULL),
        pytest.param("torch.optim.RMSprop", RMSPROP, "zero 2", 1, "fsdp 3", 2, marks=FULL),
    ],
    ids=["adamw", "sgd", "lion", "muon", "lamb", "torch.optim.RMSprop"],
)
def test_a_killed_run_resumes_on_another_engine_and_other_ranks(
    recipe, tmp_path, name, optim, before, ranks, after, then
):
    if name == "lion_pytorch.Lion":
        pytest.importorskip("lion_pytorch")
    common = (*optim, "run.steps=12", "schedule.warmup_steps=2")
    status, out = run(
        recipe, *common, *layout(before), f"run.dir={tmp_path / 'whole'}", ranks=ranks
    )
    assert status == 0, out
    process = start(recipe, *common, *layout(before), ranks=ranks, fault="hold:0:9")
    wait_for_step(tmp_path / "run", 8, process)
    wait_for_commit(tmp_path / "run", process)
    kill(process)
    status, out = finish(start(recipe, *common, *layout(after), ranks=then))
    assert status == 0 and "resuming from step 7" in out, out
    whole, ours = (metrics(tmp_path / name) for name in ("whole", "run"))
    assert [line["loss"] for line in ours] == pytest.approx(
        [line["loss"] for line in whole], rel=tolerances.loss(12, name)
    )
    assert [line["grad_norm"] for line in ours] == pytest.approx(
        [line["grad_norm"] for line in whole], rel=tolerances.norm(12, name)
    )
