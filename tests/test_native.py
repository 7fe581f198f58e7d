"""Images at their native resolution against an oracle: each image alone, without padding, in float64, by textbook
formulas on the model's weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train import dist
from clip_train.columns import Columns
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import build_model
from clip_train.native import patch_counts, to_rows
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step, with_equal_chunks
from clip_train.task import Batch, text_lengths
from tests.engine.layouts import FSDP, PLAIN, ZERO, engine_at
from tests.models.small import small_architecture
from tests.ranks import run_ranks

PATCH, MOST, CONTEXT = 4, 20, 8  # the model's table of positions is 4 x 4
GRIDS = [(1, 1), (4, 4), (2, 7), (5, 3), (1, 20), (3, 2), (6, 3), (10, 2), (2, 2), (4, 5), (1, 9)]
ARCHITECTURE = small_architecture(
    vision_cfg={"image_size": 16, "patch_size": PATCH, "width": 32, "head_width": 16, "layers": 2},
    text_cfg={"context_length": CONTEXT, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2},
).model_copy(update={"image_tokens": MOST})


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    model = build_model(ARCHITECTURE)
    for p in model.parameters():
        if p.ndim:
            p.data += 0.05 * torch.randn_like(p)
    return model


def images() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    sizes = [(3, rows * PATCH, columns * PATCH) for rows, columns in GRIDS]
    return [torch.randint(0, 256, size, generator=g, dtype=torch.uint8) for size in sizes]


def texts() -> Tensor:
    """int64 [n, CONTEXT]: the highest id ends a text, at a place of its own."""
    g = torch.Generator().manual_seed(2)
    out = torch.zeros(len(GRIDS), CONTEXT, dtype=torch.int64)
    for i, row in enumerate(out):
        length = 2 + i % (CONTEXT - 2)
        row[:length] = torch.randint(1, 48, (length,), generator=g)
        row[length] = 49
    return out


# -- the oracle


def attended(x: Tensor, weights: dict[str, Tensor], at: str, causal: bool) -> Tensor:
    """[L, width] -> [L, width]: softmax(q k^T / sqrt(d)) v of each head."""
    heads = 2
    q, k, v = F.linear(x, weights[at + "in_proj_weight"], weights[at + "in_proj_bias"]).chunk(3, -1)
    q, k, v = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in (q, k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
    if causal:
        scores = scores + torch.full_like(scores[0], -torch.inf).triu(1)
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return F.linear(out, weights[at + "out_proj.weight"], weights[at + "out_proj.bias"])


def normed(x: Tensor, weights: dict[str, Tensor], at: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[at + "weight"], weights[at + "bias"])


def through_blocks(x: Tensor, weights: dict[str, Tensor], at: str, causal: bool) -> Tensor:
    for i in range(2):
        block = f"{at}transformer.resblocks.{i}."
        inner = normed(x, weights, block + "ln_1.")
        x = x + attended(inner, weights, block + "attn.", causal)
        hidden = F.linear(
            normed(x, weights, block + "ln_2."),
            weights[block + "mlp.c_fc.weight"],
            weights[block + "mlp.c_fc.bias"],
        )
        x = x + F.linear(
            F.gelu(hidden),
            weights[block + "mlp.c_proj.weight"],
            weights[block + "mlp.c_proj.bias"],
        )
    return x


def image_feature(image: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """uint8 [3, H, W] -> [D]"""
    mean = torch.tensor(ARCHITECTURE.image_mean, dtype=torch.float64)[:, None, None]
    std = torch.tensor(ARCHITECTURE.image_std, dtype=torch.float64)[:, None, None]
    pixels = (image.double() / 255 - mean) / std
    patches = F.conv2d(pixels[None], weights["visual.conv1.weight"], stride=PATCH)[0]
    table = weights["visual.positional_embedding"]
    positions = F.interpolate(
        table[1:].T.unflatten(1, (4, 4))[None],
        size=patches.shape[1:],
        mode="bicubic",
        antialias=True,
    )[0]
    first = weights["visual.class_embedding"] + table[0]
    x = torch.cat([first[None], (patches + positions).flatten(1).T])
    x = through_blocks(normed(x, weights, "visual.ln_pre."), weights, "visual.", causal=False)
    return normed(x[0], weights, "visual.ln_post.") @ weights["visual.proj"]


def text_feature(text: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """int64 [CONTEXT] -> [D]"""
    x = weights["token_embedding.weight"][text] + weights["positional_embedding"]
    x = through_blocks(x, weights, "", causal=True)[text.argmax()]
    return normed(x, weights, "ln_final.") @ weights["text_projection"]


def oracle_features(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    image = torch.stack([image_feature(image, weights) for image in images()])
    text = torch.stack([text_feature(text, weights) for text in texts()])
    return F.normalize(image, dim=1), F.normalize(text, dim=1)


def oracle_loss(weights: dict[str, Tensor]) -> Tensor:
    image, text = oracle_features(weights)
    logits = weights["logit_scale"].exp() * image @ text.T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def oracle_steps(num: int, lr: float) -> list[tuple[float, float]]:
    """(loss, gradient norm) of `num` steps of plain gradient descent, in float64."""
    weights = {
        name: p.detach().double().requires_grad_() for name, p in make_model().named_parameters()
    }
    seen = []
    for _ in range(num):
        loss = oracle_loss(weights)
        gradients = torch.autograd.grad(loss, [*weights.values()])
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        seen.append((loss.item(), norm.item()))
        for p, g in zip(weights.values(), gradients, strict=True):
            p.data -= lr * g
    return seen


# -- the subject


def share_of_batch(rank: int, world_size: int, order: list[int], pack_texts: bool) -> Batch:
    """This rank's share. order: of the samples in the global batch."""
    rows = torch.stack([to_rows(images()[i], PATCH, MOST) for i in order])
    tokens = texts()[order]
    columns = Columns(
        images=rows,
        texts=tokens,
        sample_seeds=torch.tensor(order),
        names=[str(i) for i in order],
        text_lengths=text_lengths(tokens),
        patch_counts=patch_counts(rows),
    )
    n, more = divmod(len(order), world_size)
    start = rank * n + min(rank, more)
    own = columns.cut(start, start + n + (rank < more))
    shares = tuple(n + (r < more) for r in range(world_size))
    return Batch(own, shares=shares, pack_texts=pack_texts)


def test_features_and_gradients_are_those_of_each_image_alone():
    model = make_model().double()
    weights = dict(model.named_parameters())
    rows = torch.stack([to_rows(image, PATCH, MOST) for image in images()])
    seen = model(rows, texts(), num_patches=sum(patch_counts(rows)))[:2]
    direction = torch.randn(2, len(GRIDS), seen[0].shape[1], dtype=torch.float64)
    gradients = []
    for features in (seen, oracle_features(weights)):
        product = sum((x * d).sum() for x, d in zip(features, direction, strict=True))
        gradients.append(torch.autograd.grad(product, [*weights.values()][:-1], allow_unused=True))
    for own, expected in zip(seen, oracle_features(weights), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-13)
    for own, expected in zip(*gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-13)
    # without the number of patches the device is asked
    torch.testing.assert_close(model(rows)[0], seen[0], rtol=0, atol=1e-14)


def test_masked_attention_is_that_of_each_image_alone():
    """As a compiled tower computes it on a CPU: padded, with a mask."""
    model = make_model().double()
    rows = torch.stack([to_rows(image, PATCH, MOST) for image in images()])
    expected = model(rows)[0]
    model.visual.loops = False
    torch.testing.assert_close(model(rows)[0], expected, rtol=0, atol=1e-13)
    gradients = [
        torch.autograd.grad(features[:, 0].sum(), model.visual.proj)[0]
        for features in (expected, model(rows)[0])
    ]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)


def test_a_square_of_the_models_size_has_the_features_of_the_plain_tower():
    model = make_model().double()
    squares = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    rows = torch.stack([to_rows(image, PATCH, MOST) for image in squares])
    torch.testing.assert_close(model(rows)[0], model(squares)[0], rtol=0, atol=1e-14)


def steps(layout: str, micro_tokens: int | None, kept_graphs: int, order: list[int], pack: bool):
    """(loss, gradient norm) of three steps, and the number of micro-batches."""
    engine = engine_at(layout, make_model, OptimConfig(name="sgd", lr=0.1, weight_decay=0))
    seen = []
    for _ in range(3):
        batch = share_of_batch(dist.rank(), dist.world_size(), order, pack)
        if micro_tokens is not None:
            batch = with_equal_chunks(batch, micro_tokens)
        result = train_step(
            engine,
            batch,
            InfoNCE(),
            micro_size=3,
            micro_tokens=micro_tokens,
            kept_graphs=kept_graphs,
            lr=0.1,
        )
        seen.append((result.loss, result.grad_norm))
    return seen, result.accum_steps


UNSORTED = [*range(len(GRIDS))]
BY_SIZE = sorted(UNSORTED, key=lambda i: math.prod(GRIDS[i]))


@pytest.mark.engine
@pytest.mark.parametrize(
    "world_size, layout, micro_tokens, kept_graphs, order, pack",
    [
        (1, PLAIN[0], 20, 1, UNSORTED, True),
        (1, PLAIN[0], 64, 2, BY_SIZE, False),
        (1, PLAIN[0], 1000, 1, UNSORTED, False),
        (1, PLAIN[0], None, 1, UNSORTED, True),
        (2, FSDP[-1], 20, 1, UNSORTED, True),
        (2, FSDP[0], 40, 2, BY_SIZE, True),
        (3, FSDP[-1], 24, 1, UNSORTED, False),
        (2, ZERO[-1], 20, 1, BY_SIZE, True),
        (3, ZERO[1], 30, 1, UNSORTED, True),
        (3, ZERO[0], 1000, 1, UNSORTED, True),
    ],
)
def test_cuts_ranks_and_engines_do_not_change_the_gradient(
    world_size, layout, micro_tokens, kept_graphs, order, pack
):
    expected = oracle_steps(3, lr=0.1)
    for seen, accum_steps in run_ranks(
        steps, world_size, layout, micro_tokens, kept_graphs, order, pack
    ):
        if micro_tokens is not None:
            assert accum_steps >= sum(map(math.prod, GRIDS)) / world_size / micro_tokens
        for (loss, norm), (true_loss, true_norm) in zip(seen, expected, strict=True):
            assert loss == pytest.approx(true_loss, rel=1e-6)
            assert norm == pytest.approx(true_norm, rel=5e-6)


def test_all_ranks_have_equally_many_micro_batches_within_the_budget():
    def cut(micro_tokens):
        batches = [share_of_batch(rank, 3, BY_SIZE, True) for rank in range(3)]
        most = max(batch.least_chunks(micro_tokens) for batch in batches)
        for batch in batches:
            batch.num_chunks = most
        return [batch.micro_batches(1, micro_tokens) for batch in batches]

    for micro_tokens in (20, 33, 60):
        ranks = cut(micro_tokens)
        # the rank with the fewest samples has no more micro-batches than samples
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        for micro_batches in ranks:
            assert sum(len(m.images) for m in micro_batches) in (3, 4)
            for micro_batch in micro_batches:
                # ranks of three samples cannot have four chunks: two images share one elsewhere
                fits = micro_batch.num_patches <= micro_tokens
                assert fits or (micro_tokens == 20 and len(micro_batch.images) == 2)
                assert micro_batch.num_patches == sum(micro_batch.columns["patch_counts"])
