"""An export of a model of native resolution, read by OpenCLIP: as a plain ViT, and by its main branch as a NaFlexVit.

The second needs PYTHONPATH=CHECKOUT/src of OpenCLIP's main branch (scripts/setup_peers.sh)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.models.clip import build_model
from clip_train.models.config import load_architecture
from clip_train.models.weights import export_openclip
from clip_train.native import to_rows
from tests.models.small import small_architecture

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
PATCH, MOST = 4, 20  # the table of positions is 4 x 4
GRIDS = [(4, 4), (2, 7), (5, 3), (1, 20), (1, 1)]


def exported(folder: Path, quick_gelu: bool) -> Any:
    """The model in float64, whose export is in the folder."""
    architecture = small_architecture(
        vision_cfg={"image_size": 16, "patch_size": PATCH, "width": 32, "head_width": 16, "layers": 2},
        text_cfg={"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2},
        quick_gelu=quick_gelu,
    ).model_copy(update={"image_tokens": MOST, "resize_mode": "native"})  # fmt: skip
    torch.manual_seed(0)
    model = build_model(architecture)
    for p in model.parameters():
        if p.ndim:
            p.data += 0.05 * torch.randn_like(p)
    export_openclip(model.state_dict(), architecture, folder)
    return model.double().eval()


def pixels(model: Any, image: Tensor) -> Tensor:
    """uint8 [..., 3, H, W] -> float64, normalised"""
    mean, std = (
        torch.tensor(each, dtype=torch.float64)[:, None, None]
        for each in (model.architecture.image_mean, model.architecture.image_std)
    )
    return (image.double() / 255 - mean) / std


def drawn(*size: int) -> Tensor:
    return torch.randint(
        0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(4)
    )


@pytest.mark.parametrize("quick_gelu", [False, True])
@torch.no_grad()
def test_it_is_a_plain_vit(quick_gelu: bool, tmp_path: Path):
    model = exported(tmp_path, quick_gelu)
    peer, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    assert "CenterCrop" in str(transform)  # squares, as it makes them itself
    squares = drawn(3, 3, 16, 16)
    found = peer.double().eval().encode_image(pixels(model, squares), normalize=True)
    torch.testing.assert_close(found, model(squares)[0], rtol=0, atol=1e-12)
    assert load_architecture(str(tmp_path)).patches == model.architecture.patches


@pytest.mark.skipif(
    "force_naflex_vision" not in inspect.signature(open_clip.create_model).parameters,
    reason="this OpenCLIP has no force_naflex_vision; its main branch does",
)
@pytest.mark.parametrize("quick_gelu", [False, True])
@torch.no_grad()
def test_the_main_branch_makes_a_naflexvit_of_it(quick_gelu: bool, tmp_path: Path):
    model = exported(tmp_path, quick_gelu)
    peer = open_clip.create_model(f"local-dir:{tmp_path}", force_naflex_vision=True)
    peer = peer.double().eval()
    for rows, columns in GRIDS:
        image = drawn(3, PATCH * rows, PATCH * columns)
        patches = F.unfold(pixels(model, image)[None], PATCH, stride=PATCH)[0].T  # [T, 3 p p]
        patches = (
            patches.unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
        )  # its order: pixel, channel
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        padding = MOST - len(patches)
        inputs = {
            "patches": F.pad(patches, (0, 0, 0, padding))[None],
            "patch_coord": F.pad(places, (0, 0, 0, padding))[None],
            "patch_valid": (torch.arange(MOST) < len(patches))[None],
        }
        found = peer.encode_image(inputs, normalize=True)[0]
        expected = model(to_rows(image, PATCH, MOST)[None])[0][0]
        # OpenCLIP adds the class token's position in fp32, and timm resizes the others in fp32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
