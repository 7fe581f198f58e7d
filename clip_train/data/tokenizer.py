"""CLIP's byte-pair tokenizer, with the same ids as OpenCLIP's `SimpleTokenizer` and its default
cleaning.

It is fast for two reasons. Plain ASCII captions need no repair by ftfy. And no token contains a
blank, so the ids of a chunk between blanks can be cached.
"""

import functools
import gzip
import html
import itertools
import math
import re as plain_re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ftfy
import numpy as np
import regex
import torch
from torch import Tensor

Tokenize = Callable[[list[str]], Tensor]  # [b] captions -> int64 [b, context_length]
MERGES_FILE = Path(__file__).with_name("clip_bpe_merges.txt.gz")
START = "<start_of_text>"
END = "<end_of_text>"
# at most 8 MB, so that a worker's memory does not grow
CACHED_CHUNKS = 1 << 15
# characters; longer chunks, such as URLs and base64, would only displace words
LONGEST_CACHED_CHUNK = 64
# bytes; the rest of a word is dropped. Merging takes quadratic time, half a second for this length.
LONGEST_WORD = 4096

# Text that ftfy and html.unescape leave unchanged. The pattern excludes `&`, and also \x0b and
# \x1c-\x1f: str.split treats these as blanks, and ftfy drops them.
PLAIN_TEXT = plain_re.compile(r"[\t\n\x0c\r -%'-~]*")
# The words of a chunk. Tokens do not cross their ends.
WORD = regex.compile(
    rf"{START}|{END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+",
    regex.IGNORECASE,
)


class Vocabulary(NamedTuple):
    """CLIP's tokens, made once for all tokenizers of a process (17 MB)."""

    symbols: list[str]  # byte value -> the printable character that represents it, [256]
    tokens: list[str]  # id -> token, [49,408]
    ids: dict[str, int]  # token -> id
    ranks: dict[tuple[str, ...], int]  # pair of parts -> its rank among the 48,894 merges


@functools.cache
def vocabulary() -> Vocabulary:
    """Read the vocabulary of CLIP."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    # bytes that are not printable are represented by the characters from 256 on
    others = (chr(256 + index) for index in range(256))
    symbols = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    with gzip.open(MERGES_FILE) as file:
        # not splitlines: some symbols count as line ends
        lines = file.read().decode("utf-8").strip("\n").split("\n")
    merges = [tuple(line.split()) for line in lines]
    # printable bytes first, as in CLIP
    ordered = sorted(symbols, key=lambda symbol: (ord(symbol) >= 256, symbol))
    word_ends = [symbol + "</w>" for symbol in ordered]
    merged = ["".join(pair) for pair in merges]
    tokens = [*ordered, *word_ends, *merged, START, END]
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    return Vocabulary(symbols, tokens, ids, ranks)


def repair(text: str) -> str:
    """Repair mojibake and HTML entities, and replace blanks by single spaces."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


@dataclass(frozen=True)
class Tokenizer:
    """Turns captions into token ids."""

    # Tokens of a caption, start and end included, at least 1. A longer caption loses its tail; its
    # last token is the end token. Padding is 0.
    context_length: int = 77

    def __call__(self, texts: str | list[str]) -> Tensor:
        """Clean b captions as OpenCLIP's "lower" does, and return their ids, int64
        [b, context_length]."""
        if isinstance(texts, str):
            texts = [texts]
        start, end = vocabulary().ids[START], vocabulary().ids[END]
        table = np.zeros((len(texts), self.context_length), dtype=np.int64)
        for row, text in zip(table, texts, strict=True):
            # lower() comes before split(), because it may depend on neighboring characters
            if PLAIN_TEXT.fullmatch(text):
                chunks = text.lower().split()
            else:
                chunks = repair(text).lower().split(" ")
            ids = [start]
            for chunk in chunks:
                if len(ids) >= self.context_length:
                    break
                if len(chunk) <= LONGEST_CACHED_CHUNK:
                    ids += _cached_ids(chunk)
                else:
                    ids += _ids(chunk)
            ids = [*ids, end][: self.context_length]
            ids[-1] = end
            row[: len(ids)] = ids
        return torch.from_numpy(table)


def _ids(chunk: str) -> list[int]:
    """Compute the ids of a cleaned text without blanks.

    Each word starts as one part for each byte. In each round, the pair of neighbors that was merged
    first in training is joined, until no pair is left that was merged.
    """
    symbols, _, ids, ranks = vocabulary()
    chunk_ids: list[int] = []
    for word in WORD.findall(chunk):
        if word in (START, END):
            chunk_ids.append(ids[word])
            continue
        parts = [symbols[byte] for byte in word.encode("utf-8")[:LONGEST_WORD]]
        parts[-1] += "</w>"
        while len(parts) > 1:
            pair = min(itertools.pairwise(parts), key=lambda pair: ranks.get(pair, math.inf))
            if pair not in ranks:
                break
            parts = _joined(parts, pair)
        chunk_ids += [ids[part] for part in parts]
    return chunk_ids


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Join all occurrences of a pair of neighboring parts, from left to right."""
    first, second = pair
    joined: list[str] = []
    for part in parts:
        if joined and joined[-1] == first and part == second:
            joined[-1] = first + second
        else:
            joined.append(part)
    return joined


_cached_ids = functools.lru_cache(CACHED_CHUNKS)(_ids)
