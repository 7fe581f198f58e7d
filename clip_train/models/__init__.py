"""The model: OpenCLIP's architectures and parameter names, dropout that belongs to the sample, conversion."""

from clip_train.models.clip import CLIP, count_parameters, flops_per_sample
from clip_train.models.config import (
    IMAGE_MEAN,
    IMAGE_STD,
    Architecture,
    ModelConfig,
    load_architecture,
    preset_names,
)

__all__ = [
    "CLIP",
    "IMAGE_MEAN",
    "IMAGE_STD",
    "Architecture",
    "ModelConfig",
    "count_parameters",
    "flops_per_sample",
    "load_architecture",
    "preset_names",
]
