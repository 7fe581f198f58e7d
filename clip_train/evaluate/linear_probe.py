"""Linear probe: logistic regression on image features, by L-BFGS (CLIP, arXiv 2103.00020, A.3;
clip_benchmark).

`n` samples on this rank, `D` features, `C` classes. Each rank holds its own samples; loss and
gradient are summed over all, so that the result is that of one rank: float64 from zero weights, a
convex problem.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train import dist
from clip_train.errors import UserError
from clip_train.evaluate.features import Encoded

STRENGTHS = [
    10 ** (e / 4) for e in range(-32, 1)
]  # of the L2 penalty: 1e-8 to 1, four in each decade
HELD_OUT = 10  # every tenth training sample chooses among them
ROWS = 1 << 14  # whose logits are held at once


def linear_probe(train: Encoded, test: Encoded) -> dict[str, float]:
    """Top-1 accuracy on `test` of a classifier trained on `train`: `linear_probe_top1`; and
    `linear_probe_l2`, the strength of its penalty, chosen on a tenth of the training samples by
    CLIP's search: coarse, then its neighbours.

    Raises:
        UserError: no label in one of them; on all ranks together.
    """
    counts = dist.gather_objects(len(train.labels))
    number = sum(counts[: dist.rank()]) + torch.arange(
        len(train.labels), device=train.labels.device
    )
    held = number % HELD_OUT == HELD_OUT - 1
    known, tested = train.labels >= 0, test.labels >= 0
    (trained, scored) = dist.sum_scalars(int(known.sum()), int(tested.sum()))
    if not trained or not scored:
        key = "zero_shot_data (or data.val)" if trained else "linear_probe"
        raise UserError(
            f"evaluate.{key} has no labelled image for the linear probe: give a folder for each "
            "class, or .cls; labels that are names need evaluate.zero_shot_classes"
        )
    classes = 1 + int(
        dist.max_scalars(float(torch.cat([train.labels, test.labels, known.new_zeros(1)]).max()))[0]
    )
    x, y = train.image.double(), train.labels
    scores: dict[int, float] = {}

    def score(i: int) -> tuple[float, int]:
        if i not in scores:
            weights = fit(x[known & ~held], y[known & ~held], classes, STRENGTHS[i])
            scores[i] = hits(x[known & held], y[known & held], weights)
        return scores[i], i  # of equals the strongest

    best = max(range(0, len(STRENGTHS), 8), key=score)
    for span in (4, 2, 1):
        best = max(
            (i for i in (best - span, best, best + span) if 0 <= i < len(STRENGTHS)), key=score
        )
    weights = fit(x[known], y[known], classes, STRENGTHS[best])
    right = hits(test.image[tested].double(), test.labels[tested], weights)
    return {"linear_probe_top1": right / scored, "linear_probe_l2": STRENGTHS[best]}


def fit(x: Tensor, y: Tensor, classes: int, strength: float) -> Tensor:
    """float64 [D + 1, C], the bias in the last row: the least mean cross-entropy over all ranks'
    rows plus `strength / 2` times the weights' squares, as scikit-learn's `LogisticRegression(C=1 /
    (rows * strength))`.

    Args:
        x: [n, D] float64.
        y: int64 [n], below `classes`.
    """
    (rows,) = dist.sum_scalars(len(x))
    weights = torch.zeros(
        x.shape[1] + 1, classes, dtype=x.dtype, device=x.device, requires_grad=True
    )
    solver = torch.optim.LBFGS(
        [weights], max_iter=1000, tolerance_grad=1e-7, tolerance_change=1e-12, history_size=10,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        total = weights.new_zeros(())
        for part, labels in zip(x.split(ROWS), y.split(ROWS), strict=True):
            loss = (
                F.cross_entropy(part @ weights[:-1] + weights[-1], labels, reduction="sum") / rows
            )
            loss.backward()
            total += loss.detach()
        with torch.no_grad():
            assert weights.grad is not None
            dist.all_reduce_sum(weights.grad)
            weights.grad[:-1] += strength * weights[:-1]
            return dist.all_reduce_sum(total) + strength / 2 * weights[:-1].square().sum()

    solver.step(closure)
    return weights.detach()


def hits(x: Tensor, y: Tensor, weights: Tensor) -> float:
    """How many rows of all ranks are given their own class."""
    parts = zip(x.split(ROWS), y.split(ROWS), strict=True)
    right = sum(
        int(((part @ weights[:-1] + weights[-1]).argmax(1) == labels).sum())
        for part, labels in parts
    )
    return dist.sum_scalars(right)[0]
