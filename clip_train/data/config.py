"""What a recipe says under `data:`, and how many lanes that makes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from clip_train.errors import UserError
from clip_train.settings import Settings

MAX_AUTO_LANES = 64


class DataConfig(Settings):
    """Where the samples come from and how they are read."""

    train: str
    """WebDataset shards: a path with braces (`{00000..00099}.tar`) or globs, several joined by `::`."""

    num_samples: Annotated[int, Field(gt=0)] | None = None
    """Samples in one epoch; only turns `run.epochs` into steps. An index of the shards knows it: leave it out then."""

    verify: Literal["auto", "off"] = "auto"
    """auto: shards beside which `clip-train index` has left an index are held against it, block by block."""

    workers: Annotated[int, Field(ge=0)] = 2
    """Loader processes on each rank; 0 loads inside the trainer. Never changes the samples or their order."""

    lanes: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Streams that feed the global batch, fixed for the run. auto: its largest divisor up to 64."""

    shuffle_block: Annotated[int, Field(gt=0)] = 512
    """Raw samples that a lane permutes together.

    Memory: a rank holds (lanes that it reads) x shuffle_block undecoded samples; 16 lanes of 512 samples
    of 80 kB are 655 MB.
    """

    prefetch: Annotated[int, Field(gt=0)] = 2
    """Batches that each worker keeps ready."""

    caption_key: str | None = None
    """Take the caption from this key of the sample's `.json`; None: from its `.txt`."""

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


def resolve_lanes(lanes: int | Literal["auto"], global_size: int, world_size: int) -> int:
    """The number of lanes: a function of the global batch alone, so that the order never depends on W.

    Any world size works: lanes that do not divide by it are read by two ranks, which share them.

    Raises:
        UserError: `lanes` does not divide `global_size`, or `world_size` does not.
    """
    if global_size % world_size:
        near = global_size // world_size * world_size
        raise UserError(
            f"batch.global_size ({global_size}) must be a multiple of the world size ({world_size}); "
            f"the nearest are {near} and {near + world_size}"
        )
    divisors = [d for d in range(1, global_size + 1) if global_size % d == 0]
    if lanes == "auto":
        return max(d for d in divisors if d <= MAX_AUTO_LANES)
    if lanes not in divisors:
        below = [d for d in divisors if d < lanes][-1:]
        above = [d for d in divisors if d > lanes][:1]
        nearest = " and ".join(map(str, below + above))
        raise UserError(
            f"data.lanes ({lanes}) must divide batch.global_size ({global_size}); the nearest that do are {nearest}"
        )
    return lanes
