"""The text tower: a causal transformer, read where the text ends. `b` texts of `L` tokens, `D` features."""

from __future__ import annotations

from torch import Tensor, nn

from clip_train.models.blocks import BlockInit, LayerNorm, OneToken, Transformer, fill_parameter, new_parameter, normal
from clip_train.models.config import Architecture
from clip_train.models.vision import TEXT_DROPOUT_ID


class TokenEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        fill_parameter(self.weight, normal(0.02))


class TextTower(nn.Module):
    """Tokens to features that are not yet normalised.

    OpenCLIP keeps these parameters at the root of the state dict, so `CLIP` is a `TextTower` that has
    a vision tower as well.
    """

    def __init__(
        self, architecture: Architecture, *, dropout: float = 0.0, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        cfg = architecture.text_cfg
        self.context_length = cfg.context_length
        self.positional_embedding = new_parameter((cfg.context_length, cfg.width), normal(0.01))
        self.text_projection = new_parameter((cfg.width, architecture.embed_dim), normal(cfg.width**-0.5))
        self.transformer = Transformer(
            cfg.width,
            cfg.heads,
            cfg.layers,
            cfg.mlp_width,
            causal=True,
            quick_gelu=architecture.quick_gelu,
            dropout=dropout,
            first_dropout_id=TEXT_DROPOUT_ID,
            init=BlockInit.text(cfg.width, cfg.layers),
            activation_checkpointing=activation_checkpointing,
        )
        self.token_embedding = TokenEmbedding(cfg.vocab_size, cfg.width)
        self.ln_final = LayerNorm(cfg.width)

    def _text_features(self, texts: Tensor, sample_seeds: Tensor | None) -> Tensor:
        """int64 [b, L], int64 [b] -> [b, D]; L may be less than the context: padding that all texts share."""
        if texts.ndim != 2 or not 1 <= texts.shape[1] <= self.context_length:
            raise ValueError(f"texts must be at most [b, {self.context_length}], not {list(texts.shape)}")
        x = self.token_embedding(texts) + self.positional_embedding[: texts.shape[1]]  # [b, L, width]
        end = texts.argmax(dim=-1)  # the end-of-text token has the highest id
        return self.ln_final(self.transformer(x, sample_seeds, OneToken(end))) @ self.text_projection
