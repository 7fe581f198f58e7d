"""Runs that start from what lies in a bucket: another run's checkpoints, an export, a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clip_train.errors import CheckpointError, UserError
from clip_train.models.weights import export_openclip
from tests.launcher.saved import save_run
from tests.launcher.test_weights import ARCHITECTURE, same, started_from
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy


def described(folder: Path) -> Path:
    (folder / "small.json").write_text(json.dumps(ARCHITECTURE.model_cfg()))
    return folder / "small.json"


def test_a_runs_checkpoints_are_enough(tmp_path: Path, view: Bucket, proxy: FaultyProxy) -> None:
    model = described(tmp_path)
    saved = save_run(tmp_path / "run", ARCHITECTURE, remote=f"{view.url}/run")
    (tmp_path / "run").rename(tmp_path / "gone")
    torch.save(saved[2], tmp_path / "any.pt")
    proxy.faults = [Fault("cut", times=2, key="safetensors")]
    assert same(started_from(f"{view.url}/run", model), saved[2])
    (marker,) = [key for key in view.commits("run") if key.endswith("s0000000001.json")]
    assert same(started_from(f"{view.url}/{marker}", model), saved[1])
    (key,) = [key for key in view.keys("run/ckpt/s0000000002/") if key.endswith(".safetensors")]
    content = bytearray(view.get(key))
    content[len(content) // 8] ^= 1
    view.put(key, bytes(content))
    with pytest.raises(CheckpointError, match="sha256 does not match"):
        started_from(f"{view.url}/run", model)
    with pytest.raises(
        UserError, match=r"model.init_from .*neither weights .* nor a run's checkpoint"
    ):
        started_from(f"{view.url}/elsewhere", model)


def test_an_export_is_fetched_and_compared(
    tmp_path: Path, view: Bucket, proxy: FaultyProxy, model: Path, caplog
) -> None:
    model = described(tmp_path)
    saved = save_run(tmp_path / "run", ARCHITECTURE)[2]
    torch.save(saved, tmp_path / "any.pt")
    folder = export_openclip(saved, ARCHITECTURE, tmp_path / "export")
    for file in folder.iterdir():
        view.put(f"ours/{file.name}", file.read_bytes())
    proxy.faults = [Fault("cut", times=2, key="safetensors")]
    assert same(started_from(f"{view.url}/ours", model), saved) and proxy.fired == 2
    assert same(started_from(f"{view.url}/ours/open_clip_model.safetensors", model), saved)
    assert "sha256" not in caplog.text
    view.flip("ours/open_clip_model.safetensors")
    with pytest.raises(CheckpointError, match="does not have its sha256"):
        started_from(f"{view.url}/ours", model)
    description = json.loads((folder / "open_clip_config.json").read_text())
    del description["sha256"]
    view.put("ours/open_clip_config.json", json.dumps(description).encode())
    view.put(
        "ours/open_clip_model.safetensors", (folder / "open_clip_model.safetensors").read_bytes()
    )
    assert same(started_from(f"{view.url}/ours/", model), saved)
    assert "has no sha256" in caplog.text
    with pytest.raises(UserError, match=r"nothing\.pt: this file does not exist"):
        started_from(f"{view.url}/ours/nothing.pt", model)
    proxy.faults = [Fault("status", key="", code=403, s3code="AccessDenied", method="GET|HEAD")]
    with pytest.raises(CheckpointError, match=r"model.init_from \(s3://.*\) cannot be read: "):
        started_from(f"{view.url}/ours", model)
