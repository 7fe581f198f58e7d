"""The Engine protocol on FSDP2 (`torch.distributed.fsdp.fully_shard`), torch 2.13.

One class covers all ways to hold a model, by two numbers: among how many ranks a copy of it is shared out (all of
them, a node's, or 1, which is data parallelism), and whether the whole parameters of a unit are given back after its
forward (`engine.zero_stage: 3`) or with the step's last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from clip_train import dist
from clip_train.errors import UserError
from clip_train.plain_engine import LOSS_REMEDY, MAX_LOGIT_SCALE, start_state, surrogate
from clip_train.protocols import (
    FeatureGradients,
    Features,
    Fragment,
    FragmentSource,
    Phase,
    StepReport,
    Wanted,
)
from launcher.engines import MakeOptimizer
from launcher.engines.compile import compile_units, units
from launcher.engines.config import EngineConfig
from launcher.engines.fsdp.shards import find_shards, flat
from launcher.engines.towers import SCALARS, Towers

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def build_engine(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None = None,
) -> FSDPEngine:
    """The weights are garbage until `load_fragments`: no rank ever holds the whole model."""
    W = dist.world_size()
    ranks = 1 if config.zero_stage == 0 else config.shard_ranks or W
    with torch.device("meta"):
        model = make_model()
    _refuse_parameters(model)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload == "optimizer" else OffloadPolicy()
    sharding: dict[str, Any] = {
        "mesh": make_mesh(device.type, W, ranks),
        "reshard_after_forward": config.zero_stage == 3,  # said for the root too, which would else stay whole
        # fp32 sums of bf16 gradients, between micro-batches and between ranks. No cast of inputs or outputs: the
        # model casts its pixels itself, and its features are fp32 on purpose.
        "mp_policy": MixedPrecisionPolicy(PRECISIONS[config.precision], torch.float32, cast_forward_inputs=False),
        "offload_policy": offload,
    }
    if config.compile:
        compile_units(model)
    for unit in units(model):
        fully_shard(unit, **sharding)
    fully_shard(model, **sharding)  # in place: a module gains FSDPModule as a base
    for module in fsdp_modules(model):  # shares of a sum: nothing is averaged
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else PREMUL_SUM, which only NCCL knows
    model.to_empty(device="cpu" if config.offload == "optimizer" else device)
    optimizer = make_optimizer(model.named_parameters())
    return FSDPEngine(cast(FSDPModule, model), optimizer, device, config, grad_clip_norm)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _refuse_parameters(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    shared = sorted({name for name, _ in model.named_parameters(remove_duplicate=False)} - set(names))
    if shared:
        raise UserError(f"engine.kind (fsdp) cannot hold the shared parameter {shared[0]}; set engine.kind=deepspeed")
    for name, p in model.named_parameters():
        if p.ndim == 0:
            raise UserError(f"engine.kind (fsdp) cannot hold the parameter {name}: it is 0-d; give it shape [1]")


def make_mesh(device_type: str, W: int, ranks: int) -> DeviceMesh:
    if ranks == W:
        return init_device_mesh(device_type, (W,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (W // ranks, ranks), mesh_dim_names=("replicate", "shard"))


class FSDPEngine(Towers):
    """See `clip_train.protocols.Engine`."""

    def __init__(
        self,
        model: FSDPModule,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        config: EngineConfig,
        grad_clip_norm: float | None,
    ) -> None:
        super().__init__(model)
        self.model, self.optimizer, self.device, self.config = model, optimizer, device, config
        self.module = cast(nn.Module, model)
        self.grad_clip_norm = grad_clip_norm
        # Taken now and kept: while a unit is whole, named_parameters() gives its plain low-precision copies.
        self.shards = find_shards(self.module)
        self.optimizer_steps = 0
        self.reduce_once = config.zero_stage < 2 or config.reduce_gradients == "once"
        self._reduced = False  # the step's last backward has been seen

    # -- computing ----------------------------------------------------------------------------------------

    def backward(self, features: Features, gradients: FeatureGradients, last: bool) -> None:
        """last: no other backward comes before `step`, which refuses gradients that were not reduced."""
        self._reduced = last
        self.model.set_requires_gradient_sync(last or not self.reduce_once)
        self.model.set_requires_all_reduce(last)  # between copies (2-d mesh): shards are summed first
        self.model.set_is_last_backward(last)  # prefetching goes on from graph to graph until then
        if self.config.zero_stage < 3:
            self.model.set_reshard_after_backward(last)  # one all-gather a step, however many micro-batches
        surrogate(features, gradients).backward()

    def recovers(self, phase: Phase) -> bool:
        return dist.world_size() == 1  # collectives in forward and backward

    def remedy(self, phase: Phase) -> str:
        return LOSS_REMEDY if phase == "loss" else "Set a smaller batch.micro_size"

    def discard_gradients(self) -> None:
        self.model.reset_iter_state()  # an interrupted forward or backward is over, units are sharded
        for group in self._param_groups():
            for p in group.fsdp_params:  # reset_iter_state() leaves what earlier backwards have summed
                p.unsharded_accumulated_grad = None
                if hasattr(p, "_unsharded_param"):
                    p._unsharded_param.grad = None
        self.optimizer.zero_grad(set_to_none=True)

    def _param_groups(self) -> Iterator[Any]:
        """Private: torch 2.13 has no public way to forget gradients that were not reduced yet."""
        for module in fsdp_modules(self.module):
            yield from module._get_fsdp_state()._fsdp_param_groups

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        """The global norm, in one all-reduce. torch's own clip multiplies DTensors by a DTensor."""
        gradients = [flat(s.parameter.grad) for s in self.shards if s.parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1, device=self.device)
        squares = norms.double().square().sum()
        mesh = cast(DTensor, self.shards[0].parameter).device_mesh
        torch.distributed.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        norm = squares.sqrt()
        if self.grad_clip_norm is not None and gradients:
            torch._foreach_mul_(gradients, (self.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0).float())
        return norm

    def step(self, lr: float) -> StepReport:
        if not self._reduced:
            raise RuntimeError("a gradient was not reduced: the step's last backward was not called with last=True")
        norm = self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for shard in self.shards:
            if shard.name == "logit_scale":
                shard.local.clamp_(0, MAX_LOGIT_SCALE)  # no other copy: the next forward gathers it
        self.optimizer_steps += 1
        self._reduced = False
        self._read_scalars()
        return StepReport(norm.item())

    def _read_scalars(self) -> None:
        if self.config.precision != "fp32":
            held = [shard for shard in self.shards if shard.name in SCALARS]
            self.set_masters({s.name: cast(DTensor, s.parameter).full_tensor().to(self.device) for s in held})

    # -- saving and loading -------------------------------------------------------------------------------

    def state_fragments(self) -> Iterator[Fragment]:
        for shard in self.shards:
            if shard.saved_here and shard.local.numel():
                yield Fragment(shard.name, shard.shape, shard.start, shard.tensors(self.optimizer))

    @torch.no_grad()
    def load_fragments(self, source: FragmentSource, extra: dict[str, Any]) -> None:
        for module in fsdp_modules(self.module):
            module.reshard()  # after an evaluation, or at stages below 3, whole copies would outlive the load
        self.optimizer_steps = int(extra.get("optimizer_steps", 0))
        slots = source.slots() - {"param"}
        for shard in self.shards if slots else ():
            start_state(self.optimizer, shard.parameter, slots, self.optimizer_steps)
        wanted = [(s, slot) for s in self.shards if s.local.numel() for slot in ("param", *sorted(slots))]
        source.prepare(Wanted(s.name, slot, s.start, s.local.numel()) for s, slot in wanted)
        for s, slot in wanted:
            s.tensors(self.optimizer)[slot].copy_(source.read(s.name, slot, s.start, s.local.numel()))
        self._read_scalars()

    def extra_state(self) -> dict[str, Any]:
        return {"optimizer_steps": self.optimizer_steps}

    def close(self) -> None:
        """Nothing to free."""
