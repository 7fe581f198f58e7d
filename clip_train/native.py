"""Images at their native resolution: patches, each image with a grid of its own, in one tensor.

`b` images of at most `T` patches of `p` x `p` pixels. An image is `1 + T` rows of bytes. The first
row says how many rows and columns of patches the image has, the next ones are its patches, row by
row; what follows them is never read. So images of all shapes are rows of one tensor, like square
ones, and shared memory, micro-batches and digests do not distinguish them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

GRID_BYTES = 4  # of the first row: the numbers of rows and of columns, 16 bits each


def to_rows(image: Tensor, patch_size: int, most: int) -> Tensor:
    """uint8 [3, h p, w p] with h w <= most -> uint8 [1 + most, 3 p p], see above.

    A patch has its values in the order of a convolution's weights: channel, row, column.
    """
    rows, columns = image.shape[1] // patch_size, image.shape[2] // patch_size
    out = torch.zeros(1 + most, 3 * patch_size**2, dtype=torch.uint8)
    out[0, :GRID_BYTES] = torch.tensor([rows & 255, rows >> 8, columns & 255, columns >> 8])
    patches = image.unflatten(2, (columns, patch_size)).unflatten(1, (rows, patch_size))
    # [3, rows, p, columns, p] -> [rows, columns, 3, p, p]
    patches = patches.permute(1, 3, 0, 2, 4)
    out[1 : 1 + rows * columns].view(rows, columns, 3, patch_size, patch_size).copy_(patches)
    return out


def from_rows(rows: Tensor) -> Tensor:
    """The image of `to_rows`: uint8 [3, h p, w p]."""
    height, width = grids_of(rows[None])[0].tolist()
    side = math.isqrt(rows.shape[1] // 3)
    patches = rows[1 : 1 + height * width].view(height, width, 3, side, side)
    return patches.permute(2, 0, 3, 1, 4).reshape(3, height * side, width * side)


def grids_of(images: Tensor) -> Tensor:
    """uint8 [b, 1 + T, 3 p p] -> int64 [b, 2]: the rows and the columns of patches of each image."""
    header = images[:, 0, :GRID_BYTES].long()
    return header[:, 0::2] + 256 * header[:, 1::2]


def patch_counts(images: Tensor) -> list[int]:
    """The number of patches of each image of `to_rows`. The images are in the host's memory."""
    return grids_of(images).prod(1).tolist()


def grid_of_about(num_patches: int) -> tuple[int, int]:
    """Rows and columns of a nearly square grid with nearly, and at most, `num_patches` patches."""
    rows = max(1, math.isqrt(num_patches))
    return rows, max(1, num_patches // rows)


def blank_image(patch_size: int, most: int, grid: tuple[int, int]) -> Tensor:
    """uint8 [1 + most, 3 p p]: a black image."""
    size = (side * patch_size for side in grid)
    return to_rows(torch.zeros(3, *size, dtype=torch.uint8), patch_size, most)


def resize_weights(
    places: Tensor,
    sizes: Tensor,
    source: int,
    dtype: torch.dtype,
    mode: Literal["bicubic", "bilinear"] = "bicubic",
    *,
    antialias: bool = True,
) -> Tensor:
    """The weights by which a row of `source` values is resized, as `F.interpolate` does. (On a CPU it
    gives all rows of an image of width 1 the value of the first one, if they are floats.)

    places: int64 [P], of the output values. sizes: int64 [P], the length of the output that each
    belongs to. antialias: false only with bilinear, whose weights are those of F.interpolate then,
    too. Returns [P, source]. It is exactly one-hot where the size is `source`.
    """
    scale = source / sizes.to(dtype)  # [P]
    centers = (places.to(dtype) + 0.5) * scale
    positions = torch.arange(source, dtype=dtype, device=places.device) + 0.5
    distances = positions - centers[:, None]
    if antialias:  # a smaller output averages over a wider window
        distances = distances / scale.clamp(min=1)[:, None]
    x = distances.abs()
    if mode == "bilinear":
        weights = (1 - x).clamp(min=0)
    else:
        near = (1.5 * x - 2.5) * x * x + 1  # Keys' cubic with a = -0.5
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)


def position_weights(
    grids: Tensor, samples: Tensor, places: Tensor, side: int, dtype: torch.dtype
) -> Tensor:
    """How the position of each patch follows from a table of side x side positions.

    grids: int64 [b, 2]. samples, places: int64 [P], the image that a patch belongs to, and its
    place in it. Returns [P, side * side]: the table of that image's size would be F.interpolate's
    (see `resize_weights`), and only the rows that exist are computed, by one product.
    """
    rows, columns = grids[samples].unbind(1)
    # a place of an image without patches is not used
    of_row = resize_weights(places // columns.clamp(min=1), rows.clamp(min=1), side, dtype)
    of_column = resize_weights(places % columns.clamp(min=1), columns.clamp(min=1), side, dtype)
    return of_grid(of_row, of_column)


def of_grid(of_row: Tensor, of_column: Tensor) -> Tensor:
    """[P, rows], [P, columns] -> [P, rows * columns]: the weights of a table by those of its rows and
    of its columns."""
    return (of_row[:, :, None] * of_column[:, None]).flatten(1)
