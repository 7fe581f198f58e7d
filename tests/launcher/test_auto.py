"""batch.micro_size=auto through the command: the same curve, what plan predicts, and mistakes told."""

from __future__ import annotations

import json

import pytest

from launcher.runtime.verdict import ROOM, read_verdict
from tests import tolerances
from tests.launcher.conftest import finish, metrics, run, start

K = 4  # micro-batches of a global batch of 32
MICRO = ("batch.micro_size=8",)
AUTO = ("batch.micro_size=auto", "run.steps=3", "schedule.warmup_steps=0")


def test_limits_change_the_sizes_and_not_the_curve(recipe, tmp_path):
    curves, sizes = [], []
    for limit, ranks, more in (
        ("225MiB", 1, ()),
        ("400MiB", 1, ()),
        ("400MiB", 2, ("engine.zero_stage=3",)),
    ):
        overrides = (
            *AUTO,
            f"batch.memory_limit={limit}",
            f"run.dir={tmp_path / str(len(curves))}",
            *more,
        )
        status, out = run(recipe, *overrides, ranks=ranks)
        assert status == 0, out
        assert out.count("the least work that fits") == 1
        lines = metrics(tmp_path / str(len(curves)))
        curves.append([line["loss"] for line in lines])
        sizes.append([lines[0][key] for key in ("micro_size", "accum_steps", "kept_graphs")])
        status, out = run(recipe, "--json", "--world-size", str(ranks), *overrides, verb="plan")
        plan = json.loads(out)
        assert [plan[key] for key in ("micro_size", "accum_steps", "kept_graphs")] == sizes[-1]
    assert sizes[0] != sizes[1]
    for curve in curves:
        assert curve == pytest.approx(curves[0], rel=tolerances.loss(3))


@pytest.mark.parametrize(
    "overrides, told",
    [
        (AUTO, ["batch.micro_size", "batch.memory_limit=8GiB"]),
        (
            (*AUTO, "batch.memory_limit=20MiB"),
            ["nothing fits into 20 MiB", "Raise batch.memory_limit"],
        ),
    ],
    ids=["no limit", "too low"],
)
def test_mistakes_are_told(recipe, overrides, told):
    status, out = run(recipe, *overrides)
    assert status == 2, out
    assert all(text in out for text in told), out
    assert "Traceback" not in out


def test_as_many_graphs_as_fit_are_kept_by_default(recipe, tmp_path):
    def planned(*overrides):
        status, out = run(recipe, "--json", *MICRO, *overrides, verb="plan")
        assert status == 0, out
        return json.loads(out)

    unknown = planned()  # no GPU, and nobody has said how much memory there is
    assert unknown["kept_graphs"] == 1
    (note,) = unknown["notes"]
    assert "keeps one graph" in note and "set batch.memory_limit, such as 8GiB" in note
    assert planned("batch.micro_size=32")["notes"] == []  # one micro-batch
    line = (*MICRO, "run.steps=1", "schedule.warmup_steps=0")
    for more in ("run.dir=unknown", "--dry-run"):
        status, out = run(recipe, *line, more)
        assert status == 0 and out.count(f"note: {note}") == 1, out
    held = [
        planned(f"batch.kept_graphs={kept}")["memory_bytes"]["total"] for kept in range(1, K + 1)
    ]
    for kept in (1, 2, K):
        assert planned(f"batch.memory_limit={int(held[kept - 1]) + 1}")["kept_graphs"] == kept
    # too little for one graph, by the prediction: the run may try, as it could with a number
    too_little = planned("batch.memory_limit=20MiB")
    assert too_little["kept_graphs"] == 1 and too_little["notes"] == []
    limit = f"batch.memory_limit={int(held[1]) + 1}"
    status, out = run(recipe, *line, limit)
    assert status == 0 and "batch.kept_graphs = auto: " in out, out
    assert metrics(tmp_path / "run")[0]["kept_graphs"] == 2


def test_after_out_of_memory_an_attempt_has_half_the_activations(recipe, tmp_path):
    """One that FSDP cannot recover from. What the recipe fixes stays: then no attempt follows."""
    fsdp = ("engine.kind=fsdp", "run.steps=7", "schedule.warmup_steps=0")
    auto = (*fsdp, "batch.micro_size=auto", "batch.memory_limit=400MiB")

    def ended(*overrides, **environ):
        status, out = finish(start(recipe, *overrides, ranks=2, fault="memory:1", environ=environ))
        assert status == 1 and "or auto; start the run again to" in out, out
        word, why = read_verdict(tmp_path / "run")
        line = metrics(tmp_path / "run")[-1]
        return word, why.get("room", 0), line["micro_size"] * line["kept_graphs"]

    word, room, samples = ended(*auto)
    assert word == "FAILED" and room > 0
    word, half, fewer = ended(*auto, **{ROOM: str(room)})
    assert word == "FAILED" and half <= room / 2 + 1 and fewer <= samples / 2
    assert ended(*fsdp, "batch.micro_size=8")[:2] == ("FATAL", 0)
