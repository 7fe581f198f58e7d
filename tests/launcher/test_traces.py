"""What a run shows of its speed and memory: `mfu`, a trace of chosen steps, a snapshot where GPU memory ends."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from clip_train.flops import ForwardFlops
from clip_train.metrics.meters import Utilization, peak_flops
from clip_train.metrics.skipped import Skipped
from tests.launcher.conftest import metrics, run

GPU = torch.device("cuda", 0)
STEP = {"accum_steps": 1, "kept_graphs": 1, "rounds": 1, "text_tokens": 50.0}
FLOPS = ForwardFlops(image=15e9, text=5e9, text_per_token=1e8, text_per_square=1e6)


def test_a_run_has_mfu_and_a_trace_of_the_requested_steps(recipe, tmp_path):
    """Also where the run directory is from somebody else, with links in place of the traces."""
    (tmp_path / "run" / "profile").mkdir(parents=True)
    for ending in ("json.gz", "txt"):
        (tmp_path / "run" / "profile" / f"rank0.{ending}").symlink_to(tmp_path / "elsewhere")
    code, out = run(recipe, "run.steps=6", "log.profile_steps=[3, 4]")
    assert code == 0, out
    run_dir = recipe.parent / "run"
    assert all(0 < record["mfu"] < 2 for record in metrics(run_dir))  # the CPU is shared
    trace = json.loads(gzip.decompress((run_dir / "profile/rank0.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    assert "aten::mm" in names and "[memory]" in names
    table = (run_dir / "profile/rank0.txt").read_text()
    assert "aten::mm" in table and "Self CPU Mem" in table
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-16GB", 125), ("NVIDIA A10", 125), ("NVIDIA A10G", None), ("NVIDIA GH200 480GB", None),
    ],
)  # fmt: skip
def test_mfu_is_three_forwards_of_the_datasheets_peak(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5)
    record = {"samples_per_second": 8000.0, **STEP}
    Utilization(lambda: FLOPS, GPU, Skipped()).after_step(record, [], {})
    want = None if teraflops is None else pytest.approx(3 * 20e9 * 8000 / (teraflops * 1e12))
    assert record["mfu"] == want and record["reserved_memory_bytes"] == 5


@pytest.mark.parametrize(
    ("changed", "recomputed", "forwards", "text"),
    [
        ({}, 0.0, 3, 7.5e9),
        ({"text_tokens": 20.0}, 0.0, 3, 20 * 1e8 + 400 * 1e6),  # without padding
        ({"accum_steps": 4, "kept_graphs": 1}, 0.0, 3.75, 7.5e9),  # three of four encoded twice
        ({"accum_steps": 4, "kept_graphs": 9}, 0.7, 3.7, 7.5e9),
        ({"rounds": 2}, 0.0, 6, 7.5e9),
    ],
)
def test_computed_mfu_counts_what_the_device_computes(
    monkeypatch, changed, recomputed, forwards, text
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5)
    record = {"samples_per_second": 8000.0, **STEP, **changed}
    Utilization(lambda: FLOPS, GPU, Skipped(), recomputed).after_step(record, [], {})
    assert record["mfu"] == pytest.approx(3 * 20e9 * 8000 / 989.5e12)
    assert record["mfu_computed"] == pytest.approx(forwards * (15e9 + text) * 8000 / 989.5e12)


def test_a_model_that_cannot_be_counted_has_no_mfu() -> None:
    skipped, record = Skipped(lambda line: None), {"samples_per_second": 1.0}

    def forward_flops() -> ForwardFlops:
        raise NotImplementedError("no meta tensors here")

    callback = Utilization(forward_flops, torch.device("cpu"), skipped)
    for _ in range(2):
        callback.after_step(record, [], {})
    assert record["mfu"] is None and record["mfu_computed"] is None
    assert skipped.lines() == ["mfu after step 0: NotImplementedError: no meta tensors here"]


def test_a_cpu_reaches_a_plausible_number_of_flops() -> None:
    assert 1e8 < peak_flops(torch.device("cpu")) < 1e14
