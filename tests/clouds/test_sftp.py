"""sftp:// against a real sshd: files are whole or missing, one of racing writers wins, and messages name the remedy."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clip_train.checkpoint.config import preflight
from clip_train.errors import CheckpointError, UserError
from clip_train.storage.base import Entry
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import StorageError
from clip_train.storage.sftp_store import SftpStorage
from clip_train.storage.urls import expand_glob, open_read, open_storage
from tests.clouds.sshd import SFTP_SERVER, Sshd
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
def served_otherwise(sshd: Sshd) -> Iterator[Sshd]:
    """The test may change what serves."""
    yield sshd
    sshd.serve("internal-sftp")


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
    assert storage.read_bytes("b/two", 1) == b"22"  # to the end
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


def test_a_full_disk_publishes_nothing(
    served_otherwise: Sshd, storage: SftpStorage, folder: Folder, tmp_path: Path
) -> None:
    """The last megabytes are on the way when the disk is full, and paramiko ignores their errors."""
    script = tmp_path / "sftp-server"
    script.write_text(f"#!/bin/bash\ntrap '' XFSZ\nulimit -f 1024\nexec {SFTP_SERVER}\n")
    script.chmod(0o755)
    served_otherwise.serve(str(script))
    hasty = SftpStorage(storage.url, patience_seconds=0.2)
    assert hasty.put_bytes("fits", DATA[:-1])
    (tmp_path / "local").write_bytes(2 * DATA)
    for write in (
        lambda: hasty.put_bytes("bytes", 2 * DATA),
        lambda: hasty.put_bytes("new", 2 * DATA, if_absent=True),
        lambda: hasty.put_file(tmp_path / "local", "file"),
    ):
        with pytest.raises(
            StorageError, match=r"Failure; the server does not say why: often .*disk is full"
        ):
            write()
    assert folder.keys() == ["run/fits"]


def test_a_file_is_on_the_disk_before_it_has_its_name(
    served_otherwise: Sshd, storage: SftpStorage, folder: Folder, tmp_path: Path
) -> None:
    """And then its name, and those of new folders."""
    log = tmp_path / "log"
    served_otherwise.serve(f"{SFTP_SERVER} -e -l VERBOSE 2>>{log}")
    (tmp_path / "local").write_bytes(DATA)
    root, new = f"{folder.path}/run", "commit/new"
    for name, write in {
        "a/file": lambda: storage.put_file(tmp_path / "local", "a/file"),
        "a/bytes": lambda: storage.put_bytes("a/bytes", b"1"),
        new: lambda: storage.put_bytes(new, b"1", if_absent=True),
    }.items():
        log.write_bytes(b"")
        write()
        parent, _, last = f"{root}/{name}".rpartition("/")
        done = re.findall(r'(?m)^(?:posix-)?(fsync|rename)(?: old)? "(.*?)"', log.read_text())
        part = done[0][1]
        assert part.startswith(f"{parent}/.{last}.") and done[:2] == [
            ("fsync", part),
            ("rename", part),
        ]
        assert ("fsync", parent) in done[2:]
        assert (("fsync", root) in done[2:]) == (name != "a/bytes")
    served_otherwise.serve("internal-sftp -P fsync")
    assert storage.put_bytes("without", b"1") and folder.get("run/without") == b"1"


def test_a_server_that_may_only_be_read_is_told(
    served_otherwise: Sshd, storage: SftpStorage, folder: Folder
) -> None:
    served_otherwise.serve("internal-sftp -R")
    with pytest.raises(PermissionError, match="Permission denied; give this user the right"):
        storage.put_bytes("a/b/c", b"1")
    served_otherwise.serve("internal-sftp -P posix-rename")
    with pytest.raises(
        StorageError, match=r"does not offer posix-rename.*use the sftp server of OpenSSH"
    ):
        storage.put_bytes("a", b"1")
    assert folder.keys() == []


def test_settings_that_ssh_accepts(
    storage: SftpStorage,
    folder: Folder,
    sshd: Sshd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files that the settings name and that do not exist; lines of known_hosts that paramiko cannot
    read. A store whose settings are wrong is never an empty one."""
    assert storage.put_bytes("a", b"1")
    known = (sshd.folder / "known_hosts").read_text()
    _, kind, key = known.split()
    (tmp_path / "known").write_text(
        f"@cert-authority *.org {kind} {key}\n# a comment\nhost {kind} x\n{known}"
    )
    lines = f"IdentityFile {sshd.folder}/key\nUserKnownHostsFile {tmp_path}/known\n"

    def look(config: str, name: str) -> bool:
        (tmp_path / "config").write_text(f"Host {name}\n{config}")
        monkeypatch.setenv("CLIP_TRAIN_SSH_CONFIG", str(tmp_path / "config"))
        # each alias has another connection
        return open_storage(storage.url.replace("127.0.0.1", name), patience_seconds=0).exists("a")

    host = f"HostName 127.0.0.1\nUser {sshd.folder.owner()}\n"
    assert look(f"{host}{lines}", "Upper")
    more = f"IdentityFile {tmp_path}/none\nUserKnownHostsFile {tmp_path}/known {tmp_path}/none\n"
    assert look(f"{host}{more}{lines}", "b")
    (tmp_path / "known").write_text(f"@revoked * {kind} {key}\n{known}")
    for config, message in {
        f"{host}{lines}": "not found in known_hosts",
        f"{host}IdentityFile {tmp_path}/none\nUserKnownHostsFile {sshd.folder}/known_hosts\n": "there is no .*/none",
        "ProxyJump other\n": "proxyjump for c, which is not supported",
        "Nonsense\n": "config cannot be read",
    }.items():
        with pytest.raises(StorageError, match=message) as caught:
            look(config, "c")
        assert not isinstance(caught.value, FileNotFoundError)
    monkeypatch.setenv("CLIP_TRAIN_SSH_CONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(StorageError, match=r"nowhere cannot be read.*CLIP_TRAIN_SSH_CONFIG"):
        open_storage(storage.url.replace("127.0.0.1", "d"), patience_seconds=0).exists("a")


def test_names_are_kept_as_they_are(folder: Folder) -> None:
    for root in ("a#b", "a?b=c", "a%20b", "ü +"):
        storage = open_storage(f"{folder.url}/{root}/", patience_seconds=30)
        assert storage.put_bytes("n#?%+ ü/f", b"1")
        assert folder.get(f"{root}/n#?%+ ü/f") == b"1"
        assert [entry.name for entry in storage.list()] == ["n#?%+ ü/f"]
        with open_read(f"{storage.url}/n#?%+ ü/f") as file:
            assert file.read() == b"1"
    assert len(folder.keys()) == 4
    with pytest.raises(StorageError, match="Bad message: the name may be too long"):
        storage.put_bytes("n" * 300, b"1")
    for wrong in ("sftp://host:port/path", "sftp://host:99999/path", "sftp://[::1/path"):
        with pytest.raises(UserError, match="write sftp://host/path, with the port as a number"):
            open_storage(wrong)


def test_a_name_that_is_not_utf8_is_named(storage: SftpStorage, folder: Folder) -> None:
    folder.put("run/a", b"1")
    (folder.path / "run" / "\udce9").write_bytes(b"1")
    with pytest.raises(StorageError, match=r"/run has a name that is not UTF-8.*rename it"):
        storage.list()


def test_links_count_as_what_they_point_to(
    storage: SftpStorage, folder: Folder, tmp_path: Path
) -> None:
    """As on a disk. Removing a folder leaves what its links point to."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "0.tar").write_bytes(DATA)
    folder.put("run/data/own", b"1")
    here = folder.path / "run" / "data"
    for name, target in {
        "1.tar": real / "0.tar",
        "more": real,
        "up": here.parent,
        "gone": real / "x",
    }.items():
        (here / name).symlink_to(target)
    found = [
        Entry("data/1.tar", len(DATA)),
        Entry("data/more/0.tar", len(DATA)),
        Entry("data/own", 1),
    ]
    assert storage.list() == found
    assert expand_glob(f"{storage.url}/**/*.tar") == [
        f"{storage.url}/{each.name}" for each in found[:2]
    ]
    storage.delete_tree("data")
    assert not here.exists() and (real / "0.tar").read_bytes() == DATA


class Link:
    """A way to the server. `quiet_after`: bytes that the first connection carries to the server, then it is silent."""

    def __init__(self, port: int, quiet_after: int) -> None:
        self.to, self.left = port, quiet_after
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets = [self.listener]
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            first = True
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.to))
                self.sockets += [client, server]
                for one, other, limited in ((client, server, first), (server, client, False)):
                    threading.Thread(
                        target=self.carry, args=(one, other, limited), daemon=True
                    ).start()
                first = False

    def close(self) -> None:
        for one in self.sockets:
            one.close()

    def carry(self, one: socket.socket, other: socket.socket, limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if limited:
                    self.left -= len(data)
                    if self.left < 0:
                        continue  # taken, and never delivered
                other.sendall(data)


def test_a_silent_server_is_noticed_during_an_upload(
    sshd: Sshd, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the time for all bytes has passed: at the least rate these take an hour. The next
    attempt removes what the first one left."""
    link = Link(sshd.port, len(DATA) // 2)
    known = (sshd.folder / "known_hosts").read_text().replace(f"{sshd.port}", f"{link.port}")
    (tmp_path / "known").write_text(known)
    config = (
        (sshd.folder / "config")
        .read_text()
        .replace(f"{sshd.folder}/known_hosts", f"{tmp_path}/known")
    )
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("CLIP_TRAIN_SSH_CONFIG", str(tmp_path / "config"))
    url = f"{folder.url}/run".replace(f"{sshd.port}", f"{link.port}")
    storage = SftpStorage(url, request_seconds=1, min_rate=300, patience_seconds=600)
    (tmp_path / "local").write_bytes(DATA)
    storage.put_file(tmp_path / "local", "file")
    link.close()
    assert folder.get("run/file") == DATA
    assert [path.name for path in (folder.path / "run").iterdir()] == ["file"]


def test_a_file_that_is_closed_leaves_others_their_connection(
    sshd: Sshd, storage: SftpStorage, folder: Folder
) -> None:
    """Ranges that were fetched ahead are not wanted any more. One attempt must be enough."""
    once = StorageConfig(attempts=1)
    for name in ("run/a", "run/b"):
        folder.put(name, 32 * DATA)
    sshd.stop()  # the connection of another test ends: an attempt must not fail by that either
    sshd.start()
    for _ in range(3):
        with open_read(f"{storage.url}/a", once) as file:
            assert file.read(5 << 20) == (5 * DATA)
        with open_read(f"{storage.url}/b", once) as file:
            assert file.read(10) == DATA[:10]
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 1
