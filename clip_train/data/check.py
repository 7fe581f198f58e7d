"""A look at the training data before any process group forms: most mistakes show in the first sample."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from clip_train.data import raw
from clip_train.data.bad_samples import BadSample
from clip_train.data.config import DataConfig
from clip_train.data.index import ShardIndex, index_of
from clip_train.data.sources import Reading, expand, missing_files, open_shard
from clip_train.data.tar import RawSample, TarError, iter_samples
from clip_train.errors import RankError, UserError
from clip_train.storage import StorageConfig, is_remote, local_path

SHARDS_TRIED = 3


@dataclass(frozen=True)
class SourceSummary:
    """What `check_source` found."""

    num_shards: int
    first_shard: str
    first_key: str
    first_caption: str
    index: ShardIndex  # of data.train


def check_source(config: DataConfig, storage: StorageConfig | None = None) -> SourceSummary:
    """Expands `data.train` and `data.val`, and reads the first sample of the first training shard.

    Where that cannot be used it looks at the next shards: one damaged file is no reason not to start.

    Raises:
        UserError: nothing matches, a file is missing, cannot be opened or is not as long as its index says, no
            sample in the first shard, no image or no caption in it; each names the field, the value and the remedy.
    """
    storage = storage or StorageConfig()
    _existing(config.train, "data.train")
    index = index_of(config, storage)
    shards = index.shards
    _check_sizes(index)
    if config.val is not None:
        _existing(config.val, "data.val")
    reading = Reading(storage, index.checksums)
    first_mistake: UserError | None = None
    for shard in shards[:SHARDS_TRIED]:
        try:
            return _check_shard(shard, index, reading, config.caption_key)
        except UserError as e:
            first_mistake = first_mistake or e
    assert first_mistake is not None
    raise first_mistake


def _check_shard(shard: str, index: ShardIndex, reading: Reading, caption_key: str | None) -> SourceSummary:
    sample = _first_sample(shard, "data.train", reading)
    where = f"data.train ({shard}): the first sample, {sample.key},"
    if sample.duplicate:
        raise UserError(
            f"{where} has two members of one kind: keys end at the first dot of the file name, so "
            "names such as a.1.jpg, a.2.jpg are one sample; rename them without dots"
        )
    try:
        raw.image_bytes(sample.members)
    except BadSample as e:
        raise UserError(
            f"{where} cannot be used: {e.reason}. Its members are {_members(sample)}; an image is one of "
            f"{', '.join(raw.IMAGE_EXTENSIONS)}"
        ) from e
    try:
        caption = raw.caption(sample.members, caption_key)
    except BadSample as e:
        raise UserError(f"{where} cannot be used: {e.reason}. {_caption_remedy(sample, caption_key)}") from e
    return SourceSummary(len(index.shards), shard, sample.key, caption, index)


def _existing(spec: str, field: str) -> list[str]:
    """The shards that `spec` names. UserError where one of them is a local file that is not there."""
    shards = expand(spec, field)
    missing = missing_files(shards)
    if missing and not Path(local_path(missing[0])).parent.is_dir():
        raise RankError(  # a mount that one node lacks is no mistake of the recipe: another attempt may go elsewhere
            f"{field} ({spec}): {len(missing)} of {len(shards)} shards are not there, the first is {missing[0]}, nor "
            f"is their folder: correct the path, or mount it on {socket.gethostname()}"
        )
    if missing:
        raise UserError(
            f"{field} ({spec}): {len(missing)} of {len(shards)} shards are not there, the first is {missing[0]}; "
            "correct the path or the range in braces"
        )
    return shards


def _check_sizes(index: ShardIndex) -> None:
    """Of local shards, for nothing; remote ones are asked when they are opened."""
    for shard, checksums in index.checksums.items():
        if not is_remote(shard):
            try:
                checksums.check_size(shard, local_path(shard).stat().st_size)
            except OSError as e:
                raise UserError(f"data.train: {e}") from e


def _first_sample(shard: str, field: str, reading: Reading) -> RawSample:
    try:
        with open_shard(shard, reading) as file:
            for sample in iter_samples(file):
                return sample
    except TarError as e:
        raise UserError(f"{field} ({shard}) is no readable tar file: {e}; write it again") from e
    except OSError as e:
        raise UserError(f"{field} ({shard}) cannot be opened ({type(e).__name__}: {e})") from e
    raise UserError(f"{field} ({shard}) holds no sample: a sample is files such as 000.jpg and 000.txt in a tar")


def _caption_remedy(sample: RawSample, caption_key: str | None) -> str:
    text = f"Its members are {_members(sample)}"
    if caption_key is None and "json" in sample.members:
        return f"{text}; set data.caption_key to one of the .json's keys: {_json_keys(sample)}"
    if caption_key is None:
        return f"{text}; put the caption into a .txt member, or into a .json and set data.caption_key"
    if "json" not in sample.members:
        return f"{text}; data.caption_key ({caption_key}) needs a .json member: remove it to use the .txt"
    return f"data.caption_key is {caption_key}; the .json has {_json_keys(sample)}"


def _members(sample: RawSample) -> str:
    return ", ".join(f".{extension}" for extension in sample.members)


def _json_keys(sample: RawSample) -> str:
    try:
        return ", ".join(map(str, raw.metadata(sample.members))) or "no keys"
    except BadSample:
        return "no readable JSON"
