"""The pre-norm transformer that both towers are made of, with OpenCLIP's parameter names.

Every module draws its own weights inside its constructor, in float32 on the CPU: so a seed gives the
same model on every device, in every precision, and under an engine that shares a
module's parameters out as soon as its constructor returns.
`b` samples, `L` tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clip_train.models.dropout import SampleDropout

Fill = Callable[[Tensor], object]  # writes the initial values into a float32 CPU tensor


def normal(std: float) -> Fill:
    return lambda t: t.normal_(0.0, std)


def uniform(bound: float) -> Fill:
    return lambda t: t.uniform_(-bound, bound)


def constant(value: float) -> Fill:
    return lambda t: t.fill_(value)


@torch.no_grad()
def fill_parameter(parameter: Tensor, fill: Fill) -> None:
    """Give `parameter` the values that `fill` draws, rounded to its precision."""
    if parameter.is_meta:  # only shapes are wanted: draw nothing
        return
    # `.float()`: inside zero.Init `torch.empty` makes bf16, and bf16 draws other numbers
    values = torch.empty(parameter.shape, device="cpu").float()
    fill(values)
    parameter.copy_(values)


def new_parameter(shape: tuple[int, ...], fill: Fill) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape))
    fill_parameter(parameter, fill)
    return parameter


class Linear(nn.Linear):
    """`nn.Linear` whose weight is normal with `std`, or torch's default; bias zero, or torch's default."""

    def __init__(
        self, in_features: int, out_features: int, *, std: float | None = None, zero_bias: bool = False
    ) -> None:
        self.std, self.zero_bias = std, zero_bias
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5  # torch's default, for weight and bias
        fill_parameter(self.weight, uniform(bound) if self.std is None else normal(self.std))
        fill_parameter(self.bias, constant(0.0) if self.zero_bias else uniform(bound))


class LayerNorm(nn.LayerNorm):
    """In float32 inside (torch does so for half precisions); the result has the input's type."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


@dataclass(frozen=True)
class BlockInit:
    """Standard deviations of a block's weights; OpenCLIP sets them in the text tower only."""

    attention: float | None = None
    projection: float | None = None  # of attention's and the MLP's output
    fc: float | None = None

    @classmethod
    def text(cls, width: int, layers: int) -> BlockInit:
        return cls(width**-0.5, width**-0.5 * (2 * layers) ** -0.5, (2 * width) ** -0.5)


@dataclass(frozen=True)
class OneToken:
    """Which token of each sample is read after the last block: `index`, int64 [b]; None: the first of each."""

    index: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """[b, L, width] -> [b, width]"""
        return x[:, 0] if self.index is None else x[torch.arange(len(x), device=x.device), self.index]


class Attention(nn.Module):
    """Multi-head self-attention with the parameter names of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int, init: BlockInit) -> None:
        super().__init__()
        self.heads = heads
        xavier = math.sqrt(6 / (4 * width))  # torch's default: fan_in + fan_out = width + 3 width
        self.in_proj_weight = new_parameter(
            (3 * width, width), uniform(xavier) if init.attention is None else normal(init.attention)
        )
        self.in_proj_bias = new_parameter((3 * width,), constant(0.0))
        self.out_proj = Linear(width, width, std=init.projection, zero_bias=True)

    def forward(self, x: Tensor, causal: bool, read: OneToken | None = None) -> Tensor:
        """[b, L, width] -> [b, L, width]; with `read`, [b, width]: the result at that token alone."""
        if read is not None:
            return self._one_token(x, causal, read)
        b, L, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(b, L, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)  # [b, heads, L, .]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out_proj(out.transpose(1, 2).reshape(b, L, width))

    def _one_token(self, x: Tensor, causal: bool, read: OneToken) -> Tensor:
        """All tokens are keys and values; only the one that is read asks."""
        b, L, width = x.shape
        # split, not slices: its backward writes the packed gradient once
        query, key_value = self.in_proj_weight.split([width, 2 * width])
        query_bias, key_value_bias = self.in_proj_bias.split([width, 2 * width])
        q = F.linear(read.of(x), query, query_bias).view(b, self.heads, 1, width // self.heads)
        kv = F.linear(x, key_value, key_value_bias)
        k, v = kv.view(b, L, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)  # [b, heads, L, .]
        seen = None
        if causal:
            assert read.index is not None  # which tokens it sees depends on where it is
            seen = (torch.arange(L, device=x.device) <= read.index[:, None])[:, None, None]  # [b, 1, 1, L]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)  # [b, heads, 1, .]
        return self.out_proj(out.reshape(b, width))


class Block(nn.Module):
    """x + attention(ln(x)), then x + mlp(ln(x))."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        *,
        causal: bool,
        quick_gelu: bool,
        dropout: float,
        dropout_ids: tuple[int, int],
        init: BlockInit,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.ln_1 = LayerNorm(width)
        self.attn = Attention(width, heads, init)
        self.ln_2 = LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=Linear(width, mlp_width, std=init.fc),
                gelu=QuickGELU() if quick_gelu else nn.GELU(),
                c_proj=Linear(mlp_width, width, std=init.projection),
            )
        )
        self.drop_1, self.drop_2 = (SampleDropout(dropout, i) for i in dropout_ids)

    def forward(self, x: Tensor, sample_seeds: Tensor | None, read: OneToken | None = None) -> Tensor:
        """[b, L, width], int64 [b] -> [b, L, width]; with `read`, [b, width]: the result at that token alone."""
        if read is not None:
            return self._one_token(x, sample_seeds, read)
        x = x + self.drop_1(self.attn(self.ln_1(x), self.causal), sample_seeds)
        return x + self.drop_2(self.mlp(self.ln_2(x)), sample_seeds)

    def _one_token(self, x: Tensor, sample_seeds: Tensor | None, read: OneToken) -> Tensor:
        """The same at one token of each sample: the others are needed only as keys and values."""
        token = read.of(x) + self.drop_1(self.attn(self.ln_1(x), self.causal, read), sample_seeds, read.index)
        return token + self.drop_2(self.mlp(self.ln_2(token)), sample_seeds, read.index)


class Transformer(nn.Module):
    """A stack of blocks, each recomputed in the backward pass if `activation_checkpointing`."""

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        mlp_width: int,
        *,
        causal: bool,
        quick_gelu: bool,
        dropout: float,
        first_dropout_id: int,
        init: BlockInit,
        activation_checkpointing: bool,
    ) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.resblocks = nn.ModuleList(
            Block(
                width,
                heads,
                mlp_width,
                causal=causal,
                quick_gelu=quick_gelu,
                dropout=dropout,
                dropout_ids=(first_dropout_id + 2 * i, first_dropout_id + 2 * i + 1),
                init=init,
            )
            for i in range(layers)
        )

    def forward(self, x: Tensor, sample_seeds: Tensor | None, read: OneToken) -> Tensor:
        """[b, L, width], int64 [b] -> [b, width]: the token that is read; the last block computes no other."""
        for i, block in enumerate(self.resblocks):
            asked = read if i == len(self.resblocks) - 1 else None
            if self.activation_checkpointing and torch.is_grad_enabled():
                # no RNG state to keep: the masks are functions of the seeds
                x = checkpoint(block, x, sample_seeds, asked, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, sample_seeds, asked)
        return x
