"""A run that is gone on with reads the shards that it was begun with, or says what has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.batch import BatchSizes
from clip_train.data.config import DataConfig, order_keys
from clip_train.data.index import ResumedData, ShardIndex, index_of, look_up, resume_data
from clip_train.data.loader import TrainLoader
from clip_train.data.reader import count_missing
from clip_train.data.shards import Row, describe_changes, pack_rows, unpack_rows
from clip_train.errors import UserError
from clip_train.storage.config import StorageConfig
from tests.data.shards import keys_in, sample, write_counts, write_dataset, write_shard

STEP = 5
SIZES = BatchSizes((4,))


def config_of(folder: Path, **settings) -> DataConfig:
    return DataConfig(
        **{"train": str(folder / "*.tar"), "workers": 0, "lanes": 2, "shuffle_block": 4, **settings}
    )


def loader_of(config: DataConfig, **arguments) -> TrainLoader:
    return TrainLoader(
        config, image_size=16, context_length=8, global_size=SIZES, seed=1, **arguments
    )


def index(folder: Path) -> None:
    write_indexes(index_shards([str(p) for p in sorted(folder.glob("*.tar"))], workers=1))


def checkpoint(config: DataConfig) -> tuple[dict, list[list[str]]]:
    """What a checkpoint of step STEP keeps, and what the run would have gone on with."""
    with loader_of(config) as loader:
        keys = [next(loader).keys for _ in range(STEP + 6)]
        return json.loads(json.dumps({"step": STEP, **loader.state()})), keys[STEP:]


def resume(state: dict, config: DataConfig, seed: int = 1, order: bool = False) -> ResumedData:
    found = index_of(config.train, config.verify, StorageConfig())
    keys = order_keys(config, SIZES, seed)
    return resume_data(
        state,
        found,
        keys,
        allow_changed_shards=config.allow_changed_shards,
        allow_changed_order=order,
    )


def went_on(
    data: ResumedData, config: DataConfig, steps: int = 6, step: int = STEP
) -> list[list[str]]:
    found = count_missing(data.index, StorageConfig(), together=False)
    with loader_of(config, step=step, order_start=data.order_start, index=found) as loader:
        return [next(loader).keys for _ in range(steps)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dataset(tmp_path, [12, 9, 15])
    return tmp_path


def add(folder: Path) -> None:
    write_shard(folder / "003.tar", [m for i in range(6) for m in sample(f"new{i}", 900 + i)])


def change(folder: Path) -> None:
    write_shard(folder / "001.tar", [m for i in range(9) for m in sample(f"s1n{i}", 700 + i)])


CHANGES = {
    "added": (add, r"1 added \(003\.tar\)\."),
    "removed": (lambda folder: (folder / "000.tar").unlink(), r"1 removed \(000\.tar\)\."),
    "renamed": (
        lambda folder: (folder / "000.tar").rename(folder / "009.tar"),
        r"1 added \(009.*1 removed \(000",
    ),
    "changed": (change, r"1 changed in content \(001\.tar\)\."),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_refused_unless_allowed(folder: Path, name: str) -> None:
    index(folder)
    state, _ = checkpoint(config_of(folder))
    action, message = CHANGES[name]
    action(folder)
    index(folder)
    with pytest.raises(UserError, match=message) as caught:
        resume(state, config_of(folder))
    assert "data.allow_changed_shards=true" in str(caught.value)
    config = config_of(folder, allow_changed_shards=True)
    data = resume(state, config)
    assert data.order_start == STEP and data.notice
    epoch = -(-len(keys_in(folder)) // 4)
    keys = [key for batch in went_on(data, config, epoch) for key in batch]
    assert set(keys) == keys_in(folder) and len(keys) < len(set(keys)) + 4


def test_what_began_anew_repeats_no_seed_and_can_be_gone_on_with(folder: Path) -> None:
    config = config_of(folder, allow_changed_shards=True)
    state, _ = checkpoint(config)
    with loader_of(config) as loader:
        before = [seed for _ in range(STEP) for seed in next(loader).sample_seeds.tolist()]
    add(folder)
    data = resume(state, config)
    with loader_of(config, step=STEP, order_start=data.order_start) as loader:
        batches = [next(loader) for _ in range(6)]
        saved = json.loads(json.dumps({"step": STEP + 2, **loader.state()}))
    seeds = [seed for batch in batches for seed in batch.sample_seeds.tolist()]
    assert len({*before, *seeds}) == len(before) + len(seeds)
    again = resume(saved, config)
    assert (again.order_start, again.notice) == (STEP, "")
    assert went_on(again, config, 4, STEP + 2) == [batch.keys for batch in batches[2:]]


def test_without_an_index_the_names_are_compared(folder: Path) -> None:
    state, expected = checkpoint(config_of(folder))
    change(folder)
    assert (
        went_on(resume(state, config_of(folder)), config_of(folder)) == expected
    )  # by their names, the same
    add(folder)
    with pytest.raises(UserError, match=r"1 added \(003\.tar\)"):
        resume(state, config_of(folder))


@pytest.mark.parametrize(
    "began_with, then", [(None, "index"), ("index", None), ("wrong", "index"), (None, "wrong")]
)
def test_a_run_keeps_the_counts_that_it_began_with(
    folder: Path, began_with: str | None, then: str | None
) -> None:
    """So an index that comes or goes does not change the order, even where it corrects them."""

    def known(what: str | None) -> None:
        for path in folder.glob("*.json"):
            path.unlink()
        if what == "index":
            index(folder)
        elif what == "wrong":
            write_counts(folder, {"000.tar": 11, "001.tar": 9, "002.tar": 16})

    known(began_with)
    state, expected = checkpoint(config_of(folder))
    known(then)
    config = config_of(folder)
    assert went_on(resume(state, config), config) == expected


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"lanes": 4}, r"data\.lanes was 2, is 4"),
        ({"shuffle_block": 5}, r"data\.shuffle_block was 4, is 5"),
        ({"caption_key": "alt"}, r"data\.caption_key was None, is alt"),
        ({"caption_key": ["txt", "alt"]}, r"data\.caption_key was None, is \['txt', 'alt'\]"),
        (
            {"caption_key": {"txt": 3, "alt": 1}},
            r"data\.caption_key was None, is \[\['txt', 0\.75\], \['alt', 0\.25\]\]",
        ),
        ({"resampled": True}, r"data\.resampled was False, is True"),
        ({"seed": 2}, r"run\.seed was 1, is 2"),
    ],
)
def test_another_order_is_refused_with_what_it_was(
    folder: Path, changed: dict, message: str
) -> None:
    state, _ = checkpoint(config_of(folder))
    seed = changed.pop("seed", 1)
    config = config_of(folder, **changed)
    with pytest.raises(UserError, match=message) as caught:
        resume(state, config, seed)
    assert "checkpoint.allow_changed_recipe=true" in str(caught.value)
    assert resume(state, config, seed, order=True).order_start == STEP


def test_weights_count_by_their_ratio(tmp_path: Path) -> None:
    for name in "ab":
        write_dataset(tmp_path / name, [9])
    train = f"{tmp_path}/a/*.tar::{tmp_path}/b/*.tar"
    state, expected = checkpoint(config_of(tmp_path, train=train, train_weights=[1, 2]))
    same = config_of(tmp_path, train=train, train_weights=[2, 4])
    assert went_on(resume(state, same), same) == expected
    with pytest.raises(UserError, match=r"data\.train_weights was \[0\.33"):
        resume(state, config_of(tmp_path, train=train, train_weights=[1, 1]))


def test_captions_that_are_drawn_count_by_their_ratio_and_order(folder: Path) -> None:
    state, _ = checkpoint(config_of(folder, caption_key={"txt": 3, "alt": 1}))
    assert resume(state, config_of(folder, caption_key={"txt": 0.75, "alt": 0.25})).order_start == 0
    with pytest.raises(UserError, match=r"data\.caption_key was \[\['txt', 0\.75\]"):
        resume(state, config_of(folder, caption_key={"alt": 1, "txt": 3}))


def test_another_order_of_the_same_shards(folder: Path) -> None:
    names = [str(folder / f"00{i}.tar") for i in range(3)]
    first, second, twice = (
        ShardIndex.of(shards).rows() for shards in (names, names[::-1], [*names, names[0]])
    )
    assert describe_changes(first, second) == "the same shards are in another order"
    assert describe_changes(first, first) == ""
    moved = [name.replace(str(folder), "s3://elsewhere") for name in names]
    assert describe_changes(first, ShardIndex.of(moved).rows()) == ""
    assert (
        describe_changes(first, twice) == "1 added (000.tar)"
        and describe_changes(twice, first) == "1 removed (000.tar)"
    )


def test_it_stays_small(folder: Path) -> None:
    index(folder)
    rows = look_up([[str(folder / "000.tar")]], "auto", StorageConfig()).rows()
    assert unpack_rows(pack_rows(rows)) == rows
    assert len(rows[0][1]) == 16 and rows[0][2] == 12
    assert len(pack_rows(Row(f"{i:05d}.tar", "", 9000 + i % 1000) for i in range(10_000))) < 100_000
