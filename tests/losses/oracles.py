"""Textbook objectives in float64: whole matrices, autograd, none of the project's code."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def pairs(N: int, D: int, seed: int = 0, aligned: float = 0.5):
    """Normalised float64 images and texts [N, D]."""
    g = torch.Generator().manual_seed(seed)
    image = torch.randn(N, D, generator=g, dtype=torch.float64)
    text = torch.randn(N, D, generator=g, dtype=torch.float64) + aligned * image
    return F.normalize(image, dim=1), F.normalize(text, dim=1)


def leaves(image, text, scale: float):
    return (
        image.detach().double().clone().requires_grad_(),
        text.detach().double().clone().requires_grad_(),
        torch.tensor([scale], dtype=torch.float64, requires_grad=True),
    )


def banked_loss(I, T, s, past_I, past_T, ids, past_ids, mode):
    """Explicit concatenation; entries of one sample off the diagonal are dropped unless both are current."""
    N = len(I)
    S = s * torch.cat([I, past_I]) @ torch.cat([T, past_T]).T
    everyone = torch.cat([ids, past_ids])
    same = everyone[:, None] == everyone[None]
    same[:N, :N] = False
    same.fill_diagonal_(False)
    S = S.masked_fill(same, -1e30)
    terms = N if mode == "negatives" else len(S)
    target = torch.arange(terms)
    return (F.cross_entropy(S[:terms], target) + F.cross_entropy(S.T[:terms], target)) / 2


def distill_loss(I, T, s, U, V, z):
    """OpenCLIP's DistillClipLoss, as its source defines it: both halves with weight 1."""
    S, Z = s * I @ T.T, z * U @ V.T
    target = torch.arange(len(S))
    clip = (F.cross_entropy(S, target) + F.cross_entropy(S.T, target)) / 2
    rows = -(Z.softmax(1) * S.log_softmax(1)).sum(1).mean()
    cols = -(Z.T.softmax(1) * S.T.log_softmax(1)).sum(1).mean()
    return clip, (rows + cols) / 2


def averaged_teachers_loss(I, T, s, teachers, factors):
    """MobileCLIP's: the softmaxes of the teachers (U, V, z, weight) are averaged. Not yet summed: the two halves."""
    S, target = s * I @ T.T, torch.arange(len(I))
    total = sum(weight for *_, weight in teachers)
    halves = [(F.cross_entropy(S, target) + F.cross_entropy(S.T, target)) / 2, 0]
    for side in (S, S.T):
        average = sum(
            w / total * ((z * U @ V.T) if side is S else (z * V @ U.T)).softmax(1)
            for U, V, z, w in teachers
        )
        halves[1] = halves[1] - (average * side.log_softmax(1)).sum(1).mean() / 2
    return [factor * half for factor, half in zip(factors, halves, strict=True)]


def grouped_loss(I, T, s, b, ids, role):
    """InfoNCE, or with a bias the sigmoid loss, where samples of one id belong together."""
    N = len(I)
    own = torch.eye(N, dtype=torch.bool)
    same = own | ((ids[:, None] == ids) & (ids >= 0))
    S = s * I @ T.T
    if b is not None:
        labels = torch.where(same if role == "positives" else own, 1.0, -1.0).to(S.dtype)
        terms = -F.logsigmoid(labels * (S + b))
        return (terms if role == "positives" else terms.masked_fill(same & ~own, 0.0)).sum() / N
    target = own
    if role == "leave_out":
        S = S.masked_fill(same & ~own, -1e30)
    else:
        target = same
    share = target.to(S.dtype) / target.sum(1, keepdim=True)
    return (F.cross_entropy(S, share) + F.cross_entropy(S.T, share)) / 2


def own_loss(name, I, T, s, b=None, beta=0.5):
    """The losses of examples/losses.py, and `uniformity` of test_function.py, from full matrices."""
    N = len(I)
    eye = torch.eye(N, dtype=torch.bool)
    S = s * I @ T.T
    if name == "siglip":
        return torch.log1p(torch.exp(torch.where(eye, -1.0, 1.0) * (S + b))).sum() / N
    if name == "nt_xent":
        both = torch.cat([I, T])
        E = (s * both @ both.T).exp() * (1 - torch.eye(2 * N, dtype=I.dtype))
        return -(torch.cat([E.diagonal(N), E.diagonal(-N)]) / E.sum(1)).log().mean()
    if name == "decoupled":
        E = S.exp().masked_fill(eye, 0.0)
        return ((E.sum(1).log() - S.diagonal()).mean() + (E.sum(0).log() - S.diagonal()).mean()) / 2
    if name == "hard_negatives":
        weight = (beta * I @ T.T).detach().exp().masked_fill(eye, 0.0)
        halves = []
        for logits, given in ((S, weight), (S.T, weight.T)):
            w = (N - 1) * given / given.sum(1, keepdim=True)
            negatives = (w * logits.exp()).sum(1)
            halves.append(torch.log(1 + negatives / logits.diagonal().exp()).mean())
        return sum(halves) / 2
    assert name == "uniformity"
    distances = [((X[:, None] - X[None]) ** 2).sum(2)[~eye] for X in (I, T)]
    spread = sum(torch.exp(-s * d).sum().log() for d in distances) / 2
    return ((I - T) ** 2).sum() / N + spread


def relative(x, y) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()
