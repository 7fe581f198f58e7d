"""Credentials that expire during a run: who renews them, how late that may be, what is said where nobody can."""

from __future__ import annotations

import json
import resource
import threading
import time
from pathlib import Path

import pytest

from clip_train.storage.base import Storage
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import StorageError
from clip_train.storage.urls import open_read, open_storage
from tests import warm
from tests.launcher.conftest import MODEL, RECIPE, finish, start, wait_for_step
from tests.s3.bucket import Bucket
from tests.s3.conftest import DATA
from tests.s3.epochs import make_shards, upload
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server
from tests.s3.vending import ANY, SECRET, TOKEN, Vending

PATIENT = StorageConfig(patience_seconds=120).model_copy(update={"range_bytes": 1 << 20})
NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
OLD, NEW = ("ROTATEDOLD", "rotated-secret-old"), ("ROTATEDNEW", "rotated-secret-new")


@pytest.fixture
def profile(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """~/.aws/credentials, where a daemon keeps the profile `training`."""
    for pair in (OLD, NEW):
        server.add_key(*pair)
    for name in NAMES:
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    write(path, OLD)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_PROFILE", "training")
    return path


def write(path: Path, pair: tuple[str, str]) -> None:
    path.write_text(
        f"[training]\naws_access_key_id = {pair[0]}\naws_secret_access_key = {pair[1]}\n"
    )


def refuse(proxy: FaultyProxy, pair: tuple[str, str]) -> None:
    proxy.faults = [Fault("expired", key="", method=ANY, access_key=pair[0])]


def test_a_profile_that_is_rewritten_during_an_upload(
    storage: Storage, proxy: FaultyProxy, view: Bucket, profile: Path, big: Path, client: str
) -> None:
    """And of a shard that is open. obstore has another client for uploads."""
    view.put("shard.tar", DATA)
    with open_read(f"{view.url}/shard.tar", PATIENT) as shard:
        assert shard.read(10) == DATA[:10] and storage.list() == []
        refuse(proxy, OLD)
        write(profile, NEW)
        storage.put_file(big, "big")
        assert shard.read() == DATA[10:]
    assert view.get("run/big") == DATA and proxy.fired >= (2 if client == "obstore" else 1)


def peak_growth(url: str, profile: str, pairs: list[tuple[str, str]]) -> int:
    """Bytes that this process has grown by while each pair was refused in turn and the next one was in the profile."""
    storage = open_storage(url, patience_seconds=120)
    for i, pair in enumerate(pairs):
        write(Path(profile), pair)
        assert storage.list() == []
        if i == 9:  # Python collects s3fs's first clients late: they take 50 MiB
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.full
def test_renewals_cost_no_memory(
    url: str, server: Server, proxy: FaultyProxy, profile: Path
) -> None:
    """Another client for each would cost 12 MiB that is never given back, and a run may renew for weeks."""
    pairs = [(f"RENEWED{i:02d}", "secret") for i in range(20)]
    for pair in pairs:
        server.add_key(*pair)
    proxy.faults = [
        Fault("expired", key="", method=ANY, access_key=key, skip=1) for key, _ in pairs
    ]
    assert warm.call(peak_growth, url, str(profile), pairs) < 40 << 20
    assert proxy.fired == 19


@pytest.mark.full
def test_who_renews_may_be_late_and_caught_in_the_middle(
    storage: Storage, proxy: FaultyProxy, profile: Path, big: Path, bucket: str, server: Server
) -> None:
    server.put(f"{bucket}/shard.tar", DATA)
    with open_read(f"s3://{bucket}/shard.tar", PATIENT) as shard:
        assert shard.read(10) == DATA[:10] and storage.list() == []
        refuse(proxy, OLD)

        def renew() -> None:
            for text in ("", "[train", f"[training]\naws_access_key_id = {NEW[0]}\n"):
                time.sleep(0.3)  # each is met by some request, and it is as well if it is not
                profile.write_text(text)
            time.sleep(0.3)
            write(profile, NEW)

        daemon = threading.Thread(target=renew)
        daemon.start()
        storage.put_file(big, "big")
        assert shard.read() == DATA[10:]
        daemon.join()
    assert storage.read_bytes("big") == DATA


def test_where_nothing_new_comes_it_ends(
    impatient: Storage, proxy: FaultyProxy, profile: Path, bucket: str, server: Server
) -> None:
    server.put(f"{bucket}/shard.tar", DATA)
    told = r"HTTP \d+ ExpiredToken: .*have expired: renew them where they come from"
    with open_read(f"s3://{bucket}/shard.tar", PATIENT.model_copy(update={"attempts": 3})) as shard:
        assert impatient.list() == [] and shard.read(10)
        refuse(proxy, OLD)
        with pytest.raises(PermissionError, match=told):
            impatient.put_bytes("a", b"")
        with pytest.raises(PermissionError, match=told):
            shard.read()


def test_a_key_that_is_withdrawn_is_asked_for_again(
    storage: Storage, server: Server, proxy: FaultyProxy, profile: Path, view: Bucket
) -> None:
    """Rotated by its owner: another answer than for a token whose time is over."""
    assert storage.list() == []
    server.remove_key(OLD[0])
    # where the server does not look
    proxy.faults = [
        Fault(
            "status", key="", method=ANY, code=403, s3code="InvalidAccessKeyId", access_key=OLD[0]
        )
    ]
    write(profile, NEW)
    assert storage.put_bytes("a", b"1") and view.get("run/a") == b"1"


@pytest.mark.full
def test_a_container_role_is_renewed_by_itself(
    storage: Storage, url: str, proxy: FaultyProxy, bucket: str, server: Server, monkeypatch: pytest.MonkeyPatch,
    big: Path,
) -> None:  # fmt: skip
    for name in NAMES:
        monkeypatch.delenv(name)
    server.put(f"{bucket}/shard.tar", DATA)
    with Vending(server, proxy, seconds=3) as vending:
        for name, value in vending.environment.items():
            monkeypatch.setenv(name, value)
        resigned = open_storage(url, patience_seconds=5)  # soon, where nothing good comes any more
        assert resigned.list() == []
        with open_read(f"s3://{bucket}/shard.tar", PATIENT) as shard:
            while len(proxy.faults) < 9:  # so many have had their time
                storage.put_file(big, "big")
                shard.seek(0)
                assert shard.read() == DATA
                assert [entry.name for entry in resigned.list()] == ["big"]
        vending.stale = True
        with pytest.raises(PermissionError, match="have expired: renew them"):
            while True:
                resigned.list()


def grep(secrets: list[str], folder: Path) -> list[str]:
    """Where any of them is found, in whatever file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        f"{path}: {each}"
        for path in files
        for each in secrets
        if each.encode() in path.read_bytes()
    ]


@pytest.mark.full
@pytest.mark.engine
def test_a_run_on_a_role_and_nothing_secret_is_left(
    tmp_path: Path,
    server: Server,
    proxy: FaultyProxy,
    bucket: str,
    view: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real command, its loader workers and its checkpoint writer, all on credentials that last a few seconds."""
    make_shards(tmp_path / "set")
    train = upload(server, tmp_path / "set", bucket)
    model = tmp_path / "small.json"
    model.write_text(json.dumps(MODEL))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=tmp_path / "run", train=train, model=model))
    for name in NAMES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "120")
    secrets = [SECRET, TOKEN]
    line = (
        f"checkpoint.remote=s3://{bucket}/run",
        "checkpoint.every_steps=5",
        "data.workers=1",
        "run.steps=20",
    )
    with Vending(server, proxy, seconds=3) as vending:
        for name, value in vending.environment.items():
            monkeypatch.setenv(name, value)
        status, out = finish(start(recipe, *line), timeout=900)
        assert status == 0, out
        assert vending.issued >= 6  # for three processes, and in each more than once
        assert view.newest_step("run") == 20 and view.incomplete("run") == []
        process = start(
            recipe, *line, "run.steps=100000", "storage.attempts=7", "checkpoint.grace_seconds=5"
        )
        wait_for_step(tmp_path / "run", 25, process, timeout=600)
        vending.stale = True
        status, failed = finish(process, timeout=900)
    assert status not in (0, 75) and "expired" in failed, failed
    log = tmp_path / "log.txt"
    log.write_text(out + failed)
    stored = view.keys()
    for key in stored:
        path = tmp_path / "store" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(view.get(key))
    assert grep(secrets, tmp_path) == []
    assert grep(["expired"], tmp_path)  # it would have been found


def test_a_profile_gives_endpoint_region_and_keys(
    storage: Storage,
    proxy: FaultyProxy,
    view: Bucket,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*NAMES, "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    config = f"[profile lab]\nregion = us-east-1\naws_access_key_id = {server.access_key}\n"
    config += f"aws_secret_access_key = {server.secret_key}\nendpoint_url = {proxy.url}\n"
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert storage.put_bytes("a", b"1") and view.get("run/a") == b"1"
    with open_read(f"{view.url}/run/a") as file:
        assert file.read() == b"1"


def test_an_endpoint_without_a_scheme_is_refused_with_the_remedy(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    with pytest.raises(OSError, match="'minio:9000': write https://host"):
        storage.list()


def test_a_public_bucket_needs_no_credentials(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, bucket: str, server: Server
) -> None:
    server.put(f"{bucket}/shard.tar", DATA)
    server.make_public(bucket)
    server.make_public(f"{bucket}/shard.tar")
    for name in NAMES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with open_read(f"s3://{bucket}/shard.tar", PATIENT) as shard:
        assert shard.read() == DATA
    assert [entry.name for entry in open_storage(f"s3://{bucket}").list()] == ["shard.tar"]
    assert {answer.access_key for answer in proxy.answers} == {""}


def test_what_cannot_be_read_says_who_is_refused(
    storage: Storage, proxy: FaultyProxy, bucket: str
) -> None:
    for code, advice in (
        ("AccessDenied", "the right to do it"),
        ("SignatureDoesNotMatch", "correct the credentials"),
    ):
        proxy.faults = [Fault("status", key="", method=ANY, code=403, s3code=code)]
        with pytest.raises(PermissionError, match=f"HTTP 403 {code}.*{advice}"):
            storage.list()
        with pytest.raises(StorageError):
            open_read(f"s3://{bucket}/shard.tar", PATIENT)
