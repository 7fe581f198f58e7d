"""FSDP2 (`torch.distributed.fsdp.fully_shard`) as an engine.

One class covers all layouts of a model by two settings. The first is the number of ranks that a
replica is sharded across: all, those of a node, or 1, which is data parallelism. The second is
whether a unit's whole parameters are freed after its forward (`engine.zero_stage: 3`) or with the
step's last backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from clip_train import dist
from clip_train.engines import MakeOptimizer
from clip_train.engines.base import LOSS_REMEDY, Engine, Piece, local
from clip_train.engines.compile import compile_units, towers_without_units, units
from clip_train.engines.linear import convert
from clip_train.errors import UserError
from clip_train.models.drawing import fill_buffers
from clip_train.task import Phase
from clip_train.torch_internals import discard_unreduced

if TYPE_CHECKING:
    from clip_train.engines.config import EngineConfig

# Parameters of a tower without blocks that stage 3 still accepts: 32 MB in bf16.
LARGEST_WHOLE = 1 << 24


def build_engine(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None,
) -> FSDPEngine:
    """The weights are garbage until `load_fragments`: no rank ever holds the whole model."""
    W = dist.world_size()
    ranks = 1 if config.zero_stage == 0 else config.shard_ranks or W
    with torch.device("meta"):
        model = make_model()
    _refuse(model, config.zero_stage)
    if config.linear is not None:
        convert(model, config.linear, emulate=device.type == "cpu")
    copies: dict[str, int] = (
        {"shard": W} if ranks == W else {"replicate": W // ranks, "shard": ranks}
    )
    sharding: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, tuple(copies.values()), mesh_dim_names=tuple(copies)),
        "reshard_after_forward": config.zero_stage
        == 3,  # set for the root too, which would otherwise stay whole
        # fp32 sums of bf16 gradients by default, over micro-batches and ranks. No cast of inputs or
        # outputs: the model casts its pixels itself, and its features are fp32 on purpose.
        "mp_policy": MixedPrecisionPolicy(
            torch.bfloat16 if config.precision == "bf16" else None,
            torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(device.type == "cuda")
        if config.offload == "optimizer"
        else OffloadPolicy(),
    }
    if config.compile:
        compile_units(model, config.own_kernels)
    for unit in units(model):
        fully_shard(unit, **sharding)
    fully_shard(model, **sharding)  # in place: a module gains FSDPModule as a base
    for module in fsdp_modules(model):  # shares of a sum: nothing is averaged
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else PREMUL_SUM, which only NCCL knows
    model.to_empty(device="cpu" if config.offload == "optimizer" else device)
    fill_buffers(model, make_model)
    # FSDP registers the new tensors now (by a hook of its own) and moves no shard afterwards.
    model.load_state_dict({}, strict=False)
    optimizer = make_optimizer(model.named_parameters())
    shards = local_shards(model, optimizer)
    return FSDPEngine(model, optimizer, device, config, grad_clip_norm, shards)


def local_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, nn.Parameter]:
    """Parameter -> this rank's rows of it, in the same memory, on which `optimizer` works from now.

    Otherwise torch would wrap each DTensor again in every step while the device waits: 8 ms for
    ViT-B/32."""
    shards = {p: nn.Parameter(local(p), requires_grad=p.requires_grad) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [shards[p] for p in group["params"]]
    return shards


def aligned(gradient: Tensor) -> Tensor:
    """A gradient is a part of the tensor that a unit's reduction returned. After an odd size it may
    start anywhere in it; kernels want multiples of 16 bytes."""
    offset = gradient.storage_offset() * gradient.element_size()
    return gradient if offset % 16 == 0 else gradient.clone()


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _refuse(model: nn.Module, stage: int) -> None:
    """UserError for a model that FSDP cannot hold."""
    names = [name for name, _ in model.named_parameters()]
    shared = sorted(
        {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(names)
    )
    if shared:
        raise UserError(
            f"engine.kind (fsdp) cannot hold the shared parameter {shared[0]}; set "
            "engine.kind=deepspeed"
        )
    for name, p in model.named_parameters():
        if p.ndim == 0:
            raise UserError(
                f"engine.kind (fsdp) cannot hold the parameter {name}: it is 0-d; give it shape [1]"
            )
    for tower, count in towers_without_units(model, Engine.task).items():
        if stage == 3 and count > LARGEST_WHOLE:
            raise UserError(
                f"engine.zero_stage (3) with engine.kind=fsdp shards the blocks that repeat in a "
                f"model, and none repeat in the {tower} tower: all ranks would gather all its "
                f"{count:,} parameters at once; set engine.zero_stage=2, or engine.kind=deepspeed"
            )


def find_pieces(model: nn.Module, shards: dict[nn.Parameter, nn.Parameter]) -> list[Piece]:
    """Dim 0 is cut as torch.chunk cuts it: ceil(rows / ranks) rows each, the last ranks fewer or
    none. shards: `local_shards`."""
    out: list[Piece] = []
    for name, p in model.named_parameters():
        mesh = cast(DTensor, p).device_mesh
        ranks, here = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        row = math.prod(p.shape[1:])
        start = min(-(-p.shape[0] // ranks) * here, p.shape[0]) * row
        copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
        saved_here = len(out) % copies == copy
        out.append(
            Piece(name, tuple(p.shape), start, local(p).numel(), shards[p], saved_here=saved_here)
        )
    return out


class FSDPEngine(Engine):
    """See `clip_train.engines.base.Engine`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        config: EngineConfig,
        grad_clip_norm: float | None,
        shards: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        self.mesh = cast(DTensor, next(model.parameters())).device_mesh
        super().__init__(
            model,
            optimizer,
            device,
            find_pieces(
                model,
                # now: while a unit is whole, named_parameters() gives its low-precision copies
                shards,
            ),
            module=model,
            grad_clip_norm=grad_clip_norm,
            low_precision=config.precision != "fp32",
            group=self.mesh.get_group(self.mesh.ndim - 1),
        )
        self.stage = config.zero_stage
        self.shards = shards
        self.reduce_once = config.reduces_once

    def _backward(self, total: Tensor, last: bool) -> None:
        model = cast(FSDPModule, self.model)
        model.set_requires_gradient_sync(last or not self.reduce_once)
        model.set_requires_all_reduce(last)  # between copies (2-d mesh): shards are summed first
        model.set_is_last_backward(last)  # prefetching continues from graph to graph until then
        if self.stage < 3:
            model.set_reshard_after_backward(
                last
            )  # one all-gather a step, however many micro-batches
        total.backward()

    def remedy(self, phase: Phase) -> str | None:
        if dist.world_size() == 1:
            return None
        return (
            LOSS_REMEDY if phase == "loss" else "Set a smaller batch.micro_size, or auto"
        )  # collectives in all of them

    def discard_gradients(self) -> None:
        # Ends an interrupted forward or backward, and shards every unit again.
        cast(FSDPModule, self.model).reset_iter_state()
        for module in fsdp_modules(self.module):
            discard_unreduced(module)
        self.module.zero_grad()
        super().discard_gradients()

    @torch.no_grad()
    def _sum_and_clip(self, flags: Tensor) -> tuple[Tensor, Tensor]:
        for p, shard in self.shards.items():
            shard.grad = None if p.grad is None else aligned(local(p.grad))
            p.grad = None
        squares = self._squares()  # of gradients that FSDP has summed in the last backward
        if self.mesh.ndim == 2 and self.mesh.get_local_rank(
            0
        ):  # another copy of the model counts them
            squares.zero_()
        return self._clip_with_flags(squares, flags)

    def _masters_changed(self) -> None:
        for module in fsdp_modules(self.module):
            # after an evaluation, or at stages below 3, whole copies would outlive the change
            module.reshard()
        super()._masters_changed()
