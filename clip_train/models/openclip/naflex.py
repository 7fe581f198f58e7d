"""timm's NaFlexVit, an image tower for images of any shape: `b` images of at most `T` patches, `P`
patches in all.

timm computes the positions of each grid after reading it from the device. Here they follow from one
product, as in this project's own tower.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor

from clip_train.models.blocks import normalised_images
from clip_train.models.openclip.config import OpenCLIPArchitecture
from clip_train.native import grids_of, of_grid, resize_weights


class Embeds(NaFlexEmbeds):
    """timm's, with positions that are computed on the device."""

    def _apply_learned_naflex_pos_embed(self, x: Tensor, patch_coord: Tensor) -> None:
        """Add a position to each patch, [b, T, width], in place. patch_coord: int64 [b, T, 2]."""
        _, rows, columns, _ = self.pos_embed.shape
        mode = self.pos_embed_interp_mode
        of_row, of_column = (
            self._weights(patch_coord, axis, length, x.dtype, mode)
            for axis, length in enumerate((rows, columns))
        )
        weights = of_grid(of_row, of_column)
        x += (weights @ self.pos_embed.to(x.dtype).flatten(0, 2)).view_as(x)

    def _apply_factorized_naflex_pos_embed(self, x: Tensor, patch_coord: Tensor) -> None:
        """The same of a table of rows and one of columns."""
        for axis, table in enumerate((self.pos_embed_y, self.pos_embed_x)):
            weights = self._weights(
                patch_coord, axis, table.shape[1], x.dtype, "bilinear", antialias=False
            )
            x += (weights @ table[0].to(x.dtype)).view_as(x)

    def _weights(
        self,
        patch_coord: Tensor,
        axis: int,
        length: int,
        dtype: torch.dtype,
        mode: Any,
        *,
        antialias: bool = True,
    ) -> Tensor:
        """[P, length]: how the position of a patch on an axis follows from `length` of them."""
        sizes = patch_coord.amax(dim=1) + 1  # [b, 2]
        if self.pos_embed_ar_preserving:  # a part of the square around the image
            sizes = sizes.amax(dim=1, keepdim=True).expand(-1, 2)
        wide = torch.promote_types(dtype, torch.float32)
        places = patch_coord[..., axis]
        weights = resize_weights(
            places.flatten(),
            sizes[:, axis, None].expand_as(places).flatten(),
            length,
            wide,
            mode,
            antialias=antialias,
        )
        return weights.to(dtype)


def adopt_native(trunk: Any) -> None:
    """Let a NaFlexVit compute its positions on the device, and take fp32 pixels in any
    precision."""
    embeds = trunk.embeds
    if type(embeds) is NaFlexEmbeds and not position_mistakes(trunk):
        embeds.__class__ = Embeds
    embeds.proj.register_forward_pre_hook(
        lambda layer, inputs: (inputs[0].to(layer.weight.dtype), *inputs[1:])
    )


def position_mistakes(trunk: Any) -> list[str]:
    """What in a NaFlexVit's positions is not computed at native resolution."""
    embeds = trunk.embeds
    found = []
    if getattr(trunk, "rope", None) is not None:
        found.append("rotary positions")
    if getattr(embeds, "pos_embed_use_grid_sample", False):
        found.append("pos_embed_use_grid_sample")
    if embeds.pos_embed_type == "learned":
        if not getattr(embeds, "pos_embed_antialias", True):
            found.append("pos_embed_antialias=false")
        if getattr(embeds, "pos_embed_align_corners", False):
            found.append("pos_embed_align_corners")
        if embeds.pos_embed_interp_mode not in ("bilinear", "bicubic"):
            found.append(f"pos_embed_interp_mode={embeds.pos_embed_interp_mode}")
    return found


def native_inputs(
    images: Tensor, architecture: OpenCLIPArchitecture, embeds: NaFlexEmbeds, wide: torch.dtype
) -> dict[str, Tensor]:
    """uint8 [b, 1 + T, 3 p p] (`clip_train.native`) -> what a NaFlexVit takes: normalized patches,
    [b, T, 3 p p], with their rows and columns, [b, T, 2], and which of them exist, [b, T]."""
    grids = grids_of(images)
    rows = images[:, 1:]
    places = torch.arange(rows.shape[1], device=images.device)
    valid = places < grids.prod(1)[:, None]
    columns = grids[:, 1:].clamp(min=1)
    coordinates = torch.stack([places // columns, places % columns], dim=2)
    patches = rows.flatten(0, 1).unflatten(1, (3, -1))  # [b T, 3, p p]
    patches = normalised_images(patches, architecture, wide)
    if getattr(embeds, "channels_last", True):
        patches = patches.transpose(1, 2)
    return {
        "patches": patches.flatten(1).unflatten(0, rows.shape[:2]),
        # what does not exist must not make a grid larger
        "patch_coord": coordinates * valid[:, :, None],
        "patch_valid": valid,
    }
