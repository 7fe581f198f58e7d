"""`data.kind: synthetic`: no file is needed, and all else is as with shards."""

from __future__ import annotations

import pytest
import torch

from clip_train.batch import BatchSizes
from clip_train.data.config import DataConfig, check_source, order_keys
from clip_train.data.index import index_of, resume_data
from clip_train.data.loader import TrainLoader
from clip_train.storage.config import StorageConfig

G = 24


def loader_of(**arguments) -> TrainLoader:
    keys = {name: arguments.pop(name) for name in ("workers", "num_samples") if name in arguments}
    config = DataConfig(kind="synthetic", **{"workers": 0, "lanes": 6, "shuffle_block": 8, **keys})
    return TrainLoader(
        config, **{"image_size": 16, "context_length": 32, "global_size": G, "seed": 3, **arguments}
    )


def batches(steps: int, ranks: int = 1, **arguments) -> list[tuple]:
    loaders = [loader_of(rank=rank, world_size=ranks, **arguments) for rank in range(ranks)]
    out = []
    for _ in range(steps):
        parts = [next(loader) for loader in loaders]
        images, texts = (
            torch.cat([getattr(part, name).clone() for part in parts])
            for name in ("images", "texts")
        )
        out.append(
            (images.numpy().tobytes(), texts.tolist(), [key for part in parts for key in part.keys])
        )
    for loader in loaders:
        loader.close()
    return out


def test_images_and_captions_differ_and_fill_their_range():
    batch = next(loader_of(global_size=96))
    assert len({bytes(image.numpy().tobytes()) for image in batch.images}) == 96
    assert len({tuple(text) for text in batch.texts.tolist()}) == 96
    assert batch.images.float().mean() == pytest.approx(127.5, abs=2) and batch.images.max() == 255
    lengths = [int((text != 0).sum()) for text in batch.texts]
    assert min(lengths) >= 6 and max(lengths) > 20  # words, start and end
    assert not batch.bad_samples


def test_ranks_workers_and_resumes_change_nothing():
    reference = batches(8)
    assert batches(8, workers=2) == batches(8, 3) == reference
    assert batches(4, 2, workers=1, step=4) == reference[4:]


def test_an_epoch_holds_each_sample_once():
    keys = [key for _, _, step in batches(4, num_samples=2 * G) for key in step]
    assert len(set(keys[: 2 * G])) == len(set(keys[2 * G :])) == 2 * G
    assert loader_of(num_samples=2 * G).epoch(5) == 2


def test_it_goes_before_the_shards_of_a_recipe():
    there = {
        "train": "/nowhere/*.tar::/else/*.tar",
        "train_weights": [1, 2],
        "resampled": True,
    }
    config = DataConfig(kind="synthetic", num_samples=500, **there)
    found = check_source(config)
    assert found.index.num_samples == 500 and "noise" in found.index.describe()
    assert index_of(config.train, config.verify, StorageConfig()).num_samples == 500
    assert DataConfig(**config.model_dump()) == config


def test_a_run_goes_on_from_its_checkpoint():
    config = DataConfig(kind="synthetic")
    index, keys = (
        index_of(config.train, "auto", StorageConfig()),
        order_keys(config, BatchSizes((G,)), 3),
    )
    state = {
        **TrainLoader(config, image_size=8, context_length=8, global_size=G, seed=3).state(),
        "step": 5,
    }
    assert (
        resume_data(
            state, index, keys, allow_changed_shards=False, allow_changed_order=False
        ).order_start
        == 0
    )
