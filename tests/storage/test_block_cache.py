"""Blocks that processes share: each is fetched once, whoever dies or fails meanwhile."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from clip_train.storage.blocks import BlockCache
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import open_read
from tests.data import counting

BLOCK = 8192
HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "r+b", buffering=0) as slot:
    fcntl.flock(slot, fcntl.LOCK_EX)
    slot.write(b"half of a block")
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("slots", [8, 64])
def test_readers_of_one_cache_fetch_each_block_once(tmp_path: Path, slots: int) -> None:
    contents = [random.Random(n).randbytes(BLOCK * 20 + 77) for n in range(2)]
    cache, config = BlockCache(slots), StorageConfig().model_copy(update={"range_bytes": BLOCK})
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        url = f"{counting.SCHEME}{path}"
        files = [open_read(url, config, cache=cache) for _ in range(3)]
        at = [0, 0, 0]
        for turn in range(0, len(content), 5000):  # each reads a part, and seeks over the others'
            reader = turn // 5000 % 3
            files[reader].seek(turn)
            at[reader] = turn
            assert files[reader].read(5000) == content[turn : turn + 5000]
        for file in files:
            file.close()
    assert counting.bytes_read(tmp_path) == sum(map(len, contents))


def test_a_process_that_is_killed_frees_its_block() -> None:
    cache = BlockCache(4)
    fetched: list[int] = []

    def start(block: int) -> Future[bytes]:
        fetched.append(block)
        future: Future[bytes] = Future()
        future.set_result(b"%d" % block * 100)
        return future

    slot, _ = cache.slot("file", 2)
    with (
        slot,
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(slot.name)], stdout=subprocess.PIPE
        ) as holder,
    ):
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert cache.load("file", 1, 4, start) == b"1" * 100  # 2 is not fetched ahead: it is held
        assert fetched == [1]
        with ThreadPoolExecutor(1) as thread:
            waits = thread.submit(cache.load, "file", 2, 3, start)
            assert not waits.done()
            holder.kill()
            assert waits.result(60) == b"2" * 100
    assert cache.load("file", 2, 3, start) == b"2" * 100 and fetched == [1, 2]


def test_a_block_that_cannot_be_fetched_is_tried_again() -> None:
    cache, future = BlockCache(4), Future[bytes]()
    future.set_exception(OSError("no answer"))
    with pytest.raises(OSError, match="no answer"):
        cache.load("file", 0, 1, lambda block: future)
    good = Future[bytes]()
    good.set_result(b"bytes")
    assert cache.load("file", 0, 1, lambda block: good) == b"bytes"
    assert cache.load("another", 0, 1, lambda block: future if block else good) == b"bytes"
