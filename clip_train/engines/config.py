"""The `engine` section of a recipe, the same for every engine. Each engine's package rejects values
that it does not support."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from clip_train.settings import (
    Layout,
    Messages,
    Place,
    Recompute,
    Rounding,
    Settings,
    broken,
    is_installed,
    rule,
)

if TYPE_CHECKING:  # a recipe is read without torch
    import torch
    from torch import nn

    from clip_train.engines import EnginePackage, MakeOptimizer
    from clip_train.engines.base import Engine


KINDS = ("deepspeed", "fsdp", "plain")  # the values of `engine.kind`, but for `auto`


class EngineConfig(Settings):
    """The `engine` section: how the model is sharded and computed. It never changes the result
    beyond rounding."""

    kind: Annotated[Literal["auto", "deepspeed", "fsdp", "plain"], Layout] = "auto"
    """The engine: DeepSpeed's ZeRO, PyTorch's own FSDP2, or plain: torch alone, without sharding. A
    checkpoint of one continues under the others. auto: plain on one GPU; FSDP on several, because
    it sends gradients while the backward still computes; DeepSpeed for fp16, for engine.ds_config
    and on CPUs."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], Layout] = 1
    """Sharded over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
    With engine.kind=fsdp, 0 is plain data parallelism, 1 and 2 keep whole parameters
    from a step's first forward to its last backward, and 3 frees them after each forward. Master
    weights, moments and reduced gradients are sharded at 1, 2 and 3."""
    shard_ranks: Annotated[Annotated[int, Field(ge=1)] | None, Layout] = None
    """With engine.kind=fsdp: the number of ranks that one replica of the model is sharded across,
    such as those of a node. It must divide the number of ranks. null: all ranks. With
    engine.kind=auto and several nodes of GPUs, null means the ranks of one node, so that only sums
    of shards cross the network."""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], Layout] = "auto"
    """The precision of the model's arithmetic. Master weights, moments, features and the loss are
    always fp32. auto: bf16 on GPUs that compute in it, else fp32. fp16 on a CPU needs AVX512-FP16
    or AMX-FP16, and fp16 with engine.kind=fsdp is refused."""
    matmul: Annotated[Literal["highest", "tf32"], Rounding] = "highest"
    """How GPUs multiply the model's fp32 matrices: in full fp32, or with factors rounded to 11 bits
    (TF32): products are 7 times as fast. The loss has its own key (loss.matmul); CPUs, bf16 and
    fp16 are unaffected."""
    linear: Literal["int8", "fp8"] | None = None
    """How GPUs multiply in linear layers. null: in engine.precision. int8 or fp8: factors are
    rounded to 8 bits, each row with its own scale, from bf16 activations. With
    `pip install 'clip-train[torchao]'`; int8 needs an A100, fp8 an H100."""
    activation_checkpointing: Annotated[bool | Literal["pointwise", "auto"], Rounding] = False
    """Recompute activations in the backward. true: those of every block, for a quarter more
    arithmetic and a fraction of the memory. pointwise: only the outputs of GELU and of the norms in
    clip-train's own models, for a few percent more time and about five eighths of the memory, so
    that more graphs can be retained. auto: what is fastest within the memory that there is (see
    batch.memory_limit)."""
    offload: Annotated[Literal["none", "optimizer"], Rounding] = "none"
    """optimizer: keep master weights and moments in the CPU's memory (stages 1-3)."""
    reduce_gradients: Annotated[Literal["once", "each_backward"], Rounding] = "each_backward"
    """Stages 2 and 3. each_backward: reduce after each micro-batch; a rank holds one shard and
    sends k times. once: reduce once per step; every rank holds a whole gradient until then. Stages
    0 and 1 always do it once."""
    reduce_dtype: Annotated[Literal["fp32", "bf16"], Rounding] = "fp32"
    """The type in which ranks send and sum gradients. bf16, with engine.precision bf16 only: half
    the bytes, and a sum whose error grows with the number of ranks (4e-3 at 8, 2e-2 at 512). If
    precision auto becomes fp32 (on a CPU), this becomes fp32 too."""
    compile: Annotated[bool | Literal["auto"], Rounding] = "auto"
    """torch.compile each block of both towers (inductor), on every engine. auto: on GPUs, where
    Triton and a C compiler are installed."""
    own_kernels: Annotated[bool, Rounding] = False
    """With engine.compile on GPUs, in clip-train's own models without dropout: compute the gradients
    of norms, GELU and biases in one pass each, by Triton kernels of clip-train's own. They move 30%
    fewer bytes, and were 3% slower on an H200."""
    pack_texts: Annotated[bool, Rounding] = True
    """Compute texts without their padding. Texts stay padded with engine.linear, for models that
    are not clip-train's own, and where the text tower (or a teacher's) reads more than a text up to
    its end. The log then says why."""
    deterministic: Annotated[bool, Rounding] = False
    """On GPUs: the same bits in each run on the same GPUs and versions, at a cost in speed. PyTorch
    uses algorithms without atomics, also in attention, and raises an error for an operator that has
    none; NCCL sums in one order (a ring). docs/numerics.md describes the guarantees without it."""
    ds_config: Place | None = None
    """With engine.kind=deepspeed: a base JSON, a path or a name in ds_configs/. null:
    ds_configs/zero<stage>.json."""

    @rule
    def _sums_in_bf16(self) -> Messages:
        if self.reduce_dtype == "bf16" and self.precision in ("fp32", "fp16"):
            yield (
                "engine.reduce_dtype (bf16) needs engine.precision bf16 (it is "
                f"{self.precision}): set engine.precision=bf16, or engine.reduce_dtype=fp32"
            )

    @rule
    def _offload_needs_shards(self) -> Messages:
        if self.zero_stage == 0 and self.offload != "none":
            yield f"engine.offload ({self.offload}) needs engine.zero_stage 1, 2 or 3 (it is 0)"

    @property
    def recompute(self) -> Recompute:
        """Activations that the backward computes again. `auto` that nothing has decided counts as
        whole blocks."""
        chosen = self.activation_checkpointing
        return True if chosen == "auto" else chosen

    @property
    def reduces_once(self) -> bool:
        """Whether ranks sum the gradients once per step, not after each micro-batch."""
        return self.zero_stage < 2 or self.reduce_gradients == "once"

    def on(
        self, bf16: bool, gpus: int = 0, per_node: int = 8, compiles: bool = False
    ) -> EngineConfig:
        """With values in place of `auto`, and sums that follow them.

        bf16: whether the devices are GPUs that compute in it. gpus: the ranks, if each has one.
        per_node: how many of them a node has. compiles: whether inductor works on the devices.
        """
        chosen: dict[str, Any] = {}
        if self.compile == "auto":
            chosen["compile"] = compiles
        if self.precision == "auto":
            chosen |= (
                {"precision": "bf16"} if bf16 else {"precision": "fp32", "reduce_dtype": "fp32"}
            )
        if self.kind == "auto":
            fsdp = gpus > 1 and self.precision != "fp16" and self.ds_config is None
            chosen["kind"] = self._engine_for(gpus)
            within_nodes = self.zero_stage > 0 and gpus > per_node > 1 and gpus % per_node == 0
            if fsdp and within_nodes and self.shard_ranks is None:
                chosen["shard_ranks"] = per_node
        return self.model_copy(update=chosen)

    def _engine_for(self, gpus: int) -> str:
        """The engine that `auto` takes."""
        if self.shard_ranks is not None:
            return "fsdp"
        if gpus == 0 or self.precision == "fp16" or self.ds_config is not None:
            return "deepspeed"
        if gpus == 1:
            return "plain" if self.offload == "none" else "deepspeed"
        return "fsdp"

    def on_this_machine(self, world_size: int, per_node: int = 8) -> EngineConfig:
        """With values for `auto`, for this many ranks, `per_node` on each node, with devices like
        this machine's."""
        import torch

        if not torch.cuda.is_available():
            return self.on(bf16=False)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        triton = is_installed("triton") and torch.cuda.get_device_capability() >= (7, 0)
        compilers = (os.environ.get("CC", "cc"), "gcc", "clang")  # for the launchers of its kernels
        compiles = triton and any(map(shutil.which, compilers))
        return self.on(bf16, world_size, per_node, compiles)

    def mistakes_here(self) -> list[str]:
        """What this machine lacks for the section, which has values for `auto`."""
        import torch

        from clip_train.engines import linear
        from clip_train.torch_internals import computes_fp16

        gpu = torch.cuda.is_available()
        no_fp16 = (
            self.precision == "fp16" and not gpu and not computes_fp16(),
            "engine.precision (fp16) needs a GPU, or a CPU with AVX512-FP16 or AMX-FP16, and this "
            "CPU has neither: set engine.precision=bf16 or fp32",
        )
        return [*linear.mistakes_here(self), *broken([no_fp16])]

    @property
    def package(self) -> EnginePackage:
        """The package of the engine that `kind` names, which is not `auto` any more."""
        from clip_train.engines import deepspeed, fsdp, plain

        packages: dict[str, EnginePackage] = {"deepspeed": deepspeed, "fsdp": fsdp, "plain": plain}
        return packages[self.kind]

    def build(
        self,
        make_model: Callable[[], nn.Module],
        make_optimizer: MakeOptimizer,
        *,
        device: torch.device,
        grad_clip_norm: float | None = None,
        micro_size: int = 1,
    ) -> Engine:
        """The engine around `make_model()`, on every rank. Collective.

        The weights are those drawn by `make_model`, or undefined; `Engine.load_fragments` sets
        them. grad_clip_norm: the largest global norm; None: no clipping. micro_size: samples of a
        forward, for DeepSpeed's own counters. UserError for a model that the engine cannot hold.
        """
        import torch

        from clip_train import dist
        from clip_train.engines.compile import towers_without_units

        if device.type == "cuda":
            config = self.on_this_machine(dist.world_size())
        else:
            config = self.on(bf16=False)
        tf32 = config.matmul == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32  # convolutions: torch's own default is TF32
        if config.deterministic:  # inductor's choices too
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            # no empty tensors are filled, which finds bugs and costs time
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        engine = config.package.build(
            config,
            make_model,
            make_optimizer,
            device=device,
            grad_clip_norm=grad_clip_norm,
            micro_size=micro_size,
        )
        effects = []
        if config.kind == "fsdp" and config.zero_stage > 0:
            effects.append("one unit of FSDP's")
        if config.compile:
            effects.append("not compiled")
        if effects:
            engine.notes = [
                f"no blocks repeat in the {tower} tower ({count:,} parameters): it is "
                f"{' and '.join(effects)}"
                for tower, count in towers_without_units(engine.module, engine.task).items()
            ]
        return engine


def describe_sharding(engine: Mapping[str, Any]) -> str:
    """A short description of how the model is sharded. engine: the section's values, also those of
    a checkpoint."""
    kind = engine.get("kind", "deepspeed")  # the default of early checkpoints
    if kind == "plain":
        return "plain torch"
    groups = f" in groups of {engine['shard_ranks']}" if engine.get("shard_ranks") else ""
    return f"{'FSDP' if kind == 'fsdp' else 'ZeRO'} {engine.get('zero_stage')}{groups}"
