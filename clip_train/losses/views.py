"""One loss over several views of the features: pairs of more than two towers, nested widths,
several texts of an image.

A view is a differentiable function of the features. The loss treats each view as its own batch.
Autograd propagates gradients through the view only, which is cheap.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_train.losses.function import FunctionLoss
from clip_train.losses.info_nce import InfoNCE
from clip_train.task import (
    LOCAL_LOSS,
    NO_CONTEXT,
    Context,
    Features,
    LossOutput,
    MicroBatch,
    Objective,
    is_scalar,
)

View = Callable[[Features], Features]
Loss = Objective | Callable[..., Tensor] | None


def as_objective(loss: Any) -> Objective:
    """None is `InfoNCE()`; a function becomes a `FunctionLoss`."""
    if loss is None:
        return InfoNCE()
    return loss if isinstance(loss, Objective) else FunctionLoss(loss, {})


class WeightedViews(Objective):
    """The sum of `weight * objective(view(features))` over (weight, view)."""

    def __init__(
        self,
        objective: Objective,
        views: Iterable[tuple[float, View]],
        *,
        own_names: bool,
        of_teacher: bool = False,
        paired: Iterable[str] = (),
    ) -> None:
        """own_names: the views know the features by the names that the model gives them.
        of_teacher: what `Objective.prepare` returned is seen in the same way. paired: the features
        that the views read; empty: all."""
        self.paired = frozenset(paired)
        self.objective, self.views, self.own_names = objective, [*views], own_names
        self.of_teacher = of_teacher
        self.matmul, self.takes_bias = objective.matmul, objective.takes_bias
        self.takes_ids = objective.takes_ids

    def prepare(self, micro_batch: MicroBatch) -> Features | None:
        return self.objective.prepare(micro_batch)

    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        leaves = {name: x.detach().requires_grad_() for name, x in features.items()}
        total: Any = 0.0
        unsafe: Any = None
        metrics: dict[str, Any] = {}
        prepared = context.prepared
        for weight, view in self.views:
            with torch.enable_grad():
                viewed = view(leaves)
            if self.of_teacher and prepared is not None:
                context = replace(context, prepared=view(prepared))
            output = self.objective({name: x.detach() for name, x in viewed.items()}, context)
            total += weight * output.loss
            unsafe = output.unsafe if unsafe is None else unsafe | output.unsafe
            for name, value in output.metrics.items():
                if name.endswith("_loss"):  # a part of the loss: weighted as the loss is
                    metrics[name] = metrics.get(name, 0.0) + weight * value
                else:  # of the first view, such as a number of samples
                    metrics.setdefault(name, value)
            weighted = [weight * gradient for gradient in output.gradients.values()]
            torch.autograd.backward([viewed[name] for name in output.gradients], weighted)
        gradients = {
            name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()
        }
        return LossOutput(total, gradients, metrics=metrics, unsafe=unsafe)


def over_pairs(pairs: Mapping[tuple[str, str], float], loss: Loss = None) -> WeightedViews:
    """`loss` over pairs of features, each with its weight; None is `InfoNCE()`.

    pairs: {("image", "text"): 1.0, ("audio", "text"): 0.5}, by the names of the model's dict. The
    second of a pair may have m rows for each one of the first, its positive first.
    """
    views = [(weight, partial(of_pair, pair=pair)) for pair, weight in pairs.items()]
    paired = [name for pair in pairs for name in pair]
    return WeightedViews(as_objective(loss), views, own_names=True, paired=paired)


def of_pair(features: Features, pair: tuple[str, str]) -> Features:
    """ValueError for a name that is not a feature."""
    scalars = {name: x for name, x in features.items() if is_scalar(x)}
    missing = [name for name in pair if name not in features or name in scalars]
    if missing:
        raise ValueError(
            f"pairs: the model returns no features {missing}, only "
            f"{sorted(features.keys() - scalars.keys())}; name one of these"
        )
    return {"image": features[pair[0]], "text": features[pair[1]], **scalars}


def matryoshka(widths: Mapping[int, float], loss: Loss = None) -> WeightedViews:
    """`loss` over the first values of each feature, normalized again (arXiv 2205.13147).

    widths: {768: 1.0, 256: 1.0, 64: 0.5}, number of values and weight. None is `InfoNCE()`.
    """
    views = [(weight, partial(truncated, width=width)) for width, weight in widths.items()]
    return WeightedViews(as_objective(loss), views, own_names=False)


def truncated(features: Features, width: int) -> Features:
    """The first `width` values of each row, normalized. ValueError where rows have fewer."""
    rows = {
        name: x for name, x in features.items() if not (is_scalar(x) or name.endswith(LOCAL_LOSS))
    }
    narrowest = min(x.shape[1] for x in rows.values())
    if not 1 <= width <= narrowest:
        raise ValueError(f"widths: {width} must be between 1 and the features' {narrowest}")
    return {**features, **{name: F.normalize(x[:, :width], dim=1) for name, x in rows.items()}}


def over_texts(count: int, loss: Loss = None) -> WeightedViews:
    """The mean of `loss` over each of `count` texts of an image. None is `InfoNCE()`.

    A model returns m texts for each image, at least `count`. The others are negatives in each loss.
    """
    views = [(1 / count, partial(with_text, place=t, count=count)) for t in range(count)]
    return WeightedViews(as_objective(loss), views, own_names=False, of_teacher=True)


def with_text(features: Features, place: int, count: int) -> Features:
    """The text at `place` among the first `count` of each image, and all texts behind these."""
    out = dict(features)
    for name in features:
        if name.startswith("text"):  # "text 0" is the first teacher's
            images = features[name.replace("text", "image")]
            texts = features[name].unflatten(0, (len(images), -1))  # [n, m, D]
            chosen = torch.cat([texts[:, place : place + 1], texts[:, count:]], dim=1)
            out[name] = chosen.flatten(0, 1)
    return out
