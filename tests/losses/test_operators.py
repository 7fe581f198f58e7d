"""With few rows a rank the loss takes few operators: on a GPU each is a launch that the host pays for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clip_train.losses.exchange import Pairs
from clip_train.losses.info_nce import Softmaxes, add_cross_entropy_gradient
from clip_train.losses.tiles import GPU_SIDE, tile_shape, tiles

VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "select",
    "slice",
    "unsqueeze",
    "squeeze",
    "expand",
    "split",
    "detach",
    "alias",
    "as_strided",
    "diagonal",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
}


class CountsOperators(TorchDispatchMode):
    """Operators that launch a kernel, which a view or an allocation does not."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.split(".")[0] not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("N", [32_768, 90_112])
def test_64_rows_take_at_most_150_operators(N):
    n, D = 64, 4
    features = torch.empty(N, D, device="meta")  # cut as on a GPU; nothing is computed
    pairs = Pairs(features[:n], features[:n], features, features, (n,) * (N // n))
    with CountsOperators() as operators, torch.no_grad():
        softmaxes = Softmaxes.of(pairs, torch.ones(1, device="meta"), GPU_SIDE, deferred=True)
        d_image, d_text = torch.zeros(2, n, D, device="meta")
        add_cross_entropy_gradient(d_image, d_text, pairs, softmaxes, 1.0)
    assert 0 < operators.count <= 150


@pytest.mark.parametrize("side", [1, 7, 64, GPU_SIDE])
@pytest.mark.parametrize("n, N", [(1, 1), (1, 1000), (64, 3_000), (65, 400), (300, 20), (0, 5)])
def test_tiles_cover_every_entry_once_within_the_area(n, N, side):
    rows, cols = tile_shape(n, N, side)
    assert rows * (cols - 15) <= side * side
    pieces = list(tiles(n, N, side))
    covered = sum((r.stop - r.start) * (c.stop - c.start) for r, c in pieces)
    assert covered == n * N and len(pieces) == len({(r.start, c.start) for r, c in pieces})
