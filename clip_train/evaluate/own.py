"""Evaluations of a user's own: functions of the features of all samples."""

from collections.abc import Sequence
from dataclasses import replace

from clip_train import dist
from clip_train.errors import UserError
from clip_train.evaluate.features import Encoded
from clip_train.settings import import_path


def own_metrics(paths: Sequence[str], encoded: Encoded) -> dict[str, float]:
    """Collective: the numbers that the functions of `evaluate.functions` return on rank 0.

    They are called with an `Encoded` of all ranks' samples. UserError on all ranks if a function
    cannot be imported, raises, or does not return numbers by name.
    """
    counts = dist.gather_objects((len(encoded.image), len(encoded.text)))
    images, texts = ([count[i] for count in counts] for i in (0, 1))
    gathered = replace(
        encoded,
        image=dist.gather_rows(encoded.image, images),
        labels=dist.gather_rows(encoded.labels, images),
        text=dist.gather_rows(encoded.text, texts),
        texts=dist.gather_rows(encoded.texts, texts),
        owners=dist.gather_rows(encoded.owners + sum(images[: dist.rank()]), texts),
    )
    return dist.on_main(_call, paths, gathered)


def _call(paths: Sequence[str], encoded: Encoded) -> dict[str, float]:
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
