"""How evaluation makes a square of an image: the names and defaults of OpenCLIP's
`preprocess_cfg`."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

ResizeMode = Literal["shortest", "squash", "longest"]
Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Resize:
    """A model's description has the same fields: evaluation resizes as its weights were trained."""

    interpolation: Interpolation = "bicubic"  # with antialiasing
    resize_mode: ResizeMode = "shortest"
    """shortest: the shorter side is resized, and the middle is kept. squash: both sides are
    resized. longest: the longer side is resized, and the shorter one is padded with black."""


AS_CLIP = Resize()
RESIZED: dict[str, Any] = asdict(AS_CLIP)
