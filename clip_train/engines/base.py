"""One model with its optimizer on W ranks: the base class of all engines, and the engine on plain
torch.

`PlainEngine` keeps everything on every rank. It is for tests, evaluation, export, and for readers
of this code. It is also the specification of the engines in `clip_train.engines`.
"""

import abc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clip_train import dist
from clip_train.task import (
    EMA,
    IMAGE_TEXT,
    LOCAL_LOSS,
    NO_FLAGS,
    Features,
    Flags,
    Fragment,
    FragmentSource,
    MicroBatch,
    Phase,
    StateRange,
    StepResult,
    Task,
    groups,
)
from clip_train.torch_internals import foreach_lerp_, foreach_mul_, foreach_norm

# the remedy if memory runs out in the loss
LOSS_REMEDY = "Set batch.kept_graphs=1 or a smaller loss.tile"


def surrogate(features: Features, gradients: Features) -> Tensor:
    """A scalar, to call backward() on, whose gradient with respect to `features` is `gradients`."""
    products = [(features[name] * gradient).sum() for name, gradient in gradients.items()]
    return sum(products[1:], products[0])


def local(x: Tensor) -> Tensor:
    """This rank's rows of a DTensor, or the whole."""
    return (x.to_local() if hasattr(x, "to_local") else x).detach()


@dataclass
class MovingAverage:
    """The exponential moving average of the fp32 weights, sharded as they are.

    Running statistics are averaged too, as in timm.
    """

    decay: float
    warmup: bool = False  # at step t at most 1 - t^(-2/3): that of timm's --model-ema-warmup
    of: dict[Tensor, Tensor] = field(
        default_factory=dict
    )  # an engine's tensor -> [numel] of this rank's part of it

    def update(self, step: int) -> None:
        """After optimizer step `step`, from 1."""
        decay = min(self.decay, 1 - step ** (-2 / 3)) if self.warmup else self.decay
        foreach_lerp_([*self.of.values()], [local(each).view(-1) for each in self.of], 1 - decay)

    def exchange(self) -> None:
        """Swap the weights and their averages."""
        for held, average in self.of.items():
            weights = local(held).view(-1)
            before = weights.clone()
            weights.copy_(average)
            average.copy_(before)


@dataclass(frozen=True)
class Piece:
    """Elements `[start, start + numel)` of a flattened parameter, as this rank holds them.

    They are `held[offset : offset + numel]`, flattened.
    """

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    numel: int  # may be 0
    # fp32 master weights: a parameter, this rank's rows of one, or several in a row; it is also the
    # key of the optimizer's state
    held: Tensor
    offset: int = 0
    saved_here: bool = True  # among the ranks that hold the same elements, one saves them

    def view(self, of: Tensor) -> Tensor:
        """[numel], this piece of `held` or of a tensor with the same layout."""
        return local(of).view(-1).narrow(0, self.offset, self.numel)

    def tensors(
        self, optimizer: torch.optim.Optimizer | None, ema: MovingAverage | None
    ) -> dict[str, Tensor]:
        """Views, each [numel]: "param", the optimizer's slots, and the moving average."""
        slots = dict(optimizer.state.get(self.held, {})) if optimizer is not None else {}
        if ema is not None and self.held in ema.of:
            slots[EMA] = ema.of[self.held]
        held = {
            slot: self.view(value)
            for slot, value in slots.items()
            if slot != "step" and value is not None
        }
        return {"param": self.view(self.held), **held}


class Engine(abc.ABC):
    """The interface of an engine for the trainer and the evaluation. All ranks make the same calls.

    A subclass defines which pieces of the parameters this rank holds, and implements `_backward`
    and `_update`.
    """

    task: Task = IMAGE_TEXT  # how a step uses the model
    ema: MovingAverage | None = None  # set before the weights are loaded
    files: Mapping[str, str] = {}  # for the run directory: name -> text
    notes: Sequence[str] = ()  # for the log
    saves_frozen: bool = True  # else a checkpoint has no parameter that is not trained

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        pieces: list[Piece],
        *,
        module: Any,
        grad_clip_norm: float | None = None,
        low_precision: bool = False,
        group: Any = None,
    ) -> None:
        """model: what `task` calls; `module` has its parameters.

        low_precision: the parameters are copies of the pieces in bf16 or fp16. group: the ranks
        that share one copy of the model; None: every rank has all of it.
        """
        self.model, self.module, self.optimizer, self.device = model, module, optimizer, device
        self.pieces = pieces
        if optimizer is not None and hasattr(optimizer, "place"):  # it gathers what is cut
            optimizer.place(pieces, device, group)
        state = module.state_dict().keys()
        self.buffers = [  # running statistics, the same on all ranks, without optimizer state
            Piece(name, tuple(b.shape), 0, b.numel(), b, saved_here=dist.rank() == 0)
            for name, b in module.named_buffers()
            if name in state
        ]
        self.grad_clip_norm = grad_clip_norm
        self.low_precision = low_precision
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        self.trained_groups = set(groups(self.task, trained).values())
        self.optimizer_steps = 0  # of this optimizer
        self.updates = 0  # of any: another optimizer may have begun the run
        self._masters: dict[str, Tensor] = {}  # of the task's scalars, in low precision only
        self._reduced = False  # the step's last backward has been seen
        self._by_group = [
            [piece for piece in pieces if piece.numel and self.task.group(piece.name) == group]
            for group in (*self.task.group_names, None)
        ]
        # the few pieces that each step needs, found once among hundreds
        self._bounded = [
            piece for piece in pieces if piece.name in self.task.bounds and piece.held.requires_grad
        ]
        self._masters_here = {
            piece.name: piece
            for piece in pieces
            if piece.name in self.task.scalars and piece.numel and piece.saved_here
        }

    # -- computing

    def train(self, mode: bool = True) -> None:
        """Training (dropout on) or evaluation mode."""
        self.model.train(mode)

    def forward(self, micro_batch: MicroBatch, cached: Features | None = None) -> Features:
        """All features, with a graph unless under `torch.no_grad()`. All ranks make the same calls.

        cached: the result without a graph: the features of frozen groups are taken from it.
        """
        # a local loss reads all towers: taken from `cached` it would have no graph
        reads_all = cached is None or any(name.endswith(LOCAL_LOSS) for name in cached)
        only = None if reads_all else self.trained_groups
        features = self.task.features(self.model, micro_batch, only)
        return self.task.with_masters({**(cached or {}), **features}, self._masters)

    def encode(self, name: str, inputs: Tensor) -> Tensor:
        """The features `name`, [b, D], of inputs of that kind. All ranks call it equally often."""
        return self.task.encode(self.model, name, inputs)

    def backward(self, features: Features, gradients: Features, last: bool) -> None:
        """Add `gradients`, taken through the graph of `features`, to this step's gradient.

        last: no other backward comes before `step`, which refuses unreduced gradients.
        """
        self._reduced = last
        self._backward(surrogate(features, gradients), last)

    def _backward(self, total: Tensor, last: bool) -> None:
        total.backward()

    def reduce(self, flags: Flags = NO_FLAGS) -> tuple[Tensor, Tensor]:
        """Sum the gradients over ranks and clip them by their global norm. The host does not wait.

        Returns what `_clip` returns (empty for an engine whose `step` does all of this), and the
        sum of the ranks' packed flags, [1]."""
        if not self._reduced:
            raise RuntimeError(
                "a gradient was not reduced: the step's last backward was not called with last=True"
            )
        self._reduced = False
        on_device = torch.zeros(1, dtype=torch.float64, device=self.device)
        if any(flags):
            on_device.fill_(flags.packed())  # a copy from the host would wait for the device
        return self._sum_and_clip(on_device)

    def step(self, lr: float, norms: Sequence[float]) -> StepResult:
        """Update the weights, clear the gradients, and clamp the scalars to `Task.bounds`.

        norms: the values of the first tensor that `reduce` returned."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        measured, skipped = self._update(self.optimizer)
        if not skipped:
            self.optimizer_steps += 1
            self.updates += 1
            with torch.no_grad():
                self._apply_rules()
                if self.ema is not None:
                    self.ema.update(self.updates)
            self._read_masters()
        norm, *others = norms or measured.cpu().tolist()
        by_group = {
            f"grad_norm_{name}": value
            for name, value in zip(self.task.group_names, others, strict=False)
            if name in self.trained_groups
        }
        return StepResult(norm, skipped, {} if skipped else by_group)

    @abc.abstractmethod
    def _sum_and_clip(self, flags: Tensor) -> tuple[Tensor, Tensor]:
        """The part of `reduce` that differs between engines. flags: packed, [1], float64."""

    def _update(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, bool]:
        """The part of `step` that differs between engines.

        Returns what `_clip` returns, if `reduce` did not; and whether the step was skipped (fp16:
        an overflow).
        """
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.zeros(0), False

    def _squares(self, among: Collection[Tensor] | None = None) -> Tensor:
        """float64 [groups + 1]: sums of the squared gradients that this rank holds, by group.

        The last one is that of the scalars. among: masters whose gradients count; None: all.
        """
        gradients = self._gradients(among)
        flat = [gradient for part in gradients for gradient in part]
        if not flat:
            return torch.zeros(len(gradients), dtype=torch.float64, device=self.device)
        # A CPU adds up a large fp32 tensor in fp32: the norm of 2^25 elements would be 1e-3 off,
        # and would depend on how the tensor is sharded. A GPU sums in blocks.
        wide = torch.float64 if flat[0].device.type == "cpu" else None
        norms = foreach_norm(flat, 2, dtype=wide)
        squares = torch.stack(norms).double().square()
        return torch.stack([part.sum() for part in squares.split([*map(len, gradients)])])

    def _gradients(self, among: Collection[Tensor] | None = None) -> list[list[Tensor]]:
        """The gradients that this rank holds, each [numel], by group as in `_squares`."""
        return [
            [
                piece.view(piece.held.grad)
                for piece in pieces
                if piece.held.grad is not None and (among is None or piece.held in among)
            ]
            for pieces in self._by_group
        ]

    def _clip(self, squares: Tensor) -> Tensor:
        """Scale this rank's gradients to at most `grad_clip_norm`.

        squares: `_squares` of the whole gradient. Returns float64 [1 + groups + 1]: the global norm
        and each group's, before the clip.
        """
        norm = squares.sum().sqrt()
        gradients = {p.held.grad for p in self.pieces if p.held.grad is not None}
        scaled = [local(gradient) for gradient in gradients]
        if self.grad_clip_norm is not None and scaled:
            factor = (self.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
            foreach_mul_(scaled, factor.to(scaled[0]))
        return torch.cat([norm.view(1), squares.sqrt()])

    def _clip_with_flags(self, squares: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        """`_clip` after one sum over ranks, of `squares` of this rank's part and of the flags."""
        total = dist.all_reduce_sum(torch.cat([squares.to(self.device, non_blocking=True), flags]))
        squares, flags = total.split([len(squares), len(flags)])
        return self._clip(squares), flags

    def _clamp_scalars(self) -> None:
        for name, tensor in self._bounded_tensors():
            tensor.clamp_(*self.task.bounds[name])

    def _apply_rules(self) -> None:
        """What follows an update of the masters. An engine with copies of its own refreshes them
        after it."""
        self._clamp_scalars()

    def _bounded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of this rank that holds a trained scalar with bounds, or a part of it: its
        master, and copies that an engine computes with."""
        for piece in self._bounded:
            yield piece.name, piece.view(piece.held)

    @torch.no_grad()
    def _read_masters(self) -> None:
        if not self.low_precision:
            return
        for name in self.task.scalars:
            if getattr(self.module, name, None) is not None:
                own = self._masters_here.get(name)
                value = (
                    torch.zeros(1, device=self.device)
                    if own is None
                    else own.view(own.held).to(
                        self.device, torch.float32, non_blocking=True, copy=True
                    )
                )
                self._masters[name] = dist.all_reduce_sum(value)  # only one rank holds it

    # -- running out of memory

    def discard_gradients(self) -> None:
        """Discard every backward since the last step, even an unfinished one."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def remedy(self, phase: Phase) -> str | None:
        """The remedy for the user if a rank that fails in `phase` leaves others waiting. None: no
        rank waits, and `discard_gradients` repairs the state."""
        return (
            LOSS_REMEDY if phase == "loss" and dist.world_size() > 1 else None
        )  # the loss gathers features

    # -- saving and loading

    def state_fragments(self) -> Iterator[Fragment]:
        """The fragments that this rank saves. Over all ranks, every element occurs exactly once."""
        kept = [p for p in self.pieces if self.saves_frozen or p.held.requires_grad]
        for piece in (*kept, *self.buffers):
            if piece.saved_here and piece.numel:
                yield Fragment(
                    piece.name, piece.shape, piece.start, piece.tensors(self.optimizer, self.ema)
                )

    @torch.no_grad()
    def load_fragments(
        self, source: FragmentSource, extra: dict[str, Any], *, new_optimizer: bool = False
    ) -> None:
        """Take this rank's part of a checkpoint, whatever engine, stage and ranks wrote it.

        new_optimizer: another one wrote it. Its state is left out: slots of one name, such as
        exp_avg, mean other things to another optimizer.
        """
        steps = int(extra.get("optimizer_steps", 0))
        self.optimizer_steps = 0 if new_optimizer else steps
        self.updates = int(extra.get("updates", steps))
        stored = {piece.name: source.slots(piece.name) for piece in (*self.pieces, *self.buffers)}
        if new_optimizer:
            stored = {name: slots & {"param", EMA} for name, slots in stored.items()}
        if self.optimizer is not None:
            self._start_optimizer(self.optimizer, stored)
        if self.ema is not None:
            averaged = [p.held for p in self.pieces if p.held.requires_grad]
            averaged += [b.held for b in self.buffers if b.held.is_floating_point()]
            self.ema.of = {held: local(held).flatten().clone() for held in averaged}
        targets = [
            (StateRange(piece.name, slot, piece.start, piece.numel), tensor)
            for piece in (*self.pieces, *self.buffers)
            if piece.numel
            for slot, tensor in piece.tensors(self.optimizer, self.ema).items()
            if slot in stored[piece.name]
        ]
        targets += [
            (StateRange(name, "param", 0, copy.numel()), copy)
            for name, copy in self._copies()
            if "param" in source.slots(name)
        ]
        source.prepare(state_range for state_range, _ in targets)
        for state_range, tensor in targets:
            tensor.copy_(source.read(*state_range).view_as(tensor))
        for piece in (*self.pieces, *self.buffers):
            own = piece.tensors(None, self.ema)
            if EMA in own and EMA not in stored[piece.name]:
                own[EMA].copy_(own["param"])  # it starts here
        self._masters_changed()

    def _masters_changed(self) -> None:
        """Called after the master weights changed outside `step()`: refresh the copies used for
        computation. Collective."""
        self._read_masters()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager: inside it, the weights are their moving average. Collective.

        After an error of some ranks only, which ends the run, the weights are not restored.
        """
        assert self.ema is not None
        together = True
        self.ema.exchange()
        self._masters_changed()
        try:
            yield
        except Exception as e:
            together = dist.is_agreed(e)
            raise
        finally:
            if together:
                self.ema.exchange()
                self._masters_changed()

    def _start_optimizer(
        self, optimizer: torch.optim.Optimizer, stored: dict[str, set[str]]
    ) -> None:
        """Create the state that torch would create at its first step.

        stored: the slots of each parameter, by its name.
        """
        slots: dict[Tensor, set[str]] = {}  # by held tensor; a frozen parameter has no moments
        for piece in self.pieces:
            named = stored[piece.name] - {"param", EMA}
            if piece.held.requires_grad and named:
                slots.setdefault(piece.held, set()).update(named)
        for held, names in slots.items():
            state: dict[str, Any] = {slot: torch.zeros_like(held).detach() for slot in names}
            # One counter for each, or it would advance several times a step, and on the device
            # where the fused kernel reads it. Imported optimizers may count in Python: powers of
            # their counter must be as exact as Python's.
            dtype = (
                torch.float32
                if type(optimizer).__module__.startswith(("torch.", "clip_train."))
                else torch.float64
            )
            state["step"] = torch.tensor(
                float(self.optimizer_steps), device=held.device, dtype=dtype
            )
            optimizer.state[held] = state

    def _copies(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters beside `pieces`: the model's own, in its precision."""
        yield from ()

    def extra_state(self) -> dict[str, Any]:
        """Small JSON-able state beside the fragments: optimizer steps taken, loss scale."""
        return {"optimizer_steps": self.optimizer_steps, "updates": self.updates}

    def close(self) -> None:  # noqa: B027  torch's own need nothing
        """Free resources that the garbage collector does not."""


class PlainEngine(Engine):
    """`model(images, texts, sample_seeds) -> (image, text, logit_scale, logit_bias)`, on torch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        grad_clip_norm: float | None = None,
    ):
        """optimizer None: to evaluate."""
        device = next(model.parameters()).device
        W, here = dist.world_size(), dist.rank()
        pieces = [
            Piece(
                name, tuple(p.shape), 0, p.numel(), p, saved_here=i % W == here
            )  # every rank holds everything
            for i, (name, p) in enumerate(model.named_parameters())
        ]
        super().__init__(
            model, optimizer, device, pieces, module=model, grad_clip_norm=grad_clip_norm
        )

    @torch.no_grad()
    def _sum_and_clip(self, flags: Tensor) -> tuple[Tensor, Tensor]:
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce_sum(p.grad)  # shares sum to the gradient of the global mean
        return self._clip(self._squares()), dist.all_reduce_sum(flags)
