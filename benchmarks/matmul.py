"""What `loss.matmul` does to the loss and its gradient: errors against textbook autograd in float64.

N pairs of features of 768 numbers, at a scale of 100 (CLIP's largest) and 14.3 (its first), of a model that begins to
learn (a pair's cosine is 0.1) and of one that has learned (0.29). On a CPU the factors are rounded as a GPU rounds them
(TF32 to 11 bits, bf16x3 to two bfloat16), so this is a simulation of the GPU's numbers and not of its speed. `bf16` is
textbook autograd under autocast, what a model's own precision would be: no choice of `loss.matmul`, and why not.

Errors are relative norms: of the loss, of the gradient with respect to images and texts, and to the scale.

Targets: highest and bf16x3 within 5e-6 and 5e-5 of each gradient, TF32 within 5e-3, and bf16 at least 5 times as far
off as TF32 in the mean.
"""

from __future__ import annotations

import sys
from typing import Any, get_args

import torch
import torch.nn.functional as F
from common import finish, parser
from torch import Tensor

from clip_train.contrastive.build import build_loss
from clip_train.contrastive.config import LossConfig
from clip_train.contrastive.matmul import matmul_precision
from clip_train.settings import Matmul
from clip_train.task import named_features

D = 768
LIMITS = {"highest": 5e-6, "bf16x3": 5e-5, "tf32": 5e-3}
TARGETS = {
    "errors": "of each gradient: highest 5e-6, bf16x3 5e-5, tf32 5e-3; bf16 5 times as far off as tf32"
}
LABELS = ("loss", "d image", "d text", "d scale", "d bias")


def features(N: int, cosine: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(N)
    image, noise = (F.normalize(torch.randn(N, D, generator=g), dim=1) for _ in range(2))
    return image, F.normalize(cosine * image + (1 - cosine**2) ** 0.5 * noise, dim=1)


def textbook(
    kind: str, image: Tensor, text: Tensor, scale: float, bias: float, dtype: torch.dtype
) -> list[Tensor]:
    """autograd over the whole matrix; bfloat16: under autocast, with float32 inputs."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [x.to(wide).requires_grad_() for x in (image, text)]
    leaves += [torch.tensor([x], dtype=wide, requires_grad=True) for x in (scale, bias)]
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        logits = leaves[2] * leaves[0] @ leaves[1].T
        if kind == "sigmoid":
            signs = 2 * torch.eye(len(image), dtype=wide) - 1
            loss = -F.logsigmoid(signs * (logits + leaves[3])).sum() / len(image)
        else:
            target = torch.arange(len(image))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def ours(
    kind: str, matmul: Matmul, image: Tensor, text: Tensor, scale: float, bias: float
) -> list[Tensor]:
    objective = build_loss(LossConfig(kind=kind, matmul=matmul))  # type: ignore[arg-type]
    given = torch.tensor([bias]) if kind == "sigmoid" else None
    with matmul_precision(objective.matmul):  # as the step does
        out = objective(named_features(image, text, torch.tensor([scale]), given))
    return [out.loss, *out.gradients.values()]


def main() -> int:
    args = parser(__doc__).parse_args()
    N = 1024 if args.quick else 4096
    rows, missed = [], []
    for kind in ("info_nce", "sigmoid"):
        for scale in (100.0, 14.3):
            for cosine in (0.1, 0.29):
                pair = features(N, cosine)
                exact = textbook(kind, *pair, scale, -10.0, torch.float64)
                ways = {each: ours(kind, each, *pair, scale, -10.0) for each in get_args(Matmul)}
                ways["bf16"] = textbook(kind, *pair, scale, -10.0, torch.bfloat16)
                for way, found in ways.items():
                    errors = [
                        ((x.double() - y).norm() / y.norm()).item()
                        for x, y in zip(found, exact, strict=True)
                    ]
                    row: dict[str, Any] = {
                        "loss": kind,
                        "scale": scale,
                        "cosine": cosine,
                        "N": N,
                        "matmul": way,
                    }
                    rows.append(
                        row
                        | {
                            f"err {name}": error
                            for name, error in zip(LABELS, errors, strict=False)
                        }
                    )
                    worst = max(errors[1:])
                    if worst > LIMITS.get(way, 1.0):
                        missed.append(
                            f"errors: {kind}, scale {scale}, cosine {cosine}, {way}: {worst:.1e}"
                        )
    far = {
        way: sum(row["err d image"] for row in rows if row["matmul"] == way)
        for way in ("tf32", "bf16")
    }
    if far["bf16"] < 5 * far["tf32"]:
        missed.append(f"errors: bf16 is {far['bf16'] / far['tf32']:.1f} times as far off as tf32")
    columns = list({key: None for row in rows for key in row})
    rows = [{column: row.get(column, "") for column in columns} for row in rows]
    return finish("matmul", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
