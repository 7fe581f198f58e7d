"""The size of the images that a model is given: squares, with the names and defaults of OpenCLIP's
`preprocess_cfg`, or native resolution."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

ResizeMode = Literal["shortest", "squash", "longest", "native"]
Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Resize:
    """A model's description has the same fields: evaluation resizes as its weights were trained."""

    interpolation: Interpolation = "bicubic"  # with antialiasing
    resize_mode: ResizeMode = "shortest"
    """shortest: the shorter side is resized, and the middle is kept. squash: both sides are
    resized. longest: the longer side is resized, and the shorter one is padded with black. native:
    no square, see `Patches`."""
    image_tokens: int | None = None
    """Native resolution: the most patches of an image. None: squares."""


AS_CLIP = Resize()
RESIZED: dict[str, Any] = asdict(AS_CLIP)

SCALE_STEP = 1e-5  # of the search in `Patches.size_within`, as in SigLIP 2


@dataclass(frozen=True)
class Patches:
    """Images at their native resolution: an image keeps its aspect ratio and becomes as many
    patches as a budget allows."""

    size: int  # of a patch, in pixels
    most: int  # the largest budget: patches of an image

    @property
    def row(self) -> tuple[int, int]:
        """The shape of an image in memory: `clip_train.native.to_rows`."""
        return 1 + self.most, 3 * self.size**2

    def size_within(self, height: int, width: int, budget: int) -> tuple[int, int]:
        """The height and width in pixels to which an image of this shape is resized: the largest
        multiples of a patch that have at most `budget` patches at nearly its aspect ratio.

        This is SigLIP 2's rule (`get_image_size_for_max_num_patches` of transformers).
        """

        def scaled(scale: float) -> tuple[int, int]:
            sides = (math.ceil(side * scale / self.size) for side in (height, width))
            rows, columns = (max(1, side) for side in sides)
            return rows, columns

        low, high = SCALE_STEP / 10, 100.0
        while high - low >= SCALE_STEP:
            middle = (low + high) / 2
            if math.prod(scaled(middle)) <= budget:
                low = middle
            else:
                high = middle
        rows, columns = scaled(low)
        return rows * self.size, columns * self.size


def budget_at(shares: Mapping[int, float], place: float) -> int:
    """The budget of a sample. shares: of the samples, by budget. place: uniform in [0, 1)."""
    place *= sum(shares.values())
    for budget, share in sorted(shares.items()):
        if place < share:
            return budget
        place -= share
    return max(shares)


@dataclass(frozen=True)
class BudgetSchedule:
    """The share of samples at each budget of patches, which may change with the step."""

    pieces: tuple[Mapping[int, float], ...]  # one after the other
    ends: tuple[int, ...] = ()  # for each piece except the last: the first step after it

    def at(self, step: int) -> Mapping[int, float]:
        return self.pieces[bisect.bisect_right(self.ends, step)]

    @property
    def most(self) -> int:
        """The largest budget of all steps."""
        return max(map(max, self.pieces))

    @property
    def tokens_per_image(self) -> float:
        """The mean number of patches of an image, if each has its budget: the largest of all
        pieces."""
        return max(
            sum(budget * share for budget, share in shares.items()) / sum(shares.values())
            for shares in self.pieces
        )
