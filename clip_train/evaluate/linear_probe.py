"""A linear probe: logistic regression on frozen image features, as in the CLIP paper (appendix A.3)
and clip_benchmark, fitted by L-BFGS.

`n` samples on this rank, `N` on all, `D` features, `C` classes. Each rank keeps its samples: a fit
only sums the loss and its gradient over the ranks, so all ranks take the same steps.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from clip_train import dist
from clip_train.errors import EvaluationStopped, UserError
from clip_train.evaluate.features import STOPPED, Encoded, never
from clip_train.evaluate.retrieval import MatchRule, ranks_of_matches

# The strengths of the L2 penalty that are searched: 8 for each power of 10.
STRENGTHS: list[float] = torch.logspace(-10, 2, 97, dtype=torch.float64).tolist()
FIRST_STRENGTHS = range(0, 97, 16)  # indices into STRENGTHS, tried first
FIRST_SPAN = 8  # then the neighbors of the best at this distance, at half of it, down to 1
VALIDATION_SHARE = 5  # one of so many training samples chooses the strength
STEPS = 1000  # of L-BFGS at most, as in the CLIP paper
TOLERANCE = 1e-7  # a fit ends if no value of the gradient is larger,
LEAST_CHANGE = 1e-11  # or if the loss changes by less
BLOCK_ELEMENTS = 1 << 24  # logits held at once: 64 MiB of float32


def linear_probe_metrics(
    train: Encoded,
    test: Encoded,
    num_classes: int,
    asked_to_stop: Callable[[], bool] = never,
) -> dict[str, float]:
    """Fit on the labeled images of `train`, and test on those of `test`. Collective.

    Of the training samples, a fixed fifth chooses the strength of the penalty; the final fit uses
    all of them. The result depends on the order of the samples, not on the number of ranks.

    Returns:
        `linear_probe_top1`, `linear_probe_top5`, from 0 to 1, and `linear_probe_l2`, the chosen
        strength: the penalty is l2 / 2 times the sum of squared weights, beside the mean loss.

    Raises:
        UserError: fewer than two training images have a label.
        EvaluationStopped: a rank was asked to stop; on all ranks together.
    """
    features, labels = labeled(train)
    counts = dist.gather_objects(len(labels))
    total, before = sum(counts), sum(counts[: dist.rank()])
    if total < 2:
        raise UserError(
            f"--linear-probe: {total} of the training images have a label, and at least 2 are "
            "needed: give images with labels, as in the data of a set with classes"
        )
    # The bias absorbs a shift of the features, so the fit is the same, in fewer steps.
    shift = dist.all_reduce_sum(features.sum(dim=0, dtype=torch.float64)) / total
    features = with_constant(features - shift.float())
    # the same on any number of ranks, and independent of how the samples are sorted
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    validates = torch.zeros(total, dtype=torch.bool)
    validates[order[: max(1, total // VALIDATION_SHARE)]] = True
    mine = validates[before : before + len(labels)].to(features.device)
    fit_some = partial(fit, features[~mine], labels[~mine], num_classes, asked_to_stop)
    weights = features.new_zeros(num_classes, features.shape[1], dtype=torch.float64)
    accuracies: dict[int, float] = {}

    def accuracy(index: int) -> float:
        """On the validation samples. Each fit starts from the one before."""
        nonlocal weights
        if index not in accuracies:
            weights = fit_some(STRENGTHS[index], weights)
            (accuracies[index],) = accuracies_at(weights, features[mine], labels[mine], [1])
        return accuracies[index]

    # of equal accuracies, the strongest penalty
    best = max(reversed(FIRST_STRENGTHS), key=accuracy)
    span = FIRST_SPAN
    while span > 0:
        near = [min(best + span, len(STRENGTHS) - 1), best, max(best - span, 0)]
        best = max(near, key=accuracy)
        span //= 2
    weights = fit(features, labels, num_classes, asked_to_stop, STRENGTHS[best], weights)
    test_features, test_labels = labeled(test)
    test_features = with_constant(test_features - shift.float())
    top1, top5 = accuracies_at(weights, test_features, test_labels, [1, 5])
    return {
        "linear_probe_top1": top1,
        "linear_probe_top5": top5,
        "linear_probe_l2": STRENGTHS[best],
    }


def labeled(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """The features [n, D] float32 of the samples with a label, and their labels [n]."""
    has_label = encoded.labels >= 0
    return encoded.image[has_label].float(), encoded.labels[has_label]


def with_constant(features: Tensor) -> Tensor:
    """[n, D] -> [n, D + 1]: a one at the end of each row, for the bias."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def fit(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    asked_to_stop: Callable[[], bool],
    strength: float,
    start: Tensor,
) -> Tensor:
    """Minimize the mean cross-entropy over the samples of all ranks, plus strength / 2 times the
    sum of squared weights, without the bias. Collective.

    Args:
        features: [n, D + 1] float32, whose last column is one.
        labels: int64 [n].
        start: [C, D + 1] float64, where the search begins.

    Returns:
        [C, D + 1] float64: the weights and, in the last column, the bias.
    """
    (total,) = dist.sum_scalars(len(labels))
    weights = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=STEPS,
        tolerance_grad=TOLERANCE,
        tolerance_change=LEAST_CHANGE,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        loss, gradient = loss_and_gradient(features, labels, weights.detach())
        loss, stopped = dist.sum_scalars(loss, asked_to_stop())
        if stopped:
            raise EvaluationStopped(STOPPED)
        gradient = dist.all_reduce_sum(gradient) / total
        gradient[:, :-1] += strength * weights.detach()[:, :-1]
        weights.grad = gradient
        penalty = strength / 2 * weights.detach()[:, :-1].square().sum().item()
        return loss / total + penalty

    with torch.enable_grad():
        optimizer.step(closure)
    return weights.detach()


def loss_and_gradient(features: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """The sum of the cross-entropy over this rank's samples, and its gradient [C, D + 1] float64.
    Products are float32, sums over samples float64."""
    narrow = weights.float()
    rows = max(1, BLOCK_ELEMENTS // len(weights))
    loss = torch.zeros((), dtype=torch.float64, device=features.device)
    gradient = torch.zeros_like(weights)
    for x, y in zip(features.split(rows), labels.split(rows), strict=True):
        log_p = (x @ narrow.T).log_softmax(dim=1)  # [rows, C]
        loss -= log_p.gather(1, y[:, None]).sum(dtype=torch.float64)
        error = log_p.exp()
        error[torch.arange(len(y), device=y.device), y] -= 1
        gradient += (error.T @ x).double()
    return loss.item(), gradient


def accuracies_at(
    weights: Tensor, features: Tensor, labels: Tensor, most: Sequence[int]
) -> list[float]:
    """The share of the samples of all ranks whose class is among the first k, for each k of `most`.
    A class that ties with the right one is ranked before it."""
    class_ids = torch.arange(len(weights), device=labels.device)
    rule = MatchRule(labels, class_ids, ties_ahead=True)
    (ranks,) = dist.agreed(ranks_of_matches, features, weights.float(), [rule])
    total, *hits = dist.sum_scalars(len(ranks), *(int((ranks <= k).sum()) for k in most))
    return [hit / total for hit in hits]
