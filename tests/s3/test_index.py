"""The index verb and a training run, as a user types them, with shards on S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from clip_tools.shards.index import index_shards
from clip_train.data.index import INDEX_NAME, look_up
from clip_train.errors import UserError
from tests.launcher.conftest import clean_environment, finish
from tests.s3.epochs import PATIENT, SIZES, make_shards, upload
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import ROOT, Server
from tests.warm import Command


def clip_train(*arguments: str) -> tuple[int, str]:
    """In a process of its own, as from a shell: the environment of this test goes with it."""
    return finish(Command(arguments, env=clean_environment(), cwd=ROOT))


def test_the_verb_writes_beside_the_shards(
    tmp_path: Path, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    folder = tmp_path / "set"
    local = index_shards([str(p) for p in make_shards(folder, index=False)], workers=1)
    train = upload(server, folder, bucket)
    proxy.faults = [
        Fault("cut", times=3),
        Fault("status", times=3, key="json$", method="GET|HEAD|PUT"),
    ]
    status, out = clip_train("index", train)
    assert status == 0, out
    assert proxy.fired == 6
    urls = [f"s3://{bucket}/set/{i:03d}.tar" for i in range(len(SIZES))]
    found = look_up([urls], "auto", PATIENT)
    assert [found.shared[number][1] for number in range(len(urls))] == [
        each.entry for each in local.values()
    ]
    puts = [r.split()[1].rsplit("/", 1)[1] for r in proxy.requests if r.startswith("PUT")]
    assert set(puts) == {INDEX_NAME}

    damaged = bytearray((folder / "004.tar").read_bytes())
    damaged[1000] ^= 1
    server.put(f"{bucket}/set/004.tar", bytes(damaged))
    status, out = clip_train("index", f"s3://{bucket}/set/*.tar", "--check")
    assert status == 1 and "1 of 6 shards" in out and "004.tar: differs in 1" in out


def test_an_index_that_may_not_be_read_is_not_no_index(
    proxy: FaultyProxy, bucket: str, server: Server
) -> None:
    server.put(f"{bucket}/000.tar", b"x")
    assert look_up([[f"s3://{bucket}/000.tar"]], "auto", PATIENT).unindexed == [
        f"s3://{bucket}/000.tar"
    ]
    proxy.faults = [
        Fault("status", key="index", code=403, s3code="AccessDenied", method="GET|HEAD")
    ]
    with pytest.raises(
        UserError, match=rf"s3://{bucket}/clip_train_index\.json.*DeniedError.*data\.verify=off"
    ):
        look_up([[f"s3://{bucket}/000.tar"]], "auto", PATIENT)
