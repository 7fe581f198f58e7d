"""A loss given as a plain differentiable function, as one would write it for a single GPU.

    loss(image, text, scale, bias, rows) -> [], the terms of the samples `rows`

`image` and `text` are the features of the whole global batch, [N, D], float32 (float64 if they
are). With m texts for each image `text` is [m N, D], the first of each m the positive. `scale` is
[1]; `bias` is [1], or None where the model has no bias. `rows` is a slice of the batch. The
function is called with all rows. If it has the attribute `sums_over_rows`, each rank computes only
the terms of its own samples, piece by piece.

Autograd differentiates the function with respect to the features alone, so micro-batches, ranks and
engines stay as invisible as with a loss in closed form. Memory of a call: the function's own graph,
of N rows, or of `tile^2 / N` rows with `sums_over_rows`. Network: 2 N D features, and with
`sums_over_rows` as many gradients.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_train import dist
from clip_train.errors import UserError
from clip_train.losses.exchange import Pairs, share_counts, texts_by_image
from clip_train.losses.tiles import AUTO_SIDE, accumulation_dtype, auto_side
from clip_train.settings import broken, checked_options, shown
from clip_train.task import NO_CONTEXT, Context, Features, LossOutput, Objective

FEATURES = ("image", "text", "logit_scale", "logit_bias")


class FunctionLoss(Objective):
    """The objective of such a function.

    Its attributes, if it has them: `takes_bias`, as of an `Objective`; `sums_over_rows`, true if
    the terms of two slices add up to those of both.
    """

    def __init__(
        self, function: Callable[..., Tensor], options: Mapping[str, Any], tile: int = AUTO_SIDE
    ) -> None:
        self.takes_bias = getattr(function, "takes_bias", False)
        self.sums_over_rows = getattr(function, "sums_over_rows", False)
        self._function = partial(function, **options)
        self._tile = tile

    @classmethod
    def named(
        cls, path: str, function: Callable[..., Tensor], options: Mapping[str, Any], tile: int
    ) -> "FunctionLoss":
        """The function that the recipe names, after a trial with four samples. UserError."""
        loss = cls(function, checked_options("loss.kind", path, options), tile)
        here = f"loss.kind ({path}) with loss.options ({shown(dict(options))})"
        g = torch.Generator().manual_seed(0)
        image, text = F.normalize(torch.randn(2, 4, 8, generator=g), dim=-1).requires_grad_()
        scale, bias = torch.ones(1), torch.zeros(1) if loss.takes_bias else None
        try:
            whole, first, second = (
                loss._function(image, text, scale, bias, rows)
                for rows in (slice(0, 4), slice(0, 1), slice(1, 4))
            )
            trial = torch.autograd.grad(whole, (image, text), allow_unused=True)
        except Exception as e:
            raise UserError(
                f"{here} failed on four samples: {type(e).__name__}: {e}; it is called with "
                "(image [N, D], text [N, D], scale [1], bias [1] or None, rows: slice), and "
                "returns a differentiable scalar"
            ) from e
        rules = [
            (
                not all(each is not None and each.isfinite().all() for each in trial),
                "has no finite gradient by image and text; compute it from both, without detach()",
            ),
            (
                loss.sums_over_rows and not torch.allclose(whole, first + second, rtol=1e-4),
                f"sums over rows, but the terms of rows 0:1 ({first.item():.6g}) and 1:4 "
                f"({second.item():.6g}) do not add up to those of 0:4 ({whole.item():.6g}); divide "
                "by len(image), not by the number of rows, or take sums_over_rows away",
            ),
        ]
        for message in broken(rules):
            raise UserError(f"{here} {message}")
        return loss

    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        image, text = features["image"], features["text"]
        n, D = image.shape
        texts = texts_by_image(image, text)
        pairs = Pairs.gathered(image, texts, share_counts(n, context.global_size))
        N, own_rows = len(pairs.image_all), pairs.own_rows
        dtype = accumulation_dtype(image, text)
        inputs = {name: features[name] for name in FEATURES if name in features}
        inputs |= {"image": pairs.image_all, "text": pairs.text_all.reshape(-1, D)}
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
        arguments = [leaves.get(name) for name in FEATURES]
        pieces = [slice(0, N)]
        if self.sums_over_rows:
            side = self._tile or auto_side(n, N)
            size = max(side * side // N, 1)
            starts = range(own_rows.start, own_rows.stop, size)
            pieces = [slice(start, min(start + size, own_rows.stop)) for start in starts]
        value = image.new_zeros((), dtype=torch.float64)
        for rows in pieces:
            with torch.enable_grad():
                terms = self._function(*arguments, rows)
            terms.backward()  # and frees the graph
            value += terms.detach().double().sum()
        gradients = {
            name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()
        }
        d_image, d_text = gradients.pop("image"), gradients.pop("text").view(N, -1)
        if self.sums_over_rows:
            dist.all_reduce_sum(value)
            if len(pairs.counts) > 1:
                both = dist.all_reduce_sum(torch.cat([d_image, d_text], dim=1))
                d_image, d_text = both.split([D, texts.shape[1]], dim=1)
        else:  # each rank has the whole gradient of the scalars: it adds its share
            gradients = {name: x * (n / N) for name, x in gradients.items()}
        d_text = d_text[own_rows].reshape(-1, D)
        return LossOutput(value, {"image": d_image[own_rows], "text": d_text, **gradients})
