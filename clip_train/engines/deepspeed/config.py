"""The recipe and a base JSON from ds_configs/ become DeepSpeed's configuration; conflicts are
refused.

This module handles or rejects DeepSpeed's errors and settings that would silently change the
result, each with its reason (measured on DeepSpeed 0.19.8; tests/engine/ checks them)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_train.errors import UserError
from clip_train.places import shipped
from clip_train.settings import broken, clipped

if TYPE_CHECKING:
    from clip_train.engines.config import EngineConfig

SHIPPED = shipped("ds_configs")

# The recipe owns the optimizer and the schedule; DeepSpeed has removed the others and raises
# there.
REFUSED_SECTIONS = {
    "optimizer": "use the recipe's optim section",
    "scheduler": "use the recipe's schedule section",
    "elasticity": "any number of ranks gives the same result here without it",
    "amp": "use engine.precision",
    "nebula": "use the recipe's checkpoint section",
    "compression_training": "DeepSpeed removed it",
    "curriculum_learning": "DeepSpeed removed it",
    "data_efficiency": "use the recipe's data section",
    "tensor_parallel": "only data parallelism is exact here",
    "sequence_parallel_size": "only data parallelism is exact here",
    "torch_autocast": "use engine.precision",
    "pipeline": "a contrastive batch cannot be pipelined: every sample needs every other",
}


# Keys of zero_optimization that change the sums (quantized communication) or the group over which
# the gradient is averaged.
REFUSED_ZERO_KEYS = (
    "zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather",
    "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "offload_param", "cpu_offload_param", "cpu_offload",
)  # fmt: skip


def load_base(config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """The base JSON's file name and content. UserError."""
    named = (
        config.ds_config
        if config.ds_config is not None
        else f"{SHIPPED}/zero{config.zero_stage}.json"
    )
    places = (Path(named), SHIPPED / named, SHIPPED / f"{named}.json")
    path = next(
        (place for place in places if os.path.isfile(place)), None
    )  # unlike Path.is_file it takes any text
    if path is None:
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise UserError(
            f"engine.ds_config ({clipped(named)}): no such file; shipped ones are {names}"
        )
    try:
        base = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise UserError(f"engine.ds_config ({path}) is not JSON: {e}; correct the file") from None
    if not isinstance(base, dict):
        raise UserError(
            f"engine.ds_config ({path}) must hold a JSON object, not {type(base).__name__}"
        )
    return path.name, base


def zero_number(config: EngineConfig, key: str, default: int) -> int:
    """zero_optimization.`key` in the base JSON. default: DeepSpeed's."""
    said = load_base(config)[1].get("zero_optimization", {}).get(key, default)
    return int(float(said)) if said != "auto" else default


def build_ds_config(
    config: EngineConfig,
    *,
    world_size: int,
    micro_size: int = 1,
    grad_clip_norm: float | None = None,
) -> dict[str, Any]:
    """DeepSpeed's configuration dict. UserError lists every conflict between recipe and JSON."""
    file, base = load_base(config)
    zero = base.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    rules = [
        *(
            (key in base, f"{file} has a section {key!r}: {reason}; take it out")
            for key, reason in REFUSED_SECTIONS.items()
        ),
        *(
            (
                bool(zero.get(key)),
                f"{file} sets zero_optimization.{key}: it changes the result, or is not tested "
                "here; take it out",
            )
            for key in REFUSED_ZERO_KEYS
        ),
        (  # the recipe chooses AdamW's kernel, and counts the memory
            config.offload == "none" and bool(zero.get("offload_optimizer")),
            f"{file} sets zero_optimization.offload_optimizer, but engine.offload is none: take it "
            "out, and set engine.offload=optimizer",
        ),
        (  # it would reduce inside a backward, where a failing rank leaves the others waiting
            config.zero_stage < 2 and zero.get("overlap_comm") not in (None, False, "auto"),
            f"{file} sets zero_optimization.overlap_comm, which needs engine.zero_stage 2 or 3 "
            f"(it is {config.zero_stage}); take it out",
        ),
    ]
    mistakes = broken(rules)
    # key of the JSON -> its value, and the recipe key that sets it
    owned: dict[str, tuple[Any, str]] = {
        # The engine says which backward is a step's last, so k may change from step to step, and
        # nothing divides by k.
        "managed_gradient_accumulation": (True, "the trainer"),
        "gradient_accumulation_steps": (1, "batch.global_size and batch.micro_size"),
        # for DeepSpeed's own counters only
        "train_micro_batch_size_per_gpu": (micro_size, "batch.micro_size"),
        "train_batch_size": (micro_size * world_size, "batch.global_size"),
        # Always set: DeepSpeed's default has been 1.0 since PR #8068.
        "gradient_clipping": (grad_clip_norm or 0.0, "optim.grad_clip_norm"),
        "zero_optimization.stage": (config.zero_stage, "engine.zero_stage"),
        # it would wait for the device in every forward and step
        "timers.throughput.enabled": (False, "the trainer"),
        "bf16.enabled": (config.precision == "bf16", "engine.precision"),
        "fp16.enabled": (config.precision == "fp16", "engine.precision"),
        # DeepSpeed's default is the precision of the model.
        "communication_data_type": (config.reduce_dtype, "engine.reduce_dtype"),
        # torch's own AdamW and SGD: exact at every stage
        "zero_allow_untested_optimizer": (True, "the trainer"),
        # torch.optim on the offloaded state instead of DeepSpeedCPUAdam, which JIT-builds for
        # minutes.
        "zero_force_ds_cpu_optimizer": (False, "the trainer"),
    }
    if config.precision == "bf16":  # bf16 accumulation loses 2-3% of the update
        owned["data_types.grad_accum_dtype"] = ("fp32", "the trainer")
    if config.offload == "optimizer":
        owned["zero_optimization.offload_optimizer.device"] = ("cpu", "engine.offload")
    for key, (value, field) in owned.items():
        *sections, name = key.split(".")
        node = base
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        if node.get(name) not in (None, "auto", value):
            mistakes.append(
                f"{file} sets {key} = {node[name]!r}, but {field} in the recipe makes it "
                f'{value!r}: take it out of the JSON (or write "auto"), and set {field}'
            )
        node[name] = value
    if mistakes:
        raise UserError("\n".join(mistakes))
    if config.zero_stage == 0:
        base["gradient_clipping"] = 0.0  # the engine clips there and can also report the norm
    return base
