"""CLIP's byte-pair tokenizer, with the same ids as OpenCLIP's `SimpleTokenizer` and its default
cleaning.

It is fast for two reasons: plain ASCII captions need no ftfy, and no token crosses a blank, so the
ids of a blank-separated chunk can be cached.
"""

import functools
import gzip
import html
import itertools
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
CACHED_CHUNKS = 1 << 15  # 8 MB at most: a worker's memory does not grow
LONGEST_CACHED_CHUNK = 64  # characters: URLs and base64 would only displace words
LONGEST_WORD = 4096  # bytes; the rest is dropped: merging takes quadratic time, here half a second

# ftfy and html.unescape leave such text unchanged. It excludes \x0b and \x1c-\x1f, which str.split
# treats as blanks and ftfy drops.
_PLAIN = plain_re.compile(r"[\t\n\x0c\r -%'-~]*").fullmatch
_WORDS = regex.compile(
    rf"{START}|{END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+",
    regex.IGNORECASE,
).findall


class Vocabulary(NamedTuple):
    """CLIP's tokens, made once for all tokenizers of a process (17 MB)."""

    symbols: list[str]  # the printable character that stands for each byte value, [256]
    tokens: list[str]  # by id, [49,408]
    ids: dict[str, int]
    ranks: dict[tuple[str, ...], int]  # of the 48,894 merges


@functools.cache
def vocabulary() -> Vocabulary:
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(256 + number) for number in range(256))
    symbols = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    with gzip.open(MERGES_FILE) as file:
        # not splitlines: some symbols count as line ends
        lines = file.read().decode("utf-8").strip("\n").split("\n")
    merges = [tuple(line.split()) for line in lines]
    ordered = sorted(symbols, key=lambda s: (ord(s) >= 256, s))  # printable bytes first, as in CLIP
    ends = [symbol + "</w>" for symbol in ordered]
    tokens = [*ordered, *ends, *("".join(pair) for pair in merges), START, END]
    ids = {token: number for number, token in enumerate(tokens)}
    return Vocabulary(symbols, tokens, ids, {pair: rank for rank, pair in enumerate(merges)})


def repair(text: str) -> str:
    """Mojibake and HTML entities repaired, blanks made single spaces."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


@dataclass(frozen=True)
class Tokenizer:
    """Captions -> token ids."""

    # Tokens of a caption, start and end included, at least 1. Longer captions lose their tail, and
    # the end token takes the last place. Padding is 0.
    context_length: int = 77

    def __call__(self, texts: str | list[str]) -> Tensor:
        """[b] captions -> int64 [b, context_length]. Cleaned as by OpenCLIP's "lower"."""
        texts = [texts] if isinstance(texts, str) else texts
        start, end = vocabulary().ids[START], vocabulary().ids[END]
        table = np.zeros((len(texts), self.context_length), dtype=np.int64)
        for row, text in zip(table, texts, strict=True):
            # in this order: lower() may depend on neighbors
            chunks = text.lower().split() if _PLAIN(text) else repair(text).lower().split(" ")
            ids = [start]
            for chunk in chunks:
                if len(ids) >= self.context_length:
                    break
                ids += _cached_ids(chunk) if len(chunk) <= LONGEST_CACHED_CHUNK else _ids(chunk)
            ids = [*ids, end][: self.context_length]
            ids[-1] = end
            row[: len(ids)] = ids
        return torch.from_numpy(table)


def _ids(chunk: str) -> list[int]:
    """Ids of a cleaned text without blanks. Join the neighbors that were merged first in training,
    until no pair is left to join."""
    symbols, _, ids, ranks = vocabulary()
    chunk_ids: list[int] = []
    for word in _WORDS(chunk):
        if word in (START, END):
            chunk_ids.append(ids[word])
            continue
        parts = [symbols[byte] for byte in word.encode("utf-8")[:LONGEST_WORD]]
        parts[-1] += "</w>"
        while len(parts) > 1:
            pair = min(itertools.pairwise(parts), key=lambda pair: ranks.get(pair, 1 << 30))
            if pair not in ranks:
                break
            for place, part in enumerate(parts):  # `parts` becomes shorter meanwhile
                if part == pair[0] and parts[place + 1 : place + 2] == [pair[1]]:
                    parts[place : place + 2] = ["".join(pair)]
        chunk_ids += [ids[part] for part in parts]
    return chunk_ids


_cached_ids = functools.lru_cache(CACHED_CHUNKS)(_ids)
