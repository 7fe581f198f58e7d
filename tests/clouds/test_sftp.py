"""sftp:// against a real sshd: files are whole or missing, one of racing writers wins, and messages name the remedy."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clip_train.checkpoint.config import preflight
from clip_train.errors import CheckpointError, UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import StorageError
from clip_train.storage.sftp_store import SftpStorage
from clip_train.storage.urls import expand_glob, open_read, open_storage
from tests.clouds.sshd import Sshd
from tests.s3.folder import Folder
from tests.s3.runs import RUNS, Run, assert_is

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def sshd() -> Iterator[Sshd]:
    if missing := Sshd.missing():
        pytest.skip(missing)
    with Sshd() as up:
        yield up


@pytest.fixture
def runs() -> Iterator[None]:
    yield
    while RUNS:
        RUNS.pop().manager.close()


@pytest.fixture
def folder(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    for name, value in sshd.environment().items():
        monkeypatch.setenv(name, value)
    return Folder(tmp_path / "served", sshd.url(tmp_path / "served"))


@pytest.fixture
def storage(folder: Folder) -> SftpStorage:
    opened = open_storage(f"{folder.url}/run", patience_seconds=30)
    assert isinstance(opened, SftpStorage)
    return opened


def test_put_read_list_delete(storage: SftpStorage, folder: Folder, tmp_path: Path) -> None:
    assert storage.list() == [] and not storage.exists("a")
    assert storage.put_bytes("a", b"1") and storage.put_bytes("b/two", b"22")
    assert storage.put_bytes("b/two", b"222")
    (tmp_path / "local").write_bytes(DATA)
    storage.put_file(tmp_path / "local", "b/big")
    assert folder.get("run/b/big") == DATA
    assert storage.list() == [Entry("a", 1), Entry("b/big", len(DATA)), Entry("b/two", 3)]
    assert [each.name for each in storage.list("b")] == ["b/big", "b/two"]
    assert (storage.read_bytes("b/two"), storage.size("b/two")) == (b"222", 3)
    assert storage.read_bytes("b/big", 7, 900_000) == DATA[7:900_000]
    for ask in (storage.read_bytes, storage.size, lambda name: storage.read_bytes(name, 0, 5)):
        with pytest.raises(FileNotFoundError):
            ask("b/none")
    assert expand_glob(f"{storage.url}/b/*") == [f"{storage.url}/b/{n}" for n in ("big", "two")]
    with open_read(f"{storage.url}/b/big") as file:
        file.seek(1000)
        assert file.read(100) == DATA[1000:1100]
    storage.delete("a")
    storage.delete("a")
    storage.delete_tree("b")
    assert folder.keys() == [] and not (folder.path / "run" / "b").exists()


def test_of_racing_writers_one_wins(storage: SftpStorage, folder: Folder) -> None:
    """Each has a connection of its own, as processes have."""
    won: list[int] = []
    urls = [storage.url.replace("127.0.0.1", f"alias{i}") for i in range(8)]
    others = [open_storage(url, patience_seconds=30) for url in urls]
    start = threading.Barrier(len(others))

    def race(i: int) -> None:
        start.wait()
        if others[i].put_bytes("mark", f"{i}".encode(), if_absent=True):
            won.append(i)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(len(others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"{i}".encode() for i in won] == [folder.get("run/mark")]
    assert folder.keys() == ["run/mark"]


def test_an_unfinished_file_is_not_listed(storage: SftpStorage, folder: Folder) -> None:
    folder.put("run/ckpt/.file.0123abcd.part", b"half")
    assert storage.list() == [] and len(storage.list_all()) == 1
    assert preflight(storage) == []
    storage.delete_tree("ckpt")
    assert folder.keys() == []


def test_a_connection_that_ends_is_opened_again(storage: SftpStorage, sshd: Sshd) -> None:
    assert storage.put_bytes("a", b"1")
    sshd.stop()
    sshd.start()
    assert storage.read_bytes("a") == b"1"


def test_checkpoints(folder: Folder, tmp_path: Path, runs: None) -> None:
    """Two processes in turn: the second takes over, and the first may not commit any more."""
    url = f"{folder.url}/run"
    first = Run(tmp_path / "a", url, keep_last=1)
    first.manager.preflight()
    folder.put("run/ckpt/s0000000009/e000000-0123abcd/.rank00000.safetensors.01.part", b"half")
    assert first.save(1) and first.save(2)
    second = Run(tmp_path / "b", url, keep_last=1)
    assert assert_is(second.resume(), 2).fetched > 0
    second.manager.begin()
    with pytest.raises(CheckpointError, match=r"writes to sftp://.* now \(its epoch is 1"):
        first.save(3)
    assert second.save(3) and second.save(4)
    second.manager.close()
    assert folder.incomplete("run") == [] and folder.orphans("run") == []
    assert sorted(each["step"] for each in folder.commits("run").values()) == [2, 4]


def test_messages_name_the_remedy(
    storage: SftpStorage,
    folder: Folder,
    sshd: Sshd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wrong in ("sftp://host", "sftp:///path", "sftp://me:secret@host/path"):
        with pytest.raises(UserError, match="write sftp://host/path") as caught:
            open_storage(wrong)
        assert "secret" not in str(caught.value)

    def says(pattern: str, config: str) -> None:
        (tmp_path / "config").write_text(config)
        monkeypatch.setenv("CLIP_TRAIN_SSH_CONFIG", str(tmp_path / "config"))
        user = f"u{uuid.uuid4().hex[:8]}"  # a connection of its own
        url = folder.url.replace("sftp://", f"sftp://{user}@")
        with pytest.raises(StorageError, match=pattern):
            open_storage(url, patience_seconds=0.5).list()

    key, known = f"IdentityFile {sshd.folder}/key", f"UserKnownHostsFile {sshd.folder}/known_hosts"
    says("not found in known_hosts.*run `ssh 127.0.0.1` once", f"Host *\n{key}\n")
    says("Authentication failed.*a key that the server accepts", f"Host *\n{key}\n{known}\n")
