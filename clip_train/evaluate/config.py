"""The recipe's `evaluate` section."""

from __future__ import annotations

from pydantic import Field

from clip_train.settings import Settings


class EvaluateConfig(Settings):
    """What is measured on `data.val`, and when."""

    every_steps: int | None = Field(None, gt=0)
    """Evaluate every so many optimizer steps; none: only at the end of the run."""
    batch_size: int = Field(256, gt=0)
    """Samples that a rank encodes at once. Changes no result."""
    zero_shot_classes: str | None = None
    """A JSON file with "classnames", "templates" and how samples are labelled; none: no zero-shot."""
    retrieval: bool = True
    """Recall of images by their captions and of captions by their images."""
