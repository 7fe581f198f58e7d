"""Four losses as plain functions, for `loss.kind=examples.losses.nt_xent` and the like.

Each is called with the features of the whole global batch, [N, D] and normalized, and returns the
terms of the samples `rows`. Its sums over `rows` are divided by N, so the terms of all ranks add up
to the mean over the global batch (`sums_over_rows`). docs/extending.md has the rules.

    clip-train train recipes/demo_shapes.yaml run.name=losses loss.kind=examples.losses.hard_negatives \\
        "loss.options={beta: 0.5}"
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def nt_xent(image: Tensor, text: Tensor, scale: Tensor, bias: None, rows: slice) -> Tensor:
    """SimCLR (arXiv 2002.05709): the 2N features are one set, each one's partner its positive."""
    everyone = torch.cat([image, text])  # [2N, D]
    N = len(image)
    here = torch.arange(N, device=image.device)[rows]
    terms = image.new_zeros(())
    for own, partner in ((here, here + N), (here + N, here)):
        logits = scale * everyone[own] @ everyone.T
        itself = F.one_hot(own, 2 * N).bool()
        terms = terms + F.cross_entropy(
            logits.masked_fill(itself, -torch.inf), partner, reduction="sum"
        )
    return terms / (2 * N)


def decoupled(image: Tensor, text: Tensor, scale: Tensor, bias: None, rows: slice) -> Tensor:
    """Decoupled contrastive learning (arXiv 2110.06848): no positive in the denominator."""
    N = len(image)
    here = torch.arange(N, device=image.device)[rows]
    positive = F.one_hot(here, N).bool()
    terms = image.new_zeros(())
    for a, b in ((image, text), (text, image)):
        logits = scale * a[rows] @ b.T
        negatives = logits.masked_fill(positive, -torch.inf).logsumexp(1)
        terms = terms + (negatives - logits[positive]).sum()
    return terms / (2 * N)


def hard_negatives(
    image: Tensor, text: Tensor, scale: Tensor, bias: None, rows: slice, beta: float = 0.5
) -> Tensor:
    """InfoNCE whose negatives weigh exp(beta * cosine) (arXiv 2010.04592, without its tau+).

    beta: 0 is InfoNCE. The weights have a mean of 1 in each row; they have no gradient.
    """
    N = len(image)
    here = torch.arange(N, device=image.device)[rows]
    positive = F.one_hot(here, N).bool()
    terms = image.new_zeros(())
    for a, b in ((image, text), (text, image)):
        cosines = a[rows] @ b.T
        weights = (beta * cosines.detach()).masked_fill(positive, -torch.inf).log_softmax(1)
        weights = (weights + math.log(N - 1)).masked_fill(positive, 0.0)
        terms = terms + F.cross_entropy(scale * cosines + weights, here, reduction="sum")
    return terms / (2 * N)


def siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, rows: slice) -> Tensor:
    """SigLIP (arXiv 2303.15343): every pair is a question of yes or no. The model has a bias."""
    logits = scale * image[rows] @ text.T + bias
    here = torch.arange(len(image), device=image.device)[rows]
    signs = 2.0 * F.one_hot(here, len(image)) - 1
    return -F.logsigmoid(signs * logits).sum() / len(image)


for function in (nt_xent, decoupled, hard_negatives, siglip):
    function.sums_over_rows = True
siglip.takes_bias = True
