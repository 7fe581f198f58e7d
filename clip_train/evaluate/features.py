"""Encode a data set in one pass, each rank its own part. Every metric reads these features.

`n` samples and `t` captions on this rank, `D` features. Under ZeRO-3 a forward is a collective:
ranks that have run out of samples encode a blank one for as long as another rank has more.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train import dist
from clip_train.columns import Columns
from clip_train.data.validation import ValBatch
from clip_train.engines.base import Engine
from clip_train.errors import EvaluationStopped, UserError
from clip_train.task import MicroBatch

T = TypeVar("T")
Labeller = Callable[
    [str, dict[str, Any]], int
]  # (first caption, metadata) -> class index, -1: none


STOPPED = "stopped during the evaluation"


def never() -> bool:
    return False


def stop_together(asked_to_stop: Callable[[], bool]) -> None:
    """Collective. Raises EvaluationStopped on all ranks if one of them was asked to stop."""
    if dist.any_rank(asked_to_stop()):
        raise EvaluationStopped(STOPPED)


@dataclass
class Encoded:
    """This rank's samples, in order; the ranks' follow each other."""

    image: Tensor  # [n, D] float32, normalised
    text: Tensor  # [t, D] float32, normalised; [0, D] where no captions were asked for
    texts: Tensor  # int64 [t, context_length], as the owners also if `text` is empty
    owners: Tensor  # int64 [t]: whose caption it is, ascending
    labels: Tensor  # int64 [n], -1 where there is none
    logit_scale: Tensor  # [1], the factor itself; with captions only


def first_values(x: Tensor, width: int | None) -> Tensor:
    """[..., D] -> [..., width], normalized; None: as it is."""
    return x if width is None else F.normalize(x[..., :width], dim=-1)


def gather(encoded: Encoded) -> tuple[Encoded, list[int], list[int]]:
    """Collective: all ranks' samples, and how many images and captions each rank has."""
    counts = dist.gather_objects((len(encoded.image), len(encoded.text)))
    images, texts = ([count[i] for count in counts] for i in (0, 1))
    if dist.world_size() > 1:
        dist.agreed(reserve, encoded, sum(images), sum(texts))
    whole = replace(
        encoded,
        image=dist.gather_rows(encoded.image, images),
        labels=dist.gather_rows(encoded.labels, images),
        text=dist.gather_rows(encoded.text, texts),
        texts=dist.gather_rows(encoded.texts, texts),
        owners=dist.gather_rows(encoded.owners + sum(images[: dist.rank()]), texts),
    )
    return whole, images, texts


def reserve(encoded: Encoded, images: int, texts: int) -> None:
    """Take the memory that a `gather` fills, and free it. A rank that has too little for it fails
    here, not in a collective, where the others would wait."""
    rows = ((encoded.image, images), (encoded.text, texts), (encoded.texts, texts))
    blocks = [x.new_empty((count, *x.shape[1:])) for x, count in rows]
    del blocks


def encode(
    engine: Engine,
    batches: Iterable[ValBatch],
    label: Labeller | None,
    batch_size: int,
    *,
    with_text: bool,
    classes_key: str = "evaluate.zero_shot_classes",
    asked_to_stop: Callable[[], bool] = never,
) -> Encoded:
    """Collective: it calls the engine equally often on all ranks.

    classes_key: names the classes of `label` in messages. asked_to_stop: whether this rank was
    asked to; then all ranks leave between two batches.

    Raises UserError on all ranks for a bad label, or if no rank has a sample. EvaluationStopped on
    all ranks.
    """
    source, device = iter(batches), engine.device
    image, text, texts = [], [], []
    owners: list[int] = []
    labels: list[int] = []
    blank: ValBatch | None = None
    while True:
        # a loader that fails, or a bad label, ends all ranks together
        batch, batch_labels = dist.agreed(partial(_next, source, label, classes_key))
        rounds = -(-len(batch.texts) // batch_size) if batch is not None and with_text else 0
        more, rounds, stopped = (
            int(most) for most in dist.max_scalars(batch is not None, rounds, asked_to_stop())
        )
        if stopped:
            raise EvaluationStopped(STOPPED)
        if not more:
            break
        blank = blank or _blank(batch, device)
        batch = batch or blank
        for i, captions in enumerate(batch.captions, len(labels)):
            owners += [i] * len(captions)
        labels += batch_labels
        texts.append(batch.texts[: sum(map(len, batch.captions))].to(device, non_blocking=True))
        pixels = batch.images.to(device, non_blocking=True)
        starts = range(0, rounds * batch_size, batch_size)  # an image may have many captions
        forward = partial(_forward, engine, pixels, texts[-1], blank.texts, starts)
        seen, read = forward_together(engine, forward)
        image.append(seen[: len(batch.captions)])  # of the blank sample only the width is kept
        text += read
    if blank is None:
        raise UserError(
            "the evaluation data has no samples that can be used: `clip-train index SHARDS` says "
            "why"
        )
    logit_scale = image[0].new_ones(1)
    if with_text:
        seeds = torch.zeros(1, dtype=torch.int64, device=device)
        columns = Columns(images=blank.images, texts=blank.texts, sample_seeds=seeds)
        logit_scale = engine.forward(MicroBatch(columns))["logit_scale"]

    def join() -> Encoded:
        return Encoded(
            torch.cat(image),
            torch.cat([image[0][:0], *text]),
            torch.cat(texts),
            torch.tensor(owners, dtype=torch.int64, device=device),
            torch.tensor(labels, dtype=torch.int64, device=device),
            logit_scale,
        )

    return dist.agreed(join)


def forward_together(engine: Engine, forward: Callable[[], T]) -> T:
    """`forward()`. An error on one rank becomes an error on all ranks, unless ranks wait for each
    other inside a forward."""
    return forward() if engine.remedy("forward pass") else dist.agreed(forward)


def _forward(
    engine: Engine, pixels: Tensor, tokens: Tensor, blank: Tensor, starts: range
) -> tuple[Tensor, list[Tensor]]:
    """[n, D] float32 of the images, and the same of each part of the texts; `blank` replaces an
    empty part."""
    texts = []
    for start in starts:
        part = tokens[start : start + starts.step]
        texts.append(engine.encode("text", part if len(part) else blank)[: len(part)].float())
    return engine.encode("image", pixels).float(), texts


def _next(
    source: Iterator[ValBatch], label: Labeller | None, classes_key: str
) -> tuple[ValBatch | None, list[int]]:
    """The next batch, None after the last, and its labels. Raises UserError."""
    batch = next(source, None)
    if batch is None:
        return None, []
    if label is None:
        return batch, [-1] * len(batch.images)
    try:
        first = [captions[0] if captions else "" for captions in batch.captions]
        return batch, [label(c, m) for c, m in zip(first, batch.metadata, strict=True)]
    except ValueError as e:
        raise UserError(f"{classes_key} does not fit the data: {e}") from e


def _blank(batch: ValBatch | None, device: torch.device) -> ValBatch:
    """An image and a text of zeros in the shape of another rank's batch. They do not count as a
    sample. Collective."""
    shapes = dist.gather_objects(
        None if batch is None else (batch.images.shape[1:], batch.texts.shape[1:])
    )
    image, text = next(s for s in shapes if s is not None)
    return ValBatch(
        torch.zeros(1, *image, dtype=torch.uint8, device=device),
        torch.zeros(1, *text, dtype=torch.int64, device=device),
        captions=[],
        keys=[],
        metadata=[],
    )
