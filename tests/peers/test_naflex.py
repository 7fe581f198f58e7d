"""timm's NaFlexVit at native resolution, against each image alone, as a plain image without padding, in float64."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train import dist
from clip_train.columns import Columns
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.memory.probe import fake_profile
from clip_train.models.clip import build_model, forward_flops, parameter_sizes, random_mistakes
from clip_train.models.config import AnyArchitecture, load_architecture
from clip_train.models.weights import export_openclip, load_openclip
from clip_train.native import patch_counts, to_rows
from clip_train.optim.config import OptimConfig
from clip_train.recipe.memory import micro_batch
from clip_train.recipe.recipe import load_config
from clip_train.step import train_step, with_equal_chunks
from clip_train.task import Batch
from tests.engine.layouts import FSDP, PLAIN, ZERO, engine_at
from tests.ranks import run_ranks

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
PATCH, MOST = 4, 20  # the table of positions is 4 x 4
GRIDS = [(1, 1), (4, 4), (2, 7), (5, 3), (1, 20), (3, 2), (6, 3), (10, 2), (7, 1)]
SIZES = {"patch_size": PATCH, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
TOWERS = {  # timm's model, pool, projection
    "siglip": ("naflexvit_base_patch16_siglip", "map", "none"),
    "registers, map": ("naflexvit_base_patch16_map", "map", "linear"),
    "registers, mean": ("naflexvit_base_patch16_gap", "avg", "linear"),
    "aspect-preserving": ("naflexvit_base_patch16_par_gap", "avg", "linear"),
    "factorized": ("naflexvit_base_patch16_parfac_gap", "avg", "linear"),
}


def description(folder: Path, tower: str, image_size: int = 16, **vision: Any) -> Path:
    name, pool, projection = TOWERS[tower]
    config = {
        "embed_dim": 32,
        "custom_text": True,
        "vision_cfg": {
            "image_size": image_size, "timm_model_name": name, "timm_pool": pool,
            "timm_proj": projection, "timm_model_args": SIZES, **vision,
        },
        "text_cfg": {**TEXT, "no_causal_mask": True, "pool_type": "last"},
    }  # fmt: skip
    file = folder / "model.json"
    file.write_text(json.dumps(config))
    return file


def architecture_of(folder: Path, tower: str, **vision: Any) -> AnyArchitecture:
    """Through the recipe, whose data.resize is native."""
    file = description(folder, tower, **vision)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"run: {{steps: 3000}}\nmodel: {{name: 'open_clip:{file}'}}\n"
        f"data: {{kind: synthetic, resize: native, tokens: {MOST}}}\n"
    )
    architecture = load_config(str(recipe), []).architecture()
    assert architecture.patches is not None
    assert (architecture.patches.size, architecture.patches.most) == (PATCH, MOST)
    return architecture


def model_of(architecture: AnyArchitecture) -> Any:
    torch.manual_seed(0)
    model = build_model(architecture)
    for name, p in model.named_parameters():
        if name.endswith("gamma"):  # layer scales start at 1e-5: blocks would not be seen
            p.data.fill_(0.5)
        elif p.ndim:
            p.data += 0.05 * torch.randn_like(p)
    return model


def images() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    sizes = [(3, rows * PATCH, columns * PATCH) for rows, columns in GRIDS]
    return [torch.randint(0, 256, size, generator=g, dtype=torch.uint8) for size in sizes]


def rows_of(some: list[Tensor]) -> Tensor:
    """As the loader makes them, with noise behind each image, which nobody may read."""
    rows = torch.stack([to_rows(image, PATCH, MOST) for image in some])
    for row, count in zip(rows, patch_counts(rows), strict=True):
        row[1 + count :] = 99
    return rows


def texts() -> Tensor:
    out = torch.randint(1, 49000, (len(GRIDS), 16), generator=torch.Generator().manual_seed(2))
    out[:, -2:] = 0
    return out


# -- the oracle: timm itself, on one plain image, with a table of positions of the image's own size


def resized_positions(weights: dict[str, Tensor], tower: str, rows: int, columns: int) -> Any:
    """The parameters in place of the tables, so that timm has none to resize, which it does in fp32."""
    preserving = tower in ("aspect-preserving", "factorized")
    height, width = (max(rows, columns),) * 2 if preserving else (rows, columns)
    at = "trunk.embeds.pos_embed"
    if tower == "factorized":
        out = {}
        for axis, target, kept in (("y", height, rows), ("x", width, columns)):
            table = weights[f"{at}_{axis}"].transpose(1, 2)
            resized = F.interpolate(table, size=target, mode="linear")[:, :, :kept]
            out[f"{at}_{axis}"] = resized.transpose(1, 2)
        return out
    mode = "bilinear" if tower == "siglip" else "bicubic"
    resized = weights[at].permute(0, 3, 1, 2)
    # one axis after the other: with a width of 1, torch on a CPU gives all rows the first one's value
    for size in ((height, resized.shape[3]), (height, width)):
        resized = F.interpolate(resized, size=size, mode=mode, antialias=True)
    return {at: resized[:, :, :rows, :columns].permute(0, 2, 3, 1)}


def image_feature(model: Any, tower: str, image: Tensor) -> Tensor:
    """uint8 [3, H, W] -> [D]"""
    mean, std = (
        torch.tensor(each, dtype=torch.float64)[:, None, None]
        for each in (model.architecture.image_mean, model.architecture.image_std)
    )
    weights = dict(model.visual.named_parameters())
    grid = (image.shape[1] // PATCH, image.shape[2] // PATCH)
    positions = resized_positions(weights, tower, *grid)
    embeds = model.visual.trunk.embeds
    preserving, embeds.pos_embed_ar_preserving = embeds.pos_embed_ar_preserving, False
    pixels = ((image.double() / 255 - mean) / std)[None]
    out = functional_call(model.visual, {**weights, **positions}, (pixels,))[0]
    embeds.pos_embed_ar_preserving = preserving
    return F.normalize(out, dim=0)


@pytest.mark.parametrize("tower", TOWERS)
def test_features_and_gradients_are_those_of_each_image_alone(tower: str, tmp_path: Path):
    model = model_of(architecture_of(tmp_path, tower)).double().train()
    seen = model(rows_of(images()))[0]
    expected = torch.stack([image_feature(model, tower, image) for image in images()])
    torch.testing.assert_close(seen, expected, rtol=1e-11, atol=1e-12)
    parameters = dict(model.visual.named_parameters())
    direction = torch.randn_like(seen)
    own, alone = (
        torch.autograd.grad((x * direction).sum(), [*parameters.values()]) for x in (seen, expected)
    )
    for name, a, b in zip(parameters, own, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("tower", ["siglip", "registers, mean"])
def test_stochastic_depth_follows_the_sample_whatever_is_beside_it(tower: str, tmp_path: Path):
    model = model_of(architecture_of(tmp_path, tower, timm_drop_path=0.5)).double().train()
    seeds = torch.arange(10, 10 + len(GRIDS))
    rows = rows_of(images())
    together = model(rows, None, seeds)[0]
    for i, count in enumerate(patch_counts(rows)):
        alone = model(rows[i : i + 1, : 1 + count], None, seeds[i : i + 1])[0]
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-12)
    assert not torch.allclose(together, model(rows, None, seeds + 100)[0])
    assert not torch.allclose(together, model.eval()(rows)[0])


def share_of(rank: int, world_size: int) -> Batch:
    rows = torch.stack([to_rows(image, PATCH, MOST) for image in images()])
    columns = Columns(
        images=rows,
        texts=texts(),
        sample_seeds=torch.arange(len(GRIDS)),
        names=[str(i) for i in range(len(GRIDS))],
        patch_counts=patch_counts(rows),
    )
    shares = [len(GRIDS) // world_size + (r < len(GRIDS) % world_size) for r in range(world_size)]
    start = sum(shares[:rank])
    return Batch(columns.cut(start, start + shares[rank]), shares=tuple(shares))


def steps(layout: str, architecture: AnyArchitecture, micro_tokens: int) -> Any:
    """(loss, gradient norm) of two steps, and the number of micro-batches."""
    parameter_sizes(architecture)  # as `resolve` does: the first model must be outside zero.Init
    optim = OptimConfig(name="sgd", lr=0.1, weight_decay=0)
    engine = engine_at(layout, lambda: model_of(architecture), optim)
    seen = []
    for _ in range(2):
        batch = with_equal_chunks(share_of(dist.rank(), dist.world_size()), micro_tokens)
        result = train_step(
            engine, batch, InfoNCE(), micro_size=3, micro_tokens=micro_tokens, kept_graphs=1, lr=0.1
        )
        seen.append((result.loss, result.grad_norm))
    engine.close()
    return seen, result.accum_steps


@pytest.mark.parametrize(
    "layout, world_size, micro_tokens",
    [(PLAIN[0], 1, 20), (FSDP[-1], 2, 24), (ZERO[-1], 2, 40), (ZERO[1], 3, 30)],
)
def test_micro_batches_ranks_and_engines_do_not_change_a_step(
    layout: str, world_size: int, micro_tokens: int, tmp_path: Path
):
    architecture = architecture_of(tmp_path, "siglip")
    model, expected = model_of(architecture).double(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        image = torch.stack([image_feature(model, "siglip", each) for each in images()])
        text = F.normalize(model.encode_text(texts()), dim=1)
        logits = model.logit_scale.exp() * image @ text.T
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        expected.append((loss.item(), torch.stack(norms).norm().item()))
        optimizer.step()
    for seen, accum_steps in run_ranks(steps, world_size, layout, architecture, micro_tokens):
        assert accum_steps >= sum(map(math.prod, GRIDS)) / world_size / micro_tokens
        for (loss, norm), (true_loss, true_norm) in zip(seen, expected, strict=True):
            assert loss == pytest.approx(true_loss, rel=2e-6)
            assert norm == pytest.approx(true_norm, rel=1e-5)


@pytest.mark.parametrize("tower", TOWERS)
def test_the_host_never_waits_and_bf16_is_near(tower: str, tmp_path: Path):
    """Fake tensors have no values that could be read, and neither does the planner's memory."""
    architecture = architecture_of(tmp_path, tower)
    assert random_mistakes(architecture) == []
    zeros = partial(micro_batch, architecture, torch.device("cpu"))
    assert fake_profile(lambda: build_model(architecture), zeros).graph > 1e4
    assert forward_flops(architecture).image > forward_flops(architecture).image_of(4)
    model = model_of(architecture)
    with torch.no_grad():
        exact = model(rows_of(images()))[0]
        for p in model.parameters():
            p.data = p.data.bfloat16()
        rounded = model(rows_of(images()))[0]
    assert rounded.dtype == torch.float32
    assert F.cosine_similarity(exact, rounded).min() > 0.999


def test_towers_that_cannot_are_rejected(tmp_path: Path):
    radio = architecture_of(tmp_path, "siglip", timm_model_name="naflexvit_base_patch16_radio_v3",
                            timm_pool="token")  # fmt: skip
    (mistake,) = random_mistakes(radio)
    assert "pos_embed_antialias=false and pos_embed_align_corners" in mistake
    assert "data.resize=squash" in mistake
    with pytest.raises(UserError, match="takes only squares"):
        architecture_of(
            tmp_path, "siglip", timm_model_name="vit_base_patch16_siglip_224", image_size=224
        )


def test_weights_for_squares_go_on_at_native_resolution(tmp_path: Path):
    """A SigLIP of fixed size: a square of its size keeps its feature."""
    file = description(tmp_path, "siglip", timm_model_name="vit_base_patch16_siglip_224")
    square = model_of(load_architecture(f"open_clip:{file}"))
    folder = export_openclip(square.state_dict(), square.architecture, tmp_path / "square")
    architecture = architecture_of(tmp_path, "siglip")
    lines: list[str] = []
    native = build_model(architecture)
    native.load_state_dict(load_openclip(folder, architecture, lines.append))
    assert any("NaFlexVit" in line for line in lines)
    some = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        expected = square.double()(some)[0]
        found = native.double()(rows_of([*some]))[0]
    # timm's SigLIP has GELU, and its NaFlexVit GELU's approximation by tanh
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
