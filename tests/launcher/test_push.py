"""`export --model-card --push` against a server that speaks the hub's protocol, and back again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from clip_tools.model_card import Card, render
from clip_train.yaml_text import load_yaml
from launcher.cli.main import main
from tests.launcher.conftest import RECIPE, clean_environment, finish, run
from tests.peers.hub import Hub
from tests.warm import Command

pytestmark = pytest.mark.engine
EVALUATED = ("evaluate.every_steps=2", "run.steps=4", "schedule.warmup_steps=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data, model) -> Path:
    """The folder of a run of 4 steps with two evaluations."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=data.train, model=model))
    labeled = (f"data.val={data.val}", f"evaluate.zero_shot_classes={data.classes}")
    status, out = run(recipe, *EVALUATED, *labeled, "optim.ema_decay=0.5")
    assert status == 0, out
    return folder / "run"


@pytest.fixture
def hub(monkeypatch):
    """The client reads its variables when it is imported, and other tests have imported it."""
    from huggingface_hub import constants

    with Hub() as server:
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def test_a_push_is_private_has_a_card_and_can_be_evaluated(trained, hub, tmp_path, data):
    """In processes of their own, which find the server by HF_ENDPOINT."""
    environ = clean_environment() | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",  # the server speaks LFS
    }
    output = ["--output", str(tmp_path / "out")]
    line = [str(trained), *output, "--model-card", "--license", "mit", "--push", "hf:me/small"]
    status, out = finish(Command(["export", *line], env=environ, cwd=tmp_path))
    assert status == 0, out
    assert f"uploaded to {hub.url}/me/small" in out
    assert hub.private == {"me/small": True}
    assert hub.commits == [hub.commits[0]] and hub.commits[0].startswith("Step 4, exported by")
    for file in (tmp_path / "out").iterdir():
        assert hub.files["me/small", file.name] == file.read_bytes(), file
    text = hub.files["me/small", "README.md"].decode()
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "license": "mit",
        "library_name": "open_clip",
        "pipeline_tag": "zero-shot-image-classification",
        "tags": ["clip", "clip-train"],
        "metrics": ["accuracy", "recall"],
    }
    loaded = "model, _, preprocess = open_clip.create_model_and_transforms('hf-hub:me/small')"
    assert f"{loaded}\ntokenizer = open_clip.get_tokenizer('hf-hub:me/small')\n" in text
    scores = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    assert f"| {100 * scores['zero_shot_top1']:.2f}% |" in text and "evaluation at step 4." in text
    curve = [line for line in text.splitlines() if line.startswith(("| 1 |", "| 4 |"))]
    losses = [json.loads(x)["loss"] for x in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [float(line.split("|")[2]) for line in curve] == pytest.approx(
        [losses[0], losses[-1]], rel=1e-2
    )
    recipe = load_yaml(text.partition("```yaml\n")[2].partition("```")[0])
    assert recipe["run"] == {"seed": 3, "steps": 4} and recipe["batch"]["global_size"] == 32
    assert str(trained) not in text

    line = ["evaluate", "hf-hub:me/small", f"data.val={data.val}", "--json"]
    status, out = finish(Command(line, env=environ, cwd=tmp_path))
    assert status == 0, out
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert found["val_loss"] == pytest.approx(scores["val_loss"], rel=1e-3)


def test_a_public_repository_and_a_second_push(trained, hub, tmp_path, capsys):
    line = ["export", str(trained), "--output", str(tmp_path / "out"), "--push", "hf:me/other"]
    assert main([*line, "--public"]) == 0, capsys.readouterr().err
    assert main(line) == 0, capsys.readouterr().err
    assert hub.private == {"me/other": False} and len(hub.commits) == 2
    assert ("me/other", "README.md") not in hub.files


def test_a_card_of_the_moving_average_and_of_checkpoints_alone(trained, tmp_path, capsys):
    line = ["export", str(trained), "--output", str(tmp_path / "out"), "--model-card", "--ema"]
    assert main(line) == 0, capsys.readouterr().err
    text = (tmp_path / "out" / "README.md").read_text()
    scores = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    assert "the moving average of the weights" in text
    assert f"{100 * scores['ema_zero_shot_top1']:.2f}%" in text
    assert "local-dir:FOLDER" in text
    checkpoints = str(trained / "checkpoints")
    line = ["export", checkpoints, "--output", str(tmp_path / "alone"), "--model-card"]
    assert main(line) == 0, capsys.readouterr().err
    text = (tmp_path / "alone" / "README.md").read_text()
    assert "The run's folder was not at hand." in text and "no evaluation" in text


def test_a_card_names_repositories_of_the_hub():
    recipe = {
        "run": {"name": "tuned", "steps": 9},
        "model": {"name": "ViT-B-32", "init_from": "open_clip:ViT-B-32/openai"},
        "data": {"train": "hf://datasets/org/pairs/{0..3}.tar::/mine/*.tar", "num_samples": 5000},
        "schedule": {"warmup_steps": 0},
    }
    load = "transformers.CLIPModel.from_pretrained('FOLDER')"
    text = render(Card(recipe, step=9, run_dir=None, library="transformers", load=load))
    card = ModelCard(text).data
    assert card.base_model == ["timm/vit_base_patch32_clip_224.openai"]
    assert card.datasets == ["org/pairs"] and card.library_name == "transformers"
    assert "- Base: `open_clip:ViT-B-32/openai` (model.init_from)" in text
    assert "`hf://datasets/org/pairs/{0..3}.tar`, `/mine/*.tar`, 5,000 samples" in text
    assert f"import transformers\n\nmodel = {load}\n" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--push", "me/small"], "--push (me/small): write hf:USER/NAME"),
        (["--push", "hf:small"], "--push (hf:small): write hf:USER/NAME"),
        (["--public"], "--public is for --push"),
        (["--license", "mit"], "--license (mit) is written into the model card; add --model-card"),
    ],
)
def test_mistakes(trained, options, message, capsys):
    assert main(["export", str(trained), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (trained / "export").exists()


def test_without_a_token_or_the_package_nothing_is_exported(
    trained, hub, tmp_path, monkeypatch, capsys
):
    import huggingface_hub

    line = ["export", str(trained), "--push", "hf:me/small"]
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(line) == 2
    assert "needs a token that may write: set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(line) == 2
    assert "pip install 'clip-train[hub]'" in capsys.readouterr().err
    assert not (trained / "export").exists() and hub.requests == []


def test_a_token_that_is_refused_leaves_the_export(trained, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    line = ["export", str(trained), "--output", str(tmp_path / "out"), "--push", "hf:me/small"]
    assert main(line) == 1
    assert "--push (hf:me/small) failed: " in capsys.readouterr().err
    assert (tmp_path / "out" / "open_clip_model.safetensors").is_file()
