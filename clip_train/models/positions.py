"""Positional embeddings of weights for another image size or context length.

`L` positions of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.errors import UserError
from clip_train.models.config import AnyArchitecture, KeepPositions, OwnModel

IMAGE_POSITIONS = (
    "visual.positional_embedding",
    "visual.attnpool.positional_embedding",  # of a ResNet
    "visual.trunk.pos_embed",  # of timm's
)
MOST_PREFIX_TOKENS = 8  # the class token and registers, before the patches
TEXT_POSITIONS = ("positional_embedding", "text.positional_embedding")
# Added to the seed, so that positions are not the numbers that begin another parameter.
POSITIONS_SEED = 1 << 32


def resize_positions(
    state: dict[str, Tensor],
    architecture: AnyArchitecture,
    expected: Mapping[str, tuple[int, ...]],
    keep: KeepPositions = 0,
    seed: int = 0,
) -> list[str]:
    """Give positional embeddings another image size or context in place.

    As OpenCLIP does: the image's grid bicubic with antialias (the class token stays), the text's
    linear. What cannot be interpolated stays.
    keep: as `model.keep_positions`. seed: of drawn positions. Returns the lines for the log.
    """
    if isinstance(architecture, OwnModel):
        return []
    interpolated, drawn = [], []
    for name in IMAGE_POSITIONS:
        if name in state and name in expected:
            interpolated += resize_grid(state, name, expected[name])
    for name in TEXT_POSITIONS:
        old, shape = state.get(name), expected.get(name, ())
        if old is None or old.ndim != 2 or len(shape) != 2 or old.shape[1] != shape[1]:
            continue
        context = shape[0]  # the model may add a token of its own
        if len(old) in (0, context):
            continue
        last = architecture.text_cfg.reads_last
        if isinstance(keep, str):
            state[name], line = continued(old.float(), context, keep, last, seed)
            drawn.append(line)
            continue
        state[name] = stretched(old.float(), context, keep, last)
        kept = ""
        if keep:
            kept = f", the first {keep}{' and the last' if last else ''} as they are"
        interpolated.append(f"the text's from {len(old)} to {context} tokens{kept}")
    if interpolated:
        drawn.insert(0, f"positional embeddings interpolated: {', '.join(interpolated)}")
    return drawn


def stretched(old: Tensor, context: int, keep: int, last: bool = False) -> Tensor:
    """[L, width] -> [context, width]. UserError if L is too small to keep this many.

    With `keep` as Long-CLIP does (arXiv 2403.15378): position `keep + j` is at `keep + j (L - keep)
    / (context - keep)` of the old ones, and the last ones follow the line through the last two. If
    the tower reads the last position, `keep + j` is at `keep + j (L - 1 - keep) / (context - 1 -
    keep)`, and the last one is the old last.
    """
    if keep == 0:
        row = F.interpolate(old.T[None], size=context, mode="linear", align_corners=False)
        return row[0].T.contiguous()
    if keep > len(old) - 2:
        raise UserError(
            f"model.keep_positions ({keep}) must be at most {len(old) - 2}: the weights have "
            f"{len(old)} positions, and two are needed to interpolate; lower it"
        )
    ends = 1 if last else 0
    ratio = (len(old) - ends - keep) / max(context - ends - keep, 1)
    places = keep + ratio * torch.arange(context - keep, dtype=torch.float64)
    left = places.long().clamp(max=len(old) - 2)
    rest = old[left].lerp(old[left + 1], (places - left).to(old.dtype)[:, None])
    if last:  # without its rounding error
        rest[-1] = old[-1]
    return torch.cat([old[:keep], rest])


def continued(
    old: Tensor, context: int, keep: KeepPositions, last: bool, seed: int
) -> tuple[Tensor, str]:
    """[L, width] -> [context, width] with drawn positions behind the old ones, and a line for the
    log.

    They are drawn with the mean and the deviation of the old ones, by column: most of a position is
    what it shares with the others. UserError if the old ones do not fit.
    """
    if context < len(old):
        raise UserError(
            f"model.keep_positions ({keep}): the weights have {len(old)} positions, and "
            f"model.context_length is {context}; raise it, or set model.keep_positions=0"
        )
    count = context - len(old)
    generator = torch.Generator().manual_seed(POSITIONS_SEED + seed)
    draws = torch.randn(count, old.shape[1], generator=generator).to(old.device)
    new = old.mean(0) + old.std(0, correction=0) * draws
    text = f"the text's {len(old)} positional embeddings"
    if keep == "all_but_last":
        line = (
            f"{text} stay as they are, {count} are drawn before the last one, where texts are read"
        )
        return torch.cat([old[:-1], new, old[-1:]]), line
    line = f"{text} stay in their places, {count} are drawn behind them"
    if last:
        line += "; texts are read at the last of these, which only training can teach"
    return torch.cat([old, new]), line


def side_of(count: int) -> int:
    """The side of a square of so many patches; 0 if they make none."""
    side = math.isqrt(max(count, 0))
    return side if side**2 == count else 0


def resize_grid(state: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> list[str]:
    """The image's part of `resize_positions`, for one parameter. Returns what was done.

    shape: [(1,) prefix + side * side, width], as the model has it.
    """
    old = state[name]
    if old.ndim != len(shape) or old.ndim < 2 or old.shape[-1] != shape[-1]:
        return []
    if old.shape[-2] == shape[-2]:
        return []
    for prefix in range(MOST_PREFIX_TOKENS):
        was, side = side_of(old.shape[-2] - prefix), side_of(shape[-2] - prefix)
        if was and side:
            break
    else:
        return []
    rows = old.float().flatten(0, -2)
    grid = rows[prefix:].unflatten(0, (was, was)).permute(2, 0, 1)[None]  # [1, width, was, was]
    grid = F.interpolate(
        grid, size=(side, side), mode="bicubic", antialias=True, align_corners=False
    )
    new = torch.cat([rows[:prefix], grid[0].flatten(1).T])
    state[name] = new.reshape(*old.shape[:-2], *new.shape)
    return [f"the image's from {was} x {was} to {side} x {side} patches"]
