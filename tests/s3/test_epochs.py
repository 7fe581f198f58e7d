"""The promise about S3: three epochs through faults are those of the local disk, or an error names the shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from clip_train.errors import DataError
from tests.s3.epochs import (
    EPOCHS,
    HASTY,
    NEED_AN_INDEX,
    PATIENT,
    SILENCE,
    SIZES,
    SURVIVED,
    N,
    epoch_digests,
    make_shards,
    upload,
)
from tests.s3.proxy import Fault, FaultyProxy, fresh
from tests.s3.server import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("set")
    make_shards(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """From the local disk; with an index, which deals the samples more evenly, the order is another one."""
    digests = epoch_digests(str(folder / "*.tar"))
    assert len(digests) == len(set(digests)) == EPOCHS * sum(SIZES) // N
    return digests


@pytest.fixture(scope="module")
def unindexed(folder: Path, tmp_path_factory) -> list[str]:
    """From the local disk, without an index: nothing is verified, nor read in blocks."""
    bare = tmp_path_factory.mktemp("bare")
    for path in folder.glob("*.tar"):
        (bare / path.name).write_bytes(path.read_bytes())
    return epoch_digests(str(bare / "*.tar"))


@pytest.mark.parametrize("name", ["reset in mid-body", "burst of 503", "stall", "short body", "flipped bit"])
def test_faults_that_pass(
    name: str, folder: Path, expected: list[str], server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    train = upload(server, folder, bucket)
    proxy.faults = fresh(SURVIVED[name])
    assert epoch_digests(train, storage=HASTY if name in SILENCE else PATIENT) == expected
    assert all(fault.fired >= 2 for fault in proxy.faults)


def test_all_faults_at_once_in_workers(
    folder: Path, expected: list[str], server: Server, proxy: FaultyProxy, bucket: str, new_workers: None
) -> None:
    train = upload(server, folder, bucket)
    proxy.faults = fresh(SURVIVED["all at once"])
    assert epoch_digests(train, workers=2, storage=HASTY) == expected
    assert proxy.fired > 50


@pytest.mark.parametrize("name", sorted(set(SURVIVED) - set(NEED_AN_INDEX) - {"stall", "no answer", "slow drip"})[:3])
def test_without_an_index(
    name: str, folder: Path, unindexed: list[str], server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    train = upload(server, folder, bucket, index=False)
    proxy.faults = fresh(SURVIVED[name])
    assert epoch_digests(train, storage=PATIENT) == unindexed
    assert proxy.fired


def test_a_header_damaged_on_the_way_does_not_shorten_the_shard(
    folder: Path, unindexed: list[str], server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    """Without an index: the archive looks broken, and is read again before that is believed."""
    train = upload(server, folder, bucket, index=False)
    proxy.faults = [Fault("flip", at=0.0, key=f"00{i}.tar", times=1) for i in range(6)]  # the first letter of a name
    assert epoch_digests(train, storage=PATIENT) == unindexed
    assert all(fault.fired for fault in proxy.faults)


@pytest.mark.parametrize(
    "fault",
    [Fault("status", key=r"/003\.tar"), Fault("flip", key=r"/003\.tar"), Fault("cut", key=r"/003\.tar")],
    ids=lambda f: f.action,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_faults_that_last_name_the_shard(
    fault: Fault, workers: int, folder: Path, server: Server, proxy: FaultyProxy, bucket: str, new_workers: None
) -> None:
    train = upload(server, folder, bucket)
    proxy.faults = fresh([fault])
    with pytest.raises(DataError, match=rf"s3://{bucket}/set/003\.tar.*bytes \d+-\d+, attempt 4 of 4"):
        epoch_digests(train, workers=workers, storage=PATIENT.model_copy(update={"attempts": 4}))
    assert proxy.fired == 4 or workers  # what is final is not tried again by who asked for it


def test_a_shard_cut_where_it_is_stored_is_never_a_shorter_epoch(
    folder: Path, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    """Even at the border of two samples, with a proper end mark: a whole archive, but not the one that was indexed."""
    train = upload(server, folder, bucket)
    data = (folder / "002.tar").read_bytes()
    border = data.index(b"s2n20.jpg") // 512 * 512
    server.put(f"{bucket}/set/002.tar", data[:border] + bytes(1024))
    with pytest.raises(DataError, match=rf"002\.tar has {border + 1024} bytes, and its index says {len(data)}"):
        epoch_digests(train, storage=PATIENT)
