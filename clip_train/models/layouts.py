"""Layouts of CLIP weights: how a state dict is recognised, and renamed to OpenCLIP's names.

Functions of names and tensors alone. Files, repairs and errors: `clip_train.models.loading`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clip_train.models.config import load_architecture, preset_names

State = dict[str, Tensor]

# Modules that wrap others: DistributedDataParallel, torch.compile, FSDP, activation checkpointing.
# The first two are at the start of a name, the others anywhere in it.
OUTER_WRAPPERS = ("module", "model")
INNER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Keys of a file under which its state dict is: OpenCLIP and Lightning; torch's
# `dcp_to_torch_save` of OpenCLIP's sharded checkpoints; ZeRO's engines; other training loops.
CONTAINERS = ("state_dict", "model", "module", "model_state_dict")
AVERAGED = ("state_dict_ema", "model_ema", "ema")  # a moving average beside them
OPENAI_BUFFERS = ("input_resolution", "context_length", "vocab_size")
# Buffers that models of today compute themselves.
COMPUTED_BUFFERS = ("attn_mask", "position_ids")
LONG_CLIP_POSITIONS = "positional_embedding_res"
LONG_CLIP_KEPT = 20  # positions that Long-CLIP reads from `positional_embedding` (arXiv 2403.15378)
# The text tower's names where it is not a module of its own.
TEXT_AT_ROOT = (
    "text_projection", "positional_embedding", "token_embedding.", "transformer.", "ln_final.",
)  # fmt: skip

# Parts of a parameter's name, below its tower: OpenCLIP's -> those of transformers' CLIPModel.
TRANSFORMERS_NAMES = {
    "transformer.resblocks.": "encoder.layers.", "ln_1": "layer_norm1", "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
    "ln_final": "final_layer_norm", "ln_post": "post_layernorm",
    "ln_pre": "pre_layrnorm",  # so spelled
    "class_embedding": "embeddings.class_embedding", "conv1": "embeddings.patch_embedding",
    "token_embedding": "embeddings.token_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
}  # fmt: skip
TRANSFORMERS_PROJECTIONS = {
    "visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"
}  # fmt: skip

# The same for SiglipModel and Siglip2Model, whose image tower is timm's here; the order matters.
SIGLIP_NAMES = {
    "vision_model": {
        "attn_pool.latent": "head.probe", "attn_pool.proj.": "head.attention.out_proj.",
        "attn_pool.norm.": "head.layernorm.", "attn_pool.mlp.": "head.mlp.",
        "patch_embed.proj.": "embeddings.patch_embedding.",
        "pos_embed": "embeddings.position_embedding.weight", "blocks.": "encoder.layers.",
        "norm1.": "layer_norm1.", "norm2.": "layer_norm2.", "attn.proj.": "self_attn.out_proj.",
        "norm.": "post_layernorm.",
    },
    "text_model": {
        "token_embedding.": "embeddings.token_embedding.",
        "positional_embedding": "embeddings.position_embedding.weight",
        "transformer.resblocks.": "encoder.layers.", "ln_1.": "layer_norm1.",
        "ln_2.": "layer_norm2.", "attn.out_proj.": "self_attn.out_proj.", "mlp.c_fc.": "mlp.fc1.",
        "mlp.c_proj.": "mlp.fc2.", "ln_final.": "final_layer_norm.", "text_projection.": "head.",
    },
}  # fmt: skip

# The same for the text tower of ChineseCLIPModel.
CHINESE_NAMES = {"text_model.": "text.transformer.", "text_projection.": "text.proj."}
TRUNK = "visual.trunk."  # timm's image tower in OpenCLIP's names

OPENAI, LONG_CLIP = "OpenAI's layout", "Long-CLIP's layout"
TRANSFORMERS_CLIP = "transformers' CLIP layout"
TRANSFORMERS_SIGLIP = "transformers' SigLIP layout"
TRANSFORMERS_CHINESE = "transformers' Chinese-CLIP layout"
OWN_PIECE = "one rank's part of clip-train's own checkpoint"
MOBILE_CLIP, PEFT = "Apple's MobileCLIP layout", "peft's layout of adapters"
UNKNOWN = "an unknown layout"
# How names of parameters begin, and the layout that has all of these; the first that fits counts.
SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("param|",), OWN_PIECE),
    (("visual.", "bert."), "Chinese-CLIP's layout"),
    (("visual.blocks.",), "EVA-CLIP's layout"),
    (("visual.", LONG_CLIP_POSITIONS), LONG_CLIP),
    (("visual.", *OPENAI_BUFFERS), OPENAI),
    (("visual.", "text_decoder."), "OpenCLIP's layout of a CoCa"),
    (("visual.trunk.",), "OpenCLIP's layout with timm's image tower"),
    (("visual.", "text."), "OpenCLIP's layout with a text tower of its own"),
    (("visual.layer1.",), "OpenCLIP's layout of a ResNet"),
    (("visual.",), "OpenCLIP's layout"),
    (("vision_model.head.",), TRANSFORMERS_SIGLIP),
    (("text_model.head.",), TRANSFORMERS_SIGLIP),
    (("text_model.embeddings.word_embeddings.",), TRANSFORMERS_CHINESE),
    (("vision_model.",), TRANSFORMERS_CLIP),
    (("text_model.",), TRANSFORMERS_CLIP),
    (("image_encoder.model.",), MOBILE_CLIP),
    (("base_model.model.",), PEFT),
    (("patch_embed.",), "timm's layout of an image tower"),
    (("trunk.",), "timm's layout of an image tower"),
    (("stem.",), "timm's layout of an image tower"),
    (("text.",), "OpenCLIP's layout of a text tower"),
    (("token_embedding.",), "OpenCLIP's layout of a text tower"),
    (("class_embedding", "conv1."), "OpenCLIP's layout of an image tower"),
    (("embeddings.word_embeddings.",), "transformers' layout of a text tower"),
)


def recognise(names: Collection[str]) -> str:
    """The layout that has such names of parameters, in words for a message."""
    for starts, layout in SIGNS:
        if all(any(name.startswith(start) for name in names) for start in starts):
            return layout
    return UNKNOWN


# -- names


@dataclass(frozen=True)
class Renamed:
    state: State
    wrappers: list[str]  # that were in the names, such as "module."


def without_wrappers(state: Mapping[str, Tensor], expected: Collection[str]) -> Renamed:
    """Remove the names of wrapping modules, unless the model has such names itself.

    expected: the model's own names.
    """
    wrappers: dict[str, None] = {}
    out = dict(state)
    own = {part for name in expected for part in name.split(".")}
    for inner in INNER_WRAPPERS:
        if inner not in own and any(inner in name.split(".") for name in out):
            wrappers[inner + "."] = None
            out = {_without_part(name, inner): tensor for name, tensor in out.items()}
    while True:
        outer = _outer_wrapper(out, expected)
        if outer is None:
            return Renamed(out, list(wrappers))
        wrappers[outer] = None
        out = {name.removeprefix(outer): tensor for name, tensor in out.items()}


def _without_part(name: str, part: str) -> str:
    return ".".join(each for each in name.split(".") if each != part)


def _outer_wrapper(state: State, expected: Collection[str]) -> str | None:
    """The first part of all names, with its dot, if it is a wrapper's and not the model's."""
    firsts = {name.partition(".")[0] for name in state}
    if len(firsts) != 1:
        return None
    (first,) = firsts
    if first in state or any(name.startswith(f"{first}.") for name in expected):
        return None
    # a wrapper of any name around a whole model
    is_wrapper = first in OUTER_WRAPPERS or f"{first}.logit_scale" in state
    return f"{first}." if is_wrapper else None


def to_transformers(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """OpenCLIP's names -> those of transformers' CLIPModel."""
    for name, tensor in state.items():
        tower = "vision_model" if name.startswith("visual.") else "text_model"
        theirs = name.removeprefix("visual.")
        for ours, there in TRANSFORMERS_NAMES.items():
            theirs = theirs.replace(ours, there)
        if name == "logit_scale":
            yield name, tensor.reshape(())
        elif name in TRANSFORMERS_PROJECTIONS:
            yield TRANSFORMERS_PROJECTIONS[name], tensor.T  # a Linear's: [D, width]
        elif ".attn.in_proj_" in name:  # [3 width, ...]
            for part, chunk in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{tower}.{theirs.replace('attn.in_proj_', f'self_attn.{part}_proj.')}", chunk
        else:
            yield f"{tower}.{theirs}", tensor


def from_transformers(state: Mapping[str, Tensor]) -> State:
    """The names of transformers' CLIPModel, or of one of its towers -> OpenCLIP's.

    Names that it does not know stay as they are.
    """
    projections = {there: ours for ours, there in TRANSFORMERS_PROJECTIONS.items()}
    out: State = {}
    packed: dict[str, dict[str, Tensor]] = {}  # an `in_proj` -> its q, k and v
    for name, tensor in state.items():
        tower, _, ours = name.partition(".")
        if name in projections:
            out[projections[name]] = tensor.T.contiguous()  # [width, D]
            continue
        if tower not in ("vision_model", "text_model"):
            out[name] = tensor
            continue
        for here, there in TRANSFORMERS_NAMES.items():
            ours = ours.replace(there, here)
        prefix = "visual." if tower == "vision_model" else ""
        part = re.fullmatch(r"(.*\.)self_attn\.([qkv])_proj\.(weight|bias)", ours)
        if part is None:
            out[prefix + ours] = tensor
        else:
            whole = f"{prefix}{part[1]}attn.in_proj_{part[3]}"
            packed.setdefault(whole, {})[part[2]] = tensor
    for whole, parts in packed.items():
        if set(parts) == set("qkv"):
            out[whole] = torch.cat([parts["q"], parts["k"], parts["v"]])
        else:  # an incomplete file: the error names what is missing
            out |= {f"{whole}.{letter}": tensor for letter, tensor in parts.items()}
    return out


def chinese_from_transformers(state: Mapping[str, Tensor]) -> State:
    """The names of transformers' ChineseCLIPModel -> OpenCLIP's with a BERT as its text tower.

    Names that it does not know stay as they are.
    """
    texts = {name: tensor for name, tensor in state.items() if name.startswith("text_")}
    out = from_transformers({name: state[name] for name in state if name not in texts})
    for name, tensor in texts.items():
        for there, ours in CHINESE_NAMES.items():
            name = name.replace(there, ours)  # noqa: PLW2901
        out[name] = tensor
    return out


def chinese_to_transformers(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """OpenCLIP's names with a BERT as text tower -> those of transformers' ChineseCLIPModel."""
    texts = {name: tensor for name, tensor in state.items() if name.startswith("text.")}
    yield from to_transformers({name: state[name] for name in state if name not in texts})
    for name, tensor in texts.items():
        for there, ours in CHINESE_NAMES.items():
            name = name.replace(ours, there)  # noqa: PLW2901
        yield name, tensor


def siglip_from_transformers(state: Mapping[str, Tensor]) -> State:
    """The names of transformers' SiglipModel -> OpenCLIP's with timm's image tower.

    Names that it does not know stay as they are.
    """
    out: State = {}
    packed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        tower, _, rest = name.partition(".")
        if tower not in SIGLIP_NAMES:
            out[name] = tensor
            continue
        image = tower == "vision_model"
        if image and rest.startswith("head.attention.in_proj_"):
            kind = rest.removeprefix("head.attention.in_proj_")
            width = len(tensor) // 3
            out[f"visual.trunk.attn_pool.q.{kind}"] = tensor[:width].contiguous()
            out[f"visual.trunk.attn_pool.kv.{kind}"] = tensor[width:].contiguous()
            continue
        for here, there in SIGLIP_NAMES[tower].items():
            rest = _with_part(rest, there, here)
        whole = f"{'visual.trunk' if image else 'text'}.{rest}"
        part = re.fullmatch(r"(.*\.)self_attn\.([qkv])_proj\.(weight|bias)", whole)
        if part is not None:
            name_of_whole = f"attn.qkv.{part[3]}" if image else f"attn.in_proj_{part[3]}"
            packed.setdefault(part[1] + name_of_whole, {})[part[2]] = tensor
        elif rest == "pos_embed":
            out[whole] = tensor[None]
        else:
            out[whole] = tensor
    for whole, parts in packed.items():
        if set(parts) == set("qkv"):
            out[whole] = torch.cat([parts["q"], parts["k"], parts["v"]])
        else:  # an incomplete file: the error names what is missing
            out |= {f"{whole}.{letter}": tensor for letter, tensor in parts.items()}
    return out


def to_naflex(state: Mapping[str, Tensor]) -> State:
    """timm's names of an image tower for squares -> those of its NaFlexVit.

    A NaFlexVit multiplies pixels in the order row, column, channel, and its table of positions has
    two dimensions. What is not a square table stays.
    """
    out: State = {}
    for name, tensor in state.items():
        ours = name.replace(f"{TRUNK}patch_embed.proj.", f"{TRUNK}embeds.proj.")
        if name == f"{TRUNK}pos_embed" and tensor.ndim == 3:  # [1, positions, width]
            side = math.isqrt(tensor.shape[1])
            if side**2 == tensor.shape[1]:
                out[f"{TRUNK}embeds.pos_embed"] = tensor.unflatten(1, (side, side))
                continue
        if ours != name and tensor.ndim == 4:  # a convolution's: [width, 3, p, p]
            out[ours] = tensor.permute(0, 2, 3, 1).flatten(1).contiguous()
        else:
            out[ours] = tensor
    return out


def from_naflex(state: Mapping[str, Tensor]) -> State:
    """The inverse of `to_naflex`, but the weight of patches stays a matrix."""
    out: State = {}
    for name, tensor in state.items():
        if name == f"{TRUNK}embeds.pos_embed":
            out[f"{TRUNK}pos_embed"] = tensor.flatten(1, 2)
        else:
            out[name.replace(f"{TRUNK}embeds.proj.", f"{TRUNK}patch_embed.proj.")] = tensor
    return out


def _with_part(name: str, old: str, new: str) -> str:
    """`name` with whole parts between dots replaced."""
    return re.sub(rf"(^|\.){re.escape(old)}", rf"\g<1>{new}", name)


def siglip_to_transformers(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """OpenCLIP's names with timm's image tower -> those of transformers' SiglipModel, or, with a
    NaFlexVit, Siglip2Model."""
    state = from_naflex(state)
    for name, tensor in state.items():
        tower = "vision_model" if name.startswith("visual.trunk.") else "text_model"
        rest = name.removeprefix("visual.trunk.").removeprefix("text.")
        kind = rest.rpartition(".")[2]
        if name in ("logit_scale", "logit_bias"):
            yield name, tensor.reshape(1)
        elif rest == f"attn_pool.q.{kind}":
            both = torch.cat([tensor, state[name.replace(".q.", ".kv.")]])
            yield f"vision_model.head.attention.in_proj_{kind}", both
        elif rest == f"attn_pool.kv.{kind}":
            continue
        else:
            for here, there in SIGLIP_NAMES[tower].items():
                rest = _with_part(rest, here, there)
            if name == "visual.trunk.pos_embed":
                yield f"{tower}.{rest}", tensor[0]
                continue
            packed = re.fullmatch(r"(.*\.)attn\.(?:qkv\.|in_proj_)(weight|bias)", rest)
            if packed is None:
                yield f"{tower}.{rest}", tensor
                continue
            for part, chunk in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{tower}.{packed[1]}self_attn.{part}_proj.{packed[2]}", chunk


def with_text_tower_at(state: State, expected: Collection[str]) -> tuple[State, str | None]:
    """Move the text tower below `text.`, or to the root, as the model has it.

    Returns the state, and what was done; None: nothing.
    """
    has_tower = any(name.startswith("text.") for name in state)
    wants_tower = any(name.startswith("text.") for name in expected)
    if wants_tower and not has_tower and any(name.startswith(TEXT_AT_ROOT) for name in state):
        moved = {
            f"text.{name}" if name.startswith(TEXT_AT_ROOT) else name: tensor
            for name, tensor in state.items()
        }
        return moved, "moved the text tower from the root to `text.`"
    if has_tower and not wants_tower:
        moved = {name.removeprefix("text."): tensor for name, tensor in state.items()}
        return moved, "moved the text tower from `text.` to the root"
    return state, None


# -- sizes


def sizes_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that shapes of parameters with OpenCLIP's names show, by the keys of its JSON.

    state: tensors, of any names. Only what can be seen is in it.
    """
    shapes = {name.removeprefix("text."): list(tensor.shape) for name, tensor in state.items()}

    def shape(name: str, ndim: int) -> list[int] | None:
        found = shapes.get(name)
        return found if found is not None and len(found) == ndim else None

    def count(pattern: str) -> int:
        found = {match[1] for match in (re.match(pattern, name) for name in shapes) if match}
        return len(found)

    sizes: dict[str, Any] = {}
    embedding = shape("token_embedding.weight", 2)
    if embedding is not None:
        sizes["text_cfg.vocab_size"], sizes["text_cfg.width"] = embedding
        sizes["text_cfg.layers"] = count(r"transformer\.resblocks\.(\d+)\.")
    positions = shape("positional_embedding", 2)
    if positions is not None:
        sizes["text_cfg.context_length"] = positions[0]
    projection = shape("text_projection", 2) or shape("visual.proj", 2)
    if projection is not None:
        sizes["embed_dim"] = projection[1]
    stages = [count(rf"visual\.layer{stage}\.(\d+)\.") for stage in range(1, 5)]
    patch = shape("visual.conv1.weight", 4)
    grid = shape("visual.positional_embedding", 2)
    if any(stages):
        sizes["vision_cfg.layers"] = stages
        if patch is not None:
            sizes["vision_cfg.width"] = 2 * patch[0]
        pool = shape("visual.attnpool.positional_embedding", 2)
        if pool is not None:
            sizes["vision_cfg.image_size"] = 32 * math.isqrt(pool[0] - 1)
    elif patch is not None:
        sizes["vision_cfg.width"], sizes["vision_cfg.patch_size"] = patch[0], patch[2]
        sizes["vision_cfg.layers"] = count(r"visual\.transformer\.resblocks\.(\d+)\.")
        if grid is not None:
            sizes["vision_cfg.image_size"] = patch[2] * math.isqrt(max(grid[0] - 1, 0))
    return sizes


def fitting_names(state: Mapping[str, Tensor], quick_gelu: bool | None = None) -> list[str]:
    """The values of `model.name` whose sizes are those of these weights, in any recognised layout.

    quick_gelu: the activation of the weights; None: unknown.
    """
    layout = recognise(state)
    siglip = _siglip_name(state)
    if siglip is not None:
        return [siglip]
    if layout == TRANSFORMERS_CLIP:
        state = from_transformers(state)
    sizes = sizes_of(state)
    if not {"vision_cfg.width", "text_cfg.width"} <= set(sizes):
        return []
    names = []
    for name in preset_names():
        architecture = load_architecture(name)
        if quick_gelu in (None, architecture.quick_gelu) and _has_sizes(architecture, sizes):
            names.append(name)
    return names


def _has_sizes(architecture: Any, sizes: Mapping[str, Any]) -> bool:
    for key, size in sizes.items():
        value: Any = architecture
        for part in key.split("."):
            value = getattr(value, part, None)
        if (list(value) if isinstance(value, tuple) else value) != size:
            return False
    return True


def _siglip_name(state: Mapping[str, Tensor]) -> str | None:
    """OpenCLIP's name of a SigLIP model of these sizes, in timm's or transformers' names."""
    places = (
        (
            "vision_model.embeddings.patch_embedding.weight",
            "vision_model.embeddings.position_embedding.weight",
            "text_model.embeddings.token_embedding.weight",
        ),
        (
            "visual.trunk.patch_embed.proj.weight",
            "visual.trunk.pos_embed",
            "text.token_embedding.weight",
        ),
    )
    heads = ("vision_model.head.probe", "visual.trunk.attn_pool.latent")
    for (patch_name, grid_name, token_name), head in zip(places, heads, strict=True):
        patch, grid, tokens = (state.get(name) for name in (patch_name, grid_name, token_name))
        if patch is None or grid is None or tokens is None or head not in state:
            continue
        if patch.ndim != 4:  # SigLIP 2 with images of any shape
            return None
        side = patch.shape[2] * math.isqrt(grid.shape[-2])
        family = {768: "B", 1024: "L", 1152: "SO400M", 1536: "gopt"}.get(patch.shape[0])
        version = {32_000: "SigLIP", 250_000: "SigLIP-i18n", 256_000: "SigLIP2"}.get(len(tokens))
        if family is None or version is None:
            return None
        size = "" if side == 224 else f"-{side}"
        return f"open_clip:ViT-{family}-{patch.shape[2]}-{version}{size}"
    return None
