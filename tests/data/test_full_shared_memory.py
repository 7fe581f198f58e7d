"""A /dev/shm that is really small or full, in a mount namespace: the loader and doctor name it, and a large one is
not named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.shards import write_dataset

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds, on a machine that is slow
MOUNT = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'
FILL = """
import contextlib, itertools, os, sys

numbers = itertools.count()

def fill(keep=0):
    '''Leaves so many bytes of /dev/shm.'''
    place = os.statvfs("/dev/shm")
    file = os.open(f"/dev/shm/other-{next(numbers)}", os.O_WRONLY | os.O_CREAT)
    num_bytes = place.f_bavail * place.f_frsize - keep
    with contextlib.suppress(OSError):  # a worker has taken a part meanwhile
        if num_bytes > 0:
            os.posix_fallocate(file, 0, num_bytes)
    os.close(file)
"""
# 2 workers x 3 slots x 4 samples of 3 x 64 x 64 bytes
LOAD = """
from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.errors import RankError

IMAGES = 2 * 3 * 4 * 3 * 64 * 64

if __name__ == "__main__":
    if sys.argv[2] == "queue":
        fill(IMAGES + (8 << 10))
    config = DataConfig(train=sys.argv[1], workers=2, lanes=2)
    try:
        with TrainLoader(config, image_size=64, context_length=16, global_size=8, seed=1) as loader:
            print(len(next(loader)), "samples")
            for _ in range(20):
                if sys.argv[2] == "piece":
                    fill()  # also what the last batch has freed
                next(loader)
        print("20 more")
    except RankError as e:
        print(e)
"""
DOCTOR = """
import subprocess
from clip_tools.doctor import check_shared_memory

def look():
    for found in check_shared_memory():
        print(found.level, found.message, "->", found.remedy)

look()
subprocess.run(["mount", "-o", "remount,size=64m", "/dev/shm"], check=True)
look()
fill()
look()
"""


def run_in(size: str, code: str, *arguments: str) -> str:
    """What the code prints where /dev/shm has this size."""
    line = ["unshare", "--mount", "sh", "-c", MOUNT, "sh"]
    try:
        allowed = subprocess.run([*line, "1m", "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare (of util-linux) makes the mount namespace, and is not on this machine")
    if allowed.returncode:
        pytest.skip(f"no mount namespaces allowed: {allowed.stderr.decode()}")
    done = subprocess.run(
        [*line, size, sys.executable, "-c", FILL + code, *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("size", "when", "said"),
    [
        ("100k", "", ["data.workers (2) and data.prefetch (2) need 0.3 MiB of shared memory"]),
        ("4m", "queue", ["the queues of data.workers (2) need about 64 KiB of shared memory"]),
        ("4m", "piece", ["8 samples", "a loader worker's message needs", "KiB of shared memory"]),
        ("4m", "", ["8 samples", "20 more"]),
    ],
)
def test_a_full_shared_memory_is_named(tmp_path, size, when, said):
    """Also while it trains: another job fills it."""
    write_dataset(tmp_path, [21, 9])
    told = run_in(size, LOAD, str(tmp_path / "*.tar"), when)
    for each in said:
        assert each in told
    is_full = (size, when) != ("4m", "")
    assert ("No space left on device" in told) == ("enlarge /dev/shm" in told) == is_full


def test_doctor_names_a_full_shared_memory():
    healthy, small, full = run_in("2g", DOCTOR).splitlines()
    assert healthy.startswith("ok /dev/shm has 2,048 MiB free")
    assert small.startswith("warning /dev/shm has 64 MiB free") and "--shm-size=16g" in small
    assert full.startswith("warning /dev/shm has 0 MiB free") and "ls -l /dev/shm" in full
