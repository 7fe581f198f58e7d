"""evaluate and export after a real run, and the demo's way through all of it."""

from __future__ import annotations

import glob
import io
import json
import re
import sys
import tarfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from clip_tools.embed import load
from clip_tools.place import check_names, described
from clip_train.errors import UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.models.openclip.config import parse_openclip
from clip_train.models.weights import load_openclip
from clip_train.recipe.weights import holds_weights
from launcher.cli.main import main
from launcher.runtime.verdict import read_verdict
from tests import tolerances
from tests.data.shards import jpeg
from tests.documents import ROOT, code_lines, own_arguments
from tests.launcher.conftest import RECIPE, clean_environment, finish, metrics, run, start
from tests.warm import Command

pytestmark = pytest.mark.engine


@pytest.fixture
def trained(recipe, data):
    classes = f"evaluate.zero_shot_classes={data.classes}"
    status, out = run(
        recipe, "run.steps=12", f"data.val={data.val}", classes, "engine.zero_stage=3", ranks=2
    )
    assert status == 0, out
    return recipe.parent / "run", out


def test_embedded_features_are_those_of_the_run(trained, data, tmp_path):
    """Recall from the files is the run's own; the rows are the samples, in their order."""
    run_dir, _ = trained
    told = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[-1])
    folder = tmp_path / "features"
    status, out = run(
        run_dir, f"data.val={data.val}", "--output", str(folder), verb="embed", ranks=2
    )
    assert status == 0 and "608 samples embedded, 0 could not be used" in out, out
    image, text = (
        np.concatenate([np.load(folder / f"{kind}-0000{rank}-00000.npy") for rank in range(2)])
        for kind in ("image", "text")
    )
    own = np.arange(608)
    places = ((image @ text.T) > (image * text).sum(1)[:, None] - 1e-6).sum(1)
    assert (places <= 10).mean() == pytest.approx(told["image_to_text_R@10"], abs=0.05)
    files = [folder / f"samples-0000{rank}-00000.jsonl" for rank in range(2)]
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    pictures, keys = {}, []
    for shard in sorted(glob.glob(data.val)):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                content = tar.extractfile(member).read()
                if kind in ("jpg", "jpeg", "png"):
                    keys.append(key)
                    pictures[key] = Image.open(io.BytesIO(content))
    assert [sample["key"] for sample in samples] == keys and len(own) == len(keys)
    loaded = load(str(run_dir), ema=False)
    few = [0, 303, 304, 607]  # the last of one rank, the first of the other
    seen = loaded.images([pictures[keys[row]] for row in few]).numpy()
    read = loaded.texts([samples[row]["captions"][0] for row in few]).numpy()
    assert seen == pytest.approx(image[few], abs=1e-5) and read == pytest.approx(
        text[few], abs=1e-5
    )


def test_evaluate_and_export_agree_with_the_run(trained, data):
    run_dir, _ = trained
    resolved = run_dir / "recipe.yaml"
    told = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[-1])
    assert told["step"] == 12 and told["num_samples"] == told["zero_shot_samples"] == 608

    status, printed = run(resolved, verb="evaluate")
    assert status == 0, printed
    again = dict(
        line.split(": ")
        for line in printed.splitlines()
        if (line.count(": ") == 1 and "@" in line) or "top" in line
    )
    for name in ("zero_shot_top1", "dedup_image_to_text_R@10"):
        assert float(again[name]) == pytest.approx(
            told[name], abs=2e-3
        )  # other ranks, other rounding, ties

    status, printed = run(resolved, verb="export")
    assert status == 0 and "open_clip.create_model_and_transforms" in printed, printed
    status, printed = run(resolved, "--step", "9", "--output", "x", verb="export")
    assert status == 2 and "of step 9" in printed and "[7, 12]" in printed, printed
    status, printed = run(resolved, "--format", "transformers", "--output", "hf", verb="export")
    assert status == 0 and "transformers.CLIPModel.from_pretrained" in printed, printed
    assert {file.name for file in (run_dir / "hf").iterdir()} == {
        "config.json", "model.safetensors", "preprocessor_config.json", "vocab.json", "merges.txt",
        "tokenizer_config.json", "special_tokens_map.json",
    }  # fmt: skip
    stored = load_file(run_dir / "export" / "open_clip_model.safetensors")
    assert stored["logit_scale"].shape == ()
    architecture = load_architecture(str(run_dir / "export"))
    state = load_openclip(run_dir / "export", architecture)
    model = CLIP(architecture)
    model.load_state_dict(state)
    assert all(torch.isfinite(p).all() for p in model.parameters())

    evaluated = [f"data.val={data.val}", f"evaluate.zero_shot_classes={data.classes}"]
    status, printed = run(
        run_dir / "export", "--json", *evaluated, verb="evaluate"
    )  # no recipe: the folder says what
    assert status == 0, printed
    found = json.loads(printed.splitlines()[-1])
    assert found["weights"] == str(run_dir / "export") and found["num_samples"] == 608
    for name in ("val_loss", "zero_shot_top1", "dedup_text_to_image_R@10"):
        assert found[name] == pytest.approx(told[name], abs=2e-3)
    by_name = start(run_dir / "export", "model.name=tiny", *evaluated, verb="evaluate", cwd=run_dir)
    status, printed = finish(by_name)
    assert status == 2 and "does not fit the model" in printed, printed

    status, from_export = run(
        resolved,
        f"model.init_from={run_dir / 'export'}",
        "run.name=second",
        "run.dir=second",
        "run.steps=6",
    )
    assert status == 0, from_export
    first, going_on = metrics(run_dir), metrics(run_dir / "second")
    assert going_on[0]["loss"] < first[0]["loss"]  # it starts where the first one ended
    status, from_run = run(
        resolved,
        f"model.init_from={run_dir}",
        "run.name=third",
        "run.dir=third",
        "run.steps=6",
        ranks=2,
    )
    assert status == 0 and f"init_from ({run_dir}): step 12 of" in from_run, from_run
    assert metrics(run_dir / "third")[0]["loss"] == pytest.approx(
        going_on[0]["loss"], rel=tolerances.loss(1)
    )


def test_folders_of_images_in_training_and_after(recipe, tmp_path, data, model):
    """Zero-shot on two ranks, and on one from the export alone; the validation set beside them."""
    for number, name in enumerate(("blue", "green", "red")):
        (tmp_path / "test" / name).mkdir(parents=True)
        for i in range(5):
            pixels = np.random.default_rng(i).integers(0, 90, (32, 32, 3), dtype=np.uint8)
            pixels[..., 2 - number] += 160
            Image.fromarray(pixels).save(tmp_path / "test" / name / f"{i}.png")
    (tmp_path / "colours.json").write_text(json.dumps({"classnames": ["blue", "green", "red"]}))
    keys = [f"evaluate.zero_shot_data={tmp_path / 'test'}"]
    keys += [f"evaluate.zero_shot_classes={tmp_path / 'colours.json'}", "evaluate.batch_size=4"]
    engine = [
        "engine.kind=fsdp",
        "engine.zero_stage=3",
        f"data.val={data.val}",
        "evaluate.retrieval=false",
    ]
    status, out = run(recipe, "run.steps=6", *keys, *engine, ranks=2)
    assert status == 0, out
    (trained,) = map(json.loads, (tmp_path / "run" / "eval.jsonl").read_text().splitlines())
    assert (trained["num_samples"], trained["zero_shot_samples"]) == (608, 15)
    assert trained["val_loss"] > 0
    assert "zero_shot_top1" in (tmp_path / "run" / "report.html").read_text()
    assert run(tmp_path / "run", "--output", "weights", verb="export")[0] == 0
    status, out = run(
        tmp_path / "weights", "--json", *keys, "evaluate.templates=simple", verb="evaluate"
    )
    assert status == 0, out
    found = json.loads(out.splitlines()[-1])
    assert found["zero_shot_samples"] == 15 and "num_samples" not in found

    file = tmp_path / "weights" / "open_clip_model.safetensors"
    line = (f"model.name={model}", "--json", *keys, "evaluate.templates=simple")
    status, out = run(file, *line, verb="evaluate")  # weights with their model's JSON
    assert status == 0, out
    assert json.loads(out.splitlines()[-1]) == {**found, "weights": str(file)}


def test_a_run_that_was_never_trained_says_so(recipe):
    status, printed = run(recipe, verb="export")
    assert status == 2
    assert "train first" in printed


def test_the_example_with_labels_goes_from_tables_to_a_score(tmp_path, model):
    """The commands of docs/evaluation.md as they are, on pictures with more labels in one table than in the other."""
    page = ROOT / "docs" / "evaluation.md"
    lines = list(code_lines(page, "bash"))
    assert [line.split()[1] for line in lines] == ["shards", "shards", "train", "evaluate"]
    (tmp_path / "photos").mkdir()
    for name, count in (("birds", 40), ("birds-test", 10)):
        rows = ["filepath,caption,kind"]
        for i in range(count):
            (tmp_path / "photos" / f"{i}.jpg").write_bytes(jpeg(i))
            kind = "a red fox" if i % 3 else "911" if i < 10 else "owl"
            rows.append(f'photos/{i}.jpg,"a picture, number {i}",{kind}')
        (tmp_path / f"{name}.csv").write_text("\n".join(rows))
    recipe = RECIPE.format(run_dir="runs/x", train="x.tar", model=model)
    (tmp_path / "my.yaml").write_text(recipe.replace("steps: 40", "steps: 7"))
    for line in lines:
        arguments = own_arguments(line)
        assert arguments is not None
        status, out = finish(Command(arguments, env=clean_environment(), cwd=tmp_path))
        assert status == 0, out
    scores = dict(re.findall(r"^([\w@]+): ([\d.e-]+)$", out, re.MULTILINE))
    assert float(scores["zero_shot_samples"]) == float(scores["num_samples"]) == 10, out
    assert 0 <= float(scores["zero_shot_top1"]) <= float(scores["zero_shot_top5"]) == 1


def test_the_demo_goes_the_whole_way(tmp_path, data):
    """Few steps: that it learns is shown by `make demo`."""
    short = [
        "run.steps=4",
        "schedule.warmup_steps=1",
        "batch.global_size=64",
        "batch.micro_size=16",
        "data.lanes=1",
        "data.num_samples=640",
    ]
    line = ["demo", "--dir", str(tmp_path), *short]
    status, out = finish(Command(line, env=clean_environment(), cwd=tmp_path))
    assert status == 0, out
    assert "top-1" in out and "chance is 1.3%" in out
    run_dir = tmp_path / "demo-shapes"
    assert read_verdict(run_dir)[0] == "DONE"
    assert metrics(run_dir)[0]["accum_steps"] == 4
    assert {
        "report.html",
        "attempts.jsonl",
        "metrics.jsonl",
        "recipe.yaml",
        "ds_config.json",
        "events",
    } <= {p.name for p in run_dir.iterdir()}
    assert "state DONE" in (run_dir / "report.html").read_text()


def test_what_a_place_says_of_the_model(tmp_path):
    known = (
        "hf-hub:org/name",
        "open_clip:ViT-B-32/laion2b_s34b_b79k",
        str(tmp_path / "weights.safetensors"),
    )
    assert all(map(holds_weights, known))
    assert described(str(tmp_path / "x.pt"), "open_clip:ViT-B-32/laion2b_s34b_b79k") == "ViT-B-32"
    assert (
        described(str(tmp_path / "x.pt"), "open_clip:ViT-B-16-SigLIP/webli")
        == "open_clip:ViT-B-16-SigLIP"
    )
    assert not holds_weights("my.yaml") and not holds_weights(str(tmp_path))
    with pytest.raises(UserError, match=r"x\.pt is neither a file nor a folder"):
        described(str(tmp_path / "x.pt"), "x.pt")
    for fits, state in (
        ("ViT-B-32$", {"visual.proj": torch.zeros(2, 2)}),  # an example
        ("tiny; tiny would fit its sizes", CLIP(load_architecture("tiny")).state_dict()),
    ):
        torch.save(state, tmp_path / "x.pt")
        no_name = (
            rf"x\.pt has no open_clip_config\.json beside it, .* evaluate x\.pt model\.name={fits}"
        )
        with pytest.raises(UserError, match=no_name):
            described(str(tmp_path / "x.pt"), "x.pt")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_json_given_as_recipe_gets_the_line_to_type(tmp_path, model, wrapped, capsys):
    file = tmp_path / "model.json"
    content = json.loads(model.read_text())
    file.write_text(json.dumps({"model_cfg": content} if wrapped else content))
    line = f"clip-train evaluate WEIGHTS model.name={file}"
    assert main(["evaluate", str(file), "--weights", "x.pt"]) == 2
    told = capsys.readouterr().err
    assert f"{file} describes a model" in told and line in told and "mistake" not in told
    assert load_architecture(str(file)) == load_architecture(str(model))


def test_a_checkpoint_from_elsewhere_does_not_choose_a_tokenizer(tmp_path, monkeypatch):
    """But the one that OpenCLIP's model of this name has, or a model that the command line names."""

    def content(tokenizer: str | None) -> dict[str, Any]:
        return {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {"hf_tokenizer_name": tokenizer}}

    def check(tokenizer: str | None, name: str, *, said: bool = False) -> None:
        state = {"architecture": parse_openclip(content(tokenizer), "any").model_dump(mode="json")}
        check_names(SimpleNamespace(state=state, path="s3://bucket/run"), name, said=said)  # type: ignore[arg-type]

    library = SimpleNamespace(
        list_models=lambda: ["ViT-L-14-worldwide"],
        list_pretrained_tags_by_model=lambda name: [],
        get_model_config=lambda name: content("google/mt5-base"),
    )
    monkeypatch.setitem(sys.modules, "open_clip", library)
    theirs, own = "open_clip:ViT-L-14-worldwide", f"open_clip:{tmp_path / 'own.json'}"
    (tmp_path / "own.json").write_text(json.dumps(content("org/other")))
    check(None, "any")
    check("google/mt5-base", theirs)
    check("org/other", own, said=True)
    for name, said in ((theirs, False), (theirs, True), (own, False), ("tiny", True)):
        with pytest.raises(
            UserError,
            match=r"s3://bucket/run names org/other, which is opened only if you allow it",
        ):
            check("org/other", name, said=said)
