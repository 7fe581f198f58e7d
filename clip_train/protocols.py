"""What goes between packages: batches, features, gradients, fragments.

Capital letters, here and everywhere: `W` ranks, `k` micro-batches of `b` samples on each rank,
`n` samples on a rank, `N` in the global batch, `D` the width of the features. If W does not divide
N, the first N % W ranks hold one sample more than the others. If b does not divide n, the last
micro-batch is short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from clip_train.batch import chunk_sizes, num_chunks

Phase = Literal["forward pass", "loss", "backward pass"]  # of a step, before the optimizer's
EMA = "param_ema"  # the slot of a parameter's moving average
Features: TypeAlias = dict[str, Tensor]
"""What a model returns for a micro-batch, by name: rows [b, ...], one for each sample, and
scalars [1].

CLIP has "image" and "text", [b, D] and normalized, and the scalars "logit_scale" (the factor
itself, exp of the parameter) and, for a sigmoid loss, "logit_bias". They are float32 (or float64)
whatever the model's precision. Gradients with respect to features have the same names and shapes.
"""
# A micro-batch's texts are cut at multiples of this: each length is another shape to compile.
TEXT_STEP = 8


@dataclass
class Batch:
    """One rank's share of a global batch, in the canonical order (see `clip_train.data`).

    Ranks hold contiguous shares of it, one after another, whatever their number.
    """

    images: Tensor  # uint8 [n, 3, H, W], not normalised: the model does that on the device
    texts: Tensor  # int64 [n, context_length]
    sample_seeds: Tensor  # int64 [n]: the key of everything random about a sample
    keys: list[str] = field(default_factory=list)  # n sample keys, as in the shards
    # "reason\tshard" -> invalid samples among its places
    bad_samples: dict[str, int] = field(default_factory=dict)
    shares: tuple[int, ...] = ()  # W: samples of each rank; empty: equally many
    # n, see `text_lengths`; None: micro-batches hold texts as they are
    text_lengths: list[int] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device` (asynchronously from pinned memory)."""
        move = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("images", "texts", "sample_seeds")
        }
        return replace(self, **move)

    def micro_batches(self, micro_size: int) -> list[MicroBatch]:
        """Slices of `micro_size` samples, equally many on every rank.

        The last may be shorter (`chunk_sizes`). Texts are cut where all of them have ended, at one
        of few lengths, without asking the device.
        """
        n, length = self.texts.shape
        counts = self.shares or (n,)
        sizes = chunk_sizes(n, num_chunks(max(counts), min(counts), micro_size), micro_size)
        parts = []
        stop = 0
        for size in sizes:
            start, stop = stop, stop + size
            if self.text_lengths is not None:
                longest = max(self.text_lengths[start:stop])
                length = min(-(-longest // TEXT_STEP) * TEXT_STEP, self.texts.shape[1])
            texts, seeds = self.texts[start:stop, :length], self.sample_seeds[start:stop]
            parts.append(MicroBatch(self.images[start:stop], texts, seeds))
        return parts


def text_ends(texts: Tensor, end_id: int | None = None) -> Tensor:
    """int64 [n, L] -> int64 [n]: where each text ends, at its first `end_id` (None: highest id)."""
    return (texts if end_id is None else (texts == end_id).int()).argmax(dim=1)


def text_lengths(texts: Tensor, end_id: int | None = None) -> list[int]:
    """Tokens of each text, int64 [n, L], up to its end. A causal tower reads nothing behind it."""
    return (text_ends(texts, end_id) + 1).tolist()


@dataclass
class MicroBatch:
    """What goes through the model at once."""

    images: Tensor  # uint8 [b, 3, H, W]
    texts: Tensor  # int64 [b, L], L at most context_length
    sample_seeds: Tensor  # int64 [b]


@dataclass(frozen=True)
class StepReport:
    """What the optimizer step reports."""

    grad_norm: float  # global, before the clip
    skipped: bool = False  # fp16 only: the gradients overflowed, nothing was updated
    # "grad_norm_image", ...: the norm of each group of parameters that is trained
    by_group: dict[str, float] = field(default_factory=dict)


@dataclass
class Fragment:
    """A contiguous piece of a parameter and its optimizer state, or of a buffer, on one rank.

    Checkpoints are made of these, so they do not depend on the number of ranks or the ZeRO stage.
    """

    name: str  # of the parameter, as in the model's state dict
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # first element, in the flattened parameter
    # "param" (fp32 master), optimizer slots ("exp_avg", ...), EMA; 1-d, equally long
    tensors: dict[str, Tensor]


class Wanted(NamedTuple):
    """Elements `[start, start + numel)` of a flattened parameter or of an optimizer's slot."""

    name: str
    slot: str
    start: int
    numel: int


class FragmentSource(Protocol):
    """Reads any range of any parameter's state, however the checkpoint was cut."""

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Fetch everything that this rank will read. Collective.

        Optional: `read` fetches what is missing, piece by piece. CheckpointError, on all ranks.
        """

    def slots(self, name: str) -> set[str]:
        """What is stored for a parameter: "param" and, unless frozen, the optimizer's slots."""

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter. CheckpointError if a part
        is missing."""


class Differentiable(Protocol):
    """What the two passes need of an engine."""

    device: torch.device

    def forward(self, micro_batch: MicroBatch, seen: Features | None = None) -> Features:
        """All features, with a graph unless under `torch.no_grad()`. All ranks make the same calls.

        seen: the result of an earlier call without a graph. Features of a tower that is not trained
        may be taken from it.
        """

    def backward(self, features: Features, gradients: Features, last: bool) -> None:
        """Push `gradients` through the graph of `features`; adds to this step's gradient.

        last: no other backward follows in this step.
        """
