"""Limits and retries for reading remote files."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from clip_train.settings import Removed, Seconds, Settings

Client = Literal["auto", "obstore", "fsspec"]


class StorageConfig(Settings):
    """The `storage` section: the client, and reading remote files. Credentials come from the
    environment."""

    removed: ClassVar = {
        "backoff_seconds": Removed(instead="leave it out", ignored=lambda value: value == 0.2),
        "range_bytes": Removed(
            instead="leave it out; an index (clip-train index) has blocks of its own",
            ignored=lambda value: value == 4 << 20,
        ),
        "read_ahead": Removed(
            instead="leave it out, and lower storage.read_ahead_bytes to fetch fewer ranges ahead",
            ignored=lambda value: value == 4,
        ),
    }

    # No keys. Tests set others: `model_copy(update={"range_bytes": 4096})`.
    backoff_seconds: ClassVar[float] = 0.2  # before the second try; doubled up to 20 s, half random
    range_bytes: ClassVar[int] = 4 << 20  # of a request; an index has blocks of its own
    read_ahead: ClassVar[int] = 4  # ranges of one file that are fetched ahead, in parallel

    client: Client = "auto"
    """What sends the requests to `s3://`, `gs://` and `az://`: `obstore`, or `fsspec` (s3fs, gcsfs,
    adlfs). `auto`: the environment's `CLIP_TRAIN_STORAGE_CLIENT`, or obstore. It holds for
    everything that a run reads and writes."""

    attempts: Annotated[int, Field(gt=0)] = 10
    """Attempts for each range of a remote file. Then the run stops with an error that names the
    shard, the bytes and the reason."""

    patience_seconds: Seconds = 10.0
    """Seconds until an answer must begin; after that, `min_rate` applies."""

    min_rate: Annotated[int, Field(ge=0)] = 65_536
    """Bytes per second below which a transfer is aborted and retried; 0 accepts any rate above
    zero."""

    read_ahead_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """Memory for ranges fetched ahead, per loader process; each open shard holds one more."""
