"""A small data set on S3 and on disk, and what three epochs of the real loader deliver from either.

Used by the tests of this folder and by benchmarks/s3_faults.py.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.storage.config import StorageConfig
from tests.data.shards import write_shard
from tests.s3.proxy import Fault
from tests.s3.server import Server

SIZES = (50, 38, 44, 36, 40, 32)  # samples in each shard: 240
N = 24  # global batch: 10 steps are an epoch
EPOCHS = 3
BLOCK_BYTES = 32 << 10  # about six in a shard, so that ranges in mid-shard are hit as well

# Short waits: the faults come at once and often, here.
FAST = StorageConfig(patience_seconds=0.5, read_ahead_bytes=1 << 20).model_copy(
    update={"backoff_seconds": 0.02, "range_bytes": BLOCK_BYTES}
)
# Where the outcome may not depend on how fast this machine is: as many tries as it takes where silence is to be given
# up, and all the time for an answer where the tries are counted.
HASTY = FAST.model_copy(update={"patience_seconds": 1.0, "attempts": 100})
PATIENT = FAST.model_copy(update={"patience_seconds": 240.0})
SILENCE = ("stall", "no answer", "slow drip", "all at once")  # by the names in SURVIVED


def make_shards(folder: Path, index: bool = True) -> list[Path]:
    """Shards of small noisy images, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    number, paths = itertools.count(), []
    for shard, size in enumerate(SIZES):
        members = []
        for i in range(size):
            rng, buffer = np.random.default_rng(next(number)), io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(
                buffer, "JPEG", quality=90
            )
            caption = f"caption {shard} {i} {rng.integers(1e9)}".encode()
            members += [(f"s{shard}n{i}.jpg", buffer.getvalue()), (f"s{shard}n{i}.txt", caption)]
        paths.append(write_shard(folder / f"{shard:03d}.tar", members))
    if index:
        write_indexes(index_shards([str(p) for p in paths], block_bytes=BLOCK_BYTES, workers=1))
    return paths


def upload(server: Server, folder: Path, bucket: str, index: bool = True) -> str:
    """Everything in `folder`; what data.train says of it."""
    for path in sorted(folder.iterdir()):
        if index or path.suffix == ".tar":
            server.put(f"{bucket}/set/{path.name}", path.read_bytes())
    return f"s3://{bucket}/set/{{000..{len(SIZES) - 1:03d}}}.tar"


def epoch_digests(
    train: str, *, workers: int = 0, storage: StorageConfig = FAST, epochs: int = EPOCHS
) -> list[str]:
    """The sha256 of every batch of the epochs: images, tokens, keys, seeds and invalid samples."""
    config = DataConfig(
        train=train, workers=workers, lanes=12, shuffle_block=16, aug_scale=(0.3, 1.0)
    )
    digests = []
    with TrainLoader(
        config, image_size=16, context_length=12, global_size=N, seed=5, storage=storage
    ) as loader:
        for _ in range(epochs * sum(SIZES) // N):
            batch = next(loader)
            digest = hashlib.sha256(batch.images.numpy().tobytes())
            digest.update(batch.texts.numpy().tobytes())
            digest.update(batch.sample_seeds.numpy().tobytes())
            digest.update(repr((batch.keys, batch.bad_samples)).encode())
            digests.append(digest.hexdigest())
    return digests


# What survives, by name. Often enough that nearly every shard is hit in each epoch.
SURVIVED: dict[str, list[Fault]] = {
    "connection reset": [Fault("reset", every=5, method="GET|HEAD")],
    "reset in mid-body": [Fault("cut", every=5)],
    "closed in mid-body": [Fault("end", every=5)],
    "burst of 503": [Fault("status", every=40, burst=6, method="GET|HEAD")],
    "500": [Fault("status", every=6, code=500, s3code="InternalError")],
    "stall": [Fault("stall", every=25)],
    "no answer": [Fault("hang", every=25, method="GET|HEAD")],
    "slow drip": [Fault("drip", every=25)],
    "short body": [Fault("short", every=5)],
    "empty body": [Fault("short", every=5, at=0.0)],
    "flipped bit": [Fault("flip", every=4), Fault("flip", key=r"index\.json$", times=2)],
    "wrong bytes": [Fault("other", every=5)],
    "all at once": [
        Fault("reset", every=15), Fault("cut", every=15), Fault("status", every=30, burst=3), Fault("short", every=15),
        Fault("flip", every=15), Fault("other", every=15), Fault("end", every=15), Fault("drip", every=80),
    ],
}  # fmt: skip
NEED_AN_INDEX = ("flipped bit", "wrong bytes", "all at once")  # nothing else can see them


@contextmanager
def retries() -> Iterator[list[str]]:
    """Collects what the reader of this process logs about attempts that failed."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("clip_train.storage")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level, spread = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = spread
