"""The pre-norm transformer that both towers are made of, with OpenCLIP's parameter names. `b` samples, `L` tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clip_train.models.config import TowerConfig
from clip_train.models.dropout import SampleDropout


def normal_parameter(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=std))


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def at(x: Tensor, token: Tensor) -> Tensor:
    """[b, L, width], int64 [b] -> [b, 1, width]: one token of each sample."""
    return x[torch.arange(len(x), device=x.device), token].unsqueeze(1)


class Attention(nn.MultiheadAttention):
    """Multi-head self-attention: torch's parameters and their initialisation; one token may ask alone."""

    def forward(self, x: Tensor, causal: bool, token: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """[b, L, width] -> [b, L, width]; with `token`, int64 [b], [b, 1, width]: the result at that token alone."""
        seen = None
        if token is None:
            q, k, v = self._heads(F.linear(x, self.in_proj_weight, self.in_proj_bias), 3)
        else:  # all tokens are keys and values; split, not slices: its backward writes the packed gradient once
            query, key_value = self.in_proj_weight.split([self.embed_dim, 2 * self.embed_dim])
            query_bias, key_value_bias = self.in_proj_bias.split([self.embed_dim, 2 * self.embed_dim])
            (q,) = self._heads(F.linear(at(x, token), query, query_bias), 1)
            k, v = self._heads(F.linear(x, key_value, key_value_bias), 2)
            if causal:
                seen = (torch.arange(x.shape[1], device=x.device) <= token[:, None])[:, None, None]  # [b, 1, 1, L]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal and token is None)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, packed: Tensor, parts: int) -> Tensor:
        """[b, L, parts * width] -> [parts, b, heads, L, width / heads]"""
        return packed.unflatten(2, (parts, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)


class Block(nn.Module):
    """x + attention(ln(x)), then x + mlp(ln(x))."""

    def __init__(self, cfg: TowerConfig, *, causal: bool, quick_gelu: bool, dropout: float, dropout_id: int) -> None:
        """dropout_id: of its two dropouts the first's, the other's is one more."""
        super().__init__()
        self.causal = causal
        self.ln_1 = nn.LayerNorm(cfg.width)
        self.attn = Attention(cfg.width, cfg.heads)
        self.ln_2 = nn.LayerNorm(cfg.width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(cfg.width, cfg.mlp_width),
                gelu=QuickGELU() if quick_gelu else nn.GELU(),
                c_proj=nn.Linear(cfg.mlp_width, cfg.width),
            )
        )
        self.drop_1, self.drop_2 = SampleDropout(dropout, dropout_id), SampleDropout(dropout, dropout_id + 1)

    def forward(self, x: Tensor, sample_seeds: Tensor | None, token: Tensor | None = None) -> Tensor:
        """[b, L, width], int64 [b] -> [b, L, width]; with `token`, int64 [b], [b, 1, width]: the result at that token
        alone, for which the others are needed only as keys and values."""
        attended = self.attn(self.ln_1(x), self.causal, token)
        x = (x if token is None else at(x, token)) + self.drop_1(attended, sample_seeds, token)
        return x + self.drop_2(self.mlp(self.ln_2(x)), sample_seeds, token)


class Transformer(nn.Module):
    """A stack of blocks, each recomputed in the backward pass if `activation_checkpointing`."""

    def __init__(self, blocks: Iterable[Block], activation_checkpointing: bool) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(blocks)
        self.activation_checkpointing = activation_checkpointing

    def forward(self, x: Tensor, sample_seeds: Tensor | None, token: Tensor) -> Tensor:
        """[b, L, width], int64 [b], int64 [b] -> [b, width]: the token that is read; the last block computes no
        other."""
        for i, block in enumerate(self.resblocks):
            asked = token if i == len(self.resblocks) - 1 else None
            if self.activation_checkpointing and torch.is_grad_enabled():
                # no RNG state to keep: the masks are functions of the seeds
                x = checkpoint(block, x, sample_seeds, asked, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, sample_seeds, asked)
        return x[:, 0]
