"""PyTorch's FSDP2 as an engine: what it refuses and needs. `engine` has the engine itself."""

from clip_train.memory.plan import Memory
from clip_train.settings import broken
from launcher.engines import EngineKind, Facts, linear
from launcher.engines.config import EngineConfig


class FSDPKind(EngineKind):
    name = "FSDP"
    module = "launcher.engines.fsdp.engine"

    def mistakes(self, config: EngineConfig, facts: Facts) -> list[str]:
        W, stage, ranks = facts.world_size, config.zero_stage, config.shard_ranks
        name, needs = facts.optimizer
        divisors = [str(n) for n in range(1, W + 1) if W % n == 0]
        rules = [
            linear.rule(config),
            (
                config.precision == "fp16",
                "engine.precision (fp16) has no loss scaling with engine.kind=fsdp: use "
                "engine.precision=bf16, or engine.kind=deepspeed",
            ),
            (
                config.reduce_dtype == "bf16" and (stage < 2 or config.reduce_gradients == "once"),
                "engine.reduce_dtype (bf16) would also add up the micro-batches in bf16 where "
                "engine.kind=fsdp reduces once per step: set engine.reduce_dtype=fp32, or "
                "engine.zero_stage=2 with engine.reduce_gradients=each_backward",
            ),
            (
                config.ds_config is not None,
                f"engine.ds_config ({config.ds_config}) is not for engine.kind=fsdp: take it out, "
                "or set engine.kind=deepspeed",
            ),
            (
                W % (ranks or 1) != 0,
                f"engine.shard_ranks ({ranks}) must divide the number of ranks ({W}): one of "
                f"{', '.join(divisors)}, or null",
            ),
            (
                ranks not in (None, 1) and stage == 0,
                f"engine.shard_ranks ({ranks}) shards what engine.zero_stage 0 keeps whole: set "
                "engine.zero_stage=1, or engine.shard_ranks=null",
            ),
            (
                needs == "parameters" and stage > 0 and (ranks or W) > 1,
                f"optim.name ({name}) needs whole parameters, which engine.zero_stage {stage} "
                f"shards across {ranks or W} ranks: set engine.zero_stage=0, or "
                "engine.shard_ranks=1",
            ),
        ]
        return broken(rules)

    def memory(
        self, config: EngineConfig, P: int, trained: int, moment_bytes: int, world_size: int
    ) -> Memory:
        """Masters, moments and reduced gradients are fp32 and sharded; the rest comes on top.

        Frozen parameters have masters only.
        """
        S = 1 if config.zero_stage == 0 else config.shard_ranks or world_size
        word = 4 if config.precision == "fp32" else 2
        whole = S > 1 or word < 4  # a copy beside the masters, in the model's precision
        once = config.zero_stage < 2 or config.reduce_gradients == "once"
        offloaded = config.offload == "optimizer"
        return Memory(
            parameters=word * P if whole and config.zero_stage < 3 else 0.0,
            gradients=4 * trained / S + (4 * trained if once and S > 1 else 0),
            optimizer=0.0 if offloaded else (4 * P + moment_bytes * trained) / S,
            buffers=0.0,
        )
