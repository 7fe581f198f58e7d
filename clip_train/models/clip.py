"""CLIP: two towers, a temperature, and for the sigmoid loss a bias. `b` samples, `D` features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.models.blocks import constant, new_parameter
from clip_train.models.config import Architecture
from clip_train.models.text import TextTower
from clip_train.models.vision import VisionTower

Outputs = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


class CLIP(TextTower):
    """Parameters are named as in OpenCLIP; `logit_scale` is [1], which every engine can share out."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        dropout: float = 0.0,
        patch_dropout: float | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        """`patch_dropout` None: as the architecture says."""
        super().__init__(architecture, dropout=dropout, activation_checkpointing=activation_checkpointing)
        self.architecture = architecture
        self.visual = VisionTower(
            architecture,
            dropout=dropout,
            patch_dropout=architecture.vision_cfg.patch_dropout if patch_dropout is None else patch_dropout,
            activation_checkpointing=activation_checkpointing,
        )
        self.logit_scale = new_parameter((1,), constant(architecture.init_logit_scale))
        bias = architecture.init_logit_bias
        self.logit_bias = None if bias is None else new_parameter((1,), constant(bias))

    def forward(
        self, images: Tensor | None = None, texts: Tensor | None = None, sample_seeds: Tensor | None = None
    ) -> Outputs:
        """Encode what is given. Both towers are reached by calling the model: ZeRO-3 knows no other way in.

        Args:
            images: uint8 [b, 3, H, W], normalised here; or float, already normalised.
            texts: int64 [b, context_length], or [b, L]: cut where all of these texts have ended.
            sample_seeds: int64 [b], for the dropouts in training.

        Returns:
            image features [b, D], text features [b, D] (None where not asked for), exp(logit_scale) [1],
            logit_bias [1] or None. Features have length 1. All are float32, or float64 in a float64 model.

        Raises:
            ValueError: in training with dropout, without `sample_seeds`; images or texts of another size.
        """
        image_features = text_features = None
        if images is not None:
            image_features = F.normalize(at_least_float32(self.visual(images, sample_seeds)), dim=-1)
        if texts is not None:
            text_features = F.normalize(at_least_float32(self._text_features(texts, sample_seeds)), dim=-1)
        # a copy: an engine may take the parameter itself away when this returns
        bias = None if self.logit_bias is None else at_least_float32(self.logit_bias.clone())
        return image_features, text_features, at_least_float32(self.logit_scale).exp(), bias


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def count_parameters(architecture: Architecture) -> int:
    """Number of the model's parameters; allocates none of them."""
    with torch.device("meta"):
        return sum(p.numel() for p in CLIP(architecture).parameters())


def flops_per_sample(architecture: Architecture, patch_dropout: float = 0.0) -> float:
    """Floating point operations of one image and one text going forward: products only, 2 for each MAC.

    Causal attention counts in full, as is the custom, and so does the padding behind a text, which the model may be
    spared. Of the last blocks only what is computed counts (`OneToken`). A step costs 3 of these for each sample,
    and one more for each time the sample goes forward again.
    """
    vision, text = architecture.vision_cfg, architecture.text_cfg
    tokens = 1 + vision.kept_patches(patch_dropout)
    patches = 2.0 * vision.num_patches * 3 * vision.patch_size**2 * vision.width
    blocks = _blocks_flops(vision.layers, tokens, vision.width, vision.mlp_width)
    blocks += _blocks_flops(text.layers, text.context_length, text.width, text.mlp_width)
    projections = 2.0 * (vision.width + text.width) * architecture.embed_dim
    return patches + blocks + projections


def _blocks_flops(layers: int, tokens: int, width: int, mlp_width: int) -> float:
    keys_values = 2.0 * tokens * 2 * width * width
    # for each token that asks: query, output, MLP; scores, and their product with the values
    asking = 2.0 * (2 * width * width + 2 * width * mlp_width) + 2.0 * 2 * tokens * width
    return layers * keys_values + ((layers - 1) * tokens + 1) * asking
