"""Equal keys of two shards are two samples: many tools number each data set from 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.data.validation import ValLoader
from tests.data.shards import counted, jpeg, write_shard
from tests.launcher.conftest import metrics, run

SHARD = 24


def write(folder: Path, *, unique: bool) -> str:
    """Two sources with shards of one name; all images and texts differ."""
    for source in range(2):
        (folder / str(source)).mkdir(parents=True)
        members = []
        for i in range(SHARD):
            number = source * SHARD + i
            key = f"{number if unique else i:09d}"
            members += [(f"{key}.jpg", jpeg(number)), (f"{key}.txt", f"text {number}".encode())]
        write_shard(folder / str(source) / "00000.tar", members)
    return f"{folder}/0/00000.tar::{folder}/1/00000.tar"


@pytest.mark.engine
def test_a_memory_bank_sees_no_copies_where_there_are_none(recipe, tmp_path):
    found = {}
    for unique in (True, False):
        train = write(tmp_path / str(unique), unique=unique)
        bank = ("loss.kind=memory_bank", "loss.bank_size=64", "loss.bank_warmup_steps=0")
        size = ("batch.global_size=16", "batch.micro_size=16", "run.steps=6", "data.workers=0")
        folder = tmp_path / f"run-{unique}"
        place = (f"data.train={train}", f"run.dir={folder}")
        status, out = run(recipe, *place, *bank, *size)
        assert status == 0, out
        found[unique] = metrics(folder)
        assert len(found[unique]) == 6
    losses = {unique: [line["loss"] for line in lines] for unique, lines in found.items()}
    assert losses[True] == losses[False]
    # an epoch is three batches: none of them equals another
    digests = [line["batch_digest"] for line in found[False]]
    assert len({*digests}) == len(digests)


def test_batches_name_their_samples_by_shard_and_key(tmp_path):
    train = write(tmp_path, unique=False)
    config = DataConfig(train=train, workers=0, lanes=2)
    with TrainLoader(
        config, image_size=8, context_length=8, global_size=2 * SHARD, seed=0
    ) as loader:
        batch = next(loader)
    assert len({*batch.keys}) == SHARD
    assert {*batch.names} == {f"{shard}:{i:09d}" for shard in range(2) for i in range(SHARD)}
    assert {*batch.repeated(5, (5,)).names} == {*batch.names[:5]}


def test_a_place_that_moves_changes_no_name(tmp_path):
    names = []
    for folder in ("here", "there"):
        config = DataConfig(train=write(tmp_path / folder, unique=False), workers=0, lanes=1)
        with TrainLoader(config, image_size=8, context_length=8, global_size=9, seed=0) as loader:
            names.append(next(loader).names)
    assert names[0] == names[1]


def test_a_validation_batch_names_the_shards(tmp_path):
    train = write(tmp_path, unique=False)
    (batch,) = ValLoader(counted(train), image_size=8, context_length=8, batch_size=99)
    rows = [*zip(batch.shards, batch.keys, strict=True)]
    assert len({*rows}) == 2 * SHARD and json.dumps(rows)
