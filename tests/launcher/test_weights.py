"""Where a run can start from. What is at a URL: tests/s3/test_weights.py."""

from __future__ import annotations

import json
import os
import re
import sys
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
from clip_train.models.hub import HubPlace, resolve
from clip_train.models.weights import export_openclip, initial_weights
from clip_train.recipe.recipe import load_config
from clip_train.recipe.weights import weights_here
from clip_train.storage.config import StorageConfig
from launcher.checks import check_weights, require_places
from launcher.cli.main import main
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


def test_a_run_gives_its_newest_or_the_named_checkpoint(tmp_path: Path, model: Path, monkeypatch):
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
        capsys.readouterr()
        assert main(["export", str(place), "--output", str(tmp_path / "export")]) == 0
        out, err = capsys.readouterr()  # the sentence is on one stream, the one of results
        assert out.startswith("load it with open_clip.create_model_and_transforms('local-dir:")
        assert out.count("\n") == 1 and "load it with" not in err
        found = load_file(tmp_path / "export" / "open_clip_model.safetensors")
        assert all(
            torch.equal(found[name].flatten(), saved[step][name].flatten()) for name in found
        )
    assert main(["checkpoints", str(run)]) == 0 and capsys.readouterr().out.count("complete") == 2
    assert main(["export", str(run / "recipe.yaml")]) == 2
    assert "train first" in capsys.readouterr().err


# -- before a run: plan, train --dry-run, doctor


def other_model(folder: Path) -> str:
    architecture = small_architecture(embed_dim=8)
    state = small_model(architecture=architecture).state_dict()
    return str(export_openclip(state, architecture, folder / "other"))


def with_nan(folder: Path) -> str:
    state = small_model().state_dict()
    state["visual.proj"][0, 0], state["text_projection"][1, 1] = torch.nan, torch.inf
    torch.save(state, folder / "nan.pt")
    return str(folder / "nan.pt")


def a_run(folder: Path) -> str:
    save_run(folder / "first", ARCHITECTURE, steps=(1,))
    return str(folder / "first" / "checkpoints")


def another_run(folder: Path) -> str:
    save_run(folder / "second", small_architecture(embed_dim=8), steps=(1,))
    return str(folder / "second" / "checkpoints")


def sharded(folder: Path) -> str:
    (folder / "epoch_1").mkdir()
    (folder / "epoch_1" / ".metadata").touch()
    return str(folder / "epoch_1")


def missing(folder: Path) -> str:
    return str(folder / "nothing.pt")


def good(folder: Path) -> str:
    state = small_model().state_dict()
    return str(export_openclip(state, ARCHITECTURE, folder / "good"))


PLACES = {
    good: None,
    a_run: None,
    other_model: "does not fit the model (model.name): shapes differ (",
    with_nan: "has NaN or infinity in text_projection, visual.proj",
    another_run: "does not fit the model (model.name): shapes differ (",
    sharded: "epoch_1) is a sharded checkpoint of torch.distributed.checkpoint",
    missing: "nothing.pt is neither a file nor a folder",
}


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_initial_weights_are_looked_at_before_a_run(
    make, recipe: Path, tmp_path: Path, model: Path
):
    """By `doctor`, and by what `submit` and `train --dry-run` require; with the same words."""
    place, mistake = make(tmp_path), PLACES[make]
    keys = [f"model.name={model}", "model.dropout=0", "model.patch_dropout=0"]
    config = load_config(str(recipe), [*keys, f"model.init_from={place}"])
    (found,) = check_weights(config)
    if mistake is None:
        assert found.level == "ok" and "fits the model" in found.message
        require_places(config)
        return
    assert found.level == "error" and found.remedy
    assert mistake in found.message and place in found.message
    with pytest.raises(UserError, match=re.escape(mistake)):
        require_places(config)
    # one that continues does not read them
    save_run(config.run_dir, ARCHITECTURE, steps=(1,))
    (found,) = check_weights(config)
    assert found.level == "ok" and "continues from its checkpoints" in found.message
    assert [f.level for f in check_weights(config.updated(checkpoint={"resume": "never"}))] == [
        "error"
    ]


def test_a_teachers_weights_are_looked_at_too(recipe: Path, tmp_path: Path, model: Path):
    keys = [f"model.name={model}", f"model.teacher_name={model}", "model.dropout=0"]
    for make, level in ((good, "ok"), (with_nan, "error")):
        config = load_config(str(recipe), [*keys, f"model.teacher={make(tmp_path)}"])
        (found,) = check_weights(config)
        assert found.level == level and found.message.startswith("model.teacher (")


def test_a_plan_complains_of_initial_weights_that_do_not_exist(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = [
        "plan",
        str(recipe),
        "model.name=tiny",
        f"model.init_image_from={tmp_path}/no.pt",
        "optim.lr_multipliers={nothing: 2}",
    ]
    assert main(line) == 2
    err = capsys.readouterr().err  # with all other mistakes
    assert (
        f"model.init_image_from ({tmp_path}/no.pt) does not exist" in err and "2 mistakes" in err
    ), err
    line.pop()
    save_run(tmp_path / "run", ARCHITECTURE, steps=(1,))  # continues from it
    assert main(line) == 0


# -- pretrained tags


def test_an_unknown_tag_names_the_nearest(monkeypatch, capsys):
    """Without OpenCLIP; with it: tests/peers/test_hub.py."""
    monkeypatch.setitem(sys.modules, "open_clip", None)
    for place, repository in (
        ("ViT-B-16-SigLIP/webli", "timm/ViT-B-16-SigLIP"),
        ("ViT-gopt-16-SigLIP2-384/webli", "timm/ViT-gopt-16-SigLIP2-384"),
        ("MobileCLIP2-S4/dfndr2b", "timm/MobileCLIP2-S4-OpenCLIP"),
        ("ViTamin-S/datacomp1b", "jienengchen/ViTamin-S/pytorch_model.bin"),
        ("ViT-B/32/LAION2B-s34B-b79K", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),  # as OpenCLIP
    ):
        assert resolve(f"open_clip:{place}") == HubPlace.of(repository)
    for place, said in (
        ("ViT-B-32/laion2b_s34b_b79", "Did you mean ViT-B-32/laion2b_s34b_b79k, "),
        ("EVA02-B-16/none", "EVA02-B-16 has the tags merged2b_s8b_b131k."),
        ("ViT-B-16-SigLIP3/webli", "Did you mean ViT-B-16-SigLIP/webli, "),
        ("convnext_bass/none", "The nearest models are convnext_base, "),
        ("ViT-B-32", "write open_clip:MODEL/TAG"),
    ):
        with pytest.raises(UserError) as error:
            resolve(f"open_clip:{place}")
        assert said in str(error.value)
        assert "/" not in place or "or give the hub's repository as hf-hub:" in str(error.value)
    line = "main.py --train-data x.tar --train-num-samples 100000 --model ViT-B-32 --pretrained "
    assert main(["import-args", line + "laion2b_s34b_b79"]) == 0
    out, err = capsys.readouterr()
    assert "# --pretrained: CHECK: open_clip:ViT-B-32/laion2b_s34b_b79 is not among" in out
    assert "warning: --pretrained: " in err and "hf-hub:org/name" in err
    assert main(["import-args", line + "laion2b_s34b_b79k"]) == 0
    assert "--pretrained: CHECK" not in capsys.readouterr().out
    teacher = "laion2b_s34b_b79k --distill-model ViT-L-14 --distill-pretrained none_such"
    assert main(["import-args", line + teacher]) == 0
    assert (
        "# --distill-pretrained: CHECK: open_clip:ViT-L-14/none_such is not "
        in capsys.readouterr().out
    )


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
