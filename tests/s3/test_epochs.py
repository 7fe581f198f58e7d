"""The promise about S3: epochs through faults are those of the local disk, or an error names the shard."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

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
from tests.warm import call


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


def in_workers(train: str, **options: Any) -> list[str]:
    """As in a trainer: its workers come from a fork server that knows this test's proxy."""
    return call(functools.partial(epoch_digests, workers=2, **options), train)


def test_an_epoch_through_all_faults_at_once_in_workers(
    folder: Path, expected: list[str], server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    train = upload(server, folder, bucket)
    # More flips: of those that nobody notices, five of six change no batch.
    proxy.faults = [*fresh(SURVIVED["all at once"]), Fault("flip", every=3)]
    assert in_workers(train, storage=HASTY, epochs=1) == expected[: sum(SIZES) // N]
    assert all(fault.fired for fault in proxy.faults if fault.action != "drip")


@pytest.mark.full
def test_epochs_from_a_cache_ask_the_store_once_for_each_shard(
    folder: Path, expected: list[str], server: Server, proxy: FaultyProxy, bucket: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two workers, whose streams share shards, and a later process."""
    monkeypatch.setenv("FSSPEC_SIMPLECACHE_CACHE_STORAGE", str(tmp_path / "cache"))
    train = f"simplecache::{upload(server, folder, bucket)}"
    proxy.faults = [Fault("cut", times=2), Fault("status", times=2)]
    assert in_workers(train, storage=PATIENT) == expected
    asked = [request.split()[1] for request in proxy.requests if request.startswith("GET")]
    assert len([each for each in asked if each.endswith(".tar")]) == len(SIZES) + proxy.fired
    proxy.requests.clear()
    assert in_workers(train, storage=PATIENT, epochs=1) == expected[: sum(SIZES) // N]
    assert not [
        each for each in proxy.requests if each.startswith("GET") and "list-type" not in each
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SURVIVED))
def test_three_epochs_through_what_passes(
    name: str, folder: Path, expected: list[str], server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    train = upload(server, folder, bucket)
    proxy.faults = fresh(SURVIVED[name])
    assert epoch_digests(train, storage=HASTY if name in SILENCE else PATIENT) == expected
    assert all(fault.fired >= 2 for fault in proxy.faults)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(SURVIVED) - set(NEED_AN_INDEX)))
def test_three_epochs_without_an_index(
    name: str, folder: Path, unindexed: list[str], server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    train = upload(server, folder, bucket, index=False)
    proxy.faults = fresh(SURVIVED[name])
    assert epoch_digests(train, storage=HASTY if name in SILENCE else PATIENT) == unindexed
    assert proxy.fired


@pytest.mark.full
def test_a_header_damaged_on_the_way_does_not_shorten_the_shard(
    folder: Path, unindexed: list[str], server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    """Without an index: the archive looks broken, and is read again before that is believed."""
    train = upload(server, folder, bucket, index=False)
    proxy.faults = [
        Fault("flip", at=0.0, key=f"00{i}.tar", times=1) for i in range(6)
    ]  # the first letter of a name
    assert epoch_digests(train, storage=PATIENT) == unindexed
    assert all(fault.fired for fault in proxy.faults)


@pytest.mark.parametrize(
    "action, workers",
    [
        ("flip", 0),
        pytest.param("status", 0, marks=pytest.mark.full),
        pytest.param("cut", 0, marks=pytest.mark.full),
        pytest.param(
            "status", 2, marks=pytest.mark.full
        ),  # however it failed, its words come from a worker alike
    ],
)
def test_faults_that_last_name_the_shard(
    action: Any, workers: int, folder: Path, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    train = upload(server, folder, bucket)
    proxy.faults = [Fault(action, key=r"/003\.tar")]
    storage = PATIENT.model_copy(update={"attempts": 4})
    with pytest.raises(
        DataError, match=rf"s3://{bucket}/set/003\.tar.*bytes \d+-\d+, attempt 4 of 4"
    ):
        in_workers(train, storage=storage) if workers else epoch_digests(train, storage=storage)
    assert proxy.fired == 4 or workers  # what is final is not tried again by who asked for it


def test_a_shard_cut_where_it_is_stored_is_never_a_shorter_epoch(
    folder: Path, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    """Even at the border of two samples, with a proper end mark: a whole archive, but not the one that was indexed."""
    train = upload(server, folder, bucket)
    data = (folder / "002.tar").read_bytes()
    border = data.index(b"s2n20.jpg") // 512 * 512
    server.put(f"{bucket}/set/002.tar", data[:border] + bytes(1024))
    with pytest.raises(
        DataError, match=rf"002\.tar has {border + 1024} bytes, and its index says {len(data)}"
    ):
        epoch_digests(train, storage=PATIENT)
