"""A folder of a small SigLIP as transformers saves it, with a tokenizer like Gemma's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tests.peers.torchvision_shim  # noqa: F401  before transformers

WORDS = [
    "a",
    "photo",
    "of",
    "cat",
    "dog",
    "red",
    "blue",
    "the",
    "shape",
    "square",
    "circle",
    "on",
    "in",
    "and",
    "two",
    "small",
    "large",
]
CONTEXT = 16


def save_tokenizer(folder: Path) -> int:
    """Padded with <pad> on the right, ended by <eos>, like SigLIP 2's. Returns its tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(33, 127)]
    vocabulary = {
        token: number
        for number, token in enumerate(dict.fromkeys(["<pad>", "<eos>", "<unk>", *WORDS, *letters]))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", vocabulary["<eos>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        padding_side="right",
    )
    fast.save_pretrained(folder)
    return len(vocabulary)


def save_siglip2(
    folder: Path, side: int = 4, most: int = 20, text: dict[str, int] | None = None, **vision: Any
) -> Any:
    """SigLIP 2 NaFlex with a table of side x side positions. Returns the model, in float64 as its
    file."""
    import transformers

    tokens = save_tokenizer(folder)
    patch_size = vision.setdefault("patch_size", 8)
    sizes = {
        "hidden_size": 32, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 4
    }  # fmt: skip
    config = transformers.Siglip2Config(
        vision_config={**sizes, "num_patches": side**2, **vision},
        text_config={
            **sizes, "vocab_size": tokens, "max_position_embeddings": CONTEXT,
            "projection_size": 32, **(text or {}),
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Siglip2Model(config).double().eval()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    # transformers resizes positions in fp32, also to their own size
    table = model.vision_model.embeddings.position_embedding.weight
    table.data = table.data.float().double()
    model.save_pretrained(folder)
    transformers.Siglip2ImageProcessor(patch_size=patch_size, max_num_patches=most).save_pretrained(
        folder
    )
    return model


def save_siglip(folder: Path, resample: int = 2, **vision: Any) -> Any:
    """Returns the model, in float64 as its file."""
    import transformers

    size = vision.pop("image_size", 32)
    tokens = save_tokenizer(folder)
    sizes = {
        "hidden_size": 32, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 4
    }  # fmt: skip
    config = transformers.SiglipConfig(
        vision_config={**sizes, "image_size": size, "patch_size": 8, **vision},
        text_config={
            **sizes, "vocab_size": tokens, "max_position_embeddings": CONTEXT, "projection_size": 32
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.SiglipModel(config).double().eval()
    for p in model.parameters():  # away from zero biases and unit norms, which would hide a swap
        p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    square = {"height": size, "width": size}
    transformers.SiglipImageProcessor(
        size=square, resample=resample, do_convert_rgb=True
    ).save_pretrained(folder)
    return model
