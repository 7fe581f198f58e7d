"""Resuming with another recipe: what passes in silence, what is told, what is refused."""

from __future__ import annotations

import pytest

from clip_train.checkpoint import Resumed
from clip_train.errors import UserError
from launcher.config import RunConfig, check_config
from launcher.same_run import compare_with

BASE = {
    "run": {"name": "a", "steps": 9000},
    "model": {"name": "ViT-B-32"},
    "data": {"train": "shards/{0..3}.tar", "num_samples": 1000},
    "batch": {"global_size": 64, "micro_size": 16},
}


def recipe(**sections: dict) -> RunConfig:
    return check_config({name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}}, "r")


def resumed(world_size: int = 1) -> Resumed:
    state = {"recipe": recipe().model_dump(mode="json"), "samples": 2500, "step": 40}
    return Resumed(40, state, None, None, world_size, "s3://bucket/run/ckpt/x")  # type: ignore[arg-type]


def told(config: RunConfig, *, was: int = 1, now: int = 1) -> str:
    return "\n".join(compare_with(config, resumed(was), now))


def test_the_same_recipe() -> None:
    assert told(recipe()) == "  2,500 samples seen, 2.50 epochs; the same layout, bitwise as if never stopped"


def test_what_the_curve_cannot_tell_passes_in_silence() -> None:
    silent = {"log": {"every_steps": 7}, "batch": {"micro_size": 8}, "data": {"workers": 3}, "run": {"name": "b"}}
    config = recipe(**silent, checkpoint={"keep_last": 9})
    assert told(config) == told(recipe())


def test_what_it_may_tell_is_named() -> None:
    lines = told(recipe(engine={"zero_stage": 3}, optim={"lr": 0.5}), was=2)
    assert "layout: 2 ranks at ZeRO 1 -> 1 rank at ZeRO 3" in lines
    assert "engine.zero_stage was 1, is 3" in lines and "optim.lr was " in lines and "WARNING" not in lines


@pytest.mark.parametrize(
    "section,key,value", [("batch", "global_size", 128), ("model", "name", "ViT-B-16"), ("run", "seed", 5)]
)
def test_another_run_is_refused_unless_it_is_forced(section: str, key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"belongs to another run: {section}\.{key} was .*allow_changed_recipe=true"):
        told(recipe(**{section: {key: value}}))
    forced = told(recipe(**{section: {key: value}, "checkpoint": {"allow_changed_recipe": True}}))
    assert f"WARNING: this is another run now: {section}.{key}" in forced
