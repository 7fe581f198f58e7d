"""DeepSpeed, ZeRO 0 to 3, as an engine. The only module that imports DeepSpeed, and the only one
beside `internals` that knows its flat partitions.

DeepSpeed's own count of micro-batches is not used: each backward says whether it is the last one,
so their number is free. The two factors that DeepSpeed would add are undone here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clip_train import dist
from clip_train.engines import MakeOptimizer
from clip_train.engines.base import LOSS_REMEDY, Engine, Piece
from clip_train.engines.compile import compile_units, units
from clip_train.engines.deepspeed.config import build_ds_config
from clip_train.engines.deepspeed.gradient_order import InOrder
from clip_train.engines.deepspeed.internals import delay_loss_scale, forget_gradients, fragment_of
from clip_train.engines.linear import convert
from clip_train.errors import UserError
from clip_train.optim.optimizer import ALIGNED
from clip_train.task import FragmentSource, Phase

if TYPE_CHECKING:
    from clip_train.engines.config import EngineConfig


def _import_deepspeed() -> Any:
    """Import DeepSpeed quietly, without the C++ extension whose build takes minutes on a CPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # skip the search for other devices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that newer torch deprecates, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not torch.cuda.is_available():
        # A killed build leaves a lock on which every later run hangs; gloo does the same work.
        # (deepspeed.comm.torch as an attribute is torch itself, hence importlib.)
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
    _align_parts(deepspeed)
    return deepspeed


def _align_parts(deepspeed: Any) -> None:
    """At stages 1 and 2 each rank's part of a flat group starts at a multiple of 16 bytes.

    DeepSpeed aligns parts to two elements, so a part of the fp32 masters may start at 8 bytes.
    """
    factor = property(lambda optimizer: ALIGNED, lambda optimizer, value: None)
    for optimizer in (
        deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer,
        deepspeed.runtime.bf16_optimizer.BF16_Optimizer,
    ):
        optimizer.nccl_start_alignment_factor = factor


MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


def build_engine(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None,
    micro_size: int,
) -> DeepSpeedEngine:
    """At stage 3 the model is born partitioned (`zero.Init`). Weights at this point are whatever
    `make_model` drew: load the initial or resumed ones with `load_fragments`, so that they are the
    same at every stage."""
    ds_config = build_ds_config(
        config,
        world_size=dist.world_size(),
        micro_size=micro_size,
        grad_clip_norm=grad_clip_norm,
    )
    deepspeed = _import_deepspeed()
    # from which DeepSpeed takes the device; Slurm sets none
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    # it insists that Open MPI's local rank is the same; a task that sees one GPU alone has device 0
    local_rank = os.environ.pop(MPI_LOCAL_RANK, None)
    deepspeed.init_distributed(
        "nccl" if device.type == "cuda" else "gloo", verbose=False, auto_mpi_discovery=False
    )
    stage = config.zero_stage
    # DeepSpeed prints its memory use during setup, whatever the log level.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            with deepspeed.zero.Init(enabled=stage == 3, config_dict_or_path=ds_config):
                model = make_model()
        except UserError:
            # Towers of transformers write initial values into parameters, which are empty within
            # zero.Init. `initialize` shards a whole model as well, and needs memory for it.
            if stage < 3:
                raise
            model = make_model()
        for name, p in model.named_parameters():
            if len(getattr(p, "ds_shape", p.shape)) == 0 or not p.is_contiguous():
                # DeepSpeed's _broadcast_model views every parameter as bytes, which such a tensor
                # cannot be.
                raise UserError(
                    f"engine.kind (deepspeed) cannot hold the parameter {name}: it is 0-d or not "
                    "contiguous; give it shape [1], and call contiguous() on it"
                )
        if config.linear is not None:
            convert(model, config.linear, emulate=device.type == "cpu")
        if config.compile:
            compile_units(model, config.own_kernels)
            kinds = {type(unit) for unit in units(model)}
            if stage == 3 and kinds:
                # its hooks stay outside the blocks too: within a block each would break the graph
                deepspeed.utils.set_z3_leaf_modules(model, [*kinds])
        optimizer = make_optimizer(model.named_parameters())
        try:
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
        except ValueError as e:
            if "is not registered" not in str(e):
                raise
            raise UserError(
                "engine.kind (deepspeed) trains one run in a process, because DeepSpeed keeps the "
                "process group of the first one: start a process for each run, or set "
                "engine.kind=fsdp"
            ) from e
    if local_rank is not None:
        os.environ[MPI_LOCAL_RANK] = local_rank
    return DeepSpeedEngine(engine, optimizer, device, config, ds_config, grad_clip_norm)


def find_pieces(engine: Any, stage: int) -> Iterator[Piece]:
    """At stages 1 to 3, the fp32 masters are in a few flat tensors, which torch's optimizer
    updates."""
    W, here, wrapper = dist.world_size(), dist.rank(), engine.optimizer
    for i, (name, p) in enumerate(engine.module.named_parameters()):
        if stage and not p.requires_grad:
            # an fp32 copy in the CPU's memory, cut as stage 3 cuts the parameter itself
            shape = tuple(getattr(p, "ds_shape", p.shape))
            padded = -(-math.prod(shape) // W)
            start = min(padded * here, math.prod(shape))
            numel = min(padded, math.prod(shape) - start)
            yield Piece(name, shape, start, numel, torch.zeros(numel))
        elif stage == 0:  # the optimizer works on the parameter itself
            yield Piece(name, tuple(p.shape), 0, p.numel(), p, saved_here=i % W == here)
        elif stage < 3:
            # (also DeepSpeed's BF16_Optimizer) the parameter's fragment of this rank's partition
            mapping = fragment_of(p)
            if mapping is not None:
                flats = (
                    getattr(wrapper, "single_partition_of_fp32_groups", None)
                    or wrapper.fp32_groups_flat_partition
                )
                lp, flat = mapping.lp_fragment_address, flats[mapping.param_group_index]
                yield Piece(
                    name,
                    tuple(p.shape),
                    lp.start,
                    lp.numel,
                    flat,
                    mapping.hp_fragment_address.start,
                )
        else:  # every parameter is cut evenly over the ranks; the last piece is padded
            group, offset, padded = wrapper.grad_position[wrapper.get_param_id(p)]
            start = min(padded * torch.distributed.get_rank(p.ds_process_group), p.ds_numel)
            numel = min(padded, p.ds_numel - start)
            flat = wrapper.fp32_partitioned_groups_flat[group]
            yield Piece(name, tuple(p.ds_shape), start, numel, flat, offset)


def hand_over_gradients(wrapper: Any) -> None:
    """Give the reduced gradients of this rank's partition to torch's optimizer (stages 1 and 2)."""
    if hasattr(wrapper, "fp32_groups_gradient_flat_partition"):  # BF16_Optimizer
        for held, flat in zip(
            wrapper.fp32_groups_flat_partition,
            wrapper.fp32_groups_gradient_flat_partition,
            strict=True,
        ):
            held.grad = flat
        return
    for i, held in enumerate(wrapper.single_partition_of_fp32_groups):
        reduced = wrapper.averaged_gradients[i]
        flat = getattr(reduced, "flat_partition", None)
        if flat is None:  # a list; the last rank's lacks the padding
            flat = wrapper.flatten_dense_tensors_aligned(reduced, held.numel())
        held.grad = flat
        wrapper.averaged_gradients[i] = None


class DeepSpeedEngine(Engine):
    """See `clip_train.engines.base.Engine`."""

    def __init__(
        self,
        engine: Any,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        config: EngineConfig,
        ds_config: dict[str, Any],
        grad_clip_norm: float | None,
    ):
        stage = config.zero_stage
        # Always called through engine(...): engine.module(...) silently loses ZeRO-3's accumulated
        # gradients.
        super().__init__(
            engine,
            optimizer,  # torch's own, which DeepSpeed drives on its flat partitions
            device,
            [*find_pieces(engine, stage)],
            module=engine.module,
            grad_clip_norm=grad_clip_norm,
            low_precision=config.precision != "fp32",
            group=torch.distributed.group.WORLD if stage else None,
        )
        self.engine, self.stage = engine, stage
        self.files = {"ds_config.json": json.dumps(ds_config, indent=2) + "\n"}
        self.offloaded = config.offload == "optimizer"
        # Gradients stay local until `_reduce`: at stages 0 and 1, a rank that fails in a backward
        # must not leave others waiting.
        self.reduce_once = config.reduces_once
        if stage < 2:
            engine.enable_backward_allreduce = False
        # stages 2 and 3: open from a step's first backward to `_reduce`
        self._reduction: contextlib.ExitStack | None = None
        # the same stages, reduced after each backward
        self._in_order: InOrder | None = None
        if stage >= 2 and not self.reduce_once:
            self._in_order = InOrder(engine.module, engine.optimizer)
        # Whether DeepSpeed's own step is avoided, which asks the device for the norm, two to four
        # times. fp16 has to look for an overflow, masters on the CPU wait in any case.
        self.direct = stage < 3 and not engine.fp16_enabled() and not self.offloaded
        self._squares_clipped = torch.zeros(0)
        if not self.direct:
            optimizer.register_step_pre_hook(self._measure)
        elif stage:
            engine.optimizer.step = self._step_directly
        if engine.fp16_enabled():
            self._update_scale = delay_loss_scale(engine.optimizer)

    def _backward(self, total: Tensor, last: bool) -> None:
        if self.stage >= 2 and self.reduce_once and self._reduction is None:
            self._reduction = contextlib.ExitStack()
            self._reduction.enter_context(self.engine.coalesce_grad_reduction())
        self.engine.set_gradient_accumulation_boundary(last)
        # Each rank's gradient is averaged over world_size by the engine: undo it, once, here. Its
        # other factor, the accumulation steps, is switched off.
        self.engine.backward(total * dist.world_size(), scale_wrt_gas=False)
        if self.stage:
            # DeepSpeed does this at the next forward. With retained graphs there is none between
            # two backwards, and ZeRO-3 would overwrite the first one's gradient with the second's,
            # silently.
            self.engine.optimizer.clear_backward_seen_flag()

    def _reduce(self) -> None:
        """Sum over ranks what no backward has summed: once a step, before the host waits."""
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.close()
        elif self._in_order is not None:
            self._in_order.agree()
        elif self.stage < 2:
            self.engine.allreduce_gradients()

    def remedy(self, phase: Phase) -> str | None:
        # collectives within forward and backward, or gradients on their way to the CPU
        stuck = self.stage == 3 or self.offloaded
        alone = phase == "forward pass" or (phase == "backward pass" and self.reduce_once)
        if not stuck and (alone or dist.world_size() == 1):
            return None
        if phase == "loss":
            return LOSS_REMEDY
        once = ", or engine.reduce_gradients=once, which lets the run continue" if not stuck else ""
        return f"Set a smaller batch.micro_size, or a lower batch.memory_limit if it is auto{once}"

    def discard_gradients(self) -> None:
        self.engine.zero_grad()
        if self._in_order is not None:
            self._in_order.forget()
        if self.stage:
            forget_gradients(self.engine.optimizer)
            if self._reduction is not None:
                self._reduce()  # no gradient is left
                forget_gradients(self.engine.optimizer)
        if self.direct:
            super().discard_gradients()

    @torch.no_grad()
    def _sum_and_clip(self, flags: Tensor) -> tuple[Tensor, Tensor]:
        self._reduce()
        if not self.direct:  # the rest is done in DeepSpeed's step
            return torch.zeros(0, device=self.device), dist.all_reduce_sum(flags)
        if self.stage == 0:
            return self._clip(self._squares()), dist.all_reduce_sum(flags)
        hand_over_gradients(self.engine.optimizer)
        return self._clip_with_flags(self._squares(), flags)

    def _step_directly(self, closure: None = None) -> None:
        """Replaces the step of DeepSpeed's ZeRO optimizer; `engine.step` calls it."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.engine.optimizer.update_lp_params()

    @torch.no_grad()
    def _measure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called for each flat tensor that DeepSpeed updates. Its gradient is clipped already."""
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        self._squares_clipped = self._squares_clipped + self._squares(stepped).to(self.device)

    def _update(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, bool]:
        self._squares_clipped = torch.zeros(
            len(self._by_group), dtype=torch.float64, device=self.device
        )
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        if self.direct:
            self.discard_gradients()
            return self._squares_clipped, False
        # DeepSpeed sets `overflow` for any norm that is not finite; only fp16 has a loss scale to
        # lower.
        skipped = self.engine.fp16_enabled() and bool(self.engine.optimizer.overflow)
        if self.engine.fp16_enabled() and not skipped:
            self._update_scale(False)  # for the next step
        norm = self.engine.get_global_grad_norm()
        norm = torch.as_tensor(norm, dtype=torch.float64, device=self.device).view(1)
        # The gradients are clipped, so their squares only give each group's fraction of the norm.
        squares = dist.all_reduce_sum(self._squares_clipped)
        shares = squares / squares.sum().clamp(min=1e-300)
        return torch.cat([norm, norm * shares.sqrt()]), skipped

    def _bounded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The masters, and the model's copies: the next step would undo a change of these alone."""
        yield from super()._bounded_tensors()
        for name in self.task.bounds:
            p = self.module.get_parameter(name)
            if not p.requires_grad:
                continue
            if self.stage == 3:
                yield name, p.ds_tensor  # this rank's part
            # at stage 3 it may be below the persistence threshold, and stays gathered
            yield name, p.data

    def _copies(self) -> Iterator[tuple[str, Tensor]]:
        """Frozen ones at stages 1 and 2, which no optimizer step would gather."""
        named = self.module.named_parameters() if self.stage in (1, 2) else ()
        return ((name, p.data) for name, p in named if not p.requires_grad)

    @torch.no_grad()
    def _masters_changed(self) -> None:
        """As at the end of DeepSpeed's own steps."""
        wrapper = self.engine.optimizer
        if self.stage in (1, 2):
            wrapper.update_lp_params()
        elif self.stage == 3:
            wrapper.parameter_offload.partition_all_parameters()
            for piece in self.pieces:  # this rank's part of the model's own weights
                self.module.get_parameter(piece.name).ds_tensor.narrow(0, 0, piece.numel).copy_(
                    piece.view(piece.held)
                )
            if wrapper.persistent_parameters:  # small ones, which stay gathered
                wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
        super()._masters_changed()

    def load_fragments(
        self, source: FragmentSource, extra: dict[str, Any], *, new_optimizer: bool = False
    ) -> None:
        super().load_fragments(source, extra, new_optimizer=new_optimizer)
        if self.engine.fp16_enabled():
            vars(self.engine.optimizer.loss_scaler).update(extra.get("loss_scaler", {}))

    def extra_state(self) -> dict[str, Any]:
        out = super().extra_state()
        if self.engine.fp16_enabled() and self.engine.dynamic_loss_scale():
            out["loss_scaler"] = {
                key: getattr(self.engine.optimizer.loss_scaler, key)
                for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
            }
        return out

    def close(self) -> None:
        """Free DeepSpeed's hooks and buffers."""
        self.engine.destroy()
