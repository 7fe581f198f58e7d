"""Dropout whose randomness belongs to the sample.

Every mask is an integer hash of (sample seed, layer, position), computed in wrapping int64
arithmetic. It is the same on CPU and GPU, in any precision, in both passes, under recomputation,
and for any micro-batches. `b` is the number of samples in a
micro-batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Streams of random bits: each use of them in the model has an id of its own.
PATCH_DROPOUT_ID = 1
MODULE_ID = 3 << 16  # of OpenCLIP's models: the number of the module is added
VISION_DROPOUT_ID = 1 << 16
TEXT_DROPOUT_ID = 2 << 16
LOW_RANK_ID = 4 << 16  # of `model.lora`: the number of the layer is added

# splitmix64 (Steele, Lea and Flood, 2014), its unsigned constants written as int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_INVERSE = 0xF1DE83E19937733D - 2**64  # of _GAMMA: their product is 1, modulo 2^64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64


def splitmix64(x: Tensor) -> Tensor:
    """int64 -> int64, a bijection that looks random."""
    z = x + _GAMMA
    # `>>` copies the sign bit: mask it away for the unsigned shift of the original
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX2
    return z ^ ((z >> 31) & (2**33 - 1))


_of_micro_batch: dict[str, Any] = {"seeds": None}


def draw_by(
    sample_seeds: Tensor | None,
    token: Tensor | None = None,
    packed: tuple[Tensor | None, Tensor] | None = None,
) -> None:
    """int64 [b], for modules that do not get them as an argument, until the next call: in a
    forward, and in its recomputation in the backward.

    token, packed: for `drop_rows` in a block of this project. int64 [b], the token of each sample
    that is read; and for packed tokens, int64 [P] each, their samples' seeds and their places.
    """
    _of_micro_batch.update(seeds=sample_seeds, token=token, packed=packed)


def keep_draw() -> Callable[[], None]:
    """Returns a function that repeats the last `draw_by`, for a recomputation of a part of a block."""
    last = dict(_of_micro_batch)
    return lambda: _of_micro_batch.update(last)


def current_seeds() -> Tensor:
    """The seeds of the last `draw_by`. ValueError if there are none."""
    seeds = _of_micro_batch["seeds"]
    if seeds is None:
        raise ValueError("dropout needs sample_seeds in training: int64 [b], one for each sample")
    return seeds


def drop_rows(x: Tensor, dropped: int, layer_id: Tensor) -> Tensor:
    """`drop_elements` by the last `draw_by`.

    x: all tokens of b samples, [b m, ...]; or only the token that is read from each, [b, 1, width];
    or packed tokens, [P, 1, width].
    """
    seeds, token, packed = current_seeds(), _of_micro_batch["token"], _of_micro_batch["packed"]
    if packed is not None and len(x) == len(packed[1]):
        return drop_elements(x, dropped, layer_id, *packed)
    if token is not None and x.shape[1] == 1:
        return drop_elements(x, dropped, layer_id, seeds, token)
    return drop_elements(x.reshape(len(seeds), -1), dropped, layer_id, seeds).view(x.shape)


def random_bits(
    sample_seeds: Tensor | None, layer_id: int | Tensor, count: int, first: Tensor | None = None
) -> Tensor:
    """int64 [b] -> [b, count] int64, uniform over all 64 bits.

    first: [b], the number in each stream to begin with; None: 0. ValueError without seeds.
    """
    if sample_seeds is None:
        raise ValueError("dropout needs sample_seeds in training: int64 [b], one for each sample")
    key = splitmix64(
        splitmix64(sample_seeds) + layer_id
    )  # [b]: one stream for each (sample, layer)
    number = torch.arange(count, device=key.device)
    if first is not None:
        number = first[:, None] + number  # [b, count]
    # key + number * _GAMMA. Written so, inductor would take the product for an index, which must
    # not overflow in C++.
    return splitmix64(((key * _INVERSE)[:, None] + number) * _GAMMA)


class SampleDropout(nn.Module):
    """Zeroes elements with probability `p` (in steps of 1/65536), scales the others up."""

    def __init__(self, p: float, layer_id: int) -> None:
        super().__init__()
        # A tensor: torch.compile would make a graph for each int. Not a buffer: it stays on the
        # CPU.
        self.layer_id = torch.tensor(layer_id, device="cpu")
        self.dropped = min(round(p * 65536), 65535)  # of the 65536 values that 16 bits can have

    def forward(
        self, x: Tensor, sample_seeds: Tensor | None, token: Tensor | None = None
    ) -> Tensor:
        """[b, ...], int64 [b] -> [b, ...]. With `token`, int64 [b], x [b, 1, width] is that token
        alone of each sample's [L, width], and gets the mask that it would get among the others."""
        if self.dropped == 0 or not self.training:
            return x
        return drop_elements(x, self.dropped, self.layer_id, sample_seeds, token)


def drop_elements(
    x: Tensor,
    dropped: int,
    layer_id: int | Tensor,
    sample_seeds: Tensor | None,
    token: Tensor | None = None,
) -> Tensor:
    """As `SampleDropout` does in training. dropped: the probability, times 65,536."""
    size = x[0].numel()
    # Each hash decides four elements, 16 bits for each: a fourth of the time and memory.
    if token is None:
        bits = random_bits(sample_seeds, layer_id, (size + 3) // 4)
        bits = bits.view(torch.int16)[:, :size]  # [b, size]
    else:
        # The first element's number; at most three more come before it in its hash.
        start = token * size
        bits = random_bits(sample_seeds, layer_id, (size + 6) // 4, start // 4)
        places = (start % 4)[:, None] + torch.arange(size, device=x.device)
        bits = bits.view(torch.int16).gather(1, places)
    keep = (bits >= dropped - 32768).view(x.shape)
    return torch.where(keep, x * (65536 / (65536 - dropped)), 0.0)


def keep_patches(
    x: Tensor, p: float, layer_id: int | Tensor, sample_seeds: Tensor | None, first: int
) -> tuple[Tensor, Tensor]:
    """Keep `max(1, int(T (1 - p)))` of T patches (FLIP, arXiv 2212.00794), in the image's order.

    [b, first + T, width] -> [b, first + kept, width], and the places of those kept in T, int64
    [b, kept]. first: tokens before the patches, which all stay.
    """
    num_patches = x.shape[1] - first
    keep = max(1, int(num_patches * (1 - p)))
    # the hash is a bijection of the position: two patches of an image never tie
    chosen = random_bits(sample_seeds, layer_id, num_patches).topk(keep, dim=1).indices
    patches = chosen.sort(dim=1).values
    rows = patches[:, :, None].expand(-1, -1, x.shape[2])
    return torch.cat([x[:, :first], x[:, first:].gather(1, rows)], dim=1), patches
