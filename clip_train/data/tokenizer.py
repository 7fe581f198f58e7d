"""CLIP's byte-pair tokenizer, id for id equal to OpenCLIP's `SimpleTokenizer` with its default cleaning; and others.

Its speed comes from two observations: plain ASCII captions need no ftfy, and no token crosses a blank,
so the ids of a blank-separated chunk can be cached.
"""

from __future__ import annotations

import functools
import gzip
import html
import itertools
import json
import re as plain_re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import ftfy
import numpy as np
import regex
import torch
from torch import Tensor

from clip_train.errors import UserError

Tokenize = Callable[[list[str]], Tensor]  # [b] captions -> int64 [b, context_length]
MERGES_FILE = Path(__file__).with_name("clip_bpe_merges.txt.gz")
START = "<start_of_text>"
END = "<end_of_text>"
CACHED_CHUNKS = 1 << 15  # ~8 MB at most: a worker's memory is to stay as it is
LONGEST_CACHED_CHUNK = 64  # characters: URLs and base64 would only push words out
LONGEST_WORD = (
    4096  # bytes, of which the rest is left out: merging takes quadratic time, here half a second
)

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# ftfy and html.unescape leave such text alone. Not \x0b, \x1c-\x1f: blanks to str.split, but ftfy drops them.
_PLAIN = plain_re.compile(r"[\t\n\x0c\r -%'-~]*").fullmatch
_WORDS = regex.compile(
    rf"{START}|{END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+",
    regex.IGNORECASE,
).findall


@functools.cache
def byte_symbols() -> list[str]:
    """The printable character that stands for each byte value, [256]."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = (chr(256 + n) for n in range(256))
    return [chr(b) if b in printable else next(others) for b in range(256)]


@functools.cache
def _tables() -> tuple[list[str], dict[str, int], dict[tuple[str, ...], int]]:
    """(the tokens, their ids, the ranks of the 48,894 merges): made once for all tokenizers of a process (17 MB)."""
    with gzip.open(MERGES_FILE) as f:
        lines = (
            f.read().decode("utf-8").strip("\n").split("\n")
        )  # not splitlines: some symbols count as line ends
    merges = [tuple(line.split()) for line in lines]
    ordered = sorted(
        byte_symbols(), key=lambda s: (ord(s) >= 256, s)
    )  # printable bytes first, as CLIP numbers them
    vocabulary = [
        *ordered,
        *(s + "</w>" for s in ordered),
        *("".join(m) for m in merges),
        START,
        END,
    ]
    ids = {token: i for i, token in enumerate(vocabulary)}
    return vocabulary, ids, {pair: rank for rank, pair in enumerate(merges)}


def huggingface_files(context_length: int) -> dict[str, str]:
    """The same tokenizer for transformers' `CLIPTokenizer`: name of file -> content."""
    vocabulary, _, merges = _tables()
    start, end = "<|startoftext|>", "<|endoftext|>"  # as OpenAI's tokenizer there has them
    ids = {token: i for i, token in enumerate([*vocabulary[:-2], start, end])}
    special = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": end}
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": context_length,
        "do_lower_case": True,
        **special,
    }
    return {
        "vocab.json": json.dumps(ids, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *map(" ".join, merges), ""]),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
    }


def clean(text: str) -> list[str]:
    """OpenCLIP's "lower": mojibake and HTML entities repaired, lower case. Split at blanks."""
    if _PLAIN(text):
        return text.lower().split()
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return (
        " ".join(text.split()).lower().split(" ")
    )  # in this order: lower() may depend on neighbours


class Tokenizer:
    """Captions -> token ids.

    Args:
        context_length: tokens per caption, start and end included; longer captions lose their tail,
            and the end token stands at the last place. Padding is 0.
    """

    def __init__(self, context_length: int = 77) -> None:
        if context_length < 1:
            raise ValueError(f"context_length ({context_length}) must be at least 1; CLIP's is 77")
        self.context_length = context_length
        self.vocab_size = len(_tables()[0])  # 49,408
        self.start_id, self.end_id = self.vocab_size - 2, self.vocab_size - 1

    def __call__(self, texts: str | list[str]) -> Tensor:
        """[b] captions -> int64 [b, context_length]."""
        texts = [texts] if isinstance(texts, str) else texts
        table = np.zeros((len(texts), self.context_length), dtype=np.int64)
        for row, text in zip(table, texts, strict=True):
            ids = [self.start_id, *self.encode(text, self.context_length), self.end_id][
                : self.context_length
            ]
            ids[-1] = self.end_id
            row[: len(ids)] = ids
        return torch.from_numpy(table)

    def encode(self, text: str, enough: float = float("inf")) -> list[int]:
        """One caption -> ids, without start and end, of any length; at least the first `enough` of them."""
        ids: list[int] = []
        for chunk in clean(text):
            if len(ids) >= enough:
                break
            ids += _cached_ids(chunk) if len(chunk) <= LONGEST_CACHED_CHUNK else _chunk_ids(chunk)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text; a start, end or padding token comes out as its own name."""
        byte_of = {s: b for b, s in enumerate(byte_symbols())}
        joined = "".join(_tables()[0][i] for i in ids)
        return (
            bytes(byte_of[c] for c in joined).decode("utf-8", errors="replace").replace("</w>", " ")
        )


class HFTokenizer:
    """Captions -> token ids by a tokenizer of Hugging Face, padded and cut as OpenCLIP's `HFTokenizer` does.

    Args:
        name: on the hub or in its local cache, or a folder.
        context_length: tokens per caption, special ones included.
        clean: `whitespace`, `lower` too, or `canonicalize`: neither case nor punctuation.
        strip_sep_token: 0 in place of the separator.
    """

    def __init__(
        self,
        name: str,
        context_length: int,
        clean: str = "whitespace",
        strip_sep_token: bool = False,
    ) -> None:
        """UserError where the package is not installed or has no such tokenizer."""
        try:
            from transformers import AutoTokenizer
        except ImportError as e:
            raise UserError(
                f"text_cfg.hf_tokenizer_name ({name}) needs a package that cannot be imported ({e}); "
                "pip install 'clip-train[hf]'"
            ) from e
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as e:
            raise UserError(
                f"text_cfg.hf_tokenizer_name ({name}) cannot be loaded: {str(e).splitlines()[0]}; give a folder with "
                "its files, or fetch them where there is a network"
            ) from e
        self.context_length, self._clean, self._strip_sep_token = (
            context_length,
            clean,
            strip_sep_token,
        )
        self.vocab_size = len(self._tokenizer)

    def __call__(self, texts: str | list[str]) -> Tensor:
        """[b] captions -> int64 [b, context_length]."""
        texts = [self._cleaned(text) for text in ([texts] if isinstance(texts, str) else texts)]
        ids = self._tokenizer(
            texts,
            return_tensors="pt",
            max_length=self.context_length,
            padding="max_length",
            truncation=True,
        ).input_ids
        return (
            ids.masked_fill(ids == self._tokenizer.sep_token_id, 0)
            if self._strip_sep_token
            else ids
        )

    def _cleaned(self, text: str) -> str:
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
        if self._clean == "canonicalize":
            text = text.replace("_", " ").translate(_NO_PUNCTUATION)
        text = " ".join(text.split())
        return text if self._clean == "whitespace" else text.lower()


def _chunk_ids(chunk: str) -> tuple[int, ...]:
    """Ids of a cleaned text without blanks."""
    _, ids, _ = _tables()
    found: list[int] = []
    for word in _WORDS(chunk):
        parts = [word] if word in (START, END) else _merged(word.encode("utf-8")[:LONGEST_WORD])
        found += (ids[part] for part in parts)
    return tuple(found)


_cached_ids = functools.lru_cache(CACHED_CHUNKS)(_chunk_ids)


def _merged(word: bytes) -> list[str]:
    """Joins the neighbours that were merged first in training, until none is left to join."""
    ranks = _tables()[2]
    parts = [byte_symbols()[b] for b in word]
    parts[-1] += "</w>"
    while len(parts) > 1:
        first, second = min(itertools.pairwise(parts), key=lambda p: ranks.get(p, 1 << 30))
        if (first, second) not in ranks:
            break
        for i, part in enumerate(parts):  # which become fewer on the way
            if part == first and parts[i + 1 : i + 2] == [second]:
                parts[i : i + 2] = [first + second]
    return parts
