"""One pass over the validation set, every rank over its own part of it.

`n` samples on this rank, `D` features. Under ZeRO-3 a forward is a collective: ranks that have run out
of samples encode a blank one for as long as another rank has more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from clip_train import dist
from clip_train.data.validation import ValBatch
from clip_train.engine import Engine
from clip_train.errors import UserError
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.retrieval import retrieval_metrics
from clip_train.evaluate.zero_shot import Tokenize, ZeroShotClasses, class_embeddings, count_hits

Labeller = Callable[[str, dict[str, Any]], int]  # (caption, metadata) -> class index, -1: none


@torch.no_grad()
def evaluate(
    engine: Engine,
    batches: Iterable[ValBatch],
    config: EvaluateConfig,
    tokenize: Tokenize,
    take: Callable[[Tensor, Tensor], None] = lambda image, text: None,
) -> dict[str, float]:
    """Zero-shot accuracy and retrieval, the same numbers on every rank. All ranks must call it.

    Args:
        engine: left in training mode.
        batches: this rank's part of the validation set.
        config: what to measure.
        tokenize: b prompts -> int64 [b, context_length].
        take: is given this rank's features of images and texts, [n, D] each (see `Examples`).

    Returns:
        `num_samples`; `zero_shot_top1`, `zero_shot_top5` and `zero_shot_samples`; OpenCLIP's
        `image_to_text_R@1` ... `text_to_image_median_rank`, recalls from 0 to 1.

    Raises:
        UserError: no samples, no labels, or a bad file of classes; on all ranks together.
    """
    classes = None
    if config.zero_shot_classes is not None:
        path = config.zero_shot_classes
        classes = dist.agreed(lambda: ZeroShotClasses.load(path))
    engine.train(False)
    try:
        label = classes.labeller() if classes else None
        image, text, texts, labels = _encode(engine, batches, label, with_text=config.retrieval)
        take(image, text)
        (num_samples,) = dist.sum_scalars(len(image))
        out = {"num_samples": num_samples}
        if classes is not None:
            embeddings = class_embeddings(engine, tokenize, classes, config.batch_size)
            labelled, top1, top5 = dist.sum_scalars(*count_hits(image, labels, embeddings))
            if not labelled:
                raise UserError(
                    f"evaluate.zero_shot_classes: none of {num_samples:.0f} validation samples has a label: "
                    f"they need 'cls' or {classes.label_key!r} in their .json, or captions that name a class"
                )
            out |= {
                "zero_shot_top1": top1 / labelled,
                "zero_shot_top5": top5 / labelled,
                "zero_shot_samples": labelled,
            }
        if config.retrieval:
            out |= retrieval_metrics(image, text, texts)
        return out
    finally:
        engine.train(True)


def _encode(
    engine: Engine, batches: Iterable[ValBatch], label: Labeller | None, *, with_text: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's samples; all ranks call the engine equally often. Raises UserError.

    Returns:
        Features of the images, [n, D] float32; of the texts, [n, D] float32 ([0, D] where not asked for); the texts,
        int64 [n, context_length]; labels, int64 [n], -1 where there is none.
    """
    source = iter(batches)
    image: list[Tensor] = []
    text: list[Tensor] = []
    texts: list[Tensor] = []
    labels: list[int] = []
    blank: tuple[Tensor, Tensor] | None = None
    while True:
        # a loader that fails, or a bad label, ends all ranks together
        batch, found = dist.agreed(lambda: _next(source, label))
        if not dist.any_rank(batch is not None):
            break
        blank = blank or _blank(batch)
        pixels, tokens = blank if batch is None else (batch.images, batch.texts)
        tokens = tokens.to(engine.device, non_blocking=True)
        num = 0 if batch is None else len(pixels)  # nothing is kept of the blank sample but its width
        image.append(engine.encode_image(pixels.to(engine.device, non_blocking=True))[:num].float())
        if with_text:
            text.append(engine.encode_text(tokens)[:num].float())
        texts.append(tokens[:num])
        labels += found
    if blank is None:
        raise UserError("data.val holds no samples")
    features = torch.cat(image)
    return (
        features,
        torch.cat(text) if with_text else features[:0],
        torch.cat(texts),
        torch.tensor(labels, dtype=torch.int64, device=features.device),
    )


def _next(source: Iterator[ValBatch], label: Labeller | None) -> tuple[ValBatch | None, list[int]]:
    """The next batch, None after the last, and its labels. Raises UserError."""
    batch = next(source, None)
    if batch is None:
        return None, []
    if label is None:
        return batch, [-1] * len(batch.images)
    try:
        return batch, [label(c, m) for c, m in zip(batch.captions, batch.metadata, strict=True)]
    except ValueError as e:
        raise UserError(f"evaluate.zero_shot_classes does not fit data.val: {e}") from e


def _blank(batch: ValBatch | None) -> tuple[Tensor, Tensor]:
    """One image and one text of zeros, of the shape that some rank's batch has; collective."""
    shapes = dist.gather_objects(None if batch is None else (batch.images.shape[1:], batch.texts.shape[1:]))
    image, text = next(s for s in shapes if s is not None)
    return torch.zeros(1, *image, dtype=torch.uint8), torch.zeros(1, *text, dtype=torch.int64)
