"""The Engine protocol on DeepSpeed, ZeRO 0 to 3. The only module that imports DeepSpeed.

DeepSpeed's own accumulation is switched off (`config.py`): `backward` only accumulates, `step` is
the boundary, so the number of micro-batches is free. The two factors it would add are undone here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

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
from launcher.engines.compile import compile_units, units
from launcher.engines.deepspeed.shards import OwnedSlice, owned_slices
from launcher.engines.towers import SCALARS, Towers


def _import_deepspeed() -> Any:
    """DeepSpeed, quiet, and without the C++ extension that it would build on a CPU for minutes."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would look for other makers' devices
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
    return deepspeed


def supported_precisions() -> list[str]:
    """Of engine.precision's, those that DeepSpeed takes on this machine's devices: it asks the processor for fp16."""
    accelerator = _import_deepspeed().accelerator.get_accelerator()
    asked = {"bf16": accelerator.is_bf16_supported, "fp16": accelerator.is_fp16_supported}
    return ["fp32", *(precision for precision, supported in asked.items() if supported())]


def build_engine(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    ds_config: dict[str, Any],
    *,
    device: torch.device,
    compile: bool = False,
) -> DeepSpeedEngine:
    """A DeepSpeed engine around `make_model()`; at stage 3 the model is born partitioned (`zero.Init`).

    `make_optimizer` takes (name, parameter) pairs. Weights at this point are whatever `make_model` drew:
    load the initial or resumed ones with `load_fragments`, so that they are the same at every stage.
    """
    deepspeed = _import_deepspeed()
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # from which it takes the device; Slurm sets none
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(backend, verbose=False, auto_mpi_discovery=False)
    stage = ds_config["zero_optimization"]["stage"]
    # DeepSpeed prints its memory use while it sets up, whatever the log level: nobody needs it.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with deepspeed.zero.Init(enabled=stage == 3, config_dict_or_path=ds_config):
            model = make_model()
        _refuse_scalars(model)
        if compile:
            compile_units(model)
            if stage == 3 and (kinds := {type(unit) for unit in units(model)}):
                # its hooks outside of the blocks too, for within them each would break the graph
                deepspeed.utils.set_z3_leaf_modules(model, [*kinds])
        optimizer = make_optimizer(model.named_parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    return DeepSpeedEngine(engine, optimizer, device, stage, reduce_once=ds_config["managed_gradient_accumulation"])


def _refuse_scalars(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if len(getattr(p, "ds_shape", p.shape)) == 0 or not p.is_contiguous():
            # DeepSpeed's _broadcast_model views every parameter as bytes, which such a tensor cannot be.
            raise UserError(
                f"engine.kind (deepspeed) cannot hold the parameter {name}: it is 0-d or not contiguous; give it shape "
                "[1], and call contiguous() on it"
            )


def forget_gradients(optimizer: Any) -> None:
    """Return a ZeRO optimizer to where a step begins; of stage 1 or 2 also from the midst of a backward.

    DeepSpeed has nothing for this: its own clearing after an overflow expects whole backwards.
    """
    optimizer.zero_grad(set_to_none=True)
    if hasattr(optimizer, "extra_large_param_to_reduce"):  # stages 1 and 2, but for BF16_Optimizer
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in held:
                held[group] = None
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1
    state = optimizer._backward_hook_state
    state.backward_active_depth = 0  # an interrupted backward has not left
    state.remaining_grad_acc_hooks = 0
    state.reset_for_new_step()


class DeepSpeedEngine(Towers):
    """See `clip_train.protocols.Engine`."""

    def __init__(
        self,
        engine: Any,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        stage: int,
        reduce_once: bool = False,
    ):
        # Always called through engine(...): engine.module(...) silently loses ZeRO-3's accumulated gradients.
        super().__init__(engine)
        self.engine = engine
        self.optimizer = optimizer  # torch's own, which DeepSpeed drives on its flat partitions
        self.device = device
        self.stage = stage
        self.optimizer_steps = 0
        self.offloaded = stage > 0 and bool(engine.zero_offload_optimizer())
        self.reduce_once = reduce_once  # stages 2 and 3: gradients stay local until `step`
        self._reduction: contextlib.ExitStack | None = None  # open from a step's first backward to its `step`
        self.slices: list[OwnedSlice] = owned_slices(engine, stage)
        self._low_precision = engine.bfloat16_enabled() or engine.fp16_enabled()
        self._reduced = False  # the step's last backward has been seen
        self._stage0_norm = torch.tensor(math.nan)
        if stage == 0:
            optimizer.register_step_pre_hook(self._clip_at_stage_0)
            self._stage0_limit = math.inf
        if engine.fp16_enabled():
            # DeepSpeed raises the loss scale before it divides this step's gradients by it, which halves them.
            self._update_scale = update_scale = engine.optimizer._update_scale
            engine.optimizer._update_scale = lambda overflow: update_scale(True) if overflow else None

    # -- computing ----------------------------------------------------------------------------------------

    def backward(self, features: Features, gradients: FeatureGradients, last: bool) -> None:
        self._reduced = last
        # Each rank's gradient is averaged over world_size by the engine: undo it, once, here.
        loss = surrogate(features, gradients) * dist.world_size()
        if self.reduce_once and self._reduction is None:
            self._reduction = contextlib.ExitStack()
            self._reduction.enter_context(self.engine.coalesce_grad_reduction())
        self.engine.backward(loss, scale_wrt_gas=False)  # and never divide by accumulation steps
        if self.stage:
            # DeepSpeed does this at the next forward. With retained graphs there is none between two backwards,
            # and ZeRO-3 would overwrite the first one's gradient with the second's, silently.
            self.engine.optimizer.clear_backward_seen_flag()

    def recovers(self, phase: Phase) -> bool:
        if self.stage == 3 or self.offloaded:
            return False  # collectives in forward and backward; gradients on their way to the CPU
        alone = dist.world_size() == 1
        if phase == "backward pass":
            return alone or self.stage < 2 or self.reduce_once
        return alone or phase == "forward pass"

    def remedy(self, phase: Phase) -> str:
        if phase == "loss":
            return LOSS_REMEDY
        if self.stage == 2 and not self.offloaded:
            return "Set a smaller batch.micro_size, or engine.reduce_gradients=once, with which the run would go on"
        return "Set a smaller batch.micro_size (or auto), or a lower batch.memory_limit where it is auto"

    def discard_gradients(self) -> None:
        self.engine.zero_grad()
        if self.stage == 0:
            return
        optimizer = self.engine.optimizer
        forget_gradients(optimizer)
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.close()  # reduces nothing: there is no gradient left
            forget_gradients(optimizer)

    def set_grad_clip(self, limit: float | None) -> None:
        """Stage 0 only: the largest global gradient norm (the other stages clip inside DeepSpeed)."""
        self._stage0_limit = limit or math.inf

    def _clip_at_stage_0(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Runs between the gradients' all-reduce and the update: DeepSpeed tells no norm at fp32 stage 0."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._stage0_norm = nn.utils.clip_grad_norm_(parameters, self._stage0_limit)

    def step(self, lr: float) -> StepReport:
        if not self._reduced:
            raise RuntimeError("a gradient was not reduced: the step's last backward was not called with last=True")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.close()  # the gradients cross the network here, once
        self.engine.step()
        self._reduced = False
        # DeepSpeed sets `overflow` for any norm that is not finite; only fp16 has a loss scale to lower.
        skipped = self.engine.fp16_enabled() and bool(self.engine.optimizer.overflow)
        norm = float(self._stage0_norm if self.stage == 0 else self.engine.get_global_grad_norm())
        if not skipped:
            if self.engine.fp16_enabled():
                self._update_scale(False)  # for the next step
            self.optimizer_steps += 1
            self._clamp_logit_scale()
            self._read_scalars()
        return StepReport(norm, skipped)

    @torch.no_grad()
    def _read_scalars(self) -> None:
        if not self._low_precision:
            return
        values = {}
        for name in SCALARS:
            if getattr(self.engine.module, name, None) is None:
                continue
            owned = [p.flat.narrow(0, p.offset, 1) for p in self.slices if p.name == name]
            value = owned[0].float().to(self.device) if owned else torch.zeros(1, device=self.device)
            values[name] = dist.all_reduce_sum(value.clone())  # one rank holds it
        self.set_masters(values)

    @torch.no_grad()
    def _clamp_logit_scale(self) -> None:
        """Master copy and model copy together: clamping the model's alone is undone by the next step."""
        for piece in self.slices:
            if piece.name == "logit_scale":
                piece.flat.narrow(0, piece.offset, piece.numel).clamp_(0, MAX_LOGIT_SCALE)
        p = self.engine.module.get_parameter("logit_scale")
        if self.stage == 3:
            p.ds_tensor.clamp_(0, MAX_LOGIT_SCALE)  # this rank's part
            if p.numel():  # a parameter below the persistence threshold stays gathered as well
                p.data.clamp_(0, MAX_LOGIT_SCALE)
        else:
            p.data.clamp_(0, MAX_LOGIT_SCALE)

    # -- saving and loading -------------------------------------------------------------------------------

    def state_fragments(self) -> Iterator[Fragment]:
        for i, piece in enumerate(self.slices):
            if self.stage == 0 and i % dist.world_size() != dist.rank():
                continue  # every rank holds everything; each saves a part
            yield Fragment(piece.name, piece.shape, piece.start, piece.tensors(self.optimizer))

    @torch.no_grad()
    def load_fragments(self, source: FragmentSource, extra: dict[str, Any]) -> None:
        self.optimizer_steps = int(extra.get("optimizer_steps", 0))
        slots = source.slots() - {"param"}
        if slots:
            for flat in {id(piece.flat): piece.flat for piece in self.slices}.values():
                start_state(self.optimizer, flat, slots, self.optimizer_steps)
        source.prepare(self._wanted(slots))
        for piece in self.slices:
            for slot, target in piece.tensors(self.optimizer, only=slots).items():
                target.copy_(source.read(piece.name, slot, piece.start, piece.numel))
        self._load_model_copy(source)
        self._read_scalars()
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        if scaler is not None and "loss_scaler" in extra:
            for key, value in extra["loss_scaler"].items():
                setattr(scaler, key, value)

    def _wanted(self, slots: set[str]) -> Iterator[Wanted]:
        """What `load_fragments` reads on this rank: its slices of everything, and the weights of its model's copy."""
        for piece in self.slices:
            for slot in piece.tensors(self.optimizer, only=slots):
                yield Wanted(piece.name, slot, piece.start, piece.numel)
        for name, p in self.engine.module.named_parameters():
            if p.numel():
                yield Wanted(name, "param", 0, p.numel())

    def _load_model_copy(self, source: FragmentSource) -> None:
        """The model's own (low-precision) weights: whole at stages 0-2, this rank's part at stage 3."""
        for name, p in self.engine.module.named_parameters():
            if self.stage < 3:
                p.data.copy_(source.read(name, "param", 0, p.numel()).view_as(p))
        if self.stage == 3:
            for piece in self.slices:
                p = self.engine.module.get_parameter(piece.name)
                p.ds_tensor.narrow(0, 0, piece.numel).copy_(piece.flat.narrow(0, piece.offset, piece.numel))
            for name, p in self.engine.module.named_parameters():
                if p.numel():  # kept gathered (below the persistence threshold): refresh that copy too
                    p.data.copy_(source.read(name, "param", 0, p.numel()).view_as(p))

    def extra_state(self) -> dict[str, Any]:
        out: dict[str, Any] = {"optimizer_steps": self.optimizer_steps}
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        if scaler is not None and getattr(scaler, "dynamic", False):
            keys = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
            out["loss_scaler"] = {key: getattr(scaler, key) for key in keys if hasattr(scaler, key)}
        return out

    def close(self) -> None:
        """Free DeepSpeed's hooks and buffers."""
        self.engine.destroy()
