"""An optimizer of one's own, for `optim.name=examples.lamb.Lamb`: LAMB.

You et al., Large Batch Optimization for Deep Learning (arXiv 1904.00962). It is AdamW whose update
of each parameter is scaled to the parameter's norm. The norm is of the whole parameter, so the
run needs `engine.zero_stage=0` (docs/fine_tuning.md, *Optimizers*).

    clip-train train recipes/demo_shapes.yaml run.name=lamb optim.name=examples.lamb.Lamb \\
        optim.lr=5e-3 engine.zero_stage=0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """LAMB with bias correction, as in the paper's algorithm 2 with phi(x) = x.

    params: parameters or groups. A group without decay (vectors, the logit scale) takes AdamW's
    update, as in timm: the norm of a bias of zeros would stop it.
    betas: decay of the two moments. eps: added to the root of the second.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every parameter that has a gradient. `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**steps)
        square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2**steps)
        update = mean / (square.sqrt() + group["eps"])
        if group["weight_decay"]:
            update += group["weight_decay"] * parameter
            trust = parameter.norm() / update.norm()
            update *= torch.where(trust.isfinite() & (trust > 0), trust, 1.0)
        parameter -= group["lr"] * update
