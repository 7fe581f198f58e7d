"""torch alone: every rank holds the whole model and its optimizer. `auto` takes it on one GPU.

The masters of each parameter group are one flat fp32 tensor, and so are the sums of its gradients.
A step then launches a few kernels for the optimizer, not hundreds, and the host is not what a small
model waits for. In bf16 the model's parameters are copies of the masters, refreshed once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clip_train import dist
from clip_train.engines import MakeOptimizer
from clip_train.engines.base import Engine, Piece
from clip_train.engines.compile import compile_units
from clip_train.engines.linear import convert
from clip_train.torch_internals import foreach_add_, foreach_copy_

if TYPE_CHECKING:
    from clip_train.engines.config import EngineConfig


def build_engine(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None,
) -> UnshardedEngine:
    """The weights are those that `make_model` drew on `device`, until `load_fragments`."""
    with torch.device(device):
        model = make_model()
    # a constructor may have made a tensor on the CPU by name
    if any(x.device.type != device.type for x in (*model.parameters(), *model.buffers())):
        model.to(device)
    if config.linear is not None:
        convert(model, config.linear, emulate=device.type == "cpu")
    low_precision = config.precision == "bf16"
    if low_precision:
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16)
    if config.compile:
        compile_units(model, config.own_kernels)
    optimizer = make_optimizer(model.named_parameters())
    return UnshardedEngine(model, optimizer, device, grad_clip_norm, low_precision)


@dataclass
class Trained:
    """A trained parameter, and where its master and the sum of its gradients are."""

    name: str
    parameter: nn.Parameter  # what the model computes with
    master: Tensor  # fp32: what the optimizer updates; it holds one parameter or several
    offset: int  # of this parameter in `master`, in elements
    gradient: Tensor  # fp32, in the layout of `master`

    def view(self, of: Tensor) -> Tensor:
        """This parameter's elements of a tensor with the layout of `master`, in its own shape."""
        flat = of.detach().view(-1).narrow(0, self.offset, self.parameter.numel())
        return flat.view(self.parameter.shape)


def hold_masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[Trained]:
    """Make the fp32 masters, and let `optimizer` update them in place of the model's parameters.

    One flat tensor for each group, if the optimizer updates elements; an imported one may need
    whole parameters.
    """
    elementwise = type(optimizer).__module__.startswith(("torch.", "clip_train."))
    names = {p: name for name, p in model.named_parameters()}
    trained: list[Trained] = []
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = group["params"]
        together = [parameters] if elementwise else [[p] for p in parameters]
        group["params"] = []
        for part in together:
            shape = (sum(p.numel() for p in part),) if elementwise else part[0].shape
            master = nn.Parameter(torch.zeros(shape, device=device))
            gradient = torch.zeros_like(master).detach()
            group["params"].append(master)
            offset = 0
            for p in part:
                trained.append(Trained(names[p], p, master, offset, gradient))
                offset += p.numel()
    return trained


class UnshardedEngine(Engine):
    """See `clip_train.engines.base.Engine`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        grad_clip_norm: float | None,
        low_precision: bool,
    ) -> None:
        self.trained = hold_masters(model, optimizer, device)
        # unchanged from step to step: made once, not at every step
        self._parameters: list[Tensor] = [each.parameter for each in self.trained]
        self._masters_of = [each.view(each.master) for each in self.trained]
        self._sums_of = [each.view(each.gradient) for each in self.trained]
        # each flat tensor once
        self._sums = {each.master: each.gradient for each in self.trained}
        super().__init__(
            model,
            optimizer,
            device,
            self._find_pieces(model),
            module=model,
            grad_clip_norm=grad_clip_norm,
            low_precision=low_precision,
        )
        sums = dict(zip((each.name for each in self.trained), self._sums_of, strict=True))
        self._sums_by_group = [
            [sums[piece.name].view(-1) for piece in pieces if piece.name in sums]
            for pieces in self._by_group
        ]
        self._is_empty = True  # no backward of this step has added to the sums
        if not low_precision:
            for each in self.trained:  # the model computes with the masters themselves
                each.parameter.data = each.view(each.master)
            self._give_gradients()

    def _find_pieces(self, model: nn.Module) -> list[Piece]:
        """In the order of the model's parameters."""
        W, here = dist.world_size(), dist.rank()
        masters = {each.name: each for each in self.trained}
        pieces = []
        for i, (name, p) in enumerate(model.named_parameters()):
            saved_here = i % W == here
            shape, numel = tuple(p.shape), p.numel()
            if name in masters:
                held, offset = masters[name].master, masters[name].offset
            else:  # frozen: its fp32 weights are needed only for checkpoints and exports
                held, offset = torch.zeros(numel), 0
            pieces.append(
                Piece(
                    name,
                    shape,
                    start=0,
                    numel=numel,
                    held=held,
                    offset=offset,
                    saved_here=saved_here,
                )
            )
        return pieces

    # -- computing

    def _give_gradients(self) -> None:
        """In fp32, autograd adds to the sums themselves."""
        for p, sum_ in zip(self._parameters, self._sums_of, strict=True):
            p.grad = sum_

    def _backward(self, total: Tensor, last: bool) -> None:
        total.backward()
        if self.low_precision:
            self._accumulate()

    @torch.no_grad()
    def _accumulate(self) -> None:
        """Add the gradients of one backward to the fp32 sums."""
        sums, gradients = [], []
        for p, sum_ in zip(self._parameters, self._sums_of, strict=True):
            if p.grad is not None:
                sums.append(sum_)
                gradients.append(p.grad)
                p.grad = None
        if self._is_empty and len(sums) == len(self._parameters):
            foreach_copy_(sums, gradients)
        else:
            if self._is_empty:
                self._clear_sums()
            foreach_add_(sums, gradients)
        self._is_empty = False

    def _clear_sums(self) -> None:
        for sum_ in self._sums.values():
            sum_.zero_()

    @torch.no_grad()
    def _sum_and_clip(self, flags: Tensor) -> tuple[Tensor, Tensor]:
        for master, sum_ in self._sums.items():
            dist.all_reduce_sum(sum_)
            master.grad = sum_
        return self._clip(self._squares()), dist.all_reduce_sum(flags)

    def _gradients(self, among: Collection[Tensor] | None = None) -> list[list[Tensor]]:
        return self._sums_by_group

    def _update(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, bool]:
        optimizer.step()
        self.discard_gradients()
        return torch.zeros(0), False

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._is_empty = True
        if self.low_precision:
            for p in self._parameters:  # of an unfinished backward
                p.grad = None
        else:
            self._clear_sums()
            self._give_gradients()

    # -- the model's copies

    def _apply_rules(self) -> None:
        super()._apply_rules()
        self._refresh_copies()

    def _masters_changed(self) -> None:
        self._refresh_copies()
        super()._masters_changed()

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        if self.low_precision:
            foreach_copy_(self._parameters, self._masters_of)

    def _copies(self) -> Iterator[tuple[str, Tensor]]:
        """The model's frozen parameters, which no update refreshes."""
        for name, p in self.module.named_parameters():
            if not p.requires_grad:
                yield name, p.data
