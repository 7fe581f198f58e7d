"""What the world brings: every bad sample counted once under its reason and shard, everything else trains."""

from __future__ import annotations

import collections
import functools
import sys
import warnings
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

from clip_train.data.config import DataConfig
from clip_train.data.decode import captions, image_bytes
from clip_train.data.images import TrainTransform
from clip_train.data.index import ShardIndex
from clip_train.data.invalid import InvalidRecord, InvalidSample
from clip_train.data.loader import TrainLoader
from clip_train.data.order import Source
from clip_train.data.pixels import decode_image
from clip_train.data.reader import Files, SegmentReader, count_missing
from clip_train.data.validation import ValLoader
from clip_train.storage.config import StorageConfig
from tests.data.hostile import CAPTION_KEY, EPS, Kind, json_kinds, kinds, planted, write_hostile
from tests.data.shards import counted
from tests.ranks import run_ranks

SETS = {None: kinds, CAPTION_KEY: json_kinds}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of palettes and of bombs


@functools.cache
def chosen(caption_key: str | None) -> list[Kind]:
    return SETS[caption_key]()


def one_epoch(shards: list[Path], lanes: int, caption_key: str | None):
    """The keys that can be used and (reason, shard's name) -> count, over all streams."""
    index = count_missing(ShardIndex.of([str(shard) for shard in shards]), StorageConfig())
    keys, counts = [], collections.Counter()
    if not index.num_samples:
        return keys, counts
    files = Files.of(index, StorageConfig())
    source = Source(files.places, lanes, 3, 8)
    for stream in range(lanes):
        reader = SegmentReader(files, keep_open=True)
        for item in (item for segment in source.piece(stream, 0) for item in reader.read(segment)):
            try:
                if isinstance(item, InvalidRecord):
                    counts[item.reason, Path(item.shard).name] += 1
                else:
                    data = image_bytes(item)
                    captions(item, caption_key)
                    decode_image(data)
                    keys.append(item["__key__"])
            except InvalidSample as e:
                counts[str(e), Path(item["__url__"]).name] += 1
    return keys, counts


def test_there_are_enough():
    names = [kind.name for kind in chosen(None)]
    assert len(names) >= 50 and len(set(names)) == len(names)


@pytest.mark.parametrize("caption_key", SETS)
def test_every_kind_alone(tmp_path, caption_key):
    found, expected = {}, {}
    for kind in chosen(caption_key):
        write_hostile(tmp_path, [kind])
        found[kind.name] = one_epoch([tmp_path / f"{kind.name}.tar"], 1, caption_key)
        expected[kind.name] = (list(kind.usable), planted([kind]))
    assert found == expected


@pytest.mark.parametrize("caption_key", SETS)
@pytest.mark.parametrize("lanes", [1, 5, 16])
def test_every_planted_sample_is_counted_once_over_all_lanes(tmp_path, caption_key, lanes):
    """With more streams than shards a shard is split: its damage is still counted once, its samples used once."""
    write_hostile(tmp_path, chosen(caption_key))
    keys, counts = one_epoch(sorted(tmp_path.glob("*.tar")), lanes, caption_key)
    assert counts == planted(chosen(caption_key))
    assert sorted(keys) == sorted(key for kind in chosen(caption_key) for key in kind.usable)


def test_one_shard_among_many_lanes(tmp_path):
    for kind in chosen(None):
        if len(kind.usable) >= 2:
            write_hostile(tmp_path, [kind])
            keys, counts = one_epoch([tmp_path / f"{kind.name}.tar"], 6, None)
            assert (sorted(keys), counts) == (sorted(kind.usable), planted([kind])), kind.name


def loader_of(train: str, caption_key: str | None, **arguments) -> TrainLoader:
    settings = {"workers": 0, "lanes": 1, "shuffle_block": 10_000, "bad_sample_limit": 1.0}
    settings |= {key: arguments.pop(key) for key in list(settings) if key in arguments}
    config = DataConfig(train=train, caption_key=caption_key, **settings)
    return TrainLoader(config, image_size=16, context_length=8, seed=3, **arguments)


@pytest.mark.parametrize("caption_key", SETS)
def test_the_loader_counts_every_epoch_alike(tmp_path, caption_key):
    """With one stream, and a global batch of all places, every batch is an epoch."""
    train = write_hostile(tmp_path, chosen(caption_key))
    slots = sum(len(kind.usable) + sum(kind.bad.values()) for kind in chosen(caption_key))
    loader = loader_of(train, caption_key, global_size=slots)
    for _ in range(3):
        batch = next(loader)
        counts = {
            tuple(place.split(f"\t{tmp_path}/")): count
            for place, count in batch.bad_samples.items()
        }
        assert counts == planted(chosen(caption_key))
        assert len(batch) == slots and set(batch.keys) == {
            key for kind in chosen(caption_key) for key in kind.usable
        }


@pytest.mark.parametrize("caption_key", SETS)
def test_batches_stay_full_and_alike_on_every_layout(tmp_path, caption_key):
    train = write_hostile(tmp_path, chosen(caption_key))

    def batches(world_size: int, workers: int) -> list:
        loaders = [
            loader_of(
                train, caption_key, global_size=24, lanes=12, shuffle_block=4, workers=workers,
                rank=rank, world_size=world_size,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        out, bads = [], collections.Counter()
        for _ in range(8):
            shares = [next(loader) for loader in loaders]
            assert all(len(share) == 24 // world_size for share in shares)
            images = b"".join(share.images.numpy().tobytes() for share in shares)
            out.append(
                (
                    [k for s in shares for k in s.keys],
                    [t for s in shares for t in s.texts.tolist()],
                    images,
                )
            )
            for share in shares:
                bads.update(share.bad_samples)
        for loader in loaders:
            loader.close()
        return [out, bads]

    reference = batches(1, 0)
    assert reference[1]
    for world_size, workers in ((1, 2), (2, 1), (3, 0)):
        assert batches(world_size, workers) == reference


def test_a_list_of_captions_is_drawn_from_once_per_visit(tmp_path):
    """By the sample's seed: another run with that seed draws the same, on any layout; all are drawn in time."""
    train = write_hostile(
        tmp_path, [kind for kind in chosen(CAPTION_KEY) if kind.name == "json-list"]
    )

    def drawn(steps: int, **arguments) -> list[tuple[str, tuple[int, ...]]]:
        with loader_of(train, CAPTION_KEY, global_size=4, **arguments) as loader:
            batches = [next(loader) for _ in range(steps)]
        return [
            (k, tuple(t)) for b in batches for k, t in zip(b.keys, b.texts.tolist(), strict=True)
        ]

    epochs = drawn(30)
    texts = collections.Counter(text for key, text in epochs if key == "json-list0")
    assert len(texts) == 3 and sum(texts.values()) == 30 and min(texts.values()) >= 3
    assert (
        len({text for key, text in epochs if key == "json-list1"}) == 1
    )  # of its three only one can be used
    assert drawn(30, workers=1) == epochs


@pytest.mark.parametrize("world_size", [1, 3, 7])
@pytest.mark.parametrize("caption_key", SETS)
def test_validation_drops_and_repeats_nothing(tmp_path, caption_key, world_size):
    """Over ranks that do not divide the samples; what cannot be used is left out and listed."""
    val = write_hostile(tmp_path, chosen(caption_key))
    keys, tables = [], []
    for rank in range(world_size):
        sizes = {"image_size": 16, "context_length": 8, "batch_size": 5}
        loader = ValLoader(
            counted(val), **sizes, rank=rank, world_size=world_size, caption_key=caption_key
        )
        keys += [key for batch in loader for key in batch.keys]
        tables.append(len(loader.invalid))
    assert sorted(keys) == sorted(key for kind in chosen(caption_key) for key in kind.usable)
    assert sum(tables) == sum(planted(chosen(caption_key)).values())  # each is met by one rank


def peak() -> int:
    """The most memory that this process has held, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def mebibytes_for(path: Path) -> int:
    """In a fresh process: what reading it takes at most."""
    warnings.simplefilter("ignore")
    before = peak()
    if path.is_dir():
        one_epoch(sorted(path.glob("*.tar")), 1, None)
    else:
        TrainTransform(224)(decode_image(path.read_bytes()), 0)
    return peak() - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded(tmp_path):
    """Bombs are refused by their headers, claims of sizes are not believed."""
    write_hostile(tmp_path, chosen(None))
    (most,) = run_ranks(mebibytes_for, 1, tmp_path)
    assert most < 64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "side", [6_000, pytest.param(9_450, marks=pytest.mark.full)]
)  # the largest that is let in
def test_the_memory_for_a_large_image(tmp_path, side):
    """Transparent pixels: Pillow's 4 bytes for each and our 3. Beside them no more than one strip of it takes."""
    Image.new("RGBA", (side, side), (0, 200, 0, 100)).save(tmp_path / "large.png", compress_level=1)
    (most,) = run_ranks(mebibytes_for, 1, tmp_path / "large.png")
    assert most < 7 * side**2 / 2**20 + 120


def test_no_stranger_starts_ghostscript(monkeypatch):
    """Pillow would run it on whatever says %!PS, under any extension."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **more: started.append(args))
    with pytest.raises(InvalidSample, match="does not decode"):
        decode_image(EPS)
    assert not started
