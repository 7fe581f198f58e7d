"""A two-tower model small enough for every test, with torch's own dropout so that RNG replay matters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clip_train.columns import Column, Columns
from clip_train.task import Batch
from tests.ranks import device

WIDTH, FEATURES = 24, 16


class Tower(nn.Module):
    def __init__(self, inputs: int, dropout: float):
        super().__init__()
        self.into = nn.Linear(inputs, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(self.drop(F.gelu(self.norm(self.into(x)))))
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.normalize(x.to(dtype), dim=-1)


class ToyCLIP(nn.Module):
    """images uint8 [b, 3, 2, 2], texts int64 [b, 6]; the interface of clip_train.models.CLIP."""

    def __init__(self, dropout: float = 0.0, logit_scale: float = 2.0):
        super().__init__()
        self.visual = Tower(12, dropout)
        self.text = Tower(6, dropout)
        self.logit_scale = nn.Parameter(torch.tensor([logit_scale]))

    def forward(self, images, texts, sample_seeds=None):
        dtype = self.visual.into.weight.dtype
        image = None if images is None else self.visual(images.flatten(1).to(dtype) / 128 - 1)
        text = None if texts is None else self.text(texts.to(dtype) / 8)
        return (
            image,
            text,
            self.logit_scale.to(torch.promote_types(dtype, torch.float32)).exp(),
            None,
        )


def columns_of(
    images: Tensor,
    texts: Tensor,
    sample_seeds: Tensor,
    keys: list[str] | None = None,
    **others: Column | None,
) -> Columns:
    """The columns of a batch, without those that are None. keys: also the samples' names."""
    by_name = {"keys": keys, "names": keys, **others}
    given = {name: column for name, column in by_name.items() if column is not None}
    return Columns(images=images, texts=texts, sample_seeds=sample_seeds, **given)


def toy_batch(N: int, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    columns = columns_of(
        torch.randint(0, 256, (N, 3, 2, 2), generator=g, dtype=torch.uint8),
        torch.randint(0, 16, (N, 6), generator=g),
        torch.arange(N) + 1000 * seed,
        [f"{seed}-{i}" for i in range(N)],
    )
    return Batch(columns)


def share(batch: Batch, rank: int, world_size: int) -> Batch:
    """Rank `rank`'s contiguous part of a global batch; the first ranks hold one more where they must."""
    n, more = divmod(len(batch), world_size)
    own = batch.columns.cut(rank * n + min(rank, more), (rank + 1) * n + min(rank + 1, more))
    counts = (n + 1,) * more + (n,) * (world_size - more) if more else ()
    return Batch(own, shares=counts).to(device())


def oracle_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Ten words of textbook InfoNCE: full logits, autograd."""
    logits = scale * image @ text.T
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
