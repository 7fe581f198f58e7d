"""One object through the faulty proxy: all of its bytes, or an error that says which, where and how often."""

from __future__ import annotations

import hashlib
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from clip_train.errors import UserError
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import DeniedError, MissingError, StorageError
from clip_train.storage.urls import expand_glob, open_read, open_storage
from tests.launcher.conftest import until
from tests.s3.proxy import Fault, FaultyProxy, fresh
from tests.s3.server import Server

BLOCK = 16 << 10
FAST = StorageConfig(patience_seconds=240).model_copy(
    update={"backoff_seconds": 0.01, "range_bytes": BLOCK}
)
# What gives up early needs as many tries as it takes: a machine that stalls is no better than a server that does.
HASTY = FAST.model_copy(update={"patience_seconds": 0.5, "attempts": 200})
SILENCE = ("stall", "drip", "hang")
DATA = random.Random(3).randbytes(BLOCK * 9 + 1234)
ONCE = {
    "reset": Fault("reset", times=1), "cut": Fault("cut", times=1), "end": Fault("end", times=1),
    "short": Fault("short", times=1), "empty": Fault("short", at=0, times=1), "stall": Fault("stall", times=1),
    "drip": Fault("drip", times=1), "hang": Fault("hang", times=1, method="GET|HEAD"),
    "503": Fault("status", burst=4, times=4, method="GET|HEAD"), "500": Fault("status", times=1, code=500),
}  # fmt: skip


def sums_of(data: bytes, block: int = BLOCK) -> Checksums:
    """By hashlib alone: sixteen digits of each block's sha256."""
    blocks = [data[i : i + block] for i in range(0, len(data), block)]
    return Checksums(len(data), block, "".join(hashlib.sha256(b).hexdigest()[:16] for b in blocks))


@pytest.fixture
def url(server: Server, proxy: FaultyProxy, bucket: str) -> str:
    server.put(f"{bucket}/a/0.tar", DATA)
    return f"s3://{bucket}/a/0.tar"


# Without an index a length and an ETag are all that tells; with one, each block is held against its checksum as well.
CASES = [pytest.param(name, False, id=name) for name in ONCE]
CASES += [pytest.param(name, True, id=f"{name}-indexed", marks=pytest.mark.full) for name in ONCE]


@pytest.mark.parametrize("name, indexed", CASES)
def test_what_passes_is_survived(url: str, proxy: FaultyProxy, name: str, indexed: bool) -> None:
    proxy.faults = fresh([ONCE[name]])
    with open_read(
        url, HASTY if name in SILENCE else FAST, sums_of(DATA) if indexed else None
    ) as file:
        assert file.read(100) == DATA[:100]
        assert file.read() == DATA[100:]
    assert proxy.fired


@pytest.mark.parametrize("action", ["flip", "other"])
def test_wrong_bytes_are_seen_by_their_checksum(url: str, proxy: FaultyProxy, action: str) -> None:
    proxy.faults = [Fault(action, every=3)]
    with open_read(url, FAST, sums_of(DATA)) as file:
        file.seek(BLOCK * 4 + 77)  # as a resumed run begins: in the middle of a block
        assert file.read() == DATA[BLOCK * 4 + 77 :]
    assert proxy.fired


@pytest.mark.parametrize(
    "fault,why",
    [
        (Fault("cut", skip=2), "response body error: (Connection reset by peer|Not enough data)"),
        (Fault("status", skip=2), "HTTP 503 SlowDown"),
        (Fault("short", skip=2), "instead of 16384"),
        (Fault("hang", skip=2), "no answer within"),
        (Fault("stall", skip=2, at=0), r"only \d+ bytes within .*storage\.min_rate"),
        (Fault("drip", skip=2), r"only \d+ bytes within .*storage\.min_rate"),
        (Fault("flip", skip=2), "has changed since the index was made"),
    ],
    ids=lambda v: v.action if isinstance(v, Fault) else "",
)
def test_what_lasts_is_an_error_with_shard_offset_and_attempt(
    url: str, proxy: FaultyProxy, fault: Fault, why: str
) -> None:
    silent = fault.action in SILENCE
    config = FAST.model_copy(
        update={"attempts": 3, "read_ahead": 0, **({"patience_seconds": 0.5} if silent else {})}
    )
    for _ in range(
        60 if silent else 1
    ):  # what is to succeed has no more time than the rest: once more after a stall
        proxy.faults = [fault := replace(fault)]
        with pytest.raises(StorageError) as caught, open_read(url, config, sums_of(DATA)) as file:
            assert file.read(2 * BLOCK) == DATA[: 2 * BLOCK]
            file.read(1)
        told = str(caught.value)
        if re.search(why, told) and fault.fired == 3:
            break
    assert told.startswith(f"{url}: bytes {2 * BLOCK}-{3 * BLOCK - 1}, attempt 3 of 3: ")
    assert re.search(why, told) and fault.fired == 3


def test_a_link_of_any_rate_is_accepted(server: Server, proxy: FaultyProxy, bucket: str) -> None:
    """With `storage.min_rate: 0`, if only something comes within the patience."""
    server.put(f"{bucket}/a/small.tar", DATA[:600])
    config = FAST.model_copy(update={"patience_seconds": 1.0, "min_rate": 0, "attempts": 1})
    proxy.faults = [Fault("drip")]
    with open_read(f"s3://{bucket}/a/small.tar", config) as file:
        assert file.read() == DATA[:600]
    assert proxy.fired


def test_a_bit_flipped_where_it_is_stored(url: str, server: Server) -> None:
    checksums = sums_of(DATA)
    server.put(url.removeprefix("s3://"), DATA[:50_000] + bytes([DATA[50_000] ^ 1]) + DATA[50_001:])
    with open_read(url, FAST.model_copy(update={"attempts": 4}), checksums) as file:
        file.read(3 * BLOCK)
        with pytest.raises(
            StorageError, match=r"0\.tar: bytes 49152-65535, attempt 4 of 4.*clip-train index"
        ):
            file.read(BLOCK)


def test_an_object_of_another_length_is_refused_before_reading(url: str, server: Server) -> None:
    server.put(url.removeprefix("s3://"), DATA[:-512])
    with pytest.raises(
        StorageError, match=rf"0\.tar has {len(DATA) - 512} bytes, and its index says {len(DATA)}"
    ):
        open_read(url, FAST, sums_of(DATA))


def test_an_object_replaced_while_it_is_read(url: str, server: Server) -> None:
    """Without an index too: two halves of two objects must not make one."""
    with open_read(url, FAST.model_copy(update={"read_ahead": 0})) as file:
        file.read(10)
        server.put(url.removeprefix("s3://"), bytes(len(DATA)))
        with pytest.raises(
            StorageError, match=r"0\.tar: bytes 16384-32767, attempt 1 of 10: its ETag was"
        ):
            file.read()


def test_missing_and_denied_are_not_empty(url: str, proxy: FaultyProxy, bucket: str) -> None:
    with pytest.raises(MissingError, match=r"absent\.tar: its size, attempt 1 of 10: HTTP 404"):
        open_read(f"s3://{bucket}/absent.tar", FAST)
    with pytest.raises(
        StorageError, match=r"no-such-bucket-here/x\.tar: .*create the bucket"
    ) as caught:
        open_read("s3://no-such-bucket-here/x.tar", FAST)
    assert not isinstance(
        caught.value, FileNotFoundError
    )  # or a missing bucket would be one without an index
    proxy.faults = [Fault("status", code=403, s3code="AccessDenied", method="GET|HEAD")]
    with pytest.raises(
        DeniedError, match=r"0\.tar: its size, attempt 2 of 10: HTTP 403.*credentials"
    ):
        open_read(url, FAST)


def test_expired_credentials_are_renewed(
    url: str, server: Server, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a credentials file that a daemon rewrites: what the process holds expires in mid-shard."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    server.add_key("OLD", "s")
    server.add_key("NEW", "s")
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = OLD\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    with open_read(url, FAST) as file:
        assert file.read(BLOCK) == DATA[:BLOCK]
        proxy.faults = [Fault("expired", access_key="OLD", method="GET|HEAD")]
        credentials.write_text("[default]\naws_access_key_id = NEW\naws_secret_access_key = s\n")
        assert file.read() == DATA[BLOCK:]
    assert proxy.fired >= 1
    proxy.faults = [
        Fault("expired", access_key="NEW", method="GET|HEAD")
    ]  # and nothing newer comes
    with pytest.raises(DeniedError):
        open_read(url, FAST.model_copy(update={"attempts": 3}))


def test_reading_anywhere_gives_what_is_there(url: str) -> None:
    draws = random.Random(1)
    with open_read(url, FAST, sums_of(DATA)) as file:
        for _ in range(60):
            begin, count = (
                draws.randrange(len(DATA) + 10),
                draws.choice([0, 1, 512, BLOCK, 3 * BLOCK]),
            )
            assert file.seek(begin) == begin
            assert file.read(count) == DATA[begin : begin + count]
        assert file.seek(0, 2) == len(DATA) and file.read(1) == b""


def blocks_asked_for(proxy: FaultyProxy) -> list[int]:
    begins = (re.search(r"^GET .* bytes=(\d+)-", request) for request in proxy.requests)
    return [int(begin[1]) // BLOCK for begin in begins if begin is not None]


def test_read_ahead_is_parallel_and_bounded(url: str, proxy: FaultyProxy) -> None:
    """The second block brings those behind it; the process's budget holds however many files are open."""
    config = FAST.model_copy(update={"read_ahead": 4, "read_ahead_bytes": 3 * BLOCK})
    files = [open_read(url, config) for _ in range(3)]
    for file in files:
        file.read(BLOCK + 1)
    assert until(lambda: len(blocks_asked_for(proxy)) >= 9 and not proxy.under_way, 120)
    assert sorted(blocks_asked_for(proxy)) == [0, 0, 0, 1, 1, 1, 2, 2, 3]  # two ahead, one, none
    for file in files:
        file.close()
    proxy.requests.clear()
    with open_read(url, config) as file:  # all of the budget is there again
        file.read(2 * BLOCK + 1)
        assert until(lambda: len(blocks_asked_for(proxy)) >= 6 and not proxy.under_way, 120)
        assert sorted(blocks_asked_for(proxy)) == [0, 1, 2, 3, 4, 5]


def test_closing_gives_up_what_is_under_way(url: str, proxy: FaultyProxy) -> None:
    proxy.faults = [
        Fault("hang", begin=2 * BLOCK)
    ]  # those ahead; they may come before the one that is read
    file = open_read(url, FAST.model_copy(update={"read_ahead": 2}))
    file.read(BLOCK + 1)
    assert until(lambda: proxy.fired == proxy.under_way == 2, 120)
    file.close()
    assert until(lambda: not proxy.under_way, 120)


def test_an_empty_object(server: Server, proxy: FaultyProxy, bucket: str) -> None:
    server.put(f"{bucket}/empty")
    with open_read(f"s3://{bucket}/empty", FAST, sums_of(b"")) as file:
        assert file.read() == b""


def test_write_and_list(proxy: FaultyProxy, server: Server, bucket: str) -> None:
    open_storage(f"s3://{bucket}/x/index.json").put_bytes("", b"{}")
    assert server.get(f"{bucket}/x/index.json") == b"{}"
    assert expand_glob(f"s3://{bucket}/x/*.json") == [f"s3://{bucket}/x/index.json"]
    open_storage(f"s3://{bucket}/x/b.json").put_bytes("", b"new")  # no listing is kept
    assert len(expand_glob(f"s3://{bucket}/x/*.json")) == 2


def test_any_file_system_with_ranges(
    url: str, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    """The same object by plain HTTP: no streams, so the whole range has its time."""
    server.make_public(bucket)
    server.make_public(url.removeprefix("s3://"))
    http = f"{proxy.url}/{url.removeprefix('s3://')}"
    proxy.faults = [
        Fault("cut", every=4),
        Fault("short", every=4),
        Fault("flip", every=4),
        Fault("stall", times=1),
    ]
    with open_read(http, HASTY, sums_of(DATA)) as file:
        assert file.read() == DATA
    assert proxy.fired
    with pytest.raises(FileNotFoundError):
        open_read(http.replace("0.tar", "absent.tar"), FAST)
    proxy.faults = [Fault("status", code=503, method="GET|HEAD")]
    with pytest.raises(StorageError) as caught:  # and not: it is not there
        open_read(http, FAST.model_copy(update={"attempts": 2}))
    assert not isinstance(caught.value, FileNotFoundError)


CACHES = ("simplecache", "filecache")


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_copies_a_shard_once_for_all_who_read_it(
    url: str, proxy: FaultyProxy, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:  # fmt: skip
    """Through faults; another process, and a later one, ask only whether it is still the same."""
    monkeypatch.setenv(f"FSSPEC_{kind.upper()}_CACHE_STORAGE", str(tmp_path / "cache"))
    config = FAST.model_copy(update={"read_ahead": 4})
    proxy.faults = [Fault("cut", times=2), Fault("status", times=2), Fault("short", times=1)]
    # two processes, whose locks are told apart only by open files: here two open files
    readers = [open_read(f"{kind}::{url}", config, sums_of(DATA)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda file: file.read(), readers)) == [DATA, DATA]
    assert proxy.fired == 5
    whole = [answer.num_bytes for answer in proxy.answers if answer.num_bytes >= len(DATA)]
    assert len(whole) == 1
    proxy.requests.clear()
    with open_read(f"{kind}::{url}", config) as file:
        assert file.read() == DATA
    assert {request.split()[0] for request in proxy.requests} == {"HEAD"}
    (copy,) = (path for path in (tmp_path / "cache").iterdir() if not path.suffix)
    assert copy.read_bytes() == DATA
    server.put(url.removeprefix("s3://"), DATA[::-1])  # replaced: a new copy
    with open_read(f"{kind}::{url}", config) as file:
        assert file.read() == DATA[::-1]
    assert expand_glob(f"{kind}::{url[: -len('0.tar')]}*.tar") == [f"{kind}::{url}"]


def test_a_cache_that_cannot_be_filled_keeps_nothing(
    url: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FSSPEC_SIMPLECACHE_CACHE_STORAGE", raising=False)
    with pytest.raises(UserError, match="set FSSPEC_SIMPLECACHE_CACHE_STORAGE=/folder"):
        open_read(f"simplecache::{url}", FAST)
    with pytest.raises(UserError, match="is local already; leave simplecache:: out"):
        open_read("simplecache::/a/b.tar", FAST)
    monkeypatch.setenv("FSSPEC_SIMPLECACHE_CACHE_STORAGE", str(tmp_path))
    proxy.faults = [Fault("status")]
    with open_read(
        f"simplecache::{url}", FAST.model_copy(update={"attempts": 2, "read_ahead": 0})
    ) as file:
        with pytest.raises(StorageError, match=r"attempt 2 of 2: HTTP 503 SlowDown"):
            file.read()
        assert proxy.fired == 2
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        proxy.faults = []
        assert file.read() == DATA
    with pytest.raises(MissingError):
        open_read(f"simplecache::{url}x", FAST)
    with pytest.raises(OSError, match="simplecache:: is for reading"):
        open_storage(f"simplecache::{url}").put_bytes("", b"x")
