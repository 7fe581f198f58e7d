"""Batch normalization over the micro-batch of all ranks.

The running statistics see each sample of a step once.

`P` values of a channel (samples times pixels) on this rank, `C` channels.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clip_train import dist
from clip_train.errors import UserError
from clip_train.torch_internals import AnyBatchNorm, FakeTensor, KeepsPrecision

Update = Callable[[], None]
_updates: list[Update] | None = None  # None: updates are not collected


@contextmanager
def collect_updates() -> Iterator[list[Update]]:
    """Collect the updates of running statistics from forwards in training. The caller applies or
    drops them. Outside of this context the statistics stay as they are: in replayed forwards, in
    the recomputation of activations, in probes.
    """
    global _updates  # noqa: PLW0603  autograd recomputes activations in threads of its own
    before, _updates = _updates, []
    try:
        yield _updates
    finally:
        _updates = before


def has_batch_norm(model: nn.Module) -> bool:
    """Whether ranks wait for each other within its forward and its backward."""
    return any(isinstance(each, BatchNorm2d) for each in model.modules())


class _Normalise(torch.autograd.Function):
    """torch's SyncBatchNorm, on any device. Saves its input and [C] values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[b, C, ...], weight and bias [C] in at least float32 -> the same, mean [C], variance [C],
        values of a channel on all ranks, float64 [1]"""
        others = [0, *range(2, x.ndim)]  # all dimensions except the channels
        variance, mean = (
            each.double() for each in torch.var_mean(x.to(weight.dtype), others, correction=0)
        )
        P = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
        # in float64, squares that cancel lose no precision
        sums = torch.cat([P, P * mean, P * (variance + mean.square())])
        if not isinstance(sums, FakeTensor):
            dist.all_reduce_sum(sums)
        count, total, squares = sums.split([1, len(mean), len(mean)])
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        ctx.save_for_backward(
            x, weight, mean.to(weight.dtype), (variance + eps).rsqrt().to(weight.dtype), count
        )
        ctx.mark_non_differentiable(mean, variance, count)
        mean, variance = mean.to(weight.dtype), variance.to(weight.dtype)
        return (
            F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps),
            mean,
            variance,
            count,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, deviation, count = ctx.saved_tensors  # `deviation`: 1 / standard deviation
        wide, column = gradients[0].to(weight.dtype), [-1] + [1] * (x.ndim - 2)
        centred = x.to(weight.dtype) - mean.view(column)
        others = [0, *range(2, x.ndim)]
        own = torch.stack([wide.sum(others), (wide * centred).sum(others)])  # [2, C]
        sums = own.clone()
        if not isinstance(sums, FakeTensor):
            dist.all_reduce_sum(sums)
        total, product = sums / count
        centred.mul_((product * deviation.square()).view(column))
        out = wide.sub(centred).sub_(total.view(column)).mul_((weight * deviation).view(column))
        # this rank's share of the parameters' gradient: the engine sums the shares
        return out.to(x.dtype), own[1] * deviation, own[0], None


class BatchNorm2d(KeepsPrecision, nn.BatchNorm2d):
    """`nn.BatchNorm2d`, in training by the statistics of a micro-batch on all ranks.

    The ranks' micro-batches may differ in length.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    # `model.to(bfloat16)` does not round statistics: they move by a tenth of a difference
    kept = ("running_mean", "running_var")
    frozen = False  # normalises by the running statistics in training too, and leaves them alone

    def forward(self, x: Tensor) -> Tensor:
        """[b, C, height, width] -> the same"""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        if self.frozen or not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, weight, bias, training=False, eps=self.eps
            )
        out, mean, variance, count = _Normalise.apply(x, weight, bias, self.eps)
        if _updates is not None:
            # computed when it is applied: a recomputation must save the same tensors
            _updates.append(
                lambda: self._update(mean, variance * (count / (count - 1).clamp(min=1)))
            )
        return out

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        assert self.momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var), self.momentum)
        self.num_batches_tracked += 1


def adopt(
    model: nn.Module,
    where: str,
    more: Mapping[type[AnyBatchNorm], type[AnyBatchNorm]] | None = None,
) -> None:
    """Replace the batch norms of a foreign model by ones over all ranks, and let its first
    convolution take fp32 pixels in any precision.

    where: key and value, for messages. more: other classes of batch norms, and ours for each.
    UserError for a batch norm that cannot.
    """
    ours: dict[type, Any] = {nn.BatchNorm2d: BatchNorm2d, **(more or {})}
    for name, each in model.named_modules():
        if isinstance(each, AnyBatchNorm):
            if (
                type(each) not in ours
                or each.momentum is None
                or not (each.affine and each.track_running_stats)
            ):
                raise UserError(
                    f"{where}: {name} is a {type(each).__name__}, whose statistics cannot be taken "
                    "over a micro-batch of all ranks; choose another model"
                )
            each.__class__ = ours[type(each)]
        elif isinstance(each, nn.Conv2d) and name.startswith("visual.") and each.in_channels == 3:
            each.register_forward_pre_hook(
                lambda conv, inputs: (inputs[0].to(conv.weight.dtype), *inputs[1:])
            )
