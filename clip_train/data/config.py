"""What a recipe says under `data:`, and how many lanes that makes."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from clip_train.batch import BatchSizes
from clip_train.settings import Settings

MAX_AUTO_LANES = 64
GOOD_LANES = 16  # enough to mix shards and to feed ranks and workers
SAMPLES_PER_LANE = 4  # at least, where lanes do not divide the global batch


class DataConfig(Settings):
    """Where the samples come from and how they are read."""

    train: str
    """WebDataset shards: a path with braces (`{00000..00099}.tar`) or globs, several joined by `::`."""

    num_samples: Annotated[int, Field(gt=0)] | None = None
    """Samples in one epoch, if you know it; only turns `run.epochs` into steps."""

    workers: Annotated[int, Field(ge=0)] = 2
    """Loader processes on each rank; 0 loads inside the trainer. Never changes the samples or their order."""

    lanes: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Streams that feed the global batch, fixed for the run. auto: the largest divisor, up to 64, of every
    global batch's size; where that is below 16, a quarter of the smallest size, up to 64."""

    shuffle_block: Annotated[int, Field(gt=0)] = 512
    """Raw samples that a lane permutes together.

    Memory: a rank holds (lanes that it reads) x shuffle_block undecoded samples; 16 lanes of 512 samples
    of 80 kB are 655 MB.
    """

    prefetch: Annotated[int, Field(gt=0)] = 2
    """Batches that each worker keeps ready."""

    caption_key: str | None = None
    """Take the caption from this key of the sample's `.json`; None: from its `.txt`.

    A list there is several captions: each visit of the sample draws one, by the sample's seed.
    """

    val: str | None = None
    """Validation shards, written like `train`; read once, in order."""

    bad_sample_limit: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The run stops when more than this fraction of the last 10,000 samples (and at least 20) was bad."""

    aug_scale: tuple[float, float] = (0.9, 1.0)
    """RandomResizedCrop: the crop's area as a fraction of the image's, from and to."""

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        low, high = self.aug_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"data.aug_scale ({low}, {high}) must satisfy 0 < from <= to <= 1; OpenCLIP's is (0.9, 1.0)"
            )
        return self


def resolve_lanes(lanes: int | Literal["auto"], sizes: BatchSizes) -> int:
    """The number of lanes: a function of the global batches' sizes alone, so that the order never depends on W.

    Any number works with any sizes and ranks. Where it divides all sizes, each lane gives every batch equally
    many; where it does not, the fewer samples a lane gives, the more lanes are read by several ranks, which costs
    reading (each sample is decoded once). Hence `auto`: a divisor where there is one of some size, else a
    number that takes a few samples from each lane.
    """
    if lanes != "auto":
        return lanes
    smallest, _ = sizes.extremes()
    common = math.gcd(*{size for stage in range(len(sizes.stretches)) for size in sizes.distinct(stage)})
    divisor = max(d for d in range(1, MAX_AUTO_LANES + 1) if common % d == 0)
    if divisor >= min(GOOD_LANES, smallest):
        return divisor
    return max(divisor, min(MAX_AUTO_LANES, smallest // SAMPLES_PER_LANE))
