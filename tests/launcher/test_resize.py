"""How images become squares: from the weights' description through training, evaluation and export."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from clip_tools.embed import load
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.models.weights import export_openclip
from tests.data.shards import write_shard
from tests.launcher.conftest import run


def wide(seed: int) -> bytes:
    """A PNG that is three times as wide as it is high."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((120, 40)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.engine
def test_a_run_resizes_as_its_weights_were_trained(recipe, tmp_path, model):
    torch.manual_seed(0)
    architecture = load_architecture(str(model))
    squashed = architecture.model_copy(
        update={"resize_mode": "squash", "interpolation": "bilinear"}
    )
    base = export_openclip(CLIP(architecture).state_dict(), squashed, tmp_path / "base")
    members = [
        member
        for i in range(24)
        for member in ((f"{i}.png", wide(i)), (f"{i}.txt", f"picture {i} of them".encode()))
    ]
    write_shard(tmp_path / "wide.tar", members)
    keys = (
        f"model.init_from={base}", f"data.val={tmp_path / 'wide.tar'}", "run.steps=2",
        "checkpoint.every_steps=1", "evaluate.every_steps=2", "evaluate.batch_size=8",
        "schedule.warmup_steps=0",
    )  # fmt: skip
    status, out = run(recipe, *keys)
    assert status == 0, out
    assert "evaluation resizes images by squash, bilinear" in out
    assert "data.aug_relative_ratio=true squashes here, too" in out
    lines = (tmp_path / "run" / "eval.jsonl").read_text().splitlines()
    trained = json.loads(lines[-1])["val_loss"]

    def val_loss(place: object, *overrides: str) -> float:
        line = (f"data.val={tmp_path / 'wide.tar'}", "evaluate.batch_size=8", *overrides)
        status, out = run(place, *line, "--json", verb="evaluate")
        assert status == 0, out
        return json.loads(out.splitlines()[-1])["val_loss"]

    run_dir = tmp_path / "run"
    assert val_loss(run_dir) == pytest.approx(trained, rel=1e-6)
    assert val_loss(run_dir, "data.resize=shortest") != pytest.approx(trained, rel=1e-4)
    status, out = run(recipe, *keys, verb="export")
    assert status == 0, out
    described = json.loads((run_dir / "export" / "open_clip_config.json").read_text())
    assert described["preprocess_cfg"]["resize_mode"] == "squash"
    assert described["preprocess_cfg"]["interpolation"] == "bilinear"
    assert val_loss(run_dir / "export") == pytest.approx(trained, rel=1e-6)
    assert load(str(run_dir / "export")).resize == squashed.resize
    # the weights are not read again: the checkpoint says it
    (base / "open_clip_config.json").unlink()
    (base / "open_clip_model.safetensors").unlink()
    status, out = run(recipe, *keys, "run.steps=3", "evaluate.every_steps=1")
    assert status == 0 and "evaluation resizes images by squash, bilinear" in out, out
    # as the recipe says, whatever the weights say
    base = export_openclip(CLIP(architecture).state_dict(), squashed, tmp_path / "base")
    status, out = run(recipe, *keys, "run.dir=other", "data.resize=longest", "data.alpha=drop")
    assert status == 0 and "evaluation resizes images by longest, bilinear" in out, out
    status, out = run(recipe, *keys, "run.dir=other", "data.resize=longest", verb="export")
    described = json.loads((tmp_path / "other" / "export" / "open_clip_config.json").read_text())
    assert described["preprocess_cfg"]["resize_mode"] == "longest"
