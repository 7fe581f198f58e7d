"""Resuming with another recipe: what passes in silence, what is told, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.restore import Resumed
from clip_train.errors import UserError
from clip_train.recipe.recipe import Recipe, check_config, known_keys
from clip_train.recipe.resume import at_resume, compare_with
from tests.launcher.conftest import MODEL

BASE = {
    "run": {"name": "a", "steps": 9000},
    "model": {"name": "ViT-B-32"},
    "data": {"train": "shards/{0..3}.tar", "num_samples": 1000},
    "batch": {"global_size": 64, "micro_size": 16, "kept_graphs": 1},
    "engine": {"kind": "deepspeed", "precision": "fp32"},  # what `train` has made of auto
}


def recipe(**sections: dict) -> Recipe:
    return check_config(
        {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}},
        "r",
    )


def resumed(world_size: int = 1, **state: Any) -> Resumed:
    config = recipe()
    architecture = config.model.architecture().model_dump(mode="json")
    stored = {
        "recipe": config.model_dump(mode="json"),
        "architecture": architecture,
        "samples": 2500,
        "step": 40,
    }
    state = {**stored, **state}
    return Resumed(40, state, None, None, world_size, "s3://bucket/run/ckpt/x", CommitRef(0, 40))  # type: ignore[arg-type]


def told(config: Recipe, *, was: int = 1, now: int = 1, **state: Any) -> str:
    return "\n".join(compare_with(config, resumed(was, **state), now))


REFUSED = """run.seed model.name model.image_size model.context_length model.patch_dropout model.dropout
model.init_logit_bias model.freeze model.lora model.lock_image
model.lock_image_unlocked_groups model.lock_image_freeze_bn_stats model.lock_text model.lock_text_unlocked_layers
data.texts_per_image data.negative_texts
data.aug_scale data.aug_ratio data.aug_relative_ratio data.aug_color_jitter data.aug_color_jitter_prob
data.aug_gray_scale_prob
data.aug_flip_prob data.aug_erase_prob data.aug_own data.aug_own_options data.inputs data.stages
data.scaled_decode data.alpha data.tokens data.tokens_schedule data.reinforced
loss.distill_weights loss.teacher_scales loss.teacher_weights
batch.global_size batch.schedule loss.kind loss.options loss.groups loss.group_role loss.widths optim.name"""


def test_what_makes_it_another_run() -> None:
    """Every other key may change; one without a mark is reported."""
    kinds = {path: at_resume(path, field.metadata, recipe()) for path, field in known_keys()}
    assert {path for path, kind in kinds.items() if kind == "refused"} == set(REFUSED.split())
    silent = {path.split(".")[0] for path, kind in kinds.items() if kind == "silent"} - {
        "run",
        "data",
    }
    assert silent == {"storage", "checkpoint", "evaluate", "log", "launch"}
    assert kinds["optim.lr"] == "reported"


def test_the_whole_message() -> None:
    """Step, source, what was passed over, layout, samples seen."""
    older = {CommitRef(0, 60): "rank00001.safetensors is missing"}
    found = replace(resumed(2), skipped=older, fetched=3_000_000)
    config = recipe(engine={"zero_stage": 3, "precision": "bf16"}, optim={"lr": 0.5})
    assert "\n".join([found.describe(), *compare_with(config, found, 1)]) == (
        "resuming from step 40\n"
        "  source         s3://bucket/run/ckpt/x (3.0 MB fetched)\n"
        "  passed over    step 60: rank00001.safetensors is missing\n"
        "  layout         2 ranks at ZeRO 1, fp32 -> 1 rank at ZeRO 3, bf16\n"
        "  samples seen   2,500 (2.50 epochs)\n"
        "  changed since  optim.lr was 0.0005, is 0.5"
    )
    warm = resumed().describe()
    assert "  passed over    nothing" in warm and "(nothing fetched)" in warm


def test_the_same_recipe() -> None:
    assert told(recipe()) == (
        "  layout         the same (1 rank at ZeRO 1, fp32): bitwise equal to an uninterrupted run\n"
        "  samples seen   2,500 (2.50 epochs)"
    )


def test_bitwise_on_gpus_is_claimed_only_with_deterministic(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (
        "fp32): equal within rounding to an uninterrupted run; bitwise with "
        "engine.deterministic=true\n" in told(recipe())
    )
    deterministic = recipe(engine={"deterministic": True})
    before = {"recipe": deterministic.model_dump(mode="json")}
    assert "fp32): bitwise equal to an uninterrupted run\n" in told(deterministic, **before)


def test_what_the_curve_cannot_tell_passes_in_silence() -> None:
    silent = {
        "log": {"batch_digest": True},
        "data": {"workers": 3},
        "run": {"name": "b"},
        "launch": {"hang_seconds": 9},
    }
    config = recipe(**silent, checkpoint={"keep_last": 9})
    assert told(config) == told(recipe())


@pytest.mark.parametrize(
    ("section", "key", "value"), [("batch", "micro_size", 8), ("loss", "tile", 64)]
)
def test_what_only_rounds_is_not_called_bitwise(section: str, key: str, value: int) -> None:
    lines = told(recipe(**{section: {key: value}}))
    assert (
        f"fp32); {section}.{key} changed: equal within rounding" in lines and "bitwise" not in lines
    )
    assert "bitwise" not in told(recipe(batch={"micro_size": "auto"}))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("batch", "global_size", 128),
        ("model", "name", "ViT-B-16"),
        ("run", "seed", 5),
        ("data", "aug_scale", (0.5, 1.0)),
        ("data", "aug_color_jitter", (0.4, 0.4, 0.4, 0.1)),
        ("model", "init_logit_bias", -10.0),
    ],
)
def test_another_run_is_refused_unless_it_is_forced(section: str, key: str, value: object) -> None:
    with pytest.raises(
        UserError,
        match=rf"belongs to another run: {section}\.{key}.* was .*allow_changed_recipe=true",
    ):
        told(recipe(**{section: {key: value}}))
    forced = told(recipe(**{section: {key: value}, "checkpoint": {"allow_changed_recipe": True}}))
    assert (
        f"WARNING        this is a different run now: {section}.{key}" in forced
        and "bitwise" not in forced
    )


def test_a_key_that_is_newer_than_the_checkpoint_had_its_default() -> None:
    then = recipe().model_dump(mode="json")
    for key in (
        "kind",
        "texts_per_image",
        "negative_texts",
        "aug_ratio",
        "aug_color_jitter",
        "aug_color_jitter_prob",
        "aug_gray_scale_prob",
        "aug_flip_prob",
        "aug_erase_prob",
        "aug_own",
        "aug_own_options",
        "inputs",
        "stages",
        "scaled_decode",
        "alpha",
    ):
        del then["data"][key]
    assert told(recipe(), recipe=then) == told(recipe())


def test_some_keys_matter_only_with_others() -> None:
    def then(**sections: Any) -> dict[str, Any]:
        return {"recipe": recipe(**sections).model_dump(mode="json")}

    bank = {"loss": {"kind": "memory_bank", "bank_size": 64}}
    with pytest.raises(UserError, match=r"loss\.bank_size was 64, is 128"):
        told(recipe(loss={"kind": "memory_bank", "bank_size": 128}), **then(**bank))
    assert "changed since  loss.bank_size" in told(recipe(loss={"bank_size": 64}))


def test_a_model_is_what_its_file_says_not_what_it_is_called(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(MODEL))
    other.write_text(json.dumps(MODEL))
    config = recipe(model={"name": str(one)})
    state = {
        "recipe": config.model_dump(mode="json"),
        "architecture": config.model.architecture().model_dump(mode="json"),
    }
    assert "changed since  model.name was" in told(
        recipe(model={"name": str(other)}), **state
    )  # it has moved
    one.write_text(
        json.dumps({**MODEL, "text_cfg": {**MODEL["text_cfg"], "heads": 1}})
    )  # every shape is the same
    with pytest.raises(UserError, match=r"one\.json\): text_cfg\.heads was 2, is 1"):
        told(config, **state)


def test_another_model_of_ones_own_is_named_by_its_class():
    """Its sizes are stand-ins: differences of these would mean nothing to a reader."""
    with pytest.raises(UserError) as error:
        told(recipe(model={"name": "examples.towers.Towers"}))
    assert "class was None, is 'examples.towers.Towers'. Restore" in str(error.value)
    assert "vision_cfg" not in str(error.value)
