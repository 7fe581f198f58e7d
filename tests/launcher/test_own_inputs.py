"""A recipe that trains audio with text, through the command: examples/audio.yaml and examples/frames.yaml."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import webdataset

from clip_train.data.tar import write_shards
from launcher.cli.main import main
from tests import tolerances
from tests.launcher.conftest import ROOT, metrics, run

EXAMPLES = ROOT / "examples"
SMALL = (
    "batch.global_size=24",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "log.tensorboard=false",
)


def without_noise(sample: dict) -> dict:
    return {name: value for name, value in sample.items() if name != "noise"}


def mended(sample: dict) -> dict:
    """The captions as the examples have them."""
    return {**sample, "txt": sample["caption"]}


clean = webdataset.map(mended)
quiet = webdataset.map(without_noise)
STAGE = f"data.stages=[{__name__}.clean, {__name__}.quiet]"


def example(tmp_path, name: str):
    """The example's recipe with its data, whose captions a stage has to find."""
    module = pytest.importorskip(f"examples.{name}")
    samples = {"audio": "tones", "frames": "clips"}[name]
    for part, rounds in (("train", 4), ("val", 1)):
        folder = tmp_path / "data" / samples.replace("clips", "frames") / part
        folder.mkdir(parents=True)
        made = getattr(module, samples)(rounds, seed=rounds)
        moved = ({"caption": each.pop("txt"), "noise": b"x"} | each for each in made)
        write_shards(folder, moved, per_shard=48)
    return Path(shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path))


@pytest.mark.engine
def test_audio_trains_resumes_and_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = example(tmp_path, "audio")
    common = (*SMALL, STAGE, "run.dir=run")
    status, out = run(recipe, *common, "run.steps=2", ranks=2)
    assert status == 0, out
    more = ("run.steps=3", "batch.micro_size=7", "data.workers=2", "engine.kind=deepspeed")
    status, out = run(recipe, *common, *more)
    assert status == 0 and "resuming from step 2" in out, out
    whole = ("run.steps=3", "run.dir=whole", "batch.micro_size=24", "data.workers=0")
    status, out = run(recipe, *common, *whole)
    assert status == 0, out
    seen, expected = ([line["loss"] for line in metrics(tmp_path / x)] for x in ("run", "whole"))
    assert seen == pytest.approx(expected, rel=tolerances.loss(3))
    status, out = run(recipe, *common, "data.stages=null", "run.steps=4")
    assert status == 2 and "cannot be used: no caption. Its members are .caption, .noise" in out, (
        out
    )
    status, out = run(recipe, *common, "data.inputs.sound=examples.audio.waveform", "run.steps=4")
    assert status == 2 and "data.inputs was {'audio': 'examples.audio:waveform'}" in out, out

    kept = tmp_path / "run" / "checkpoints"  # whose recipe nobody has given
    model, inputs = (
        "model.name=examples.audio.AudioText",
        "data.inputs={audio: examples.audio:waveform}",
    )
    status, out = run(kept, model, STAGE, verb="evaluate")
    assert (
        status == 2 and "names data.inputs={audio: 'examples.audio:waveform'}, which is" in out
    ), out
    status, out = run(kept, model, inputs, verb="evaluate")
    assert status == 2 and f"names data.stages=['{__name__}.clean" in out, out
    val = f"data.val={tmp_path}/data/tones/val/*.tar"
    status, out = run(kept, model, inputs, STAGE, val, verb="evaluate")
    assert status == 0 and "image_to_text_R@1" in out and "unusable" not in out, out
    assert main(["embed", str(recipe), "run.dir=run", STAGE, "--output", "features"]) == 0
    (image,) = (tmp_path / "features").glob("image-*.npy")
    assert np.linalg.norm(np.load(image), axis=1) == pytest.approx(np.ones(24), abs=1e-5)


@pytest.mark.engine
def test_frames_one_sample_at_a_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = example(tmp_path, "frames")
    losses = {}
    for micro_size in (1, 24):
        size = (f"batch.micro_size={micro_size}", f"run.dir=by-{micro_size}", "run.steps=2")
        status, out = run(recipe, *SMALL, STAGE, *size)
        assert status == 0, out
        losses[micro_size] = [line["loss"] for line in metrics(tmp_path / f"by-{micro_size}")]
    assert losses[1] == pytest.approx(losses[24], rel=tolerances.loss(2))


def test_other_verbs_take_inputs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = example(tmp_path, "audio")
    assert main(["plan", str(recipe), STAGE, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan
    for verb in (("train", "--dry-run"), ("doctor",)):
        assert main([verb[0], str(recipe), STAGE, *verb[1:]]) == 0, capsys.readouterr()
    assert main(["plan", str(recipe), STAGE, "model.name=tiny"]) == 2
    assert "need a model of your own, and model.name (tiny) gets images" in capsys.readouterr().err
    assert main(["plan", str(recipe), STAGE, "model.teacher=x"]) == 2
    assert "sees images, and the samples have data.inputs" in capsys.readouterr().err
