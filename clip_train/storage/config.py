"""Limits and retries for reading remote files."""

from typing import Annotated

from pydantic import Field

from clip_train.settings import Seconds, Settings


class StorageConfig(Settings):
    """The `storage` section: reading remote files. Credentials come from the environment."""

    attempts: Annotated[int, Field(gt=0)] = 10
    """Attempts for each range of a remote file. Then the run stops with an error that names the
    shard, the bytes and the reason."""

    backoff_seconds: Annotated[float, Field(ge=0)] = 0.2
    """The wait before the second try; doubled by each one up to 20 s, half of it random."""

    patience_seconds: Seconds = 10.0
    """Seconds until an answer must begin; after that, `min_rate` applies."""

    min_rate: Annotated[int, Field(ge=0)] = 65_536
    """Bytes per second below which a transfer is aborted and retried; 0 accepts any rate above
    zero."""

    range_bytes: Annotated[int, Field(ge=4096)] = 4 << 20
    """Bytes per request; an indexed shard is read in the blocks of the index instead."""

    read_ahead: Annotated[int, Field(ge=0)] = 4
    """Ranges of one file that are fetched ahead of the reader, in parallel."""

    read_ahead_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """Memory for ranges fetched ahead, per loader process; each open shard holds one more."""
