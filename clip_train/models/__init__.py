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
from clip_train.models.convert import check_state, expected_shapes, export_openclip, load_openclip

__all__ = [
    "CLIP",
    "IMAGE_MEAN",
    "IMAGE_STD",
    "Architecture",
    "ModelConfig",
    "check_state",
    "count_parameters",
    "expected_shapes",
    "export_openclip",
    "flops_per_sample",
    "load_architecture",
    "load_openclip",
    "preset_names",
]
