"""The recipe and a base JSON from ds_configs/ become DeepSpeed's configuration; conflicts are
refused.

This module handles or rejects DeepSpeed's errors and settings that would silently change the
result, each with its reason (measured on DeepSpeed 0.19.8; tests/engine/ checks them)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clip_train.errors import UserError
from clip_train.places import shipped
from clip_train.settings import clipped

if TYPE_CHECKING:
    from clip_train.engines.config import EngineConfig

SHIPPED = shipped("ds_configs")

# Sections of the JSON that are rejected -> the remedy or the reason. The recipe owns some of them;
# the others cannot be exact, or DeepSpeed has removed them.
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
    """The base JSON's file name and content. Raises UserError."""
    name = config.ds_config
    if name is None:
        name = f"{SHIPPED}/zero{config.zero_stage}.json"
    candidates = (Path(name), SHIPPED / name, SHIPPED / f"{name}.json")
    # os.path.isfile takes any text, unlike Path.is_file
    path = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
    if path is None:
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise UserError(
            f"engine.ds_config ({clipped(name)}): no such file; shipped ones are {names}"
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
    """The integer that zero_optimization.`key` has in the base JSON. DeepSpeed's `default` replaces
    a missing key and "auto"."""
    _, base = load_base(config)
    value = base.get("zero_optimization", {}).get(key, default)
    if value == "auto":
        return default
    # JSON may spell an integer as 5e8
    return int(float(value))


class OwnedKey(NamedTuple):
    """A key of DeepSpeed's configuration that the base JSON must not set to another value."""

    value: Any
    recipe_key: str | None  # the key or keys that the value follows from; None: it is always so


def build_ds_config(
    config: EngineConfig,
    *,
    world_size: int,
    micro_size: int = 1,
    grad_clip_norm: float | None = None,
) -> dict[str, Any]:
    """DeepSpeed's configuration dict. Raises one UserError with every conflict between recipe and
    JSON."""
    file, base = load_base(config)
    mistakes = refused_keys(config, file, base)
    for key, owned in owned_keys(config, world_size, micro_size, grad_clip_norm).items():
        *sections, name = key.split(".")
        node = base
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        if node.get(name) not in (None, "auto", owned.value):
            found = f"{file} sets {key} = {node[name]!r}"
            if owned.recipe_key is None:
                mistakes.append(
                    f"{found}, but this trainer needs {owned.value!r}: take it out of the JSON"
                )
            else:
                mistakes.append(
                    f"{found}, but {owned.recipe_key} in the recipe makes it {owned.value!r}: take "
                    f'it out of the JSON (or write "auto"), and set {owned.recipe_key}'
                )
        node[name] = owned.value
    if mistakes:
        raise UserError("\n".join(mistakes))
    if config.zero_stage == 0:
        # The engine itself clips at stage 0, so that it can also report the norm. This is set after
        # the loop above, which compares the JSON's value with the recipe's.
        base["gradient_clipping"] = 0.0
    return base


def refused_keys(config: EngineConfig, file: str, base: dict[str, Any]) -> list[str]:
    """A message for each section and key of the base JSON that this engine cannot use."""
    mistakes = []
    for section, reason in REFUSED_SECTIONS.items():
        if section in base:
            mistakes.append(f"{file} has a section {section!r}: {reason}; take it out")
    zero = base.get("zero_optimization")
    if not isinstance(zero, dict):
        return mistakes
    for key in REFUSED_ZERO_KEYS:
        if zero.get(key):
            mistakes.append(
                f"{file} sets zero_optimization.{key}: it changes the result, or is not tested "
                "here; take it out"
            )
    # engine.offload decides, because the recipe chooses AdamW's kernel by it and counts the memory
    if config.offload == "none" and zero.get("offload_optimizer"):
        mistakes.append(
            f"{file} sets zero_optimization.offload_optimizer, but engine.offload is none: take it "
            "out, and set engine.offload=optimizer"
        )
    # It would reduce inside a backward, where a failing rank leaves the others waiting.
    if config.zero_stage < 2 and zero.get("overlap_comm") not in (None, False, "auto"):
        mistakes.append(
            f"{file} sets zero_optimization.overlap_comm, which needs engine.zero_stage 2 or 3 "
            f"(it is {config.zero_stage}); take it out"
        )
    return mistakes


def owned_keys(
    config: EngineConfig, world_size: int, micro_size: int, grad_clip_norm: float | None
) -> dict[str, OwnedKey]:
    """The keys of DeepSpeed's configuration that the recipe or this trainer sets. A dot separates a
    section and its key."""
    owned = {
        # The engine says which backward is a step's last, so k may change from step to step, and
        # nothing divides by k.
        "managed_gradient_accumulation": OwnedKey(True, None),
        "gradient_accumulation_steps": OwnedKey(1, "batch.global_size and batch.micro_size"),
        # for DeepSpeed's own counters only
        "train_micro_batch_size_per_gpu": OwnedKey(micro_size, "batch.micro_size"),
        "train_batch_size": OwnedKey(micro_size * world_size, "batch.global_size"),
        # Always set: DeepSpeed's default has been 1.0 since PR #8068.
        "gradient_clipping": OwnedKey(grad_clip_norm or 0.0, "optim.grad_clip_norm"),
        "zero_optimization.stage": OwnedKey(config.zero_stage, "engine.zero_stage"),
        # it would wait for the device in every forward and step
        "timers.throughput.enabled": OwnedKey(False, None),
        "bf16.enabled": OwnedKey(config.precision == "bf16", "engine.precision"),
        "fp16.enabled": OwnedKey(config.precision == "fp16", "engine.precision"),
        # DeepSpeed's default is the precision of the model.
        "communication_data_type": OwnedKey(config.reduce_dtype, "engine.reduce_dtype"),
        # torch's own AdamW and SGD: exact at every stage
        "zero_allow_untested_optimizer": OwnedKey(True, None),
        # torch.optim on the offloaded state instead of DeepSpeedCPUAdam, which JIT-builds for
        # minutes.
        "zero_force_ds_cpu_optimizer": OwnedKey(False, None),
    }
    if config.precision == "bf16":
        # bf16 accumulation loses 2-3% of the update
        owned["data_types.grad_accum_dtype"] = OwnedKey("fp32", None)
    if config.offload == "optimizer":
        owned["zero_optimization.offload_optimizer.device"] = OwnedKey("cpu", "engine.offload")
    return owned
