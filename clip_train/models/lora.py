"""The recipe's `model.lora`: adapters of low rank beside frozen weights (arXiv 2106.09685)."""

from fnmatch import fnmatchcase

from pydantic import Field, PositiveFloat, PositiveInt

from clip_train.settings import Settings

KINDS = {
    # the last three: the attention pool of timm's towers, whose MLP is not attention
    "attention": (
        "*.attn.*", "*.attention.*", "*.attn_pool.q", "*.attn_pool.kv", "*.attn_pool.proj",
    ),
    "mlp": ("*.mlp.*",),
    "linear": ("*",),
}  # fmt: skip
"""Names of several layers -> patterns over the names of their weights, after a dot."""


class Lora(Settings):
    """W + alpha / rank B A for each weight W [out, in], with A [rank, in] and B [out, rank]."""

    rank: PositiveInt = 16
    """The rank of each adapter. Packed attention weights, and timm's fused qkv, have three: for
    queries, keys, values."""
    alpha: PositiveFloat = 32.0
    """The adapters count alpha / rank times."""
    on: tuple[str, ...] = Field(("attention", "mlp"), min_length=1)
    """The weights that get adapters: attention, mlp, linear (all of them), or ends of layers' names
    (out_proj, mlp.c_fc, visual.*.c_fc)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs, drawn by the sample's seed."""
    train: tuple[str, ...] = ()
    """Patterns over the names of other parameters that are trained, such as ["*proj"]; logit_scale
    and logit_bias are."""


def covers(entry: str, weight: str) -> bool:
    """Whether an entry of `on` means the weight of this name, such as
    visual.transformer.resblocks.0.mlp.c_fc.weight."""
    layer = weight.removesuffix(".weight")
    names = (f".{weight}", f".{layer}", f".{layer.removesuffix('.in_proj_weight')}")
    patterns = KINDS.get(entry, (f"*.{entry}",))
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
