"""Compute the metrics of a data set. It is encoded once, and every metric reads its features."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch

from clip_train import dist
from clip_train.data.tokenizer import Tokenize
from clip_train.data.validation import ValBatch
from clip_train.engines.base import Engine
from clip_train.errors import UserError
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.examples import Examples
from clip_train.evaluate.features import Encoded, encode, first_values, gather, never
from clip_train.evaluate.linear_probe import linear_probe_metrics
from clip_train.evaluate.retrieval import caption_metrics
from clip_train.evaluate.zero_shot import ZeroShotClasses, prompt_features, zero_shot_metrics
from clip_train.settings import import_path


@torch.no_grad()
def evaluate(
    engine: Engine,
    batches: Iterable[ValBatch],
    config: EvaluateConfig,
    tokenize: Tokenize,
    classes: ZeroShotClasses | None = None,
    *,
    captions: bool = True,
    train: Iterable[ValBatch] | None = None,
    widths: Collection[int] = (),
    examples: Examples | None = None,
    asked_to_stop: Callable[[], bool] = never,
) -> dict[str, float]:
    """The same numbers on every rank. All ranks must call it.

    Args:
        engine: left in training mode.
        batches: this rank's part of the data set.
        config: what to measure.
        tokenize: b prompts -> int64 [b, context_length].
        classes: for zero-shot classification; None: no zero-shot.
        captions: False: the samples have labels alone.
        train: this rank's part of labeled images on which a linear probe is fitted, which is tested
            on `batches`; with `classes`.
        widths: each metric of whole features is also computed on their first values.
        examples: takes the captions that are ranked first for the first images.
        asked_to_stop: whether this rank was asked to stop; then all ranks stop between two batches.

    Returns:
        With captions `num_samples`, and, if they are asked for, the results of `caption_metrics`
        and of `config.functions`; with classes those of `zero_shot_metrics`; with `train` those of
        `linear_probe_metrics`. `width_64/...`: the same of the first 64 values, without a probe.

    Raises:
        UserError: no samples or no labels; on all ranks together.
        EvaluationStopped: a rank was asked to stop; on all ranks together.
    """
    sizes = {"": None} | {f"width_{width}/": width for width in widths}
    with_text = captions and (config.retrieval or config.val_loss or bool(config.functions))
    label, classes_key = None, ""
    if classes is not None:
        label, classes_key = classes.labeller(), classes.key
    if captions and examples is not None:
        batches = examples.watch(batches)
    engine.train(False)
    try:
        out: dict[str, float] = {}
        encoded = encode(
            engine,
            batches,
            label,
            config.batch_size,
            with_text=with_text,
            classes_key=classes_key,
            asked_to_stop=asked_to_stop,
        )
        if captions:
            (out["num_samples"],) = dist.sum_scalars(len(encoded.image))
        if with_text:
            gathered, num_images, num_texts = gather(encoded)
            if examples is not None:
                examples.rank_captions(gathered, num_images, num_texts)
            for prefix, width in sizes.items():
                narrow = replace(
                    gathered,
                    image=first_values(gathered.image, width),
                    text=first_values(gathered.text, width),
                )
                metrics = caption_metrics(narrow, num_images, num_texts, config)
                out |= {f"{prefix}{name}": value for name, value in metrics.items()}
            if config.functions:
                out |= dist.on_main(own_metrics, config.functions, gathered)
        if classes is not None:
            prompts = prompt_features(engine, tokenize, classes, config.batch_size, asked_to_stop)
            for prefix, width in sizes.items():
                metrics = zero_shot_metrics(classes, prompts, encoded, width)
                out |= {f"{prefix}{name}": value for name, value in metrics.items()}
        if classes is not None and train is not None:
            training = encode(
                engine,
                train,
                label,
                config.batch_size,
                with_text=False,
                classes_key=classes_key,
                asked_to_stop=asked_to_stop,
            )
            num_classes = len(classes.classnames)
            out |= linear_probe_metrics(training, encoded, num_classes, asked_to_stop)
        return out
    finally:
        engine.train(True)


def own_metrics(paths: Sequence[str], encoded: Encoded) -> dict[str, float]:
    """On rank 0: the numbers that the functions of `evaluate.functions` return for all samples.

    UserError if a function cannot be imported, raises, or does not return numbers by name.
    """
    out: dict[str, float] = {}
    for path in paths:
        function = import_path("evaluate.functions", path)
        try:
            out |= {str(name): float(value) for name, value in function(encoded).items()}
        except Exception as e:
            raise UserError(
                f"evaluate.functions ({path}) failed: {type(e).__name__}: {e}; correct it, or take "
                "it out. It gets a clip_train.evaluate.features.Encoded and returns numbers by name"
            ) from e
    return out
