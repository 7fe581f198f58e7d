"""CLIP: two towers, a temperature, and for the sigmoid loss a bias.

`b` samples of `L` tokens, `D` features.
"""

import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clip_train.errors import CheckpointError, UserError
from clip_train.flops import ForwardFlops
from clip_train.inputs import change_first_argument, row_shape, unpacked
from clip_train.models.batch_norm import adopt
from clip_train.models.blocks import (
    Block,
    Outputs,
    Packing,
    Transformer,
    VisionTower,
    has_flash_attention,
    normal_parameter,
    normalised_images,
    outputs,
)
from clip_train.models.config import AnyArchitecture, Architecture, OwnModel, without_neutral
from clip_train.models.dropout import TEXT_DROPOUT_ID
from clip_train.models.low_rank import adapt
from clip_train.models.openclip.config import OpenCLIPArchitecture, is_resnet, library
from clip_train.settings import Recompute, broken, clipped, import_path
from clip_train.task import text_ends


class CLIP(nn.Module):
    """CLIP with OpenCLIP's parameter names, the text tower's at the root, and its initialization.

    `logit_scale` is [1], which every engine can shard.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        dropout: float = 0.0,
        patch_dropout: float | None = None,
        activation_checkpointing: Recompute = False,
    ) -> None:
        """`patch_dropout` None: as the architecture says."""
        super().__init__()
        self.architecture = architecture
        cfg, quick_gelu = architecture.text_cfg, architecture.quick_gelu
        self.context_length = cfg.context_length
        self.positional_embedding = normal_parameter(cfg.context_length, cfg.width, std=0.01)
        self.text_projection = normal_parameter(
            cfg.width, architecture.embed_dim, std=cfg.width**-0.5
        )
        blocks = (
            Block(cfg, quick_gelu=quick_gelu, dropout=dropout, dropout_id=TEXT_DROPOUT_ID + 2 * i)
            for i in range(cfg.layers)
        )
        self.transformer = Transformer(blocks, activation_checkpointing)
        self.token_embedding = nn.Embedding(cfg.vocab_size, cfg.width)
        with torch.no_grad():
            self.token_embedding.weight.mul_(0.02)  # torch draws with a deviation of 1
        self.ln_final = nn.LayerNorm(cfg.width)
        if patch_dropout is None:
            patch_dropout = architecture.vision_cfg.patch_dropout
        self.visual = VisionTower(
            architecture,
            dropout=dropout,
            patch_dropout=patch_dropout,
            activation_checkpointing=activation_checkpointing,
        )
        self.logit_scale = nn.Parameter(torch.full((1,), architecture.init_logit_scale))
        bias = architecture.init_logit_bias
        self.logit_bias = None if bias is None else nn.Parameter(torch.full((1,), bias))

    def forward(
        self,
        images: Tensor | None = None,
        texts: Tensor | None = None,
        sample_seeds: Tensor | None = None,
        num_tokens: int | None = None,
        num_patches: int | None = None,
    ) -> Outputs:
        """Encode what is given. Call the model itself, or ZeRO-3 does not gather the
        parameters.

        Args:
            images: uint8 [b, 3, H, W], normalized here, or float, already normalized. Or uint8
                [b, 1 + T, 3 p p], images at their native resolution (`clip_train.native`).
            texts: int64 [b, context_length], or [b, L]: cut after the longest of these texts. Or [T
                b, L], where those of an image follow one another.
            sample_seeds: int64 [b], for the dropouts in training.
            num_tokens: of the texts up to their ends. Given, texts are computed without padding.
            num_patches: of all native images together. None: the host waits for the device.

        Returns:
            image features [b, D], text features [b, D] or [T b, D] (None where not asked for),
            exp(logit_scale) [1], logit_bias [1] or None. Features have length 1. All are float32,
            or float64 in a float64 model.

        Raises:
            ValueError: `sample_seeds` are missing in training with dropout; a wrong size of images
                or texts.
        """
        image = None
        if images is not None:
            patches = () if num_patches is None else (num_patches,)
            image = self.visual(images, sample_seeds, *patches)
        more = () if num_tokens is None else (num_tokens,)  # a subclass may not know it
        text = None if texts is None else self._text_features(texts, sample_seeds, *more)
        return outputs(self, image, text)

    def _text_features(
        self, texts: Tensor, sample_seeds: Tensor | None, num_tokens: int | None = None
    ) -> Tensor:
        """int64 [b, L], int64 [b] -> [b, D]. Padding that all texts share may be cut off.

        With [T b, L] the T texts of a sample follow one another. They draw by its seed and by the
        T - 1 numbers after it.
        """
        cfg = self.architecture.text_cfg
        if sample_seeds is not None and len(texts) > len(sample_seeds):
            text_index = torch.arange(len(texts) // len(sample_seeds), device=texts.device)
            sample_seeds = (sample_seeds[:, None] + text_index).flatten()
        if texts.ndim != 2 or not 1 <= texts.shape[1] <= self.context_length:
            raise ValueError(
                f"texts must be at most [b, {self.context_length}], not {list(texts.shape)}"
            )
        ends = text_ends(texts)  # [b]: places in L
        packing = None
        if num_tokens is None:
            # [b, L, width]
            x = self.token_embedding(texts) + self.positional_embedding[: texts.shape[1]]
        else:
            # packed also if no text has padding: with ZeRO 2 all ranks need the same graph
            flash = has_flash_attention(self.positional_embedding, cfg.heads)
            packing = Packing.of(ends, texts.shape[1], num_tokens, sample_seeds, flash)
            if flash:
                # flash attention takes the length as an upper bound only. If it is constant,
                # torch.compile makes one graph for all lengths.
                packing = packing._replace(length=cfg.context_length)
            positions = F.embedding(packing.places, self.positional_embedding)
            tokens = texts.flatten()[packing.rows]
            x = (self.token_embedding(tokens) + positions).unsqueeze(1)  # [P, 1, width]
        x = self.transformer(x, sample_seeds, ends, packing)[:, 0]  # [b, width]: at the ends
        return self.ln_final(x) @ self.text_projection


def parse_saved(dump: Mapping[str, Any], name: str | None = None) -> AnyArchitecture:
    """The architecture that a checkpoint describes. CheckpointError if it does not describe one.
    UserError for a class of the user's own that `name` does not name.

    name: `model.name`, if the user has given it. A checkpoint alone cannot make a class be
    imported. Earlier versions saved `patch_size` with ResNets, and with ViTs keys that the towers
    have no longer.
    """
    try:
        own = dump.get("own")
        if own not in (None, name):
            raise UserError(
                f"the checkpoint's model is your own ({clipped(str(own))}), which is imported only "
                f"if you name it: set model.name={clipped(str(own))}, or give the recipe of its run"
            )
        if own is not None:
            return OwnModel.model_validate(without_neutral(dict(dump), OwnModel))
        if "open_clip" in dump:
            return OpenCLIPArchitecture.model_validate(dump)
        resnet = is_resnet(dump)
        if resnet:
            vision = {key: x for key, x in dump["vision_cfg"].items() if key != "patch_size"}
            described = {"open_clip": "a ResNet", **dump, "vision_cfg": vision}
            return OpenCLIPArchitecture.model_validate(described)
        return Architecture.model_validate(without_neutral(dict(dump)))
    except (ValidationError, TypeError, LookupError, AttributeError) as e:
        raise CheckpointError(
            f"the checkpoint does not describe a model: {' '.join(str(e).split())}"
        ) from e


def build_model(
    architecture: AnyArchitecture,
    *,
    dropout: float = 0.0,
    patch_dropout: float | None = None,
    activation_checkpointing: Recompute = False,
) -> nn.Module:
    """A `CLIP`, or one of OpenCLIP's modules with the same `forward`, whose architecture has its
    dropouts.

    UserError if OpenCLIP is not installed, or cannot build it.
    """
    if isinstance(architecture, OpenCLIPArchitecture):
        library(architecture.open_clip)
        from clip_train.models.openclip.model import build

        model: nn.Module = build(
            architecture, activation_checkpointing=bool(activation_checkpointing)
        )
    elif isinstance(architecture, OwnModel):
        model = build_own_model(architecture, bool(activation_checkpointing))
    else:
        model = CLIP(
            architecture,
            dropout=dropout,
            patch_dropout=patch_dropout,
            activation_checkpointing=activation_checkpointing,
        )
    if architecture.inputs:
        change_first_argument(model, partial(unpacked, architecture.inputs))
    if architecture.lora is not None:
        adapt(model, architecture.lora)
    return model


def random_mistakes(architecture: AnyArchitecture) -> list[str]:
    """Random draws in training that would not belong to a sample. UserError as of `build_model`."""
    if not isinstance(architecture, OpenCLIPArchitecture):
        return []
    library(architecture.open_clip)
    from clip_train.models.openclip.model import random_draws

    return random_draws(architecture).mistakes


def shape_of_sample(architecture: AnyArchitecture) -> tuple[int, ...]:
    """The shape of one sample in `Batch.images`, uint8."""
    size = architecture.vision_cfg.image_size
    return row_shape(architecture.inputs, size, architecture.patches)


def build_own_model(architecture: OwnModel, activation_checkpointing: bool) -> nn.Module:
    """The user's module, which sees normalized pixels or `data.inputs`. Its batch norms see all
    ranks. UserError."""

    def pixels(images: Tensor | None) -> Tensor | None:
        return None if images is None else normalised_images(images, architecture, torch.float32)

    where = f"model.name ({architecture.own})"
    build = import_path("model.name", architecture.own or "")
    try:
        model = build()
        if not architecture.inputs:
            change_first_argument(model, pixels)
        if activation_checkpointing:
            model.set_grad_checkpointing()
    except Exception as e:
        raise UserError(
            f"{where} cannot be built: {type(e).__name__}: {e}; it is called without arguments and "
            "returns a torch.nn.Module, which for engine.activation_checkpointing has a method "
            "set_grad_checkpointing()"
        ) from e
    adopt(model, where)
    return model


@torch.no_grad()
def own_mistakes(architecture: OwnModel, num_texts: int = 1) -> list[str]:
    """Check the model with two samples on torch's meta device; returns a message for each mistake.
    UserError if it cannot be built."""
    length = architecture.text_cfg.context_length
    where, D = f"model.name ({architecture.own})", architecture.embed_dim
    both = 2 * num_texts
    expected = [[2, D], [both, D]] * 2
    with torch.device("meta"):
        model = build_model(architecture).eval()
        images = torch.zeros(2, *shape_of_sample(architecture), dtype=torch.uint8)
        texts = torch.zeros(both, length, dtype=torch.int64)
        try:
            image, text, scale, bias, *_ = model(images, texts, texts[:2, 0])
            every = (image, text, model(images, None)[0], model(None, texts)[1])
            model.get_submodule("visual"), model.get_parameter("logit_scale")
            if architecture.tokenizer is not None:  # loader workers get a copy
                texts = pickle.loads(pickle.dumps(architecture.tokenizer))(["a photo"] * both)
        except Exception as e:
            return [
                f"{where} failed on two samples on torch's meta device: {type(e).__name__}: {e}. "
                "Correct it: it is called with (images float32 [b, 3, S, S] or None, texts int64 "
                "[b, L] or None, sample_seeds=None). It returns (image [b, D] or None, text [b, D] "
                "or None, scale [1], bias [1] or None). It has a module `visual` and a parameter "
                "`logit_scale`. A tokenizer takes a list of texts, and can be pickled"
            ]
    shapes = [[*each.shape] for each in every]
    rules = [
        (shapes != expected, f"returned features {shapes}; its embed_dim asks for {expected[1]}"),
        ([*scale.shape] != [1], f"returned a scale {[*scale.shape]}; return exp(logit_scale), [1]"),
        (
            (bias is None) != (architecture.init_logit_bias is None),
            "must return a bias if it has an attribute init_logit_bias, and else None",
        ),
        (
            texts.dtype != torch.int64 or [*texts.shape] != [both, length],
            f"has a tokenizer that returned {texts.dtype} {[*texts.shape]} for {both} texts; "
            f"return torch.int64 [{both}, {length}], or change its context_length",
        ),
    ]
    return [f"{where} {message}" for message in broken(rules)]


@cache
def parameter_shapes(architecture: AnyArchitecture) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by name; allocates none of them."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build_model(architecture).named_parameters()}


@cache
def state_shapes(architecture: AnyArchitecture) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the model's state dict, buffers included; allocates none."""
    with torch.device("meta"):
        state = build_model(architecture).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def parameter_sizes(architecture: AnyArchitecture) -> dict[str, int]:
    """Elements of each of the model's parameters, by name."""
    return {name: math.prod(shape) for name, shape in parameter_shapes(architecture).items()}


def count_parameters(architecture: AnyArchitecture) -> int:
    return sum(parameter_sizes(architecture).values())


@cache
def forward_flops(
    architecture: AnyArchitecture, patch_dropout: float = 0.0, num_texts: int = 1
) -> ForwardFlops:
    """A step costs 3 of these per sample, and one more for each repeated forward of the sample."""
    if architecture.patches is not None:
        return _native_flops(architecture, num_texts)
    vision = architecture.vision_cfg.model_copy(update={"patch_dropout": patch_dropout})
    length, sample = architecture.text_cfg.context_length, shape_of_sample(architecture)
    with torch.device("meta"):
        model = build_model(architecture.model_copy(update={"vision_cfg": vision}))
        model.eval().requires_grad_(False)
        for module in model.modules():
            # only what leaves patches out, timm's and OpenCLIP's modules too
            module.training = isinstance(module, VisionTower) or "Patch" in type(module).__name__
        images = torch.zeros(1, *sample, dtype=torch.uint8)
        texts = torch.zeros(num_texts, length, dtype=torch.int64)
        seeds = torch.zeros(1, dtype=torch.int64)

    def counted(*inputs: Tensor | None) -> float:
        counter = FlopCounterMode(display=False)
        with torch.device("meta"), sdpa_kernel(SDPBackend.MATH), counter:
            model(*inputs)
        return float(counter.get_total_flops())

    image, text = counted(images, None, seeds), counted(None, texts, seeds)
    half = length // 2
    if type(architecture) is not Architecture or half == 0:
        return ForwardFlops(image, text, text / length, 0.0)
    # The cost of a text of l tokens is a l + b l^2. Fit a and b to those of `length` and of `half`.
    # The projection does not depend on l, but is less than a thousandth of the cost.
    of_half = counted(None, texts[:, :half], seeds)
    square = (text / length - of_half / half) / (length - half)
    return ForwardFlops(image, text, text / length - square * length, square)


def _native_flops(architecture: Any, num_texts: int) -> ForwardFlops:
    """`forward_flops` at native resolution, from those of squares of two sizes."""
    size, most = architecture.patches.size, architecture.patches.most

    def of_square(side: int) -> ForwardFlops:
        vision = architecture.vision_cfg.model_copy(update={"image_size": side * size})
        square = {"vision_cfg": vision, "image_tokens": None}
        return forward_flops(architecture.model_copy(update=square), num_texts=num_texts)

    # a l + b l^2 through both numbers of patches
    small, large = of_square(7), of_square(14)
    square = (large.image / 14**2 - small.image / 7**2) / (14**2 - 7**2)
    token = small.image / 7**2 - square * 7**2
    return replace(
        small,
        image=token * most + square * most**2,
        image_per_token=token,
        image_per_square=square,
    )


def flops_per_sample(
    architecture: AnyArchitecture, patch_dropout: float = 0.0, num_texts: int = 1
) -> float:
    """`forward_flops` of an image and its texts with all padding."""
    return forward_flops(architecture, patch_dropout, num_texts).total
