"""Native resolution through the real command: train, kill, resume elsewhere, evaluate, export and embed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from clip_tools.embed import load
from clip_train.native import grids_of
from tests import tolerances
from tests.launcher.conftest import ENDLESS, kill, metrics, run, start, wait_for_step

pytestmark = pytest.mark.engine

RECIPE = """\
run: {{name: native, dir: {run_dir}, steps: 20, seed: 3}}
model: {{name: {model}}}
data: {{train: "{train}", val: "{val}", workers: 0, lanes: 4, resize: native, tokens: {{8: 1, 20: 2}},
  tokens_schedule: [{{until_step: 5, tokens: 6}}]}}
batch: {{global_size: 24, micro_tokens: 60}}
optim: {{lr: 1e-3}}
schedule: {{warmup_steps: 5}}
checkpoint: {{every_steps: 7}}
evaluate: {{tokens: [8, 4]}}
log: {{batch_digest: true, tensorboard: false}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data, model) -> Path:
    folder = tmp_path_factory.mktemp("native")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(run_dir=folder / "run", train=data.train, val=data.val, model=model)
    )
    status, out = run(recipe)
    assert status == 0, out
    return recipe


def test_a_run_has_its_tokens_and_scores_at_each_budget(trained):
    lines = metrics(trained.parent / "run")
    assert all(line["image_tokens"] <= 6 for line in lines[:5])
    assert all(8 < line["image_tokens"] <= 20 for line in lines[5:])
    for line in lines:
        assert line["accum_steps"] >= 24 * line["image_tokens"] / 60
    last = json.loads((trained.parent / "run" / "eval.jsonl").read_text().splitlines()[-1])
    plain = {name for name in last if "/" not in name and name not in ("step", "time")}
    for tokens in (8, 4):
        assert {f"tokens_{tokens}/{name}" for name in plain} <= set(last)
        assert last[f"tokens_{tokens}/num_samples"] == last["num_samples"]
    assert last["tokens_4/val_loss"] != last["val_loss"]


def test_a_killed_run_goes_on_with_other_ranks_and_cuts(trained, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(trained.read_text().replace(str(trained.parent), str(tmp_path)))
    process = start(recipe, fault="hold:0:18")
    wait_for_step(tmp_path / "run", 9, process)
    kill(process)
    layout = ("engine.kind=fsdp", "engine.zero_stage=2", "batch.micro_tokens=25", "data.workers=1")
    status, out = run(recipe, *layout, ranks=2)
    assert status == 0 and "resuming from step" in out, out
    seen, expected = metrics(tmp_path / "run"), metrics(trained.parent / "run")
    for name in ("batch_digest", "samples", "lr"):
        assert [line[name] for line in seen] == [line[name] for line in expected]
    assert [line["loss"] for line in seen] == pytest.approx(
        [line["loss"] for line in expected], rel=tolerances.loss(20)
    )


def test_an_export_embeds_an_image_at_its_own_shape(trained, tmp_path):
    status, out = run(trained, "--output", str(tmp_path / "export"), verb="export")
    assert status == 0, out
    content = json.loads((tmp_path / "export" / "open_clip_config.json").read_text())
    assert content["preprocess_cfg"]["image_tokens"] == 20
    assert content["preprocess_cfg"]["resize_mode"] == "shortest"  # of OpenCLIP, as a plain ViT
    run_model, exported = load(str(trained.parent / "run")), load(str(tmp_path / "export"))
    wide = Image.linear_gradient("L").resize((300, 60)).convert("RGB")
    rows = exported.preprocess(wide)
    height, width = grids_of(rows[None])[0].tolist()
    assert height < width and 8 < height * width <= 20
    features = [loaded.images([wide]) for loaded in (run_model, exported)]
    torch.testing.assert_close(features[0], features[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.resize=auto"], "data.tokens .* is for native resolution: set data.resize=native"),
        (["batch.micro_tokens=12"], r"batch.micro_tokens \(12\) is less than the 20 patches"),
        (["model.patch_dropout=0.5"], "leaves out patches of squares"),
        (["batch.micro_size=auto"], "both cut a batch"),
        (["evaluate.tokens=[64]"], r"evaluate.tokens \(\[64\]\): a model of at most 20"),
        (["data.tokens=null"], "needs data.tokens, which"),
        (
            ["data.tokens_schedule=[{until_step: 9, tokens: 4}, {until_step: 3, tokens: 6}]"],
            "must rise",
        ),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(trained, tmp_path, overrides, message):
    status, out = run(trained, f"run.dir={tmp_path}", "--dry-run", *overrides)
    assert status == 2
    import re

    assert re.search(message, " ".join(out.split())), out


def test_a_native_teacher_is_refused(trained, data, tmp_path):
    places = ("--teacher", str(trained.parent / "run"), "--to", str(tmp_path / "out"))
    shard = sorted(Path(data.train).parent.glob("*.tar"))[0]
    status, out = run(shard, *places, verb="reinforce")
    assert status == 2 and "trained at native resolution" in out, out


def test_tokens_without_native_resolution_are_refused(recipe):
    status, out = run(recipe, "batch.micro_tokens=100", "evaluate.tokens=[9]", "--dry-run")
    assert status == 2 and "counts patches at native resolution" in out
    assert "evaluate.tokens ([9]) needs native resolution" in out


def test_another_budget_is_another_run(trained):
    status, out = run(trained, "data.tokens=16", "run.steps=30", *ENDLESS[1:])
    assert status == 2 and "data.tokens" in out
