"""Paths and URLs of shards. `memory://` stands for every fsspec protocol."""

import importlib.util
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import obstore
import pytest

from clip_train.checkpoint.config import CheckpointConfig, preflight
from clip_train.data.shards import expand, expand_braces
from clip_train.errors import CheckpointError, UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import StorageError
from clip_train.storage.object_store import ObjectStorage
from clip_train.storage.remote import Pace, RemoteStorage
from clip_train.storage.urls import (
    expand_glob,
    is_remote,
    local_path,
    open_read,
    open_storage,
)
from tests.s3.conftest import forget_buckets


@pytest.fixture
def bucket() -> Iterator[str]:
    import fsspec

    fs, name = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    fs.pipe({f"{name}/shards/{i:05d}.tar": bytes([i]) * (i + 1) for i in range(3)})
    fs.pipe(f"{name}/other.txt", b"text")
    yield f"memory:/{name}"
    fs.rm(name, recursive=True)


def test_is_remote() -> None:
    assert [is_remote(u) for u in ("s3://b/k", "https://h/p", "simplecache::s3://b/k")] == [
        True
    ] * 3
    assert is_remote("my_package.stores:MyStore://h/p") and is_remote("_my.MyStore://h/p")
    assert [is_remote(u) for u in ("/a/b", "a:b", "file:///a", "~/x", "pipe:cat x")] == [False] * 5
    with pytest.raises(ValueError, match="not a local path"):
        local_path("s3://b/k")


def test_local_glob(tmp_path: Path) -> None:
    for name in ("b-1.tar", "b-0.tar", "c.txt", "odd[1].tar"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "dir.tar").mkdir()
    assert expand_glob(str(tmp_path / "b-*.tar")) == [str(tmp_path / f"b-{i}.tar") for i in (0, 1)]
    assert expand_glob(f"file://{tmp_path}/b-?.tar") == [
        str(tmp_path / f"b-{i}.tar") for i in (0, 1)
    ]
    assert expand_glob(str(tmp_path / "absent.tar")) == [
        str(tmp_path / "absent.tar")
    ]  # no pattern: not looked for
    assert expand_glob(tmp_path / "odd[1].tar") == [str(tmp_path / "odd[1].tar")]
    assert len(expand_glob(str(tmp_path / "*.tar"))) == 3  # not the folder
    with pytest.raises(UserError, match="no file matches"):
        expand_glob(str(tmp_path / "z-*.tar"))
    with open_read(tmp_path / "b-0.tar") as f:
        assert f.read() == b"b-0.tar"
    with pytest.raises(FileNotFoundError):
        open_read(str(tmp_path / "absent.tar"))


def test_remote_is_read_and_seeked(bucket: str) -> None:
    urls = expand_glob(f"{bucket}/shards/*.tar")
    assert [u.rsplit("/", 1)[1] for u in urls] == ["00000.tar", "00001.tar", "00002.tar"]
    with open_read(urls[2]) as f:
        f.seek(1)
        assert f.read() == b"\2\2"
    with pytest.raises(UserError, match="no file matches"):
        expand_glob(f"{bucket}/shards/*.zip")
    with pytest.raises(FileNotFoundError):
        open_read(f"{bucket}/absent")


def test_remote_storage_reads(bucket: str) -> None:
    storage = open_storage(bucket)
    assert storage.list("shards") == [Entry(f"shards/{i:05d}.tar", i + 1) for i in range(3)]
    assert Entry("other.txt", 4) in storage.list()
    assert storage.list("absent") == []
    assert storage.read_bytes("other.txt") == b"text" and storage.size("other.txt") == 4
    assert storage.exists("other.txt") and not storage.exists("absent")
    assert storage.read_bytes("other.txt", 1, 3) == b"ex"


MEMORY = obstore.store.MemoryStore()


class MemoryStorage(ObjectStorage):
    """A store of a user's own, which a URL names by its dotted path."""

    def open(self, **options: Any) -> Any:
        return MEMORY


class ShortStorage(MemoryStorage):
    most_listed = 2


class RootlessStorage(MemoryStorage):
    """Its author took the keys of a listing for names below the root."""

    async def listing(self, folder: str, pace: Pace) -> list[Entry]:
        found = await super().listing(folder, pace)
        return [Entry(each.name.removeprefix(f"{self.root}/"), each.size) for each in found]


def test_a_store_that_does_not_list_its_files_is_refused() -> None:
    """A run would not find its checkpoints there, and begin anew."""
    place = f"bucket/{uuid.uuid4().hex}/run"
    assert preflight(open_storage(f"{__name__}.MemoryStorage://{place}")) == []
    with pytest.raises(CheckpointError, match="does not list a file that it has stored"):
        preflight(open_storage(f"{__name__}.RootlessStorage://{place}"))


class IncompleteStorage(RemoteStorage):
    """Its author has not yet written its methods."""


def test_a_store_that_lacks_methods_is_refused() -> None:
    with pytest.raises(UserError, match=r"IncompleteStorage has no .*\blisting\b.*; define"):
        open_storage(f"{__name__}.IncompleteStorage://bucket/p")


def test_the_host_of_a_store_of_ones_own_is_known() -> None:
    """urlsplit finds none, because the module's name has an underscore."""
    assert cast("RemoteStorage", open_storage(f"{__name__}.MemoryStorage://h:80/p")).host == "h:80"


def test_a_listing_without_an_end_is_given_up() -> None:
    storage = ShortStorage(f"memory://bucket/{uuid.uuid4().hex}")
    storage.put_bytes("a", b"")
    storage.put_bytes("b", b"")
    assert [entry.name for entry in storage.list()] == ["a", "b"]
    storage.put_bytes("c", b"")
    with pytest.raises(StorageError, match="more than 2 objects are listed there: name a folder"):
        storage.list()


@pytest.mark.parametrize(
    "scheme",
    ["memory", "fsspec+memory", f"{__name__}.MemoryStorage", f"{__name__}:MemoryStorage"],
)
def test_any_remote_storage_can_be_written_to(scheme: str, tmp_path: Path) -> None:
    """What tests/s3/test_storage.py shows for S3."""
    bucket, root = uuid.uuid4().hex, uuid.uuid4().hex
    storage = open_storage(f"{scheme}://{bucket}/{root}")
    assert storage.list() == [] and not storage.exists("a")
    assert storage.put_bytes("a", b"1") and storage.put_bytes("b/two", b"22")
    assert storage.put_bytes("b/two", b"222")  # replaces
    local = tmp_path / "local"
    local.write_bytes(b"content")
    storage.put_file(local, "b/file")
    assert storage.list("b") == [Entry("b/file", 7), Entry("b/two", 3)]
    assert (storage.read_bytes("b/two"), storage.size("b/two")) == (b"222", 3)
    assert storage.read_bytes("b/file", 1, 3) == b"on"
    assert storage.read_bytes("b/two", 1) == b"22"  # to the end
    assert storage.put_bytes("once", b"first", if_absent=True)
    assert not storage.put_bytes("once", b"second", if_absent=True)
    assert storage.read_bytes("once") == b"first"
    for ask in (storage.read_bytes, storage.size, lambda name: storage.read_bytes(name, 0, 5)):
        with pytest.raises(FileNotFoundError):
            ask("b/none")
    assert expand_glob(f"{storage.url}/b/*") == [f"{storage.url}/b/{n}" for n in ("file", "two")]
    assert abs(time.time() - storage.list()[0].modified) < 600
    storage.delete("a")
    storage.delete("a")
    storage.delete_tree("b")
    assert [entry.name for entry in storage.list()] == ["once"]
    with pytest.raises(ValueError, match="relative"):
        storage.read_bytes("../other")
    with pytest.raises(ValueError, match="below the root"):
        storage.delete_tree("")


def test_a_store_that_cannot_be_imported_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"no_such\.Store\) cannot be imported"):
        open_storage("no_such.Store://bucket/run")
    with pytest.raises(UserError, match=r"subprocess\.run\) is not a subclass of .*Storage"):
        open_storage("subprocess.run://bucket/run")


def test_brackets_of_a_host_are_no_pattern() -> None:
    assert expand_glob("http://[::1]:80/a.tar") == ["http://[::1]:80/a.tar"]


def test_an_unknown_protocol_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="not a URL that fsspec can open"):
        open_read("s4://bucket/key")
    if importlib.util.find_spec("gcsfs") is None:
        with pytest.raises(UserError, match=r"gcsfs.*; install it, or use storage\.client=obstore"):
            open_storage("gs://bucket/key", client="fsspec")


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        ("s3://", "write s3://bucket/prefix"),
        ("fsspec+s3://", r"write fsspec\+s3://bucket/prefix"),
        ("gs://b*/run", "write gs://bucket/prefix"),
        ("az:///run", "write az://bucket/prefix"),
        ("sftp://host", "write sftp://host/path"),
        ("simplecache::s3://bucket/run", "simplecache:: is for reading; leave simplecache:: out"),
    ],
)
def test_a_wrong_place_for_checkpoints_is_the_recipes_mistake(remote: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint.remote.*{message}"):
        CheckpointConfig(remote=remote)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No S3 to be asked: nothing listens at the endpoint, and credentials come only from the environment."""
    with socket.socket() as taken:  # and not listened on
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_PROFILE",
        ):
            monkeypatch.delenv(name, raising=False)
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, "/nowhere")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "0")
        forget_buckets()
        yield
        forget_buckets()


@pytest.mark.parametrize(
    "key, why", [("", "NoCredentialsError.*; log in, set AWS_PROFILE"), ("k", "Connection refused")]
)
def test_s3_that_cannot_be_asked_is_a_mistake_in_words(
    nowhere: None, monkeypatch: pytest.MonkeyPatch, key: str, why: str
) -> None:
    if key:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key)
    with pytest.raises(
        UserError, match=rf"data\.val \(s3://b/x/\*\.tar\) cannot be listed .*{why}"
    ):
        expand("s3://b/x/*.tar", "data.val")
    with pytest.raises(OSError, match=f"s3://b/sizes.json: writing: .*{why}"):
        open_storage("s3://b/sizes.json").put_bytes("", b"{}")


def test_a_cache_stays_in_front_of_its_url_among_several_sources() -> None:
    cached = "simplecache::s3://a/{0..1}.tar::b/2.tar::filecache::https://h/3.tar::notsimplecache"
    assert [each for (each,) in expand_braces("a.tar::b.tar")] == ["a.tar", "b.tar"]
    assert expand_braces(cached) == [
        ["simplecache::s3://a/0.tar", "simplecache::s3://a/1.tar"],
        ["b/2.tar"],
        ["filecache::https://h/3.tar"],
        ["notsimplecache"],
    ]
