"""The gradient of a contrastive batch, as it is usually computed when the batch does not fit.

    .venv/bin/python benchmarks/usual_ways.py [--picture docs/images/usual_ways.svg]

Two small towers with dropout, 256 pairs in float64, 8 pieces, which are micro-batches or ranks. Every way is compared
with autograd over the whole batch with the same dropout masks. `towers` and `temperature`: the relative error of the
gradient, |g - exact| / |exact|. `angle`: between both gradients of the towers, in degrees; what remains if Adam
hides a wrong factor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import finish, parser
from torch import Tensor, nn

N, PIECES = 256, 8
SIZE = N // PIECES
TARGETS = {"ours": "towers and temperature within 1e-9, for any size of the micro-batch"}


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (
            nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
            for d in (48, 20)
        )
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.image(images), dim=1)
        return image, F.normalize(self.text(texts), dim=1), self.logit_scale.exp()


def batch() -> tuple[Tensor, Tensor]:
    """Pairs that share 16 hidden numbers."""
    g = torch.Generator().manual_seed(1)
    shared = torch.randn(N, 16, generator=g)
    images = shared @ torch.randn(16, 48, generator=g) + torch.randn(N, 48, generator=g)
    texts = shared @ torch.randn(16, 20, generator=g) + torch.randn(N, 20, generator=g)
    return images.double(), texts.double()


def pieces() -> list[slice]:
    return [slice(start, start + SIZE) for start in range(0, N, SIZE)]


def encode(model: Towers, part: slice, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The features of a piece. Its dropout masks follow from the seed."""
    images, texts = batch()
    torch.manual_seed(1000 * seed + part.start)
    return model(images[part], texts[part])


def clip_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, own = scale * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def exact(model: Towers) -> None:
    parts = [encode(model, part) for part in pieces()]
    image, text = (torch.cat([part[side] for part in parts]) for side in range(2))
    clip_loss(image, text, parts[0][2]).backward()


def alone(model: Towers) -> None:
    for part in pieces():
        (clip_loss(*encode(model, part)) / PIECES).backward()


def gathered_without_gradient(model: Towers) -> None:
    """Each rank's own rows against all features, which are constants; gradients are averaged."""
    with torch.no_grad():
        parts = [encode(model, part) for part in pieces()]
        all_images, all_texts = (torch.cat([part[side] for part in parts]) for side in range(2))
    for part in pieces():
        image, text, scale = encode(model, part)
        own = torch.arange(part.start, part.stop)
        rows = F.cross_entropy(scale * image @ all_texts.T, own)
        columns = F.cross_entropy(scale * text @ all_images.T, own)
        ((rows + columns) / 2 / PIECES).backward()


def replaced_rows(model: Towers) -> None:
    """The whole loss for each piece, whose features replace theirs among stored ones."""
    with torch.no_grad():
        parts = [encode(model, part) for part in pieces()]
    for i, part in enumerate(pieces()):
        here = [*parts[:i], encode(model, part), *parts[i + 1 :]]
        image, text = (torch.cat([piece[side] for piece in here]) for side in range(2))
        clip_loss(image, text, here[i][2]).backward()


def other_masks(model: Towers) -> None:
    """Two passes whose second one draws other dropout masks."""
    with torch.no_grad():
        parts = [encode(model, part) for part in pieces()]
    leaves = [torch.cat([part[side] for part in parts]).requires_grad_() for side in range(2)]
    scale = model.logit_scale.exp()
    clip_loss(*leaves, scale).backward()
    for part in pieces():
        image, text, _ = encode(model, part, seed=1)
        d_image, d_text = (leaf.grad[part] for leaf in leaves)
        ((image * d_image).sum() + (text * d_text).sum()).backward()


def ours(model: Towers) -> None:
    from clip_train import contrastive_step

    images, texts = batch()

    def seeded(rows: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(int(rows[0]))  # the masks of the other ways
        return model(images[rows], texts)

    contrastive_step(seeded, torch.arange(N), texts, micro_size=SIZE)


WAYS: dict[str, tuple[str, Callable[[Towers], None]]] = {
    "each piece by itself": ("gradient accumulation, DDP without a gather", alone),
    "a gather without gradient": (
        "torch.distributed.all_gather, local loss",
        gathered_without_gradient,
    ),
    "rows replaced in stored features": ("OpenCLIP's --accum-freq", replaced_rows),
    "two passes, other dropout masks": ("GradCache without a replay", other_masks),
    "contrastive_step": ("this project", ours),
}


def gradients(way: Callable[[Towers], None]) -> tuple[Tensor, Tensor]:
    model = Towers()
    way(model)
    towers = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "." in n])
    return towers, model.logit_scale.grad


def row_of(name: str, wanted: tuple[Tensor, Tensor]) -> dict[str, Any]:
    where, way = WAYS[name]
    towers, temperature = gradients(way)
    cosine = F.cosine_similarity(towers, wanted[0], dim=0).clamp(max=1)
    return {
        "way": name,
        "as in": where,
        "towers": ((towers - wanted[0]).norm() / wanted[0].norm()).item(),
        "angle": math.degrees(math.acos(cosine.item())),
        "temperature": ((temperature - wanted[1]).norm() / wanted[1].norm()).item(),
    }


def picture(rows: list[dict[str, Any]]) -> str:
    """Bars of the errors, as SVG."""
    height, left, width = 46 * len(rows) + 60, 270, 420
    longest = max(max(row["towers"], min(row["temperature"], 2)) for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="760" height="{height}" fill="white"/>',
        '<text x="12" y="22" font-weight="bold">Relative error of the gradient, 256 pairs in 8 pieces</text>',
        f'<rect x="{left}" y="33" width="12" height="10" fill="#3b6ea8"/><text x="{left + 18}" y="43">towers</text>',
        f'<rect x="{left + 90}" y="33" width="12" height="10" fill="#d98b2b"/>'
        f'<text x="{left + 108}" y="43">temperature</text>',
    ]
    for i, row in enumerate(rows):
        top = 58 + 46 * i
        lines.append(f'<text x="12" y="{top + 13}">{row["way"]}</text>')
        lines.append(
            f'<text x="12" y="{top + 29}" fill="#666" font-size="11">{row["as in"]}</text>'
        )
        for j, (name, color) in enumerate((("towers", "#3b6ea8"), ("temperature", "#d98b2b"))):
            value, y = row[name], top + 17 * j
            drawn = max(width * min(value, longest) / longest, 1)
            lines.append(
                f'<rect x="{left}" y="{y}" width="{drawn:.1f}" height="14" fill="{color}"/>'
            )
            lines.append(
                f'<text x="{left + drawn + 6:.1f}" y="{y + 12}" font-size="12">{value:.2g}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--picture", metavar="FILE", help="draw the errors as SVG")
    args = p.parse_args()
    torch.set_num_threads(1)
    wanted = gradients(exact)
    rows = [row_of(name, wanted) for name in WAYS]
    if args.picture:
        Path(args.picture).write_text(picture(rows))
    last = rows[-1]
    missed = [f"ours: {last}"] if max(last["towers"], last["temperature"]) > 1e-9 else []
    return finish("usual_ways", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
