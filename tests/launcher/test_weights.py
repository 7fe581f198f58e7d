"""Where a run can start from. What is at a URL: tests/s3/test_weights.py."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clip_train import dist
from clip_train.errors import CheckpointError, UserError
from clip_train.models.config import ModelConfig
from clip_train.models.weights import export_openclip, initial_weights
from clip_train.storage.config import StorageConfig
from launcher.cli.main import main
from launcher.weights import weights_here
from tests.launcher.saved import save_run
from tests.models.small import small_architecture, small_model
from tests.peers.hub import Hub
from tests.ranks import run_ranks

ARCHITECTURE = small_architecture()


def started_from(place: str | Path, model: Path, late: float = 0.0) -> dict[str, Tensor]:
    """late: seconds after which all ranks but the first open the weights."""
    config = ModelConfig(name=str(model), init_from=str(place))
    with weights_here(config, StorageConfig()) as here:
        if dist.rank() > 0:
            time.sleep(late)
        source = initial_weights(here, seed=0)
    return {
        name: source.read(name, "param", 0, p.numel()).reshape(p.shape)
        for name, p in torch.load(model.parent / "any.pt").items()
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(ARCHITECTURE.model_cfg()))
    return file


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_gives_its_newest_committed_checkpoint_or_the_one_that_is_named(
    tmp_path: Path, model: Path, monkeypatch
):
    run, spool = tmp_path / "run", tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spool))
    saved = save_run(run, ARCHITECTURE, steps=(1, 2))
    torch.save(saved[2], tmp_path / "any.pt")
    (first,) = (run / "checkpoints" / "commit").glob("*s0000000001.json")
    (attempt,) = (run / "checkpoints" / "ckpt" / "s0000000001").iterdir()
    assert same(started_from(run / "checkpoints", model), saved[2])
    assert same(started_from(run, model), saved[2])
    assert same(started_from(first, model), saved[1]) and same(
        started_from(attempt, model), saved[1]
    )
    recipe = {
        "run": {"dir": "where it was trained", "steps": 5000},
        "data": {"train": "x.tar"},
        "batch": {"global_size": 8},
    }
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    assert same(started_from(run, model), saved[2])
    (run / "recipe.yaml").write_text(json.dumps(recipe | {"run": {"dir": str(run), "steps": 5000}}))
    assert same(started_from(run / "recipe.yaml", model), saved[2])
    assert not any(spool.glob("clip-train-*"))  # nothing stays behind
    first.rename(tmp_path / "away")
    (second,) = (run / "checkpoints" / "commit").glob("*s0000000002.json")
    second.unlink()
    with pytest.raises(
        UserError, match=r"model.init_from .*neither weights .* nor a run's checkpoint"
    ):
        started_from(run / "checkpoints", model)


def test_a_folder_that_has_moved_and_one_checkpoint_are_exported(tmp_path: Path, capsys):
    run = tmp_path / "run"
    saved = save_run(run, ARCHITECTURE, steps=(1, 2))
    recipe = {"run": {"dir": "where it was trained", "steps": 5000}, "data": {"train": "x.tar"}}
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    (first,) = (run / "checkpoints" / "commit").glob("*s0000000001.json")
    for place, step in ((run, 2), (first, 1)):
        assert main(["export", str(place), "--output", str(tmp_path / "export")]) == 0
        found = load_file(tmp_path / "export" / "open_clip_model.safetensors")
        assert all(
            torch.equal(found[name].flatten(), saved[step][name].flatten()) for name in found
        )
    assert main(["checkpoints", str(run)]) == 0 and capsys.readouterr().out.count("complete") == 2
    assert main(["export", str(run / "recipe.yaml")]) == 2
    assert "train first" in capsys.readouterr().err


def test_damage_is_seen_before_a_weight_is_used(tmp_path: Path, model: Path):
    saved = save_run(tmp_path / "run", ARCHITECTURE, steps=(1,))
    torch.save(saved[1], tmp_path / "any.pt")
    (file,) = (tmp_path / "run").rglob("rank*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 8] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its sha256"):
        started_from(tmp_path / "run", model)


def _opened_late(place: Path, model: Path, spool: Path) -> dict[str, Tensor]:
    tempfile.tempdir = str(spool)
    return started_from(place, model, late=2.0)


@pytest.mark.distributed
def test_one_rank_of_a_node_fetches_for_all(tmp_path: Path, model: Path):
    saved = save_run(tmp_path / "run", ARCHITECTURE)
    torch.save(saved[2], tmp_path / "any.pt")
    spool = tmp_path / "spool"
    spool.mkdir()
    for found in run_ranks(_opened_late, 3, tmp_path / "run", model, spool):
        assert same(found, saved[2])
    assert not any(spool.glob("clip-train-*"))  # nothing stays behind


def _from_hub(url: str, home: str, model: Path) -> dict[str, Tensor]:
    os.environ.update(HF_ENDPOINT=url, HF_HOME=home)  # read when huggingface_hub is imported
    return started_from("hf-hub:me/clip", model)


@pytest.mark.distributed
def test_one_rank_of_a_node_fetches_from_the_hub_for_all(tmp_path: Path, model: Path):
    """What is fetched and how: tests/peers/test_hub.py."""
    pytest.importorskip(
        "huggingface_hub", reason="huggingface_hub is missing: pip install 'clip-train[hub]'"
    )
    state = small_model(seed=4).state_dict()
    torch.save(state, tmp_path / "any.pt")
    folder = export_openclip(state, ARCHITECTURE, tmp_path / "export")
    with Hub() as hub:
        hub.files = {("me/clip", file.name): file.read_bytes() for file in folder.iterdir()}
        for found in run_ranks(_from_hub, 3, hub.url, str(tmp_path / "home"), model):
            assert same(found, state)
    paths = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(paths) == 2  # weights and description, once
