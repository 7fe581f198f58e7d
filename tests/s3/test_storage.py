"""S3 as a store that can be written to: whole or not at all, one winner, and 'not there' kept from 'cannot tell'.

Here each class of fault is met by each operation on its own; what a run makes of them is in the other files.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from clip_train.errors import UserError
from clip_train.storage.base import Storage
from clip_train.storage.urls import open_storage
from tests.launcher.test_rendezvous import listeners
from tests.s3.bucket import Bucket
from tests.s3.conftest import DATA, PART
from tests.s3.proxy import Fault, FaultyProxy, fresh
from tests.s3.server import Server

SILENT = ("hang", "stall", "drip")  # what only a limit of time ends


def left_over(view: Bucket, proxy: FaultyProxy) -> int:
    """Unfinished uploads, without those that may be of beginnings that were given up before they were carried out."""
    begun = sum(
        each.startswith("POST") and each.endswith(("?uploads", "?uploads="))
        for each in proxy.requests
    )
    return max(0, len(view.unfinished_uploads()) - max(0, begun - 1))


def test_the_server_can_be_reached_from_this_machine_alone(server: Server) -> None:
    """It takes any credentials."""
    if "Ceph" in server.name:
        pytest.skip("Ceph refuses wrong credentials, so it may listen anywhere")
    assert listeners(server.port) == ["0100007F"]


def test_put_read_list_delete(storage: Storage, view: Bucket, big: Path) -> None:
    assert storage.list() == [] and not storage.exists("a")
    assert (
        storage.put_bytes("a", b"1")
        and storage.put_bytes("b/two", b"22")
        and storage.put_bytes("b/two", b"222")
    )
    storage.put_file(big, "b/big")
    assert view.get("run/b/big") == DATA
    assert [(e.name, e.size) for e in storage.list()] == [
        ("a", 1),
        ("b/big", len(DATA)),
        ("b/two", 3),
    ]
    assert [e.name for e in storage.list("b")] == ["b/big", "b/two"] and storage.list(
        "nothing"
    ) == []
    assert (storage.read_bytes("b/two"), storage.size("b/two")) == (b"222", 3)
    assert storage.read_bytes("b/big", PART - 7, PART + 9) == DATA[PART - 7 : PART + 9]
    assert storage.read_bytes("b/two", 1) == b"22"  # to the end
    for ask in (storage.read_bytes, storage.size, lambda name: storage.read_bytes(name, 0, 5)):
        with pytest.raises(FileNotFoundError):
            ask("b/none")
    storage.delete("a")
    storage.delete("a")
    storage.delete_tree("b")
    assert view.keys() == []
    with pytest.raises(ValueError, match="relative"):
        storage.read_bytes("../other")
    with pytest.raises(ValueError, match="below the root"):
        storage.delete_tree("")


def test_a_listing_of_several_pages(storage: Storage, proxy: FaultyProxy, view: Bucket) -> None:
    names = [f"{i}" for i in range(5)]
    for name in names:
        view.put(f"run/{name}", b"x")
    proxy.faults = [Fault("pages", key="")]
    assert [entry.name for entry in storage.list()] == names
    assert proxy.fired == 3


UPLOADS = [
    Fault("status", burst=4, times=4, method="PUT|POST", key="big"),
    Fault("reset", times=3, method="PUT|POST", key="big"),
    Fault("hang", times=1, method="PUT", key="big"),
    Fault("lost", times=1, method="PUT", key="big"),
    # the answer to its completion
    Fault("lost", times=1, method="POST|PUT", query="^uploadId|comp=blocklist", key="big"),
    Fault("upflip", times=2, method="PUT", key="big"),
    Fault(
        "status",
        times=1,
        method="POST",
        query="uploadId",
        code=200,
        s3code="InternalError",
        key="big",
    ),
    Fault("status", times=1, method="HEAD", key="big"),
]


@pytest.mark.parametrize(
    "fault", UPLOADS, ids=lambda fault: f"{fault.action}-{fault.method}-{fault.query}"
)
def test_an_upload_survives_what_passes(
    storage: Storage, hasty: Storage, proxy: FaultyProxy, view: Bucket, big: Path, fault: Fault
) -> None:
    survives_in_an_upload(fault, storage, hasty, proxy, view, big)


def survives_in_an_upload(
    fault: Fault, storage: Storage, hasty: Storage, proxy: FaultyProxy, view: Bucket, big: Path
) -> None:
    silent = fault.action in SILENT
    proxy.faults = fresh([fault])
    (hasty if silent else storage).put_file(big, "big")
    assert proxy.fired >= 1
    assert (
        view.get("run/big") == DATA
        and (left_over(view, proxy) if silent else len(view.unfinished_uploads())) == 0
    )


@pytest.mark.full
def test_a_slow_link_is_given_more_time(
    hasty: Storage, proxy: FaultyProxy, view: Bucket, big: Path
) -> None:
    """All parts share it, and take 10 s: a request may take 4 s at first, and 16 s once that was too little."""
    proxy.faults = [Fault("crawl", method="PUT|GET", key="big", rate=1 << 20)]
    hasty.put_file(big, "big")
    parts = Counter(
        re.findall(
            r"partNumber=\d", " ".join(each for each in proxy.requests if each.startswith("PUT"))
        )
    )
    assert view.get("run/big") == DATA and not left_over(view, proxy) and max(parts.values()) > 1
    proxy.faults = [Fault("crawl", key="big", rate=2 << 20)]
    assert hasty.read_bytes("big", 0, 2 * PART) == DATA[: 2 * PART]


@pytest.mark.full
def test_a_completion_is_given_more_time(
    hasty: Storage, proxy: FaultyProxy, view: Bucket, big: Path
) -> None:
    proxy.faults = [
        Fault("slow", method="POST", query="uploadId", key="big", seconds=4)
    ]  # not its beginning
    hasty.put_file(big, "big")
    assert view.get("run/big") == DATA and not left_over(view, proxy)
    assert [each for each in proxy.answers if each.request.startswith("POST")]


def test_an_upload_that_fails_publishes_nothing(
    impatient: Storage, proxy: FaultyProxy, view: Bucket, big: Path
) -> None:
    proxy.faults = [Fault("status", method="PUT", key="big", skip=1)]
    with pytest.raises(OSError, match="writing big: HTTP 503 SlowDown"):
        impatient.put_file(big, "big")
    assert view.keys() == []


RACES: dict[str, list[Fault]] = {
    "plain": [],
    "answer lost": [Fault("lost", times=1, method="PUT", key="mark")],
    "all delayed": [Fault("status", times=8, method="PUT", key="mark")],
    "conflict": [
        Fault(
            "status",
            times=2,
            method="PUT",
            key="mark",
            code=409,
            s3code="ConditionalRequestConflict",
        )
    ],
}


@pytest.mark.parametrize("name", RACES)
def test_of_racing_writers_one_wins(
    storage: Storage, proxy: FaultyProxy, view: Bucket, name: str
) -> None:
    proxy.faults = fresh(RACES[name])
    won: list[int] = []

    def race(i: int) -> None:
        if storage.put_bytes("mark", f"{i}".encode(), if_absent=True):
            won.append(i)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"{i}".encode() for i in won] == [view.get("run/mark")]


ASK: dict[str, Callable[[Storage], object]] = {
    "list": lambda s: s.list("commit"),
    "exists": lambda s: s.exists("a"),
    "size": lambda s: s.size("a"),
    "read_bytes": lambda s: s.read_bytes("a"),
    "a range": lambda s: s.read_bytes("a", 0, 1),
    "put_bytes": lambda s: s.put_bytes("a", b""),
    "put if absent": lambda s: s.put_bytes("a", b"", if_absent=True),
    "delete": lambda s: s.delete("a"),
    "delete_tree": lambda s: s.delete_tree("a"),
}
REFUSALS = {
    "denied": Fault("status", code=403, s3code="AccessDenied"),
    "expired token": Fault("status", code=400, s3code="ExpiredToken"),
    "clock skew": Fault("status", code=403, s3code="RequestTimeTooSkewed"),
    "another region": Fault("status", code=400, s3code="AuthorizationHeaderMalformed"),
    "busy for good": Fault("status"),
    "reset for good": Fault("reset"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_cannot_be_told_is_never_missing(
    impatient: Storage, proxy: FaultyProxy, refusal: str
) -> None:
    for ask in ASK if refusal == "denied" else ("list", "exists"):
        refused_to(impatient, proxy, ask, refusal)


@pytest.mark.full
@pytest.mark.parametrize("refusal", sorted(set(REFUSALS) - {"denied"}))
def test_what_no_operation_can_tell_is_never_missing(
    impatient: Storage, proxy: FaultyProxy, refusal: str
) -> None:
    for ask in sorted(set(ASK) - {"list", "exists"}):
        refused_to(impatient, proxy, ask, refusal)


def test_a_missing_bucket_is_never_an_empty_one(proxy: FaultyProxy) -> None:
    nowhere = open_storage("s3://nowhere/run", patience_seconds=1)
    for ask in ASK.values():
        with pytest.raises(OSError, match=r"s3://nowhere.*create the bucket") as caught:
            ask(nowhere)
        assert not isinstance(caught.value, FileNotFoundError)


def refused_to(storage: Storage, proxy: FaultyProxy, ask: str, refusal: str) -> None:
    (fault,) = fresh([REFUSALS[refusal]])
    fault.key, fault.method = "", "GET|HEAD|PUT|DELETE|POST"
    proxy.faults = [fault]
    with pytest.raises(OSError) as caught:
        ASK[ask](storage)
    assert not isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, PermissionError) == (refusal in ("denied", "expired token"))
    assert fault.fired


@pytest.mark.parametrize("action", ["reset", "cut", "end", "short", "stall", "drip", "status"])
def test_reads_survive_what_passes(
    storage: Storage, hasty: Storage, proxy: FaultyProxy, view: Bucket, action: str
) -> None:
    view.put("run/f", DATA[: 1 << 20])
    proxy.faults = [Fault(action, times=2, key="f$")]  # type: ignore[arg-type]
    reader = hasty if action in SILENT else storage
    assert reader.read_bytes("f", 100, 700_000) == DATA[100:700_000]
    assert proxy.fired == 2


def test_expired_credentials_are_asked_for_again(
    impatient: Storage, server: Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert impatient.list() == []
    proxy.faults = [Fault("expired", key="", access_key=server.access_key, method="GET|PUT")]
    with pytest.raises(PermissionError, match="have expired: renew them"):
        impatient.list()
    server.add_key("renewed", "another-secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    assert impatient.list() == [] and impatient.put_bytes("a", b"")


def test_urls() -> None:
    assert open_storage("s3://bucket/prefix/").url == "s3://bucket/prefix"
    for url in ("s3://", "s3://key:secret@bucket/run"):
        with pytest.raises(UserError, match="write s3://bucket/prefix") as caught:
            open_storage(url)
        assert "secret" not in str(caught.value)
