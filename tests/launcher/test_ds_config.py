"""DeepSpeed's configuration: what the recipe owns, what is refused, what conflicts."""

from __future__ import annotations

import json

import pytest
import torch

from clip_train.engines.config import EngineConfig
from clip_train.engines.deepspeed.config import SHIPPED, build_ds_config
from clip_train.errors import UserError
from clip_train.recipe.recipe import check_config
from clip_train.recipe.resolve import resolve
from launcher.train import build_engine
from tests.ranks import run_ranks


def built(config: EngineConfig, clip: float | None = 1.0) -> dict:
    return build_ds_config(config, world_size=4, micro_size=8, grad_clip_norm=clip)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shipped_files_give_the_settings_the_step_relies_on(stage):
    config = built(EngineConfig(zero_stage=stage))
    assert config["managed_gradient_accumulation"] is True  # the engine sets the boundary itself
    assert config["gradient_accumulation_steps"] == 1
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_clipping"] == (
        0.0 if stage == 0 else 1.0
    )  # said, since DeepSpeed's default is 1.0
    assert built(EngineConfig(zero_stage=stage), clip=None)["gradient_clipping"] == 0.0


def test_every_shipped_file_is_of_a_stage():
    assert sorted(p.name for p in SHIPPED.glob("*.json")) == [
        f"zero{stage}.json" for stage in range(4)
    ]


def test_bf16_accumulates_in_fp32():
    assert built(EngineConfig(zero_stage=1, precision="bf16"))["data_types"] == {
        "grad_accum_dtype": "fp32"
    }


def test_a_conflict_names_both_sides(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3},
                "gradient_clipping": 0.3,
                "bf16": {"enabled": "auto"},
            }
        )
    )
    with pytest.raises(UserError) as e:
        built(EngineConfig(zero_stage=2, ds_config=str(file)))
    message = str(e.value)
    assert (
        "mine.json sets zero_optimization.stage = 3, but engine.zero_stage in the recipe makes it 2"
        in message
    )
    assert "gradient_clipping = 0.3, but optim.grad_clip_norm in the recipe makes it 1.0" in message
    assert "bf16" not in message


def test_a_conflict_with_the_trainer_names_no_recipe_key(tmp_path):
    file = tmp_path / "mine.json"
    content = {
        "managed_gradient_accumulation": False,
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"stage": 3},
    }
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as e:
        built(EngineConfig(zero_stage=1, precision="bf16", ds_config=str(file)))
    assert str(e.value).splitlines() == [
        "mine.json sets managed_gradient_accumulation = False, but this trainer needs True: take it "
        "out of the JSON",
        "mine.json sets zero_optimization.stage = 3, but engine.zero_stage in the recipe makes it "
        '1: take it out of the JSON (or write "auto"), and set engine.zero_stage',
        "mine.json sets data_types.grad_accum_dtype = 'bf16', but this trainer needs 'fp32': take "
        "it out of the JSON",
    ]


def test_a_base_file_keeps_its_own_keys(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1234}}))
    assert (
        built(EngineConfig(zero_stage=2, ds_config=str(file)))["zero_optimization"][
            "reduce_bucket_size"
        ]
        == 1234
    )


@pytest.mark.parametrize(
    "section", ["optimizer", "scheduler", "amp", "elasticity", "curriculum_learning"]
)
def test_sections_that_would_fight_the_recipe_are_refused(tmp_path, section):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({section: {}}))
    with pytest.raises(UserError, match=f"section '{section}'"):
        built(EngineConfig(ds_config=str(file)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False, "auto"])
def test_overlapped_communication_is_for_stages_2_and_3(tmp_path, stage, overlap):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"overlap_comm": overlap}}))
    config = EngineConfig(zero_stage=stage, ds_config=str(file))
    if stage < 2 and overlap is True:
        with pytest.raises(
            UserError,
            match=rf"mine.json sets .*overlap_comm.*engine.zero_stage 2.*{stage}.*take it out",
        ):
            built(config)
    else:
        assert built(config)["zero_optimization"]["overlap_comm"] == overlap


def test_only_the_recipe_offloads(tmp_path):
    file = tmp_path / "mine.json"
    pinned = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    file.write_text(json.dumps({"zero_optimization": pinned}))
    with pytest.raises(UserError, match=r"sets .*offload_optimizer.*set engine.offload=optimizer"):
        built(EngineConfig(ds_config=str(file)))
    found = built(EngineConfig(ds_config=str(file), offload="optimizer"))["zero_optimization"]
    assert found["offload_optimizer"] == pinned["offload_optimizer"]
    file.write_text(json.dumps({"zero_optimization": {"cpu_offload": True}}))
    with pytest.raises(UserError, match=r"sets zero_optimization.cpu_offload.*take it out"):
        built(EngineConfig(ds_config=str(file), offload="optimizer"))


class MadeError(Exception):
    """With `fused` of an AdamW that a run asks for."""


def asked_of_adamw(offload: str) -> bool:
    """On a process that says that it has a GPU."""

    def adamw(groups, lr, *, fused, **options):
        raise MadeError(fused)

    sections = {
        "run": {"name": "a", "steps": 9000},
        "model": {"name": "tiny"},
        "data": {"train": "{0..3}.tar", "num_samples": 8},
        "batch": {"global_size": 8, "micro_size": 8, "kept_graphs": 1},
        "engine": {"kind": "fsdp", "offload": offload, "compile": False},
    }
    resolved = resolve(check_config(sections, "r"), 1, read_data=False)
    torch.optim.AdamW, torch.cuda.is_available = adamw, lambda: True  # type: ignore[assignment]
    try:
        build_engine(resolved, torch.device("cpu"))
    except MadeError as e:
        return e.args[0]
    raise AssertionError("no AdamW was made")


@pytest.mark.engine
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_run_that_offloads_does_not_take_the_fused_adamw(offload):
    """It would run on the CPU, where its rounding depends on the layout."""
    assert run_ranks(asked_of_adamw, 1, offload) == [offload == "none"]


@pytest.mark.parametrize("content, said", [("{", "not JSON"), ("[]", "JSON object")])
def test_a_bad_file(tmp_path, content, said):
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(UserError, match=said):
        built(EngineConfig(ds_config=str(file)))


def test_a_missing_file_lists_the_shipped_ones():
    with pytest.raises(UserError, match="zero0, zero1, zero2, zero3"):
        built(EngineConfig(ds_config="zero9"))
