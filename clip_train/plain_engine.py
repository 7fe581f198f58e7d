"""The Engine protocol on plain torch: for tests, for evaluation and export, for reading.

Every rank holds everything. It is also the specification of what the engines in `launcher.engines` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clip_train import dist
from clip_train.errors import UserError
from clip_train.protocols import (
    FeatureGradients,
    Features,
    Fragment,
    FragmentSource,
    MicroBatch,
    Phase,
    StepReport,
    Wanted,
)

MAX_LOGIT_SCALE = math.log(100)  # CLIP's ceiling on the parameter: the factor stays at most 100

LOSS_REMEDY = "Set batch.kept_graphs=1 or a smaller loss.tile"  # where memory ends in the loss


def surrogate(features: Features, gradients: FeatureGradients) -> Tensor:
    """A scalar whose gradient with respect to the features is `gradients`: what a backward() can be called on."""
    total = (features.image * gradients.image).sum() + (features.text * gradients.text).sum()
    total = total + (features.logit_scale * gradients.logit_scale).sum()
    if features.logit_bias is not None and gradients.logit_bias is not None:
        total = total + (features.logit_bias * gradients.logit_bias).sum()
    return total


def start_state(optimizer: torch.optim.Optimizer, parameter: Tensor, slots: Iterable[str], steps: int) -> None:
    """Give `parameter` the state that torch would give it at its first step, at a count of `steps`."""
    state = {slot: torch.zeros_like(parameter).detach() for slot in slots}
    if isinstance(optimizer, torch.optim.AdamW):
        # one for each, and where the fused kernel reads it: shared it would advance several times a step
        state["step"] = torch.tensor(float(steps), device=parameter.device)
    optimizer.state[parameter] = state


class PlainEngine:
    """`model(images, texts, sample_seeds) -> (image, text, logit_scale, logit_bias)` with a torch optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        grad_clip_norm: float | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.grad_clip_norm = grad_clip_norm
        self.device = next(model.parameters()).device
        self.optimizer_steps = 0

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def forward(self, micro_batch: MicroBatch) -> Features:
        return Features(*self.model(micro_batch.images, micro_batch.texts, micro_batch.sample_seeds))

    def encode_image(self, images: Tensor) -> Tensor:
        return self.model(images, None)[0]

    def encode_text(self, texts: Tensor) -> Tensor:
        return self.model(None, texts)[1]

    def backward(self, features: Features, gradients: FeatureGradients, last: bool = False) -> None:
        surrogate(features, gradients).backward()

    def discard_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def recovers(self, phase: Phase) -> bool:
        return phase != "loss" or dist.world_size() == 1  # the loss gathers features

    def remedy(self, phase: Phase) -> str:
        return LOSS_REMEDY

    def step(self, lr: float) -> StepReport:
        if self.optimizer is None:
            raise UserError("this engine was built without an optimizer: it evaluates, it does not train")
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for p in parameters:
            assert p.grad is not None
            dist.all_reduce_sum(p.grad)  # the ranks' shares sum to the gradient of the global mean
        limit = self.grad_clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(parameters, limit)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.model.get_parameter("logit_scale").clamp_(0, MAX_LOGIT_SCALE)
        self.optimizer_steps += 1
        return StepReport(norm.item())

    def state_fragments(self) -> Iterator[Fragment]:
        for i, (name, p) in enumerate(self.model.named_parameters()):
            if i % dist.world_size() == dist.rank():  # every rank holds everything; each saves a part
                slots = self.optimizer.state.get(p, {}) if self.optimizer else {}
                tensors = {slot: v.flatten() for slot, v in slots.items() if slot != "step" and v is not None}
                yield Fragment(name, tuple(p.shape), 0, {"param": p.detach().flatten(), **tensors})

    @torch.no_grad()
    def load_fragments(self, source: FragmentSource, extra: dict[str, Any]) -> None:
        self.optimizer_steps = int(extra.get("optimizer_steps", 0))
        slots = source.slots() - {"param"}
        kept = {"param", *(slots if self.optimizer is not None else ())}
        named = list(self.model.named_parameters())
        source.prepare(Wanted(name, slot, 0, p.numel()) for name, p in named for slot in kept)
        for name, p in named:
            p.copy_(source.read(name, "param", 0, p.numel()).view_as(p))
            if self.optimizer is not None and slots:
                start_state(self.optimizer, p, slots, self.optimizer_steps)
                for slot in slots:
                    self.optimizer.state[p][slot].copy_(source.read(name, slot, 0, p.numel()).view_as(p))

    def extra_state(self) -> dict[str, Any]:
        return {"optimizer_steps": self.optimizer_steps}
