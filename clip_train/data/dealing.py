"""Which parts of which shards a lane reads in an epoch: arithmetic alone, a function of the seed and the epoch.

Capital letters: `L` lanes. Three ways, each the same on every rank and in every worker:

- by shares: nothing is known about the shards. As many as divide evenly are dealt whole, each of the rest is split
  by a hash of where its samples begin, so that no lane's epoch is much longer than another's.
- counted: an index knows the number of samples in each shard. The shuffled shards, end to end, are cut into L
  pieces of exactly the samples that the lanes have to give: position p of the stream is of lane p mod L, so the
  first E positions, and every E after them, hold each of the E samples once.
- drawn: shards are drawn with replacement, and an epoch is as many draws as there are shards.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from typing import NamedTuple

UNEVENNESS = 10  # lanes' shares of an epoch differ by at most 1 / UNEVENNESS, or by one shard of very many


def hash64(*numbers: int) -> int:
    """A uniform number in [0, 2^63), the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Part(NamedTuple):
    """A shard, or some of its samples."""

    shard: int  # index into the list of all shards
    share: int = 0
    parts: int = 1  # one of so many equal shares of it, by a hash
    numbers: range | None = None  # or these of its usable samples, counted from 0


def samples_below(position: int, lane: int, lanes: int) -> int:
    """How many of the positions below `position` are of lane `lane`."""
    return (position + lanes - 1 - lane) // lanes


@functools.lru_cache(maxsize=8)  # all lanes of a worker are in the same one or two epochs
def by_shares(num_shards: int, lanes: int, seed: int, epoch: int) -> list[list[Part]]:
    """Lane -> its parts; over all lanes every sample comes exactly once."""
    order = _shuffled(num_shards, seed, epoch)
    whole, rest = num_shards // lanes * lanes, num_shards % lanes
    parts = min(lanes // math.gcd(lanes, rest), math.ceil(UNEVENNESS * lanes / num_shards)) if rest else 1
    dealt = [Part(i) for i in order[:whole]] + [Part(i, s, parts) for s in range(parts) for i in order[whole:]]
    return [dealt[lane::lanes] for lane in range(lanes)]


@functools.lru_cache(maxsize=8)
def counted(samples: tuple[int, ...], lanes: int, seed: int, epoch: int) -> list[list[Part]]:
    """Lane -> its parts, where shard i has samples[i] usable samples; exactly once each, in equal pieces."""
    order = [i for i in _shuffled(len(samples), seed, epoch) if samples[i]]
    ends = list(itertools.accumulate(samples[i] for i in order))
    total = ends[-1] if ends else 0
    out, begin = [], 0
    for lane in range(lanes):
        taken = samples_below((epoch + 1) * total, lane, lanes) - samples_below(epoch * total, lane, lanes)
        out.append(_piece(begin, begin + taken, order, ends))
        begin += taken
    return out


def _piece(begin: int, end: int, order: list[int], ends: list[int]) -> list[Part]:
    """The shards' samples at [begin, end) of all of them end to end."""
    out = []
    at = bisect.bisect_right(ends, begin)
    while begin < end:
        start = ends[at - 1] if at else 0
        stop = min(end, ends[at])
        out.append(Part(order[at], numbers=range(begin - start, stop - start)))
        begin, at = stop, at + 1
    return out


def drawn(num_shards: int, lane: int, lanes: int, seed: int, epoch: int) -> list[Part]:
    """A lane's draws of an epoch, with replacement; at least one."""
    draws = max(1, samples_below(num_shards, lane, lanes))
    return [Part(hash64(seed, epoch, lane, j, -2) % num_shards) for j in range(draws)]


def _shuffled(num_shards: int, seed: int, epoch: int) -> list[int]:
    return sorted(range(num_shards), key=lambda i: hash64(seed, epoch, i))
