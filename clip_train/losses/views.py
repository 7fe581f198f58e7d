"""One loss over several views of the features: pairs of more than two towers, nested widths,
several texts of an image.

A view is a differentiable function of the features. The loss treats each view as its own batch.
Autograd propagates gradients through the view only, which is cheap.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
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
    """Make an objective of a loss: None is `InfoNCE()`, a function becomes a `FunctionLoss`."""
    if loss is None:
        return InfoNCE()
    if isinstance(loss, Objective):
        return loss
    return FunctionLoss(loss, {})


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
        """
        Args:
            own_names: the views use the names that the model gives to its features.
            of_teacher: the views also apply to the features that `Objective.prepare` returned.
            paired: the names of the features that the views read; empty: all.
        """
        self.feature_names = frozenset(paired) or objective.feature_names
        self.objective = objective
        self.views = [*views]
        self.own_names = own_names or objective.own_names
        self.constants, self.feature_dims = objective.constants, objective.feature_dims
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
        # every view is of these, not of the last view's
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
                if name.endswith("_loss"):
                    # a part of the loss has the loss's weight
                    metrics[name] = metrics.get(name, 0.0) + weight * value
                else:
                    # other metrics, such as a number of samples, are those of the first view
                    metrics.setdefault(name, value)
            # from the view's features to the model's
            weighted = [weight * gradient for gradient in output.gradients.values()]
            torch.autograd.backward([viewed[name] for name in output.gradients], weighted)
        gradients = {
            name: torch.zeros_like(x) if x.grad is None else x.grad
            for name, x in leaves.items()
            if name not in self.constants
        }
        return LossOutput(total, gradients, metrics=metrics, unsafe=unsafe)


def over_pairs(pairs: Mapping[tuple[str, str], float], loss: Loss = None) -> WeightedViews:
    """Sum `loss` over pairs of features, each with its weight; None is `InfoNCE()`.

    pairs: {("image", "text"): 1.0, ("audio", "text"): 0.5}, with the names of the model's dict. The
    second feature of a pair may have m rows for each row of the first. The first of the m is the
    positive.
    """
    views = [(weight, partial(of_pair, pair=pair)) for pair, weight in pairs.items()]
    paired = [name for pair in pairs for name in pair]
    return WeightedViews(as_objective(loss), views, own_names=True, paired=paired)


def of_pair(features: Features, pair: tuple[str, str]) -> Features:
    """Return the two features of a pair as "image" and "text", with all scalars.

    Raises ValueError for a name that is not a feature.
    """
    scalars = {name: x for name, x in features.items() if is_scalar(x)}
    missing = [name for name in pair if name not in features or name in scalars]
    if missing:
        raise ValueError(
            f"pairs: the model returns no features {missing}, only "
            f"{sorted(features.keys() - scalars.keys())}; name one of these"
        )
    renamed = dict(zip(pair, ("image", "text"), strict=True))
    masks = {
        f"{new}_mask": features[f"{name}_mask"]
        for name, new in renamed.items()
        if f"{name}_mask" in features
    }
    return {new: features[name] for name, new in renamed.items()} | masks | scalars


def matryoshka(widths: Mapping[int, float], loss: Loss = None) -> WeightedViews:
    """Sum `loss` over the first values of each feature, normalized again (arXiv 2205.13147); None is
    `InfoNCE()`.

    widths: {768: 1.0, 256: 1.0, 64: 0.5}, a number of values and its weight.
    """
    objective = as_objective(loss)
    views = [
        (weight, partial(truncated, width=width, constants=objective.constants))
        for width, weight in widths.items()
    ]
    return WeightedViews(objective, views, own_names=False)


def truncated(features: Features, width: int, constants: Collection[str] = ()) -> Features:
    """Cut all features, [n, D] or [n, tokens, D], to their first `width` values, and normalize them.

    constants: as of an `Objective`; they stay. Raises ValueError if a feature has fewer values.
    """
    rows = {
        name: x
        for name, x in features.items()
        if not (is_scalar(x) or name.endswith(LOCAL_LOSS) or name in constants)
    }
    narrowest = min(x.shape[-1] for x in rows.values())
    if not 1 <= width <= narrowest:
        raise ValueError(f"widths: {width} must be between 1 and the features' {narrowest}")
    narrow = {name: F.normalize(x[..., :width], dim=-1) for name, x in rows.items()}
    return {**features, **narrow}


def over_texts(count: int, loss: Loss = None) -> WeightedViews:
    """Average `loss` over `count` texts of each image, each in turn the image's only positive; None
    is `InfoNCE()`.

    The model returns m >= count texts for each image. The m - count last ones are negatives in each
    of the losses.
    """
    views = [(1 / count, partial(with_text, index=t, count=count)) for t in range(count)]
    return WeightedViews(as_objective(loss), views, own_names=False, of_teacher=True)


def with_text(features: Features, index: int, count: int) -> Features:
    """Choose one of the first `count` texts of each image, by its index, and keep all texts behind
    these."""
    out = dict(features)
    for name in features:
        # the model's "text", and the teachers' "text 0", "text 1", ...
        if name.startswith("text"):
            images = features[name.replace("text", "image")]
            texts = features[name].unflatten(0, (len(images), -1))  # [n, m, D]
            chosen = torch.cat([texts[:, index : index + 1], texts[:, count:]], dim=1)
            out[name] = chosen.flatten(0, 1)
    return out
