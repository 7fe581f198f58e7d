"""From a recipe's `data:` to the order of its samples: one source, or several with their weights."""

from __future__ import annotations

from clip_train.data.config import DataConfig, resolve_block
from clip_train.data.dealing import hash64
from clip_train.data.index import ShardIndex
from clip_train.data.lanes import LanePlan
from clip_train.data.mixture import Mixture
from clip_train.data.sources import Reading, expand, split


def plan_order(config: DataConfig, index: ShardIndex, reading: Reading, seed: int, lanes: int) -> LanePlan | Mixture:
    """The plan that the lanes of a run follow. UserError as `expand` raises it."""

    def source(shards: list[str], number: int, block: int, resampled: bool) -> LanePlan:
        own_seed = hash64(seed, number, -4) if number else seed
        counts = index.counts(config.caption_key, shards)
        return LanePlan(shards, own_seed, lanes, block, config.caption_key, reading, counts, resampled)

    together = resolve_block(config.shuffle_block, lanes)
    if config.train_weights is None:
        return source(index.shards, 0, together, config.resampled is True)
    sources = split(config.train)
    weights = config.train_weights
    resampled = config.resampled if isinstance(config.resampled, list) else [config.resampled] * len(sources)
    plans = []
    for number, part in enumerate(sources):
        block = max(1, round(together * weights[number] / sum(weights)))
        plans.append(source(expand(part), number, block, resampled[number]))
    return Mixture(tuple(plans), tuple(weights), seed)
