"""The contrastive losses, forward and backward, beside other ways to compute them. D = 512, float32.

A rank alone computes the loss over N pairs of features and its gradient with respect to the features, the
scale and the bias. `bare products` is what cannot be saved: the matrix products of `clip_train InfoNCE`, on
tiles of the same size, and nothing else (8 N^2 D flops). Seconds are CPU seconds of all threads (which sleep while
they wait, so that other programs on the machine do not count), median over rounds in which the methods take turns;
`x bare` and `x ours` are medians of the ratios within a round. `peak` is how far one call raises a fresh process's
resident memory, gradients included. Errors are relative, against textbook autograd in float64, in blocks of rows.

Targets, at the largest N that OpenCLIP runs at (16,384; with --quick 4,096):
  InfoNCE takes at most 1.25 times its bare matrix products, at most half of OpenCLIP's ClipLoss called once (two
  thirds at 4,096, where full logits still fit into some caches), at most an eighth of it called 8 times (once per
  micro-batch, as its accumulation does), and at most 5% of its extra memory (at 16,384 only: the gradients alone are
  5% at 4,096); loss and gradients of both losses within 1e-6.

OpenCLIP's rows need it: scripts/setup_peers.sh, then .venv-peers/bin/python benchmarks/loss.py.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import ROOT, describe_products, finish, parser, products
from torch import Tensor

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.losses.tiles import auto_side, tiles
from clip_train.task import named_features

try:
    from open_clip.loss import ClipLoss, SigLipLoss
except ImportError:
    ClipLoss = SigLipLoss = None
MISSING = "open_clip not installed: run scripts/setup_peers.sh"

D, SCALE, CALLS = 512, 50.0, 8
SIGMOID_SCALE, BIAS = 10.0, -10.0  # where SigLIP starts
Outcome = tuple[Tensor, ...]  # loss, d_image, d_text, d_scale[, d_bias]; empty: nothing to compare

TARGETS = {
    "x bare": "clip_train InfoNCE at most 1.25 times its bare matrix products",
    "x OpenCLIP": "ClipLoss once at least 2 times, called 8 times at least 8 times as long as clip_train InfoNCE",
    "peak": "clip_train InfoNCE at most 5% of ClipLoss's extra memory at N = 16,384",
    "error": "loss and every gradient of both clip_train losses within 1e-6",
}


# --- what is compared: (I, T) -> Outcome -----------------------------------------------------------------


def ours(I: Tensor, T: Tensor) -> Outcome:
    o = InfoNCE()(named_features(I, T, torch.tensor([SCALE])))
    return o.loss, o.gradients["image"], o.gradients["text"], o.gradients["logit_scale"]


def ours_sigmoid(I: Tensor, T: Tensor) -> Outcome:
    o = SigmoidLoss()(named_features(I, T, torch.tensor([SIGMOID_SCALE]), torch.tensor([BIAS])))
    assert o.gradients.get("logit_bias") is not None
    return (
        o.loss,
        o.gradients["image"],
        o.gradients["text"],
        o.gradients["logit_scale"],
        o.gradients.get("logit_bias"),
    )


def bare_products(I: Tensor, T: Tensor) -> Outcome:
    N = len(I)
    side = auto_side(N, N)
    buffer, d_image, d_text = (
        torch.empty(min(side, N) ** 2),
        torch.zeros_like(I),
        torch.zeros_like(T),
    )
    for sweep in (1, 2):
        for rows, cols in tiles(N, N, side):
            a, b = I[rows], T[cols]
            S = buffer[: len(a) * len(b)].view(len(a), len(b))
            torch.addmm(S, a, b.t(), beta=0, alpha=SCALE, out=S)
            if sweep == 2:
                d_image[rows].addmm_(S, b, alpha=1e-6)
                d_text[cols].addmm_(S.t(), a, alpha=1e-6)
    return ()


def with_autograd(
    loss: Callable[..., Tensor], scalars: list[float], I: Tensor, T: Tensor
) -> Outcome:
    leaves = [I, T, *(torch.tensor([x]) for x in scalars)]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = loss(*leaves)
    value.backward()
    return value.detach(), *(leaf.grad for leaf in leaves)  # type: ignore[misc]


def textbook(I: Tensor, T: Tensor, scale: Tensor) -> Tensor:
    logits = scale * I @ T.T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def openclip_accumulating(calls: int, I: Tensor, T: Tensor) -> Outcome:
    """open_clip_train.train with accum_freq = 8: for each micro-batch the loss over all features, of which this
    micro-batch's have a graph. `calls` of the 8 are made."""
    d_image, d_text = torch.zeros_like(I), torch.zeros_like(T)
    loss_fn = ClipLoss()
    for own in torch.arange(len(I)).tensor_split(CALLS)[:calls]:
        i, j = int(own[0]), int(own[-1]) + 1
        a, b, scale = (
            I[i:j].clone().requires_grad_(),
            T[i:j].clone().requires_grad_(),
            torch.tensor([SCALE]),
        )
        value = loss_fn(
            torch.cat([I[:i], a, I[j:]]), torch.cat([T[:i], b, T[j:]]), scale.requires_grad_()
        )
        value.backward()
        d_image[i:j], d_text[i:j] = a.grad, b.grad
    return (value.detach(), d_image, d_text) if calls == CALLS else ()


class InfCL(torch.autograd.Function):
    """Inf-CL (arXiv 2410.17243), one direction on one rank: a running log-sum-exp per row over tiles of columns
    forward, each tile again backward. Its kernels' schedule in plain torch."""

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, scale: Tensor) -> Tensor:
        lse = Q.new_full((len(Q),), -torch.inf)
        side = auto_side(len(Q), len(K))
        for rows, cols in tiles(len(Q), len(K), side):
            S = (Q[rows] @ K[cols].T).mul_(scale)
            lse[rows] = torch.logaddexp(lse[rows], S.logsumexp(1))
        ctx.save_for_backward(Q, K, scale, lse)
        return (lse - scale * (Q * K).sum(1)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        Q, K, scale, lse = ctx.saved_tensors
        w = grad / len(Q)
        dQ, dK = -K * (scale * w), -Q * (scale * w)
        for rows, cols in tiles(len(Q), len(K), auto_side(len(Q), len(K))):
            q, k = Q[rows], K[cols]
            P = (q @ k.T).mul_(scale).sub_(lse[rows, None]).exp_().mul_(w * scale)
            dQ[rows] += P @ k
            dK[cols] += P.T @ q
        return dQ, dK, (Q * dQ).sum().reshape(1) / scale


def inf_cl(I: Tensor, T: Tensor, scale: Tensor) -> Tensor:
    return (InfCL.apply(I, T, scale) + InfCL.apply(T, I, scale)) / 2


OURS, SIGMOID, BARE = "clip_train InfoNCE", "clip_train sigmoid", "bare products"
NAIVE, INF_CL = "autograd, full logits", "Inf-CL's schedule in torch"
ONCE, PART, FULL, SIGLIP = (
    "OpenCLIP ClipLoss",
    "2 calls of 8",
    f"OpenCLIP ClipLoss x {CALLS}",
    "OpenCLIP SigLipLoss",
)
METHODS: dict[str, Callable[[Tensor, Tensor], Outcome]] = {
    BARE: bare_products,
    OURS: ours,
    SIGMOID: ours_sigmoid,
    NAIVE: partial(with_autograd, textbook, [SCALE]),
    INF_CL: partial(with_autograd, inf_cl, [SCALE]),
    ONCE: partial(with_autograd, ClipLoss and ClipLoss(), [SCALE]),
    FULL: partial(openclip_accumulating, CALLS),
    PART: partial(openclip_accumulating, 2),
    SIGLIP: partial(with_autograd, SigLipLoss and SigLipLoss(), [SIGMOID_SCALE, BIAS]),
}
PEERS = (ONCE, FULL, PART, SIGLIP)


def features(N: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(N)
    image = torch.randn(N, D, generator=g)
    text = (
        torch.randn(N, D, generator=g) + 0.3 * image
    )  # pairs at a cosine of 0.29, like a trained CLIP's
    return F.normalize(image, dim=1), F.normalize(text, dim=1)


# --- truth -----------------------------------------------------------------------------------------------


def truth(N: int, sigmoid: bool) -> Outcome:
    """Textbook autograd in float64; the loss is a sum over rows, so 1,024 at a time have their graph."""
    I, T = features(N)
    scalars = [SIGMOID_SCALE, BIAS] if sigmoid else [SCALE]
    leaves = [I.double(), T.double(), *(torch.tensor([x], dtype=torch.float64) for x in scalars)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    image, text, scale = leaves[:3]
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(N).split(1024):
        if sigmoid:
            labels = torch.full((len(rows), N), -1.0, dtype=torch.float64)
            labels[torch.arange(len(rows)), rows] = 1
            part = -F.logsigmoid(labels * (scale * image[rows] @ text.T + leaves[3])).sum() / N
        else:
            sides = (image[rows], text), (text[rows], image)
            part = sum(
                F.cross_entropy(scale * a @ b.T, rows, reduction="sum") for a, b in sides
            ) / (2 * N)
        part.backward()
        total += part.detach()
    return total, *(leaf.grad for leaf in leaves)  # type: ignore[misc]


def errors(outcome: Outcome, exact: Outcome) -> list[float]:
    """Of loss, d_image, d_text, d_scale[, d_bias]."""
    return [
        ((x.double() - y).norm() / y.norm()).item() for x, y in zip(outcome, exact, strict=False)
    ]


# --- measuring -------------------------------------------------------------------------------------------


def take_turns(names: list[str], N: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each method in each round, after one call of each at a small N."""
    small, large = features(256), features(N)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        METHODS[name](*small)
        if N <= 4096:
            METHODS[name](*large)
    for _ in range(rounds):
        for name in names:
            start = time.process_time()
            METHODS[name](*large)
            seconds[name].append(time.process_time() - start)
    return seconds


def peak_memory(name: str, N: int) -> float:
    """MiB, in a fresh process (Linux)."""
    script = (
        f"import sys; sys.path.insert(0, 'benchmarks'); import loss; loss.print_peak({name!r}, {N})"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if out.returncode != 0:
        raise RuntimeError(f"{name} at N = {N}: {out.stderr[-2000:]}")
    return float(out.stdout.split()[-1])


def print_peak(name: str, N: int) -> None:
    I, T = features(N)
    METHODS[name](*features(256))  # libraries load, thread pools start
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    METHODS[name](I, T)
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    """KiB."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field + ":"))


def measure(N: int, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row per method. Slow ones take their turns once, beside the bare products and ours."""
    available = [name for name in names if ClipLoss is not None or name not in PEERS]
    quick = [name for name in available if name in (BARE, OURS, SIGMOID)]
    slow = [BARE, OURS, *(name for name in available if name not in quick)]
    turns = take_turns(quick, N, rounds)
    ratios = {name: _ratios(turns, name) for name in quick}
    if len(slow) > 2:
        slow_turns = take_turns(slow, N, 1 if N > 4096 else rounds)
        ratios |= {name: _ratios(slow_turns, name) for name in slow[2:]}
        turns |= {name: slow_turns[name] for name in slow[2:]}
    exact = {sigmoid: truth(N, sigmoid) for sigmoid in (False, True)} if N <= 16384 else None
    rows = []
    for name in names:
        row: dict[str, Any] = {"N": N, "method": FULL if name == PART else name}
        if name not in available:
            rows.append(row | {"note": MISSING})
            continue
        times = CALLS / 2 if name == PART else 1
        row |= {"CPU s": statistics.median(turns[name]) * times, "x bare": ratios[name][0] * times}
        row |= {"x ours": ratios[name][1] * times}
        if N >= 4096:  # below, the libraries' own buffers are most of it
            row["peak MiB"] = peak_memory(name, N)
        if exact is not None and name not in (BARE, PART):
            labels = ("loss", "d image", "d text", "d scale", "d bias")
            found = errors(METHODS[name](*features(N)), exact[name in (SIGMOID, SIGLIP)])
            row |= {f"err {label}": error for label, error in zip(labels, found, strict=False)}
        rows.append(row)
    return rows


def _ratios(turns: dict[str, list[float]], name: str) -> tuple[float, float]:
    """Against the bare products and against ours, each the median of the ratios within a round."""

    def against(other: str) -> float:
        return statistics.median(x / y for x, y in zip(turns[name], turns[other], strict=True))

    return against(BARE), against(OURS)


def check(rows: list[dict[str, Any]]) -> list[str]:
    missed = []
    N = max(row["N"] for row in rows if row["method"] == ONCE)
    at = {row["method"]: row for row in rows if row["N"] == N}
    if at[OURS]["x bare"] > 1.25:
        missed.append(f"x bare: {at[OURS]['x bare']:.2f} at N = {N}")
    for name, least in ((ONCE, 2.0 if N >= 16384 else 1.5), (FULL, 8)):
        if name in at and "x ours" in at[name] and at[name]["x ours"] < least:
            missed.append(
                f"x OpenCLIP: {name} takes {at[name]['x ours']:.2f} x ours at N = {N}, not {least}"
            )
    if N == 16384 and "peak MiB" in at[ONCE] and at[OURS]["peak MiB"] > 0.05 * at[ONCE]["peak MiB"]:
        missed.append(
            f"peak: {at[OURS]['peak MiB']:.0f} MiB beside {at[ONCE]['peak MiB']:.0f} at N = {N}"
        )
    for row in rows:
        if row["method"] in (OURS, SIGMOID):
            missed += [
                f"error: {row['method']} at N = {row['N']}, {key[4:]}: {value:.1e}"
                for key, value in row.items()
                if key.startswith("err") and value > 1e-6
            ]
    return missed


def main() -> int:
    args = parser(__doc__).parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:  # read when torch is loaded: start again with it
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
    small = [BARE, OURS, SIGMOID, NAIVE, INF_CL, ONCE, FULL, SIGLIP]
    large = [
        PART if name == FULL else name for name in small
    ]  # 8 calls at 16,384 take two minutes: 2 are made
    plan = [(1024, small, 5), (4096, small, 3)]
    if not args.quick:
        plan += [(16384, large, 3), (32768, [BARE, OURS, SIGMOID], 1)]
    rows: list[dict[str, Any]] = []
    for N, names, rounds in plan:
        started = time.monotonic()
        rows += measure(N, names, rounds)
        print(f"N = {N}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    columns = sorted(
        {key: None for row in rows for key in row}, key=lambda key: key == "note"
    )  # the note is last
    rows = [{column: row.get(column, "") for column in columns} for row in rows]
    print(describe_products(products()))
    print(
        "arithmetic: with the logits at hand a call of ClipLoss is 6 N^2 D flops, ours 8: by products alone it "
        f"takes {6 / 8:.2f} of our time, {CALLS} calls {CALLS * 6 / 8:.0f} times; what is above is memory traffic"
    )
    return finish(
        "loss",
        rows,
        TARGETS,
        check([{k: v for k, v in row.items() if v != ""} for row in rows]),
        args,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError:
        traceback.print_exc()
        sys.exit(1)
