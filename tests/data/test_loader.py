"""The loader's promise: ranks, workers and resumes change nothing about the global batch."""

from __future__ import annotations

import collections
import functools
import io
import json
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import get_worker_info

from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.data.order import hash64
from clip_train.errors import DataError, UserError
from clip_train.storage.config import StorageConfig
from tests.data import counting
from tests.data.shards import jpeg, keys_in, sample, write_dataset, write_shard

N = 24  # global batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Unequal shards with what the world brings: 55 samples of which 3 do not decode, 1 has no caption."""
    folder = tmp_path_factory.mktemp("shards")
    write_dataset(folder, [21, 9, 14])
    members = [m for i in range(8) for m in sample(f"mixed{i}", 500 + i)]
    for bad in ("broken0", "broken1"):
        members += [(f"{bad}.jpg", jpeg(0)[:200]), (f"{bad}.txt", b"a broken image")]
    members += [("text.png", b"no image at all"), ("text.txt", b"text"), ("silent.jpg", jpeg(1))]
    write_shard(folder / "mixed.tar", members)
    return folder


def config_of(folder: Path, **settings) -> DataConfig:
    defaults = {
        "workers": 0,
        "lanes": 12,
        "shuffle_block": 7,
        "aug_scale": (0.3, 1.0),
        "aug_color_jitter": (0.4, 0.4, 0.4, 0.1),
        "aug_gray_scale_prob": 0.2,
        "bad_sample_limit": 1.0,
    }
    return DataConfig(train=str(folder / "*.tar"), **{**defaults, **settings})


def loader_of(config: DataConfig, **arguments) -> TrainLoader:
    return TrainLoader(
        config, **{"image_size": 16, "context_length": 8, "global_size": N, "seed": 5, **arguments}
    )


def global_batches(config: DataConfig, steps: int, world_size: int = 1, **arguments):
    """Per step: (keys, seeds, images, texts) of all ranks in turn; the invalid samples by reason and shard."""
    loaders = [
        loader_of(config, rank=r, world_size=world_size, **arguments) for r in range(world_size)
    ]
    steps_out, bads = [], collections.Counter()
    for _ in range(steps):
        batches = [next(loader) for loader in loaders]
        assert all(len(batch) == N // world_size for batch in batches)
        for batch in batches:
            bads.update(batch.bad_samples)
        steps_out.append(
            {
                "keys": [key for batch in batches for key in batch.keys],
                "seeds": [seed for batch in batches for seed in batch.sample_seeds.tolist()],
                "images": b"".join(batch.images.numpy().tobytes() for batch in batches),
                "texts": torch.cat([batch.texts for batch in batches]).tolist(),
            }
        )
    for loader in loaders:
        loader.close()
    return steps_out, bads


@pytest.fixture(scope="module")
def reference(folder):
    return global_batches(config_of(folder), 12)


@pytest.mark.parametrize(
    "world_size,workers,prefetch",
    [(1, 2, 2), (2, 0, 1), (2, 1, 3), (4, 0, 1), (3, 0, 1), (8, 0, 1), (24, 0, 1)],
)
def test_global_batches_are_the_same(folder, reference, world_size, workers, prefetch):
    config = config_of(folder, workers=workers, prefetch=prefetch)
    assert global_batches(config, 12, world_size) == reference


def test_scaled_decoding_changes_pixels_alone(folder):
    """JPEGs of 24 px for a model of 8 px: most are decoded at half their sides."""
    settings = {"aug_scale": (0.9, 1.0), "aug_color_jitter": None, "aug_gray_scale_prob": 0.0}
    full, small = (
        global_batches(config_of(folder, scaled_decode=scaled, **settings), 2, image_size=8)[0]
        for scaled in (False, True)
    )
    alone = config_of(folder, scaled_decode=True, **settings)
    assert global_batches(alone, 2, 2, image_size=8)[0] == small
    for ours, reference in zip(small, full, strict=True):
        pixels = [np.frombuffer(batch.pop("images"), np.uint8) for batch in (ours, reference)]
        assert ours == reference
        error = np.abs(pixels[0].astype(float) - pixels[1]).mean()
        assert 0 < error < 25


@pytest.mark.parametrize("world_size,lanes", [(2, 3), (8, 6), (24, 1), (3, 8), (4, 24)])
def test_lanes_that_do_not_divide_among_ranks(folder, world_size, lanes):
    config = config_of(folder, lanes=lanes)
    assert global_batches(config, 6, world_size) == global_batches(config, 6)


@pytest.mark.parametrize(
    "stop,world_size,workers", [(0, 2, 0), (4, 1, 2), (5, 3, 0), (8, 4, 0), (10, 1, 0)]
)
def test_resume_on_another_layout_is_exact(folder, reference, stop, world_size, workers):
    config = config_of(folder, workers=workers)
    resumed, _ = global_batches(config, 11 - stop, world_size, step=stop + 1)
    assert resumed == reference[0][stop + 1 :]


def test_every_bad_sample_is_counted_once_per_epoch(folder):
    config = config_of(folder, lanes=1, shuffle_block=6)
    loader = loader_of(config, global_size=8)
    counts = collections.Counter()
    for _ in range(
        3 * 56 // 8
    ):  # three epochs of 56: 44 good ones, and in mixed.tar 8 good, 3 broken, 1 without text
        counts.update(next(loader).bad_samples)
    mixed = str(folder / "mixed.tar")
    assert counts == {f"image does not decode\t{mixed}": 9, f"no caption\t{mixed}": 3}


def test_what_does_not_decode_is_replaced_by_a_good_one(folder, reference):
    keys = {key for step in reference[0] for key in step["keys"]}
    good = keys_in(folder) - {"broken0", "broken1", "text", "silent"}
    assert keys == good
    assert all(len(set(step["images"])) > 2 for step in reference[0])


def test_a_block_without_a_decodable_sample_takes_what_follows(tmp_path):
    members = [m for i in range(4) for m in ((f"bad{i}.jpg", jpeg(0)[:150]), (f"bad{i}.txt", b"x"))]
    write_shard(tmp_path / "a.tar", members + sample("good", 1))
    config = config_of(tmp_path, lanes=1, shuffle_block=1)
    runs = [global_batches(config, 2, world_size)[0] for world_size in (1, 3)]
    assert runs[0] == runs[1]
    assert set(runs[0][0]["keys"]) == {"good"}


def test_augmentation_differs_between_visits(tmp_path):
    write_dataset(tmp_path, [1])
    batch = next(loader_of(config_of(tmp_path, lanes=1)))
    assert set(batch.keys) == {"s0n0"}
    assert len({image.numpy().tobytes() for image in batch.images}) > N // 2
    assert batch.sample_seeds.tolist() == [hash64(5, 0, count) for count in range(N)]


def test_batch_fields(folder):
    batch = next(loader_of(config_of(folder)))
    assert batch.images.shape == (N, 3, 16, 16) and batch.images.dtype == torch.uint8
    assert batch.texts.shape == (N, 8) and batch.texts.dtype == torch.int64
    assert batch.sample_seeds.shape == (N,) and batch.sample_seeds.dtype == torch.int64


def test_image_and_caption_stay_together(tmp_path):
    """One plain colour per caption: the pairs must survive shuffling, workers and replacement."""

    from clip_train.data.tokenizer import Tokenizer

    members = []
    for i in range(30):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), (i * 8, i * 8, i * 8)).save(buffer, "PNG")
        members += [(f"k{i}.png", buffer.getvalue()), (f"k{i}.txt", f"{i}".encode())]
    write_shard(tmp_path / "a.tar", members)
    batch = next(loader_of(config_of(tmp_path, lanes=4, aug_color_jitter=None)))
    tokenizer = Tokenizer(8)
    for image, text, key in zip(batch.images, batch.texts, batch.keys, strict=True):
        number = int(key[1:])
        assert (image == number * 8).all()
        assert torch.equal(text, tokenizer([str(number)])[0])


# ------------------------------------------------------------ stages


def shout(fields: dict) -> dict:
    return {**fields, "txt": fields["txt"].upper() + b" !"}


def drop_some(samples):
    for i, fields in enumerate(samples):
        if i % 5:
            yield fields


def test_user_stages_see_every_sample_replacements_too(folder, reference):
    stages = (webdataset.map(shout),)
    plain = reference[0]
    for workers in (0, 2):
        shouted, _ = global_batches(config_of(folder, workers=workers), 3, stages=stages)
        assert [s["keys"] for s in shouted] == [s["keys"] for s in plain[:3]]
        # "caption 7 !": every text has one token more, before the end
        for text, before in zip(shouted[0]["texts"], plain[0]["texts"], strict=True):
            end = before.index(49407)
            assert text[:end] == before[:end] and text[end : end + 2] == [256, 49407]


def test_a_stage_sees_each_sample_alone(folder):
    """By its place in the stream it could tell nothing that other ranks see as well."""
    with pytest.raises(DataError, match=r"in a row cannot be used(.|\n)*\(drop_some\) dropped it"):
        next(loader_of(config_of(folder), stages=(drop_some,)))


# ------------------------------------------------------------ errors


def test_worker_errors_arrive_as_they_were(tmp_path):
    write_shard(tmp_path / "a.tar", [("a.jpg", jpeg(0))])
    loader = loader_of(config_of(tmp_path, workers=2))
    with pytest.raises(DataError, match="no caption"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


@pytest.fixture
def workers():
    """() -> the loaders' processes that this test has started, alive or not."""
    before = set(multiprocessing.active_children())
    seen: set[multiprocessing.Process] = set()

    def started() -> list[multiprocessing.Process]:
        seen.update(set(multiprocessing.active_children()) - before)
        return list(seen)

    return started


def test_a_killed_worker_is_an_error_not_a_hang(folder, workers):
    loader = loader_of(config_of(folder, workers=2))
    next(loader)
    os.kill(workers()[0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match="worker died"):
        for _ in range(100):
            next(loader)


def test_what_workers_send_is_small_enough_to_be_written_whole(tmp_path, monkeypatch):
    """More than PIPE_BUF is written in parts, and the trainer waits for the rest of what a killed worker began."""
    write_shard(
        tmp_path / "a.tar", [m for i in range(40) for m in sample(f"{i:090d}", i)]
    )  # long keys
    sizes, receive = [], Connection.recv_bytes

    def weighing(self, *args):
        message = receive(self, *args)
        sizes.append(len(message) + 4)  # with its length in front
        return message

    monkeypatch.setattr(Connection, "recv_bytes", weighing)
    with loader_of(config_of(tmp_path, workers=2), global_size=256) as loader:
        batches = [next(loader) for _ in range(2)]
    assert len(pickle.dumps(batches[0].keys[:128])) > 2 * select.PIPE_BUF
    assert len(sizes) >= 4  # a piece of each worker for each batch
    assert max(sizes) <= select.PIPE_BUF


def test_close_ends_the_workers(folder, workers):
    with loader_of(config_of(folder, workers=2)) as loader:
        next(loader)
        assert len(workers()) == 2 and all(worker.is_alive() for worker in workers())
    for worker in workers():
        worker.join(300)  # torch waits 5 s for one that is held up
    assert not any(worker.is_alive() for worker in workers())
    assert list(loader) == []


def test_an_error_in_the_loop_of_a_user_ends_the_process(folder):
    """Who never closes the loader: its workers ignore the signals that the interpreter would end them with."""
    program = f"""
from pathlib import Path
from tests.data.test_loader import config_of, loader_of
loader = loader_of(config_of(Path({str(folder)!r}), workers=1))
next(loader)
raise RuntimeError("an error of theirs")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "RuntimeError: an error of theirs" in done.stderr


@pytest.mark.parametrize("lanes, num, world_size", [(2, 4, 1), (1, 3, 1), (3, 2, 2)])
def test_workers_that_share_streams(folder, workers, lanes, num, world_size):
    """As many as asked for; the steps of a stream are decoded by one after another."""
    config = config_of(folder, lanes=lanes, workers=num)
    with loader_of(config, world_size=world_size) as loader:
        assert next(loader).keys
        assert len(workers()) == num
    expected = global_batches(config_of(folder, lanes=lanes), 7, world_size, step=5)
    assert global_batches(config, 7, world_size, step=5) == expected


def test_too_many_bad_samples_stop_the_run_with_a_table(tmp_path):
    members = []
    for i in range(100):
        content = jpeg(i) if i % 10 else b"\xff\xd8 broken"
        members += [(f"k{i:03d}.jpg", content), (f"k{i:03d}.txt", b"x")]
    write_shard(tmp_path / "a.tar", members)
    loader = loader_of(config_of(tmp_path, lanes=1, bad_sample_limit=0.05, shuffle_block=50))
    seen = 0
    with pytest.raises(DataError, match=r"data\.bad_sample_limit \(0\.05\)") as caught:
        for _ in range(1000):
            next(loader)
            seen += N
    assert 150 < seen < 260  # 20 bad ones are there after 200 samples
    assert (
        "image does not decode" in str(caught.value)
        and "a.tar" in str(caught.value)
        and "k0" in str(caught.value)
    )
    patient = loader_of(config_of(tmp_path, lanes=1, bad_sample_limit=0.2))
    assert sum(sum(next(patient).bad_samples.values()) for _ in range(30)) > 50


def test_decoding_cannot_move_the_order(tmp_path):
    """Places and seeds are the same whether their images decode or not."""
    for name, broken in (("whole", ()), ("broken", range(0, 30, 3))):
        members = []
        for i in range(30):
            data = b"\xff\xd8" + bytes(len(jpeg(i)) - 2) if i in broken else jpeg(i)
            members += [(f"k{i}.jpg", data), (f"k{i}.txt", b"x")]
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "a.tar", members)
    whole, broken = (loader_of(config_of(tmp_path / name)) for name in ("whole", "broken"))
    bad = 0
    for _ in range(9):
        expected, found = next(whole), next(broken)
        assert expected.sample_seeds.tolist() == found.sample_seeds.tolist()
        for a, b in zip(expected.keys, found.keys, strict=True):
            assert a == b or int(a[1:]) % 3 == 0
        bad += sum(found.bad_samples.values())
    assert bad > 50


def test_workers_that_share_streams_fetch_remote_bytes_once(tmp_path):
    """Four workers on two streams; without their cache they read the shards five times."""
    write_dataset(tmp_path, [800, 780])
    total = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    shards = "::".join(counting.SCHEME + str(path) for path in sorted(tmp_path.glob("*.tar")))
    config = DataConfig(train=shards, workers=4, lanes=2, shuffle_block=8)
    storage = StorageConfig().model_copy(update={"range_bytes": 1 << 17})
    with loader_of(config, storage=storage) as loader:
        counted = counting.bytes_read(tmp_path)  # without an index
        keys = [next(loader).keys for _ in range(50)]
    assert counting.bytes_read(tmp_path) - counted < 2.5 * total
    with loader_of(config.model_copy(update={"workers": 0}), storage=storage) as alone:
        assert keys == [next(alone).keys for _ in keys]


# ------------------------------------------------------------ shared memory


def wait_for_the_first_worker(folder: Path, ahead: int, fields: dict) -> dict:
    """A stage: the last worker goes on with a batch once the first one is `ahead` samples further than that."""
    worker = get_worker_info().id
    with open(folder / str(worker), "ab") as file:
        file.write(b".")
        passed = file.tell()
    if worker == 1:
        deadline = time.monotonic() + 600
        while (folder / "0").stat().st_size < passed + ahead:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    return fields


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_piece_is_not_overwritten_before_it_is_fetched(tmp_path, prefetch):
    """The trainer holds the first worker's piece until it has the second one's; meanwhile the first worker goes on as
    far as it can, which is `prefetch` pieces more, and leaves alone what the trainer holds."""
    folder = tmp_path / "shards"
    write_dataset(
        folder, [30, 50]
    )  # all decode: a sample that takes another's place would pass the stage too
    (tmp_path / "0").touch()
    stage = webdataset.map(
        functools.partial(wait_for_the_first_worker, tmp_path, prefetch * N // 2)
    )
    plain = loader_of(config_of(folder))
    with loader_of(config_of(folder, workers=2, prefetch=prefetch), stages=(stage,)) as loader:
        for _ in range(6):
            assert torch.equal(next(loader).images, next(plain).images)


def test_shared_memory_is_as_large_as_the_largest_piece(folder):
    def shared() -> dict[str, int]:
        """Torch's blocks of shared memory that this process has open: bytes by name."""
        found = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                name, size = (
                    os.readlink(f"/proc/self/fd/{fd}"),
                    os.stat(f"/proc/self/fd/{fd}").st_size,
                )
            except FileNotFoundError:  # of the listing itself
                continue
            if name.startswith("/dev/shm/torch"):
                found[name] = size
        return found

    before = shared()
    with loader_of(config_of(folder, workers=2)) as loader:
        next(loader)
        new = [size for name, size in shared().items() if name not in before]
        assert (
            max(new) == 2 * 3 * 12 * 3 * 16 * 16
        )  # workers, prefetch + 1, N / 2 samples of 3 x 16 x 16 bytes


def test_a_loop_of_ones_own_continues_on_other_ranks_and_workers(folder, tmp_path):
    """Also a DataLoader's user: the state is JSON, and names what has changed."""
    own = {"image_size": 16, "context_length": 8, "global_size": N, "seed": 3}
    with TrainLoader(config_of(folder, workers=2), **own) as whole:
        batches = [next(whole).keys for _ in range(5)]
    with TrainLoader(config_of(folder), **own) as first:
        assert [next(first).keys for _ in range(3)] == batches[:3]
        state = json.loads(json.dumps(first.state_dict()))
        with pytest.raises(UserError, match="make a new TrainLoader"):
            first.load_state_dict(state)
    rest: list[list[str]] = [[], []]
    for rank in range(2):
        settings = config_of(folder, workers=rank)
        with TrainLoader(settings, **own, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            for number in range(2):
                rest[number] += next(loader).keys
            assert loader.state_dict()["step"] == 5
    assert rest == batches[3:]
    other = TrainLoader(config_of(folder), **own | {"seed": 4})
    with pytest.raises(UserError, match=r"run.seed was 3, is 4"):
        other.load_state_dict(state)
