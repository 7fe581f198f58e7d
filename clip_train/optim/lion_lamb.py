"""Lion and LAMB, which torch does not have. Moments are saved and resumed as AdamW's are, by their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from clip_train.engine import local


def norms(tensors: list[Tensor], like: Tensor) -> Tensor:
    """[n]: of whole tensors, of which this rank has its rows where `like` is a DTensor; one all-reduce."""
    squares = torch.stack(torch._foreach_norm(tensors)).double().square()
    mesh = getattr(like, "device_mesh", None)  # of a DTensor, whose import takes most of a second
    if mesh is not None:
        torch.distributed.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    return squares.sqrt()


class Lion(torch.optim.Optimizer):
    """The sign of a momentum (arXiv 2302.06675): each element moves by `lr`, so that a rate is a third to a tenth of
    AdamW's, and its weight decay as many times larger."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                weight, gradient, moment = local(p), local(p.grad), local(self.state[p]["exp_avg"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(moment.lerp(gradient, 1 - beta1).sign_(), alpha=group["lr"])
                moment.lerp_(gradient, 1 - beta2)


class LAMB(torch.optim.Optimizer):
    """Adam's update of each whole parameter, scaled to the parameter's own norm (arXiv 1904.00962)."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        trained = [
            (group, p) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not trained:
            return
        weights, updates = (
            [local(p) for _, p in trained],
            [self._update(group, p) for group, p in trained],
        )
        of_weights, of_updates = norms(weights + updates, trained[0][1]).chunk(2)
        # a parameter that is zero, such as a new bias, has no norm to be scaled to
        ratios = torch.where((of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0)
        for (group, _), weight, update, ratio in zip(
            trained, weights, updates, ratios, strict=True
        ):
            weight.sub_(update * ratio.to(update.dtype), alpha=group["lr"])

    def _update(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """Of this rank's rows, decay included."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        weight, gradient = local(p), local(p.grad)  # type: ignore[arg-type]
        if not state:
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] = torch.zeros((), device=weight.device)
        first, second, step = local(state["exp_avg"]), local(state["exp_avg_sq"]), state["step"]
        step += 1
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return first / (1 - beta1**step) / root + group["weight_decay"] * weight
