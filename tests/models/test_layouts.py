"""Weights as people have them: each layout is loaded with its source's features, or refused by its name.

Every file is made here from a small random model, name by name. Files that OpenCLIP, transformers and timm
write themselves: tests/peers/test_layouts.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from clip_tools.exports import export_transformers
from clip_train.errors import CheckpointError, UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, load_architecture
from clip_train.models.weights import load_openclip
from tests.models.small import inputs, small_architecture, small_model

# of torch's sharded checkpoints, which one process writes here
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, Tensor]
SMALL = small_architecture()
WITH_BIAS = small_architecture(init_logit_bias=-10.0)
TEXT = {"context_length": 8, "vocab_size": 49408, "width": 20, "heads": 2, "layers": 2}
ALL_TOKENS = small_architecture(text_cfg=TEXT)  # as transformers' tokenizer needs
LONG = small_architecture(text_cfg=TEXT | {"context_length": 24, "vocab_size": 100})


def source(architecture: Architecture = SMALL, seed: int = 4) -> CLIP:
    """Away from zero biases and unit norms, which would hide a swapped name."""
    model = small_model(seed, architecture=architecture)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def saved(content: Any, folder: Path, name: str = "weights.pt") -> Path:
    torch.save(content, folder / name)
    return folder / name


# -- layouts that are loaded: each writes a state dict, and returns the place


def plain(state: State, folder: Path) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def openclip_training(state: State, folder: Path) -> Path:
    scalars = {name: t.reshape(()) if name == "logit_scale" else t for name, t in state.items()}
    return saved({"epoch": 3, "name": "run", "state_dict": prefixed("module.", scalars)}, folder)


def compiled_then_ddp(state: State, folder: Path) -> Path:
    return saved({"state_dict": prefixed("module._orig_mod.", state)}, folder)


def ddp_then_compiled(state: State, folder: Path) -> Path:
    return saved({"state_dict": prefixed("_orig_mod.module.", state)}, folder)


def compiled_in_parts(state: State, folder: Path) -> Path:
    named = {
        name.replace(".resblocks.0.", ".resblocks.0._orig_mod."): t for name, t in state.items()
    }
    return saved(named, folder)


def lightning(state: State, folder: Path) -> Path:
    content = {"state_dict": prefixed("model.", state), "pytorch-lightning_version": "2.1"}
    return saved(content, folder, "last.ckpt")


def own_wrapper(state: State, folder: Path) -> Path:
    return saved(prefixed("clip_model.", state), folder)


def fsdp_sharded_to_one_file(state: State, folder: Path) -> Path:
    """OpenCLIP's --fsdp-checkpoint sharded, through torch's own tool."""
    sharded(state, folder)
    dcp_to_torch_save(folder / "epoch_1", folder / "weights.pt")
    return folder / "weights.pt"


def model_state_dict(state: State, folder: Path) -> Path:
    return saved({"model_state_dict": state, "epoch": 1}, folder)


def with_average(state: State, folder: Path) -> Path:
    other = {name: torch.zeros_like(t) for name, t in state.items()}
    return saved({"state_dict": state, "state_dict_ema": other}, folder)


def nested(state: State, folder: Path) -> Path:
    return saved({"state_dict": {"state_dict": state}}, folder)


def openai(state: State, folder: Path) -> Path:
    sizes = {"input_resolution": 16, "context_length": 8, "vocab_size": 100}
    return saved({**state, **{name: torch.tensor(size) for name, size in sizes.items()}}, folder)


def position_ids(state: State, folder: Path) -> Path:
    ids = {"text_model.embeddings.position_ids": torch.arange(8)[None]}
    return saved({**state, **ids}, folder)


def attention_mask(state: State, folder: Path) -> Path:
    return saved({**state, "attn_mask": torch.zeros(8, 8)}, folder)


def long_clip(state: State, folder: Path) -> Path:
    positions = state["positional_embedding"]
    first, rest = positions.clone(), positions.clone()
    first[20:], rest[:20] = torch.nan, torch.nan  # which its model never reads
    return saved({**state, "positional_embedding": first, "positional_embedding_res": rest}, folder)


def fsdp_units(state: State, folder: Path) -> Path:
    named = {
        name.replace("resblocks.", "resblocks._fsdp_wrapped_module."): t
        for name, t in state.items()
    }
    return saved({"state_dict": prefixed("_fsdp_wrapped_module.", named)}, folder)


def activation_checkpointing(state: State, folder: Path) -> Path:
    named = {
        name.replace(".attn.", "._checkpoint_wrapped_module.attn."): t for name, t in state.items()
    }
    return saved({"state_dict": named}, folder)


def deepspeed_consolidated(state: State, folder: Path) -> Path:
    """As zero_to_fp32.py writes it: a folder."""
    saved(prefixed("module.", state), folder, "pytorch_model.bin")
    return folder


def deepspeed_ranks_file(state: State, folder: Path) -> Path:
    return saved({"module": state, "ds_version": "0.19.8", "global_steps": 4}, folder)


def own_text_tower(state: State, folder: Path) -> Path:
    """OpenCLIP's CustomTextCLIP."""
    root = ("visual.", "logit_")
    return plain({n if n.startswith(root) else f"text.{n}": t for n, t in state.items()}, folder)


def transformers_folder(state: State, folder: Path) -> Path:
    return export_transformers(state, ALL_TOKENS, folder / "export")


def transformers_file(state: State, folder: Path) -> Path:
    return transformers_folder(state, folder) / "model.safetensors"


def half(state: State, folder: Path) -> Path:
    return plain({name: t.double() for name, t in state.items()}, folder)


@dataclass(frozen=True)
class Loaded:
    write: Callable[[State, Path], Path]
    layout: str = "OpenCLIP's layout"
    log: tuple[str, ...] = ()  # parts of the lines about repairs, in order
    of: Architecture = SMALL  # the model that the file holds


MODULE, COMPILED = "removed module. from", "removed _orig_mod., module. from"
LOADED = (
    Loaded(plain),
    Loaded(half),
    Loaded(openclip_training, log=(MODULE,)),
    Loaded(compiled_then_ddp, log=(COMPILED,)),
    Loaded(ddp_then_compiled, log=(COMPILED,)),
    Loaded(compiled_in_parts, log=("removed _orig_mod. from",)),
    Loaded(lightning, log=("removed model. from",)),
    Loaded(own_wrapper, log=("removed clip_model. from",)),
    Loaded(fsdp_sharded_to_one_file, log=("under 'model'",)),
    Loaded(model_state_dict, log=("under 'model_state_dict'",)),
    Loaded(with_average, log=("moving average beside it ('state_dict_ema') is not used",)),
    Loaded(nested),
    Loaded(openai, "OpenAI's layout", ("dropped input_resolution, context_length, vocab_size", "QuickGELU")),
    Loaded(position_ids, log=("dropped text_model.embeddings.position_ids",)),
    Loaded(attention_mask, log=("dropped attn_mask",)),
    Loaded(long_clip, "Long-CLIP's layout", ("positions from 20 on from positional_embedding_res",), LONG),
    Loaded(fsdp_units, log=("removed _fsdp_wrapped_module. from",)),
    Loaded(activation_checkpointing, log=("removed _checkpoint_wrapped_module. from",)),
    Loaded(deepspeed_consolidated, log=(MODULE,)),
    Loaded(deepspeed_ranks_file, log=("under 'module'",)),
    Loaded(own_text_tower, "OpenCLIP's layout with a text tower of its own", ("from `text.` to the root",)),
    Loaded(transformers_folder, "transformers' CLIP layout", ("of transformers' CLIPModel",), ALL_TOKENS),
    Loaded(transformers_file, "transformers' CLIP layout", ("of transformers' CLIPModel",), ALL_TOKENS),
)  # fmt: skip


@pytest.mark.parametrize("case", LOADED, ids=lambda case: case.write.__name__)
def test_a_layout_loads_with_equal_features_and_logs_each_repair(case: Loaded, tmp_path: Path):
    model = source(case.of)
    lines: list[str] = []
    place = case.write(model.state_dict(), tmp_path)
    state = load_openclip(place, case.of, lines.append)
    again = CLIP(case.of)
    again.load_state_dict(state)
    images, texts, _ = inputs(3)
    if case.of is LONG:
        texts = torch.randint(1, 99, (3, 24)).index_fill_(1, torch.tensor(23), 99)
    for found, expected in zip(again(images, texts)[:3], model(images, texts)[:3], strict=True):
        assert torch.equal(found, expected)
    assert len(lines) == len(case.log), lines
    for line, part in zip(lines, case.log, strict=True):
        assert part in line and f"({case.layout})" in line and str(tmp_path) in line


# -- the bias of the sigmoid loss


def test_a_missing_bias_starts_at_0_as_in_openclip(tmp_path: Path):
    lines: list[str] = []
    model = source()
    place = plain(model.state_dict(), tmp_path)
    state = load_openclip(place, WITH_BIAS, lines.append)
    assert state["logit_bias"].tolist() == [0.0]
    assert len(lines) == 1 and "no logit_bias: it starts at 0" in lines[0]
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())


def test_a_bias_that_the_model_lacks_is_dropped_with_a_line(tmp_path: Path):
    lines: list[str] = []
    model = source(WITH_BIAS)
    model.logit_bias.data.fill_(-12.5)
    state = load_openclip(plain(model.state_dict(), tmp_path), SMALL, lines.append)
    assert set(state) == set(model.state_dict()) - {"logit_bias"}
    assert len(lines) == 1 and "dropped logit_bias (-12.5): the model has none" in lines[0]


def test_a_tower_alone_in_transformers_names_is_loaded(tmp_path: Path):
    model = source(ALL_TOKENS)
    export = export_transformers(model.state_dict(), ALL_TOKENS, tmp_path / "export")
    for tower, key in (("image", "visual.proj"), ("text", "text_projection")):
        state = load_openclip(export, ALL_TOKENS, tower=tower)
        assert torch.equal(state[key], model.state_dict()[key])
        assert all(torch.equal(t, model.state_dict()[name]) for name, t in state.items())


# -- layouts that are refused


def sharded(state: State, folder: Path) -> Path:
    dcp.save(
        {"model": state, "optimizer": {"step": 1}}, checkpoint_id=folder / "epoch_1", no_dist=True
    )
    return folder / "epoch_1"


def deepspeed_folder(state: State, folder: Path) -> Path:
    (folder / "zero_to_fp32.py").write_text("")
    (folder / "latest").write_text("global_step4")
    return folder


def peft_folder(state: State, folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    return folder


def several_files(state: State, folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def names(*names: str) -> Callable[[State, Path], Path]:
    """A file in which these names stand for a whole layout."""
    return lambda state, folder: plain({name: torch.zeros(2, 2) for name in names}, folder)


def transformers_siglip(state: State, folder: Path) -> Path:
    tensors = {
        "logit_scale": torch.zeros(1),
        "logit_bias": torch.zeros(1),
        "text_model.embeddings.token_embedding.weight": torch.zeros(32_000, 1),
        "text_model.head.weight": torch.zeros(2, 2),
        "vision_model.head.probe": torch.zeros(1, 1, 768),
        "vision_model.embeddings.patch_embedding.weight": torch.zeros(768, 3, 16, 16),
        "vision_model.embeddings.position_embedding.weight": torch.zeros(256, 768),
    }
    return plain(tensors, folder)


def torchscript(state: State, folder: Path) -> Path:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), folder / "ViT-B-32.pt")
    return folder / "ViT-B-32.pt"


def big_vision(state: State, folder: Path) -> Path:
    np.savez(folder / "siglip.npz", **{"params/img/embedding/kernel": np.zeros(2)})
    return folder / "siglip.npz"


def empty(state: State, folder: Path) -> Path:
    return saved({}, folder)


REFUSED: dict[str, tuple[Callable[[State, Path], Path], tuple[str, ...]]] = {
    "sharded by DCP": (
        sharded,
        ("sharded checkpoint of torch.distributed", "format_utils dcp_to_torch"),
    ),
    "DeepSpeed's folder": (deepspeed_folder, ("a DeepSpeed checkpoint", "zero_to_fp32.py")),
    "peft's folder": (peft_folder, ("peft adapters", "merge_and_unload")),
    "several files": (several_files, ("transformers in several files", "save_pretrained")),
    "transformers' SigLIP": (
        transformers_siglip,
        ("transformers' SigLIP layout", "model.name=open_clip:ViT-B-16-SigLIP-256"),
    ),
    "transformers' CLIP, in part": (
        names("text_model.embeddings.token_embedding.weight", "visual_projection.weight"),
        ("transformers' CLIP layout", "missing: "),
    ),
    "MobileCLIP": (names("image_encoder.model.a", "logit_scale"), ("Apple's MobileCLIP layout",)),
    "EVA-CLIP": (
        names("visual.blocks.0.attn.q_proj.weight", "logit_scale"),
        ("EVA-CLIP's layout",),
    ),
    "Chinese-CLIP": (names("bert.embeddings.a", "visual.proj"), ("Chinese-CLIP's layout",)),
    "timm": (names("patch_embed.proj.weight", "blocks.0.norm1.weight"), ("timm's layout",)),
    "adapters": (
        names("base_model.model.visual.proj.lora_A.weight"),
        ("peft's layout of adapters",),
    ),
    "a part of a checkpoint": (
        names("param|0|visual.proj", "exp_avg|0|visual.proj"),
        ("one rank's part of clip-train's own checkpoint", "give the run's folder"),
    ),
    "TorchScript": (torchscript, ("a TorchScript archive", "ViT-B-32-quickgelu/openai")),
    "big_vision": (big_vision, ("big_vision's layout",)),
    "nothing": (empty, ("holds no tensors",)),
    "another model": (
        names("backbone.weight"),
        ("an unknown layout", "not in the model: backbone.weight"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_is_not_loaded_is_named_with_a_remedy(name: str, tmp_path: Path):
    write, parts = REFUSED[name]
    place = write(source().state_dict(), tmp_path)
    with pytest.raises((UserError, CheckpointError)) as e:
        load_openclip(place, SMALL)
    for part in (*parts, str(place)):
        assert part in str(e.value)


def test_a_misfit_names_the_preset_that_fits_but_no_positions(tmp_path: Path):
    state = source(load_architecture("tiny")).state_dict()
    place = plain(state, tmp_path)
    lines: list[str] = []
    with pytest.raises(UserError) as e:
        load_openclip(place, small_architecture(), lines.append)
    message = str(e.value)
    assert "(OpenCLIP's layout) does not fit the model (model.name)" in message
    assert (
        "Its sizes are those of tiny; set model.name=tiny" in message
        and message.count("the model's") == 3
    )
    assert not lines
    other = state | {"text_projection": torch.zeros(64, 3)}
    with pytest.raises(
        UserError, match=r"No preset has its sizes \(.*embed_dim .*a JSON that has them"
    ):
        load_openclip(plain(other, tmp_path), small_architecture(), lines.append)


def test_a_transformers_description_gives_activation_and_pixels(tmp_path: Path):
    quick = small_architecture(text_cfg=TEXT, quick_gelu=True, image_mean=(0.5,) * 3)
    export = export_transformers(source(quick).state_dict(), quick, tmp_path / "export")
    with pytest.raises(UserError, match="was trained with QuickGELU"):
        load_openclip(export, ALL_TOKENS)
    lines: list[str] = []
    load_openclip(export, quick, lines.append)
    assert len(lines) == 1
    load_openclip(export, quick.model_copy(update={"image_mean": (0.4,) * 3}), lines.append)
    assert any("'image_mean': (0.5, 0.5, 0.5)" in line for line in lines[1:]), lines
    # CLIPModel's default
    config = json.loads((export / "config.json").read_text())
    for tower in ("vision_config", "text_config"):
        del config[tower]["hidden_act"]
    (export / "config.json").write_text(json.dumps(config))
    load_openclip(export, quick)
