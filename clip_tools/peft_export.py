"""Adapters in the format of Hugging Face's peft, which need not be installed."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.models.lora import Lora
from clip_train.models.weights import save_json, save_weights


def export_peft(state: Mapping[str, Tensor], lora: Lora, folder: str) -> Path:
    """Write the files that `PeftModel.from_pretrained(OpenCLIP's model, FOLDER)` reads; returns the
    folder.

    peft has one adapter for packed attention weights, always together with one for `out_proj`. Our
    three adapters become one of block matrices, with three times the rank and alpha. Parameters
    trained beside the adapters are saved in trained.safetensors.
    """
    out: dict[str, Tensor] = {}
    adapters = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    rest = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    layers = [name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")]
    packed = [x for x in layers if len(state[f"{x}.lora_A"]) == 3 * lora.rank]
    outputs = {f"{x}.out_proj": state[f"{x}.lora_A"].shape[1] for x in packed}
    for layer in dict.fromkeys([*layers, *outputs]):
        width = outputs.get(layer, 0)
        A = adapters.get(f"{layer}.lora_A", torch.zeros(lora.rank, width))
        B = adapters.get(f"{layer}.lora_B", torch.zeros(width, lora.rank))
        B = torch.block_diag(*B.chunk(len(A) // lora.rank))
        place = f"base_model.model.{layer}"
        if layer in outputs:
            place = f"{place.removesuffix('.out_proj')}.base_layer.out_proj"
            A, B = F.pad(A, (0, 0, 0, 2 * lora.rank)), F.pad(B, (0, 2 * lora.rank))
        out |= {f"{place}.lora_A.weight": A, f"{place}.lora_B.weight": B}
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [layer for layer in layers if layer not in outputs],
        "rank_pattern": dict.fromkeys(packed, 3 * lora.rank),
        "alpha_pattern": dict.fromkeys(packed, 3 * lora.alpha),
    }
    path = save_weights(out, Path(folder), "adapter_model.safetensors").parent
    save_weights(rest, path, "trained.safetensors")
    save_json(path, "adapter_config.json", config)
    return path
