"""Tokenizers of Hugging Face against OpenCLIP's `HFTokenizer`, on ones that are made here: nothing is fetched."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train.data.tokenizer import HFTokenizer
from clip_train.errors import UserError
from clip_train.models.config import Architecture
from launcher.components import tokenizer_of
from tests.peers.test_configs import open_clip

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
WORDS = [
    "a",
    "photo",
    "of",
    "the",
    "dog",
    "cat",
    "naive",
    "uber",
    "eiffel",
    "tower",
    "night",
    "1",
    "9",
    "s",
    ",",
    ".",
    "-",
    "&",
    "_",
    "##s",
    "##er",
]
CAPTIONS = [
    "A photo of the DOG, the cats.",
    "",
    "na\u00efve &amp;amp; \u00dcBER_eiffel-tower",
    "  dog\t\ncat  ",
    "dog " * 50,
    "don't &lt;b&gt; \u65e5\u672c",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Like BERT's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made = Tokenizer(
        models.WordPiece({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("context_length", [4, 32])
@pytest.mark.parametrize(
    "options", [{}, {"strip_sep_token": True}, {"clean": "canonicalize"}, {"clean": "lower"}]
)
def test_ids_are_openclips(folder: Path, options: dict[str, Any], context_length: int):
    peer = open_clip.tokenizer.HFTokenizer(str(folder), context_length, **options)
    text = {
        "context_length": context_length,
        "hf_tokenizer_name": str(folder),
        "tokenizer_kwargs": options,
    }
    ours = tokenizer_of(
        Architecture.model_validate({"embed_dim": 8, "vision_cfg": {}, "text_cfg": text})
    )
    assert torch.equal(ours(CAPTIONS), peer(CAPTIONS))
    assert torch.equal(
        pickle.loads(pickle.dumps(ours))(CAPTIONS[0]), peer(CAPTIONS[0])
    )  # as the loader's workers get it


def test_what_cannot_be_used_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(
        UserError, match=r"hf_tokenizer_name \(.*nothing\) cannot be loaded: .* give a folder"
    ):
        HFTokenizer(str(tmp_path / "nothing"), 8)
    with pytest.raises(UserError, match=r"vocab_size \(5\) must be at least 25"):
        text = {"hf_tokenizer_name": str(folder), "vocab_size": 5}
        tokenizer_of(
            Architecture.model_validate({"embed_dim": 8, "vision_cfg": {}, "text_cfg": text})
        )
