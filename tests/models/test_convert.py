"""Export and import in OpenCLIP's layout. Equality with OpenCLIP itself: tests/peers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from clip_train.errors import CheckpointError, UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.weights import export_openclip, load_openclip, load_teacher
from tests.models.small import inputs, small_architecture, small_model, small_resnet

SINUSOIDAL = small_architecture().vision_cfg.model_dump() | {"pos_embed_type": "sin_cos_2d"}
ARCHITECTURE = small_architecture(init_logit_bias=-10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_comes_back_equal(tmp_path: Path, dtype: torch.dtype):
    model = small_model(dtype=dtype, architecture=ARCHITECTURE)
    export_openclip(model.state_dict(), ARCHITECTURE, tmp_path / "new" / "export")
    folder = tmp_path / "new" / "export"
    assert sorted(p.name for p in folder.iterdir()) == [
        "open_clip_config.json",
        "open_clip_model.safetensors",
    ]
    with safe_open(folder / "open_clip_model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
        assert f.get_tensor("logit_scale").shape == f.get_tensor("logit_bias").shape == ()
        assert {f.get_tensor(name).dtype for name in f.keys()} == {torch.float32}  # noqa: SIM118
    assert load_architecture(str(folder)) == ARCHITECTURE
    again = CLIP(ARCHITECTURE)
    again.load_state_dict(load_openclip(folder, ARCHITECTURE))
    for a, b in zip(again.to(dtype)(*inputs(3)), model(*inputs(3)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_buffers_are_exported_and_come_back(tmp_path: Path):
    for architecture in (small_resnet(), small_architecture(vision_cfg=SINUSOIDAL)):
        model = small_model(architecture=architecture)
        for name, buffer in model.named_buffers():
            buffer.fill_(3 if name.endswith("tracked") else 0.7)
        folder = export_openclip(model.state_dict(), architecture, tmp_path / str(architecture.vision_cfg.depth))
        assert load_architecture(str(folder)) == architecture
        loaded = load_openclip(folder, architecture)
        assert dict(model.named_buffers())
        for name, buffer in model.named_buffers():
            assert loaded[name].dtype == buffer.dtype and torch.equal(loaded[name], buffer), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_teachers_temperature_keeps_its_digits_in_every_precision(tmp_path: Path, dtype: torch.dtype):
    model = small_model(architecture=ARCHITECTURE)
    model.logit_scale.data.fill_(math.log(100))
    folder = export_openclip(model.state_dict(), ARCHITECTURE, tmp_path / "export")
    config = ModelConfig(name=str(folder / "open_clip_config.json"), teacher=str(folder))
    teacher = load_teacher(config, torch.device("cpu"), dtype)
    assert teacher is not None and teacher.visual.proj.dtype == dtype
    images, texts, _ = inputs(2)
    assert teacher(images, texts)[2].item() == pytest.approx(100, abs=1e-3)


def test_an_export_can_be_read_by_all_whom_the_umask_allows(tmp_path: Path):
    before = os.umask(0o027)
    try:
        export_openclip(CLIP(ARCHITECTURE).state_dict(), ARCHITECTURE, tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def test_openclips_training_checkpoints_load(tmp_path: Path):
    model = small_model(architecture=ARCHITECTURE)
    state = {f"module.{k}": v.reshape(()) if k.startswith("logit") else v for k, v in model.state_dict().items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": state, "optimizer": {"lr": 0.1}}, tmp_path / "epoch_3.pt")
    torch.save(model.half().state_dict(), tmp_path / "half.bin")
    loaded = load_openclip(tmp_path / "epoch_3.pt", ARCHITECTURE)
    assert loaded["logit_scale"].shape == (1,)
    small_model(1, architecture=ARCHITECTURE).load_state_dict(loaded)
    assert load_openclip(tmp_path / "half.bin", ARCHITECTURE)["visual.proj"].dtype == torch.float32


def test_weights_of_another_model_are_refused_with_their_names(tmp_path: Path):
    state = small_model().state_dict()
    del state["visual.proj"]
    state["extra.weight"] = torch.zeros(2)
    state["text_projection"] = torch.zeros(2, 3)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError) as e:
        load_openclip(tmp_path / "other.safetensors", small_architecture())
    for part in (
        'Missing key(s) in state_dict: "visual.proj"',
        'Unexpected key(s) in state_dict: "extra.weight"',
        "text_projection: copying a param with shape torch.Size([2, 3])",
    ):
        assert part in str(e.value)
    with pytest.raises(CheckpointError, match=r"the state to export does not fit the model .*Missing key.*logit_bias"):
        export_openclip(small_model().state_dict(), ARCHITECTURE, tmp_path / "export")
    assert not (tmp_path / "export").exists()


class _Code:
    def __reduce__(self):
        return (print, ("this ran",))


def test_damage_and_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=r"nothing\.pt is no file"):
        load_openclip(tmp_path / "nothing.pt", ARCHITECTURE)
    with pytest.raises(UserError, match=r"nor a folder with open_clip_model\.safetensors or"):
        load_openclip(tmp_path, ARCHITECTURE)
    torch.save({"state_dict": {"a": _Code()}}, tmp_path / "code.pt")
    with pytest.raises(CheckpointError, match="needs code to unpickle is refused"):
        load_openclip(tmp_path / "code.pt", ARCHITECTURE)
    assert "this ran" not in capsys.readouterr().out
    torch.save({"epoch": 1}, tmp_path / "no_state.pt")
    with pytest.raises(CheckpointError, match="'epoch' is a int"):
        load_openclip(tmp_path / "no_state.pt", ARCHITECTURE)
    export_openclip(small_model().state_dict(), small_architecture(), tmp_path / "export")
    weights = tmp_path / "export" / "open_clip_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        load_openclip(tmp_path / "export", ARCHITECTURE)
    weights.write_bytes(whole)
    config = tmp_path / "export" / "open_clip_config.json"
    content = json.loads(config.read_text())
    content["model_cfg"]["vision_cfg"]["pool_type"] = "none"
    config.write_text(json.dumps(content))
    with pytest.raises(UserError, match="pool_type"):
        load_architecture(str(tmp_path / "export"))
