"""Export and import in OpenCLIP's layout. Equality with OpenCLIP itself: tests/peers."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from clip_train.errors import CheckpointError, UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import ModelConfig, load_architecture, parse_architecture
from clip_train.models.freeze import check_drawn_positions
from clip_train.models.hub import HubPlace, resolve
from clip_train.models.positions import stretched
from clip_train.models.weights import export_openclip, initial_weights, load_openclip, load_teacher
from tests.models.small import inputs, small_architecture, small_model

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


def test_fitting_weights_take_settings_from_their_description(tmp_path: Path):
    """Activation and statistics of pixels, of a teacher whose architecture is named; a line is logged of others."""
    theirs = ARCHITECTURE.model_copy(
        update={
            "quick_gelu": True,
            "image_mean": (0.5,) * 3,
            "image_std": (0.25,) * 3,
            "interpolation": "bilinear",
            "resize_mode": "squash",
        }
    )
    model = small_model(architecture=theirs).eval()
    folder = export_openclip(model.state_dict(), theirs, tmp_path / "export")
    pixels = {
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
        "interpolation": "bilinear",
        "resize_mode": "squash",
    }
    assert load_architecture(str(folder)) == theirs
    described = json.loads((folder / "open_clip_config.json").read_text())
    assert described["preprocess_cfg"] == pixels
    (tmp_path / "plain.json").write_text(json.dumps({"model_cfg": ARCHITECTURE.model_cfg()}))
    name = str(tmp_path / "plain.json")
    plain = ModelConfig(name=name, teacher=str(folder), teacher_name=name)
    loaded = load_teacher(plain, str(folder), torch.device("cpu"), torch.float32)
    assert loaded is not None
    images, texts, _ = inputs(2)
    for ours, other in zip(loaded[0](images, texts), model(images, texts), strict=True):
        assert torch.equal(ours, other)
    lines: list[str] = []
    load_openclip(folder, theirs.model_copy(update={"image_mean": (0.4,) * 3}), lines.append)
    assert (
        len(lines) == 1
        and "'image_mean': (0.5, 0.5, 0.5)" in lines[0]
        and "(0.4, 0.4, 0.4)" in lines[0]
    ), lines
    load_openclip(folder, theirs, lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_teachers_temperature_is_exact_in_every_precision(tmp_path: Path, dtype: torch.dtype):
    model = small_model(architecture=ARCHITECTURE)
    model.logit_scale.data.fill_(math.log(100))
    folder = export_openclip(model.state_dict(), ARCHITECTURE, tmp_path / "export")
    config = ModelConfig(name=str(folder / "open_clip_config.json"), teacher=str(folder))
    loaded = load_teacher(config, str(folder), torch.device("cpu"), dtype)
    assert loaded is not None
    teacher = loaded[0]
    assert teacher.visual.proj.dtype == dtype
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
    state = {
        f"module.{k}": v.reshape(()) if k.startswith("logit") else v
        for k, v in model.state_dict().items()
    }
    torch.save(
        {"epoch": 3, "name": "run", "state_dict": state, "optimizer": {"lr": 0.1}},
        tmp_path / "epoch_3.pt",
    )
    half = model.half().state_dict()
    loaded = load_openclip(tmp_path / "epoch_3.pt", ARCHITECTURE)
    assert loaded["logit_scale"].shape == (1,)
    small_model(1, architecture=ARCHITECTURE).load_state_dict(loaded)
    for zipped in (True, False):  # torch's format of before 1.6 cannot be mapped
        torch.save(half, tmp_path / "half.bin", _use_new_zipfile_serialization=zipped)
        loaded = load_openclip(tmp_path / "half.bin", ARCHITECTURE)
        assert torch.equal(loaded["visual.proj"], half["visual.proj"])


def test_weights_of_another_model_are_refused_with_their_names(tmp_path: Path):
    state = small_model().state_dict()
    del state["visual.proj"]
    state["extra.weight"] = torch.zeros(2)
    state["text_projection"] = torch.zeros(2, 3)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(UserError) as e:
        load_openclip(tmp_path / "other.safetensors", small_architecture())
    for part in (
        "(OpenCLIP's layout) does not fit the model (model.name)",
        "missing: visual.proj;",
        "not in the model: extra.weight.",
        "text_projection: [2, 3], the model's [20, 24]",
    ):
        assert part in str(e.value)
    with pytest.raises(
        CheckpointError,
        match=r"the state to export does not fit the model: missing: logit_bias",
    ):
        export_openclip(small_model().state_dict(), ARCHITECTURE, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_another_image_size_and_context_are_interpolated(tmp_path: Path):
    """Equality with OpenCLIP: tests/peers. Here: what a linear map of positions must do, and what stays."""
    small, ramp = small_model(), torch.linspace(-1, 1, 8)
    state = small.state_dict()
    columns = torch.arange(4.0).repeat(4)[:, None]  # of the patch grid, row by row
    state["visual.positional_embedding"] = torch.cat(
        [torch.full((1, 32), 9.0), columns.expand(16, 32)]
    )
    state["positional_embedding"] = ramp[:, None].repeat(1, 20)
    save_file(state, tmp_path / "small.safetensors")
    content = small_architecture().model_cfg()
    content["vision_cfg"]["image_size"], content["text_cfg"]["context_length"] = 32, 16
    large, said = parse_architecture(content, "test"), []
    loaded = load_openclip(tmp_path / "small.safetensors", large, said.append)
    assert [line.partition(" (OpenCLIP's layout): ")[2] for line in said] == [
        "positional embeddings interpolated: the image's from 4 x 4 to 8 x 8 patches, the text's from 8 to 16 tokens"
    ]
    grid = loaded["visual.positional_embedding"]
    assert torch.equal(grid[0], torch.full((32,), 9.0))  # the class token's
    rows = grid[1:].unflatten(0, (8, 8))[..., 0]
    torch.testing.assert_close(rows, rows[:1].expand(8, 8))  # nothing varies down a column
    torch.testing.assert_close(
        rows[0, 3:5], torch.tensor([1.25, 1.75]), rtol=0, atol=0.02
    )  # between columns 1 and 2
    text = loaded["positional_embedding"][:, 0]
    torch.testing.assert_close(
        text[1:3], (ramp[0] + (ramp[1] - ramp[0]) * torch.tensor([0.25, 0.75]))
    )
    CLIP(large).load_state_dict(loaded)
    assert torch.equal(loaded["visual.proj"], state["visual.proj"])
    # one that is no square grid is refused with its shape
    save_file(
        state | {"visual.positional_embedding": torch.zeros(16, 32)}, tmp_path / "odd.safetensors"
    )
    with pytest.raises(UserError, match=r"visual.positional_embedding: \[16, 32\]"):
        load_openclip(tmp_path / "odd.safetensors", large)


def long_clip(old: torch.Tensor, keep: int) -> torch.Tensor:
    """As the paper's code has it: four positions for each old one behind the first `keep`."""
    L = len(old)
    new = torch.zeros(4 * L - 3 * keep, old.shape[1])
    new[:keep] = old[:keep]
    for i in range(L - 1 - keep):
        for part in range(4):
            new[4 * i + part + keep] = (4 - part) / 4 * old[i + keep] + part / 4 * old[i + keep + 1]
    for part in range(4):
        new[4 * L - 3 * keep - 4 + part] = old[L - 1] + part * (old[L - 1] - old[L - 2]) / 4
    return new


def test_the_first_positions_stay_as_in_long_clip(tmp_path: Path):
    """And an export has the length."""
    state, said = small_model().state_dict(), []
    save_file(state, tmp_path / "small.safetensors")
    keys = {"init_from": str(tmp_path / "small.safetensors"), "context_length": 23}
    (tmp_path / "model.json").write_text(json.dumps(small_architecture().model_cfg()))
    config = ModelConfig(name=str(tmp_path / "model.json"), keep_positions=3, **keys)
    held = initial_weights(config, 0, said.append)
    name, width = "positional_embedding", state["positional_embedding"].shape[1]
    new = held.read(name, "param", 0, 23 * width).view(23, width)
    torch.testing.assert_close(new, long_clip(state[name], 3), rtol=0, atol=1e-6)
    assert [line.partition(" (OpenCLIP's layout): ")[2] for line in said] == [
        "positional embeddings interpolated: the text's from 8 to 23 tokens, the first 3 as they are"
    ]
    longer = config.architecture()
    export = export_openclip({**state, name: new}, longer, tmp_path / "export")
    described = json.loads((export / "open_clip_config.json").read_text())["model_cfg"]
    assert described["text_cfg"]["context_length"] == 23
    with pytest.raises(UserError, match=r"keep_positions \(7\) must be at most 6"):
        initial_weights(config.model_copy(update={"keep_positions": 7}), 0)
    for wrong in ({"init_from": None}, {"context_length": 3}, {"context_length": None}):
        with pytest.raises(ValueError, match=r"model\.keep_positions \(3\) needs weights"):
            ModelConfig(name="tiny", keep_positions=3, **{**keys, **wrong})


def test_a_tower_that_reads_the_last_position_keeps_it():
    """The pooled row of a SigLIP stays what it was; those before it lie on the line between."""
    old = torch.tensor([0.0, 1, 2, 3, 4, 10])[:, None].repeat(1, 3)
    found = stretched(old, 16, 2, last=True)
    expected = [0, 1, *(2 + 3 * j / 13 for j in range(14))]  # places among the old ones
    values = [p if p <= 4 else 4 + 6 * (p - 4) for p in expected]
    torch.testing.assert_close(found, torch.tensor(values)[:, None].repeat(1, 3))
    assert torch.equal(found[-1], old[-1])
    assert torch.equal(stretched(old, 16, 0, last=True)[-1], old[-1])
    assert torch.equal(stretched(old, 3, 2, last=True), old[[0, 1, 5]])


def test_positions_stay_and_new_ones_are_drawn_behind_them(tmp_path: Path):
    """By the run's seed, as large as the weights' own."""
    state, said = small_model().state_dict(), []
    name = "positional_embedding"
    spread = torch.linspace(0.1, 3, 20)
    torch.manual_seed(1)
    state[name] = torch.linspace(-5, 5, 20) + spread * torch.randn(8, 20)
    save_file(state, tmp_path / "small.safetensors")
    (tmp_path / "model.json").write_text(json.dumps(small_architecture().model_cfg()))
    keys = {"init_from": str(tmp_path / "small.safetensors"), "keep_positions": "all"}
    config = ModelConfig(name=str(tmp_path / "model.json"), context_length=4008, **keys)
    new = [
        initial_weights(config, seed, said.append).read(name, "param", 0, 4008 * 20).view(-1, 20)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(new[0], new[1]) and not torch.equal(new[0][8:], new[2][8:])
    assert all(torch.equal(each[:8], state[name]) for each in new)
    drawn, old = new[0][8:], state[name]
    deviation = ((old - old.mean(0)) ** 2).mean(0).sqrt()
    torch.testing.assert_close(drawn.std(0), deviation, rtol=0.05, atol=0)
    assert ((drawn.mean(0) - old.mean(0)).abs() < 0.1 * deviation).all()
    assert said[0].partition(" (OpenCLIP's layout): ")[2] == (
        "the text's 8 positional embeddings stay in their places, 4000 are drawn behind them"
    )
    with pytest.raises(
        UserError, match=r"\(all\): the weights have 8 positions, and .* is 6; raise"
    ):
        initial_weights(config.model_copy(update={"context_length": 6}), 0)
    with pytest.raises(UserError, match=r"\(all_but_last\) is for text towers that read the last"):
        config.model_copy(update={"keep_positions": "all_but_last"}).architecture()


def test_drawn_positions_must_be_trained():
    keys = {"name": "tiny", "init_from": "x", "context_length": 99, "keep_positions": "all"}
    names = ["positional_embedding", "visual.proj", "visual.conv1.lora_A"]
    check_drawn_positions(ModelConfig(**keys), names)
    check_drawn_positions(ModelConfig(**{**keys, "keep_positions": 9}, lock_text=True), names)
    lora = {"rank": 2, "on": ["mlp"]}
    trained = {**lora, "train": ["positional_embedding"]}
    check_drawn_positions(ModelConfig(**keys, lora=trained), names)
    for more, remedy in (
        ({"lock_text": True}, "set model.lock_text=false"),
        ({"freeze": ["pos*"]}, "take positional_embedding out of model.freeze"),
        ({"lora": lora}, r'set model.lora.train=\["positional_embedding"\]'),
    ):
        with pytest.raises(UserError, match=f"positional_embedding is not trained; {remedy}"):
            check_drawn_positions(ModelConfig(**keys, **more), names)


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("kind", ["whole model", "tower alone", "tower with its prefix"])
def test_one_tower_starts_from_a_file_and_the_rest_is_drawn(tmp_path: Path, tower: str, kind: str):
    config = _described(tmp_path)
    drawn = _started(config)
    state = small_model(seed=5).state_dict()
    own = {
        k: v
        for k, v in state.items()
        if k.startswith("visual.") == (tower == "image") and k != "logit_scale"
    }
    if kind == "whole model":  # the other tower may be another's
        given = state | {k: torch.zeros(3) for k in state if k not in own}
    else:
        prefix = {"image": "visual.", "text": "text."}[tower] if kind != "tower alone" else ""
        given = {prefix + k.removeprefix("visual."): v for k, v in own.items()}
    save_file(given, tmp_path / "given.safetensors")
    found = _started(
        config.model_copy(update={f"init_{tower}_from": str(tmp_path / "given.safetensors")})
    )
    assert all(torch.equal(found[name], own.get(name, drawn[name])) for name in drawn)
    assert set(found) == set(drawn) and not torch.equal(
        found["visual.proj"], found["text_projection"]
    )
    # and beside a whole model
    export_openclip(small_model(seed=6).state_dict(), small_architecture(), tmp_path / "export")
    both = {
        "init_from": str(tmp_path / "export"),
        f"init_{tower}_from": str(tmp_path / "given.safetensors"),
    }
    found, whole = _started(config.model_copy(update=both)), small_model(seed=6).state_dict()
    assert all(torch.equal(found[name], own.get(name, whole[name])) for name in drawn)


def test_a_tower_that_does_not_fit_is_refused_by_its_key(tmp_path: Path):
    config = _described(tmp_path)
    state = {
        k: v
        for k, v in small_model().state_dict().items()
        if k.startswith("visual.") and "ln_post" not in k
    }
    save_file(state, tmp_path / "half.safetensors")
    with pytest.raises(UserError, match=r"image tower of .*half.*missing: visual.ln_post.weight"):
        _started(config.model_copy(update={"init_image_from": str(tmp_path / "half.safetensors")}))
    with pytest.raises(UserError, match=r"text tower of .*half.*missing: positional_embedding"):
        _started(config.model_copy(update={"init_text_from": str(tmp_path / "half.safetensors")}))
    with pytest.raises(UserError, match=r"model.init_text_from: .*nothing is neither a file"):
        _started(config.model_copy(update={"init_text_from": str(tmp_path / "nothing")}))


def test_a_torchscript_archive_is_refused_and_the_hub_named(tmp_path: Path):
    archive = tmp_path / "ViT-B-32.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), archive)
    with pytest.raises(CheckpointError, match=r"ViT-B-32\.pt .*a TorchScript archive") as e:
        load_openclip(archive, small_architecture())
    remedy = re.search(r"model\.init_from=(\S+/\w+)", str(e.value))
    assert remedy and resolve(remedy[1]) == HubPlace("timm/vit_base_patch32_clip_224.openai")


def test_an_exports_activation_function_is_compared(tmp_path: Path):
    quick = small_architecture(quick_gelu=True)
    export_openclip(small_model().state_dict(), quick, tmp_path)
    with pytest.raises(UserError, match="was trained with QuickGELU"):
        load_openclip(tmp_path, small_architecture())
    export_openclip(small_model().state_dict(), small_architecture(), tmp_path)
    with pytest.raises(UserError, match="was trained with GELU"):
        load_openclip(tmp_path, quick)


def _described(folder: Path) -> ModelConfig:
    (folder / "small.json").write_text(json.dumps(small_architecture().model_cfg()))
    return ModelConfig(name=str(folder / "small.json"))


def _started(config: ModelConfig) -> dict[str, torch.Tensor]:
    """What a run starts with, by name."""
    source = initial_weights(config, seed=3)
    shapes = {name: p.shape for name, p in CLIP(config.architecture()).named_parameters()}
    return {
        name: source.read(name, "param", 0, shape.numel()).reshape(shape)
        for name, shape in shapes.items()
    }


class _Code:
    def __reduce__(self):
        return (print, ("this ran",))


def test_damage_and_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=r"nothing\.pt is neither a file"):
        load_openclip(tmp_path / "nothing.pt", ARCHITECTURE)
    with pytest.raises(UserError, match=r"nor a folder with open_clip_model\.safetensors, .* or"):
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
