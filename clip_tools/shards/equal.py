"""How many pairs of a global batch have equal captions, from one pass over the captions.

A sketch (AMS) adds a random sign for each caption to one of CELLS cells, which the caption's hash
chooses. The sum of its squares estimates the sum of the squared counts of all captions, with a
standard deviation of 2.2%. Sketches of shards add up.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from clip_train.data.values import group_name
from clip_train.task import sample_ids

CELLS = 1 << 12
BATCHES = (4096, 32_768)  # global sizes


def sketch(captions: Iterable[str]) -> np.ndarray:
    """int32 [CELLS]."""
    ids = sample_ids(group_name({}, caption, "caption") for caption in captions).numpy()
    return np.bincount(ids // 2 % CELLS, 1.0 - ids % 2 * 2, CELLS).astype(np.int32)


def describe(
    sketches: Sequence[np.ndarray],
    counts: Sequence[int],
    batches: Sequence[int] = BATCHES,
    shards: int | None = None,
) -> str:
    """A text with the expected pairs of a global batch, for each of these sizes; empty if they are
    below the noise, or below half a pair.

    Args:
        sketches, counts: of each shard that was read, and its captions.
        shards: of the data set, if only some were read; the others are taken to be like these.
    """
    total = sum(counts)
    squares = _squares(np.asarray(np.sum(sketches, axis=0, dtype=np.float64)))
    own = sum(map(_squares, sketches))
    within, across = own - total, squares - own  # ordered pairs of equal captions
    num, captions = len(sketches), float(total)
    if shards is not None and 1 < num < shards:
        within *= shards / num
        across *= shards * (shards - 1) / (num * (num - 1))
        captions *= shards / num
    chance = (within + across) / max(captions * (captions - 1), 1)
    pairs = [f"{chance * N * (N - 1) / 2:,.0f} in a global batch of {N:,}" for N in batches]
    is_seen = squares - total > 3 * (2 / CELLS) ** 0.5 * squares  # three standard deviations
    is_many = chance * max(batches) ** 2 >= 1
    text = f"\npairs of samples with equal captions: about {', '.join(pairs)}"
    return text if is_seen and is_many else ""


def _squares(sketched: np.ndarray) -> float:
    return float(np.square(sketched, dtype=np.float64).sum())
