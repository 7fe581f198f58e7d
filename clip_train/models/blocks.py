"""The pre-norm transformer of both towers, and the vision tower: a ViT with a class token.

Parameters have OpenCLIP's names. `b` samples, `L` tokens, `P` packed tokens, `T` patches, `D`
features.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.utils.checkpoint import checkpoint

from clip_train.models.config import Architecture, TextConfig, TowerConfig
from clip_train.models.dropout import (
    PATCH_DROPOUT_ID,
    VISION_DROPOUT_ID,
    SampleDropout,
    keep_draw,
    keep_patches,
)
from clip_train.models.one_pass import (
    add_norm,
    bias_gelu,
    compiles_to_kernels,
    fork_norm,
    linear_split,
)
from clip_train.native import grids_of, position_weights
from clip_train.settings import Recompute
from clip_train.torch_internals import (
    FakeTensor,
    has_forward_hooks,
    has_onednn_linear,
    onednn_linear,
)

_FEWEST = 1 << 21  # multiplications for which oneDNN's longer call pays
_HAS_ONEDNN = (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkldnn.is_available()
    and has_onednn_linear()
)
# The return value of a model: see `CLIP.forward`.
Outputs = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def outputs(model: Any, image: Tensor | None, text: Tensor | None) -> Outputs:
    """The return value of a model with `logit_scale`, and perhaps `logit_bias`, from its towers'
    features, [b, D]."""
    image = None if image is None else F.normalize(at_least_float32(image), dim=-1)
    text = None if text is None else F.normalize(at_least_float32(text), dim=-1)
    # a copy: an engine may take the parameter itself away when this returns
    has_bias = getattr(model, "logit_bias", None) is not None
    bias = at_least_float32(model.logit_bias.clone()) if has_bias else None
    return image, text, at_least_float32(model.logit_scale).exp(), bias


def normal_parameter(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=std))


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Packing(NamedTuple):
    """Positions of the tokens of b samples that are packed one after another: [P, 1, width].

    Linear layers and norms see no padding then. Attention sees none either if it has `starts`.
    """

    rows: Tensor  # int64 [P]: each token's place in [b * L]
    places: Tensor  # int64 [P]: its place in its sample
    seeds: Tensor | None  # int64 [P]: its sample's
    read: Tensor  # int64 [b]: the token of each sample that is read, a place in [P]
    last: Tensor  # int64 [b]: the last token of each sample, a place in [L]
    length: int  # L
    starts: Tensor | None  # int32 [b + 1]: of each sample in [P], and P; for flash attention
    sizes: list[int] | None = None  # b: tokens of each sample, where attention is a loop over them

    @classmethod
    def of(
        cls,
        last: Tensor,
        length: int,
        num_tokens: int,
        seeds: Tensor | None,
        flash: bool,
        *,
        reads_first: bool = False,
    ) -> "Packing":
        """last: int64 [b], the last token of each sample. num_tokens: P. The host does not wait for
        the device.

        reads_first: a sample's features are its first token's, not its last one's.
        """
        visible = up_to(last, length)
        # a copy: compiled blocks would each copy a view
        rows = visible.flatten().nonzero_static(size=num_tokens).squeeze(1).clone()
        places = rows % length
        starts = (places == 0).nonzero_static(size=len(last)).squeeze(1)
        starts = F.pad(starts, (0, 1), value=num_tokens)
        read = starts[:-1] if reads_first else starts[1:] - 1
        seeds = None if seeds is None else seeds[rows // length]
        return cls(
            rows=rows,
            places=places,
            seeds=seeds,
            read=read,
            last=last,
            length=length,
            starts=starts.int() if flash else None,
        )

    def unpacked(self, x: Tensor) -> Tensor:
        """[P, 1, width] -> [b, L, width], zeros behind each sample."""
        zeros = x.new_zeros(len(self.last) * self.length, x.shape[-1])
        return zeros.index_copy_(0, self.rows, x.squeeze(1)).unflatten(0, (-1, self.length))

    def packed(self, x: Tensor) -> Tensor:
        """[b, L, width] -> [P, 1, width]"""
        return x.flatten(0, 1).index_select(0, self.rows).unsqueeze(1)


def up_to(last: Tensor, length: int) -> Tensor:
    """int64 [b] -> bool [b, length]: the places of a sample up to its last token."""
    return torch.arange(length, device=last.device) <= last[:, None]


def at(x: Tensor, token: Tensor, packing: Packing | None) -> Tensor:
    """[b, L, width], int64 [b] -> [b, 1, width]: one token of each sample.

    packing: that of x, [P, 1, width], which knows the tokens that are read.
    """
    if packing is not None:
        return x.index_select(0, packing.read)
    return x[torch.arange(len(x), device=x.device), token].unsqueeze(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in], [out, in], [out] -> [..., out], as `F.linear`.

    Where torch has MKL, which leaves half of AVX-512 unused on processors that are not Intel's,
    large float32 products on a CPU go to oneDNN (docs/performance.md).
    """
    if (
        torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or not x.dtype == weight.dtype == torch.float32
        or x.numel() * len(weight) < _FEWEST
        or not (_HAS_ONEDNN and torch.backends.mkldnn.enabled)
        or torch.is_autocast_enabled("cpu")
    ):
        return F.linear(x, weight, bias)
    return _OneDNN.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


class _OneDNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            onednn_linear(gradient, weight.t()) if of_x else None,
            onednn_linear(gradient.t(), x.t()) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


class Linear(nn.Linear):
    """Draws its weight from a normal distribution with `std`; None: as torch does."""

    def __init__(
        self, in_features: int, out_features: int, std: float | None, zero_bias: bool = False
    ) -> None:
        self.std, self.zero_bias = std, zero_bias
        super().__init__(in_features, out_features)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5  # torch's, for weight and bias
        self.weight.uniform_(-bound, bound) if self.std is None else self.weight.normal_(
            std=self.std
        )
        self.bias.zero_() if self.zero_bias else self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def recomputed(
    pointwise: Callable[[Tensor], Tensor], product: Callable[..., Any], x: Tensor, *more: Any
) -> Any:
    """product(pointwise(x), *more), whose backward computes pointwise(x) again, not the product.

    A product keeps its input for the backward. So checkpointing both keeps x alone, and computes
    again up to the point at which the product would keep its input: it stops there. An adapter in
    the product has dropout by the last `draw_by`, which by then is another one's.
    """
    # a compiled block has its inputs in its graph
    draw_again = None if torch.compiler.is_compiling() else keep_draw()

    def both(x: Tensor) -> Any:
        if draw_again is not None:
            draw_again()
        return product(pointwise(x), *more)

    return checkpoint(both, x, use_reentrant=False, preserve_rng_state=False)


class Attention(nn.Module):
    """Multi-head self-attention with the parameters of `nn.MultiheadAttention`.

    It can be computed for one query token alone.
    """

    own_kernels = False  # whether a compiled backward uses `clip_train.models.kernels` on a GPU

    def __init__(
        self, width: int, heads: int, std: float | None, projection_std: float | None
    ) -> None:
        """std: of the packed weights; None: drawn as torch does."""
        super().__init__()
        self.width, self.heads = width, heads
        bound = math.sqrt(6 / (4 * width))  # torch's: fan_in + fan_out = width + 3 width
        weight = torch.empty(3 * width, width)
        self.in_proj_weight = nn.Parameter(
            weight.uniform_(-bound, bound) if std is None else weight.normal_(std=std)
        )
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = Linear(width, width, projection_std, zero_bias=True)

    def forward(
        self,
        x: Tensor,
        causal: bool,
        token: Tensor | None = None,
        packing: Packing | None = None,
        norm: nn.Module | None = None,
    ) -> Tensor:
        """[b, L, width] -> [b, L, width]; with `token`, int64 [b]: only that token's, [b, 1,
        width]. With `packing`, [P, 1, width] takes the place of [b, L, width].

        norm: applied to x first, and computed again in the backward.
        """
        return self.out_proj(self.values(x, causal, token, packing, norm))

    def values(
        self,
        x: Tensor,
        causal: bool,
        token: Tensor | None = None,
        packing: Packing | None = None,
        norm: nn.Module | None = None,
    ) -> Tensor:
        """`forward` without its last product."""
        if norm is None:
            parts = self._projected(x, token, packing)
        else:
            parts = recomputed(norm, self._projected, x, token, packing)
        if packing is not None and packing.starts is not None:
            return self._values_of_packed(parts, causal, token, packing, packing.starts)
        if packing is not None and packing.sizes is not None:
            return self._values_of_each(parts, causal, token, packing.sizes)
        if token is None:
            q, k, v = (self._heads(part, packing) for part in parts)
        else:
            query, *others = parts
            q, (k, v) = self._heads(query), (self._heads(part, packing) for part in others)
        last = None  # int64 [b]: the last key that queries see, where it is not all or not causal
        if causal:
            last = token
        elif packing is not None:
            last = packing.last
        visible = None if last is None else up_to(last, k.shape[2])[:, None, None]  # [b, 1, 1, L]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal and token is None
        )
        out = out.transpose(1, 2).flatten(2)
        return out if packing is None or token is not None else packing.packed(out)

    def _values_of_packed(
        self,
        parts: list[Tensor],
        causal: bool,
        token: Tensor | None,
        packing: Packing,
        starts: Tensor,
    ) -> Tensor:
        """Queries, keys and values -> [P, 1, width], or [b, 1, width] with `token`: attention
        within each sample, without padding."""
        from torch.nn.attention.varlen import varlen_attn  # it imports much

        queries, longest = starts, packing.length
        window = (-1, 0) if causal else (-1, -1)
        if token is not None:  # the token that is read sees all of its sample's tokens
            queries = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
            longest, window = 1, (-1, -1)
        q, k, v = (part.squeeze(1).unflatten(1, (self.heads, -1)) for part in parts)
        out: Any = varlen_attn(
            q, k, v, queries, starts, longest, packing.length, window_size=window
        )  # [P, heads, width / heads], or [b, ...]
        return out.flatten(1).unsqueeze(1)

    def _values_of_each(
        self, parts: list[Tensor], causal: bool, token: Tensor | None, sizes: list[int]
    ) -> Tensor:
        """`_values_of_packed` as a loop over the samples, for a CPU. sizes: tokens of each."""
        heads = [part.squeeze(1).unflatten(1, (self.heads, -1)).transpose(0, 1) for part in parts]
        num_queries = sizes
        if token is not None:  # the token that is read sees all of its sample's tokens
            num_queries, causal = [1] * len(sizes), False
        queries = heads[0].split(num_queries, dim=1)
        keys, values = (x.split(sizes, dim=1) for x in heads[1:])
        outputs = []
        for q, k, v in zip(queries, keys, values, strict=True):  # [heads, tokens, width / heads]
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)
            outputs.append(out[0])
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1).unsqueeze(1)

    def _projected(self, x: Tensor, token: Tensor | None, packing: Packing | None) -> list[Tensor]:
        """[..., width] -> queries, keys and values of all tokens, [..., width] each. With `token`
        queries are those of one token of each sample, [b, 1, width].

        The backward of a split writes the gradient once, in the layout of the product. Those of
        selections are filled with zeros and added: a sixth of a compiled step on an H100."""
        if token is not None:
            query, key_value = self.in_proj_weight.split([self.width, 2 * self.width])
            query_bias, key_value_bias = self.in_proj_bias.split([self.width, 2 * self.width])
            keys_and_values = self.project(x, key_value, key_value_bias, 1, 3)
            return [
                self.project(at(x, token, packing), query, query_bias, 0, 1),
                *keys_and_values.split(self.width, dim=-1),
            ]
        if self.own_kernels and type(self) is Attention and compiles_to_kernels(x):
            return linear_split(x, self.in_proj_weight, self.in_proj_bias)
        joined = self.project(x, self.in_proj_weight, self.in_proj_bias, 0, 3)
        return [*joined.split(self.width, dim=-1)]

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, first: int, last: int) -> Tensor:
        """[..., width] -> [..., (last - first) width]: the chosen ones of queries, keys and
        values."""
        return linear(x, weight, bias)

    def _heads(self, part: Tensor, packing: Packing | None = None) -> Tensor:
        """[b, L, width], or [P, 1, width] -> [b, heads, L, width / heads]"""
        part = part if packing is None else packing.unpacked(part)
        return part.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """x + attention(ln(x)), then x + mlp(ln(x))."""

    own_kernels = False  # as in `Attention`
    recomputes = False  # the outputs of GELU and of the norms, in the backward

    def __init__(
        self, cfg: TowerConfig, *, quick_gelu: bool, dropout: float, dropout_id: int
    ) -> None:
        """dropout_id: the id of its first dropout; the second one's is one higher."""
        super().__init__()
        self.causal = isinstance(cfg, TextConfig)
        attention = projection = fc = None
        if isinstance(cfg, TextConfig):  # OpenCLIP's; it leaves the vision tower to torch
            attention, projection = cfg.width**-0.5, cfg.width**-0.5 * (2 * cfg.layers) ** -0.5
            fc = (2 * cfg.width) ** -0.5
        self.ln_1 = nn.LayerNorm(cfg.width)
        self.attn = Attention(cfg.width, cfg.heads, attention, projection)
        self.ln_2 = nn.LayerNorm(cfg.width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=Linear(cfg.width, cfg.mlp_width, fc),
                gelu=QuickGELU() if quick_gelu else nn.GELU(),
                c_proj=Linear(cfg.mlp_width, cfg.width, projection),
            )
        )
        self.drop_1 = SampleDropout(dropout, dropout_id)
        self.drop_2 = SampleDropout(dropout, dropout_id + 1)

    def forward(
        self,
        x: Tensor,
        sample_seeds: Tensor | None,
        token: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """[b, L, width], int64 [b] -> [b, L, width]; with `token`, int64 [b]: only that token's,
        [b, 1, width], for which the others are needed only as keys and values. With `packing`,
        [P, 1, width] takes the place of [b, L, width]."""
        kernels = self.own_kernels and compiles_to_kernels(x)
        if kernels and token is None and self.has_plain_layers():
            return self.with_joined_passes(x, packing)
        if self.recomputes:
            attended = self.attn(x, self.causal, token, packing, self.ln_1)
        else:
            attended = self.attn(self.ln_1(x), self.causal, token, packing)
        if token is not None:
            x = at(x, token, packing)
        elif packing is not None:  # each token gets the same mask as in its unpacked sample
            sample_seeds, token = packing.seeds, packing.places
        x = x + self.drop_1(attended, sample_seeds, token)
        if self.recomputes:
            c_fc, gelu, c_proj = self.mlp
            fed = recomputed(gelu, c_proj, recomputed(self.ln_2, c_fc, x))
        else:
            fed = self.mlp(self.ln_2(x))
        return x + self.drop_2(fed, sample_seeds, token)

    def has_plain_layers(self) -> bool:
        """Whether `with_joined_passes` computes what `forward` does: no dropout, and no layer has
        been replaced or has hooks, as by adapters, 8-bit products or ZeRO 3."""
        linears: list[Any] = [self.attn.out_proj, self.mlp.c_fc, self.mlp.c_proj]
        layers: list[nn.Module] = [self.attn, self.ln_1, self.ln_2, self.mlp, *linears]
        return (
            not (self.training and (self.drop_1.dropped or self.drop_2.dropped))
            and type(self.attn) is Attention
            and all(type(layer) is Linear for layer in linears)
            and not any(map(has_forward_hooks, layers))
        )

    def with_joined_passes(self, x: Tensor, packing: Packing | None) -> Tensor:
        """`forward` in pieces whose backward is one pass each. Two biases are added after their
        products, by the operation that follows."""
        out_proj: Linear = self.attn.out_proj
        c_fc: Any = self.mlp.c_fc
        c_proj: Any = self.mlp.c_proj
        x, normed = fork_norm(x, self.ln_1)
        attended = self.attn.values(normed, self.causal, packing=packing)
        x, normed = add_norm(x, F.linear(attended, out_proj.weight), out_proj.bias, self.ln_2)
        is_quick = isinstance(self.mlp.gelu, QuickGELU)
        hidden = bias_gelu(F.linear(normed, c_fc.weight), c_fc.bias, is_quick)
        return x + c_proj(hidden)


class Transformer(nn.Module):
    """A stack of blocks.

    activation_checkpointing: what the backward computes again: nothing, the outputs of GELU and of
    the norms, or whole blocks.
    """

    def __init__(self, blocks: Iterable[Block], activation_checkpointing: Recompute) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(blocks)
        for block in self.resblocks:
            assert isinstance(block, Block)
            block.recomputes = activation_checkpointing == "pointwise"
        self.activation_checkpointing = activation_checkpointing is True

    def forward(
        self,
        x: Tensor,
        sample_seeds: Tensor | None,
        token: Tensor,
        packing: Packing | None = None,
    ) -> Tensor:
        """[b, L, width], int64 [b], int64 [b] -> [b, 1, width]: the token that is read.

        The last block computes only that token. With `packing`, x is [P, 1, width].
        """
        for i, block in enumerate(self.resblocks):
            asked = token if i == len(self.resblocks) - 1 else None
            if self.activation_checkpointing and torch.is_grad_enabled():
                # no RNG state to keep: the masks are functions of the seeds
                x = checkpoint(
                    block,
                    x,
                    sample_seeds,
                    asked,
                    packing,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                x = block(x, sample_seeds, asked, packing)
        return x


def normalised(channel: Tensor, mean: float, std: float, wide: torch.dtype) -> Tensor:
    """Normalize uint8 pixels of one channel in the dtype `wide`; float pixels are already
    normalized.

    The operations are torchvision's ToTensor and Normalize, in their order: equal to the last bit.
    """
    if channel.dtype != torch.uint8:
        return channel
    return channel.to(wide).div_(255).sub_(mean).div_(std)


def normalised_images(images: Tensor, architecture: Any, wide: torch.dtype) -> Tensor:
    """[b, 3, ...], by the statistics of the architecture; see `normalised`."""
    statistics = zip(architecture.image_mean, architecture.image_std, strict=True)
    channels = [normalised(images[:, c], *pair, wide) for c, pair in enumerate(statistics)]
    return torch.stack(channels, dim=1)


def has_flash_attention(weight: Tensor, heads: int) -> bool:
    """Whether attention of packed samples needs no padding. weight: any of the tower's whose last
    dimension is its width."""
    head_width = weight.shape[-1] // heads
    q = weight.new_empty(1, heads, 1, head_width)
    # query, key, value, mask, dropout, causal, grouped queries: torch takes them by position only
    params = SDPAParams(q, q, q, None, 0.0, True, False)
    return q.is_cuda and head_width % 8 == 0 and can_use_flash_attention(params)


def check_size(images: Tensor, size: int) -> None:
    if images.shape[1:] != (3, size, size):
        raise ValueError(f"images must be [b, 3, {size}, {size}], not {list(images.shape)}")


class PatchEmbedding(nn.Conv2d):
    """A convolution whose stride is its kernel, computed as a matrix product.

    It normalizes decoded pixels while it cuts them into patches: one kernel if compiled.
    """

    def __init__(self, architecture: Architecture) -> None:
        cfg = architecture.vision_cfg
        super().__init__(3, cfg.width, cfg.patch_size, stride=cfg.patch_size, bias=False)
        # Plain numbers: `model.to(bfloat16)` would round a buffer, and the pixels with it.
        self.image_mean, self.image_std = architecture.image_mean, architecture.image_std

    def forward(self, images: Tensor) -> Tensor:
        """uint8, or already normalised float, [b, 3, H, W] -> [b, T, width]; or patches of
        `clip_train.native.to_rows`, uint8 [P, 3 p p] -> [P, width]"""
        if images.ndim == 2:
            return self._embed_rows(images)
        side, dtype = self.kernel_size[0], self.weight.dtype
        rows, columns = images.shape[2] // side, images.shape[3] // side
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # [b, rows, columns, 3, side, side]: in the order of the kernel's weights
        patches = torch.empty(
            len(images), rows, columns, 3, side, side, dtype=dtype, device=images.device
        )
        for c, (mean, std) in enumerate(zip(self.image_mean, self.image_std, strict=True)):
            channel = normalised(images[:, c, : rows * side, : columns * side], mean, std, wide)
            patches[:, :, :, c] = (
                channel.unflatten(2, (columns, side)).unflatten(1, (rows, side)).transpose(2, 3)
            )
        return linear(patches.flatten(3).flatten(1, 2), self.weight.flatten(1))

    def _embed_rows(self, patches: Tensor) -> Tensor:
        dtype = self.weight.dtype
        # not -1: the kernel would divide by a size that it does not know
        channels = patches.unflatten(1, (3, self.kernel_size[0] ** 2))  # [P, 3, p p]
        pixels = normalised_images(channels, self, torch.promote_types(dtype, torch.float32))
        return linear(pixels.to(dtype).flatten(1), self.weight.flatten(1))


class VisionTower(nn.Module):
    """Pixels to features that are not yet normalized.

    Blocks and patches have torch's initialization, as in OpenCLIP.
    """

    # On a CPU, attention of native images is a loop over them. Compiled blocks cannot loop.
    loops = True

    def __init__(
        self,
        architecture: Architecture,
        *,
        dropout: float,
        patch_dropout: float,
        activation_checkpointing: Recompute,
    ) -> None:
        super().__init__()
        cfg, quick_gelu = architecture.vision_cfg, architecture.quick_gelu
        self.image_size, self.heads = cfg.image_size, cfg.heads
        self.image_tokens = architecture.image_tokens
        self.side = side = cfg.image_size // cfg.patch_size  # of the table of positions
        scale = cfg.width**-0.5
        self.conv1 = PatchEmbedding(architecture)
        self.class_embedding = normal_parameter(cfg.width, std=scale)
        self.positional_embedding = normal_parameter(1 + side**2, cfg.width, std=scale)
        self.patch_dropout = patch_dropout
        self.ln_pre = nn.LayerNorm(cfg.width)
        blocks = (
            Block(cfg, quick_gelu=quick_gelu, dropout=dropout, dropout_id=VISION_DROPOUT_ID + 2 * i)
            for i in range(cfg.layers)
        )
        self.transformer = Transformer(blocks, activation_checkpointing)
        self.ln_post = nn.LayerNorm(cfg.width)
        self.proj = normal_parameter(cfg.width, architecture.embed_dim, std=scale)

    def forward(
        self,
        images: Tensor,
        sample_seeds: Tensor | None = None,
        num_patches: int | None = None,
    ) -> Tensor:
        """uint8, or already normalised float, [b, 3, H, W]; or uint8 [b, 1 + T, 3 p p], images at
        their native resolution (`clip_train.native`); int64 [b] -> [b, D].

        num_patches: of all native images together; None: the device is asked.
        """
        if images.ndim == 3:
            return self._native(images, sample_seeds, num_patches)
        check_size(images, self.image_size)
        x = self.conv1(images)  # [b, T, width]
        class_token = self.class_embedding.to(x.dtype).expand(len(x), 1, -1)
        x = torch.cat([class_token, x], dim=1) + self.positional_embedding.to(
            x.dtype
        )  # [b, 1 + T, width]
        if self.training and self.patch_dropout > 0:
            x = keep_patches(x, self.patch_dropout, PATCH_DROPOUT_ID, sample_seeds, first=1)[0]
        x = self.ln_pre(x)
        first = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        x = self.transformer(x, sample_seeds, first)[:, 0]
        return self.ln_post(x) @ self.proj

    def _native(
        self, images: Tensor, sample_seeds: Tensor | None, num_patches: int | None
    ) -> Tensor:
        """`forward` of native images, packed: no padding is computed."""
        if self.training and self.patch_dropout > 0:
            raise ValueError("patch_dropout is for squares; set it to 0 for native images")
        grids = grids_of(images)
        last = grids.prod(1)  # [b]: the class token is token 0
        if num_patches is None:
            num_patches = int(last.sum())
        flash = has_flash_attention(self.class_embedding, self.heads)
        length = images.shape[1]
        packing = Packing.of(
            last, length, num_patches + len(images), sample_seeds, flash, reads_first=True
        )
        if self.loops and images.device.type == "cpu" and not isinstance(images, FakeTensor):
            packing = packing._replace(sizes=(last + 1).tolist())
        if flash and self.image_tokens is not None:
            # there it is only a bound, and a constant one needs no second graph
            packing = packing._replace(length=1 + self.image_tokens)
        # a row of `images` for each token; the class token's has the grid, which is replaced
        x = self.conv1(images.flatten(0, 1)[packing.rows])  # [P, width]
        is_class = (packing.places == 0)[:, None]
        table = self.positional_embedding.to(x.dtype)
        weights = position_weights(
            grids,
            samples=packing.rows // length,
            places=(packing.places - 1).clamp(min=0),
            side=self.side,
            dtype=torch.promote_types(x.dtype, torch.float32),
        )
        positions = weights.to(x.dtype) @ table[1:]
        class_token = self.class_embedding.to(x.dtype) + table[0]
        x = torch.where(is_class, class_token, x + positions)
        x = self.ln_pre(x).unsqueeze(1)
        first = torch.zeros(len(images), dtype=torch.int64, device=x.device)
        x = self.transformer(x, sample_seeds, first, packing)[:, 0]
        return self.ln_post(x) @ self.proj
