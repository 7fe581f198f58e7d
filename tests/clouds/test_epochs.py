"""Shards at Azure, Google Cloud and an sftp server: an epoch is that of the local disk, also through faults."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.clouds.sshd import Sshd
from tests.s3.bucket import Bucket
from tests.s3.epochs import (
    HASTY,
    PATIENT,
    SILENCE,
    SIZES,
    SURVIVED,
    N,
    epoch_digests,
    make_shards,
)
from tests.s3.proxy import FaultyProxy, fresh
from tests.warm import call

EPOCH = sum(SIZES) // N


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("set")
    make_shards(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    return epoch_digests(str(folder / "*.tar"))


def shards_in(view: Bucket, folder: Path) -> str:
    for path in sorted(folder.iterdir()):
        view.put(f"set/{path.name}", path.read_bytes())
    return f"{view.url}/set/{{000..{len(SIZES) - 1:03d}}}.tar"


def test_an_epoch_through_all_faults_at_once_in_workers(
    folder: Path, expected: list[str], proxy: FaultyProxy, view: Bucket
) -> None:
    train = shards_in(view, folder)
    proxy.faults = fresh(SURVIVED["all at once"])
    read = functools.partial(epoch_digests, workers=2, storage=HASTY, epochs=1)
    assert call(read, train) == expected[:EPOCH]
    assert all(fault.fired for fault in proxy.faults if fault.action != "drip")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(SURVIVED) - {"all at once"}))
def test_three_epochs_through_what_passes(
    name: str, folder: Path, expected: list[str], proxy: FaultyProxy, view: Bucket
) -> None:
    train = shards_in(view, folder)
    proxy.faults = fresh(SURVIVED[name])
    assert epoch_digests(train, storage=HASTY if name in SILENCE else PATIENT) == expected
    assert proxy.fired >= 2


def test_an_epoch_by_sftp_in_workers(
    folder: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := Sshd.missing():
        pytest.skip(missing)
    with Sshd() as sshd:
        for name, value in sshd.environment().items():
            monkeypatch.setenv(name, value)
        train = f"{sshd.url(folder)}/{{000..{len(SIZES) - 1:03d}}}.tar"
        read = functools.partial(epoch_digests, workers=2, storage=PATIENT, epochs=1)
        assert call(read, train) == expected[:EPOCH]
