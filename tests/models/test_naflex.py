"""What timm's NaFlexVit needs of this project, without timm: weights of positions, and names of parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clip_train.models.layouts import from_naflex, to_naflex
from clip_train.native import resize_weights


@pytest.mark.parametrize(
    "mode, antialias", [("bicubic", True), ("bilinear", True), ("bilinear", False)]
)
def test_weights_of_positions_are_those_of_interpolate(mode: str, antialias: bool):
    row = torch.randn(5, 16, dtype=torch.float64).T[None]  # [1, width, source]
    for size in (1, 2, 3, 4, 5, 6, 9, 16, 31):
        # a square: a width of 1 is wrong in torch on a CPU
        square = row[..., None].expand(-1, -1, -1, 5)
        resized = F.interpolate(square, size=(size, 5), mode=mode, antialias=antialias)
        expected = resized[0, :, :, 0].T
        weights = resize_weights(
            torch.arange(size),
            torch.full((size,), size),
            5,
            torch.float64,
            mode,
            antialias=antialias,
        )
        torch.testing.assert_close(weights @ row[0].T, expected, rtol=0, atol=1e-12)


def test_patches_and_positions_of_squares_are_those_of_a_naflexvit():
    weight = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    positions = torch.randn(1, 9, 6)
    state = {
        "visual.trunk.patch_embed.proj.weight": weight,
        "visual.trunk.patch_embed.proj.bias": torch.zeros(6),
        "visual.trunk.pos_embed": positions,
        "visual.trunk.blocks.0.norm1.weight": torch.ones(6),
        "text.positional_embedding": torch.zeros(4, 6),
    }
    out = to_naflex(state)
    image = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    expected = F.conv2d(image, weight)[0, :, 0, 0]
    pixels = image[0].permute(1, 2, 0).flatten()  # row, column, channel
    torch.testing.assert_close(out.pop("visual.trunk.embeds.proj.weight") @ pixels, expected)
    assert torch.equal(out.pop("visual.trunk.embeds.pos_embed")[0, 1, 2], positions[0, 5])
    rest = ["visual.trunk.embeds.proj.bias", *list(state)[3:]]
    assert list(out) == rest
    table = {"visual.trunk.pos_embed": torch.zeros(1, 10, 6)}  # one of a class token, or no square
    assert to_naflex(table) == table


def test_the_way_back_keeps_the_matrix():
    matrix, table = torch.randn(6, 48), torch.randn(1, 3, 3, 6)
    out = from_naflex(
        {"visual.trunk.embeds.proj.weight": matrix, "visual.trunk.embeds.pos_embed": table}
    )
    assert torch.equal(out["visual.trunk.patch_embed.proj.weight"], matrix)
    assert torch.equal(out["visual.trunk.pos_embed"][0, 5], table[0, 1, 2])
    assert all(
        torch.equal(a, b) for a, b in zip(to_naflex(out).values(), (matrix, table), strict=True)
    )
