"""What a recipe says under `data:`, and how many lanes that makes."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from clip_train.batch import BatchSizes
from clip_train.data.sources import split
from clip_train.explain import Allowed
from clip_train.settings import Settings

FEW_LANES, MANY_LANES = 64, 1024  # what `auto` chooses up to, for small and for large global batches
SAMPLES_PER_AUTO_LANE = 32  # in a global batch, beyond FEW_LANES
SHUFFLED, LARGEST_BLOCK = 32_768, 512  # samples in the blocks of all lanes, and in one, by `shuffle_block: auto`
GOOD_LANES = 16  # enough to mix shards and to feed ranks and workers
SAMPLES_PER_LANE = 4  # at least, where lanes do not divide the global batch


class DataConfig(Settings):
    """Where the samples come from and how they are read."""

    train: Annotated[str, Allowed("text", example="'shards/{00000..00099}.tar'")]
    """WebDataset shards: a path with braces (`{00000..00099}.tar`) or globs, several sources joined by `::`."""

    train_weights: Annotated[
        list[Annotated[float, Field(gt=0)]] | None, Allowed("a list of numbers greater than 0, such as [3, 1], or null")
    ] = None
    """How much of the stream each of the sources joined by `::` gives, as [3, 1] or 3::1; each then has epochs of
    its own. null: they are one list of shards, in whose epochs each sample comes once."""

    resampled: bool | list[bool] = False
    """Draw shards with replacement rather than in epochs; with train_weights also one answer for each source."""

    num_samples: Annotated[int, Field(gt=0)] | None = None
    """Samples in one epoch; only turns `run.epochs` into steps. An index of the shards knows it: leave it out then."""

    verify: Literal["auto", "off"] = "auto"
    """auto: shards beside which `clip-train index` has left an index are held against it, block by block."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 2
    """Loader processes on each rank; 0 loads inside the trainer. Never changes the samples or their order.
    Where the model trains on a CPU, each takes a core from its threads, up to half; OMP_NUM_THREADS says otherwise."""

    lanes: Annotated[int, Field(gt=0, le=65_536)] | Literal["auto"] = "auto"
    """Streams that feed the global batch, fixed for the run. auto: the largest divisor of every global batch's size
    up to 64, or up to a 32nd of the smallest if that is more, at most 1024; where it is below 16, a quarter of the
    smallest size, up to 64."""

    shuffle_block: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Raw samples that a lane permutes together. auto: 512, and less from 64 lanes on (32,768 over all lanes).

    Memory: a rank holds (lanes that it reads) x shuffle_block undecoded samples; 16 lanes of 512 samples
    of 80 kB are 655 MB. Weighted sources share it.
    """

    prefetch: Annotated[int, Field(gt=0, le=1024)] = 2
    """Batches that each worker keeps ready."""

    caption_key: str | None = None
    """Take the caption from this key of the sample's `.json`; None: from its `.txt`.

    A list there is several captions: each visit of the sample draws one, by the sample's seed.
    """

    val: str | None = None
    """Validation shards, written like `train`; read once, in order."""

    allow_changed_shards: bool = False
    """Go on from a checkpoint though shards were added, removed or changed since: from the start of an epoch."""

    bad_sample_limit: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The run stops when more than this fraction of the last 10,000 samples (and at least 20) was bad."""

    aug_scale: tuple[float, float] = (0.9, 1.0)
    """RandomResizedCrop: the crop's area as a fraction of the image's, from and to."""

    @field_validator("train_weights", mode="before")
    @classmethod
    def _as_openclip_writes_them(cls, value: Any) -> Any:
        """1::2 is how OpenCLIP writes its upsampling factors."""
        return value.split("::") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_each_for_each_source(self) -> DataConfig:
        sources = len(split(self.train))
        if self.train_weights is not None and len(self.train_weights) != sources:
            raise ValueError(
                f"data.train_weights ({self.train_weights}) must have one weight for each of the {sources} sources "
                "that :: joins in data.train"
            )
        if isinstance(self.resampled, list):
            if len(self.resampled) != sources:
                raise ValueError(
                    f"data.resampled ({self.resampled}) must be true, false, or one answer for each of the {sources} "
                    "sources that :: joins in data.train"
                )
            if self.train_weights is None:
                raise ValueError(
                    f"data.resampled ({self.resampled}) tells sources apart, which only data.train_weights makes of "
                    "them; set data.train_weights, or one answer for all"
                )
        return self

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
    most = min(MANY_LANES, max(FEW_LANES, smallest // SAMPLES_PER_AUTO_LANE))
    divisor = max(d for d in range(1, most + 1) if common % d == 0)
    if divisor >= min(GOOD_LANES, smallest):
        return divisor
    return max(divisor, min(FEW_LANES, smallest // SAMPLES_PER_LANE))


def resolve_block(shuffle_block: int | Literal["auto"], lanes: int) -> int:
    """Samples that a lane permutes together: a function of the recipe alone, as the number of lanes is."""
    return max(1, min(LARGEST_BLOCK, SHUFFLED // lanes)) if shuffle_block == "auto" else shuffle_block
