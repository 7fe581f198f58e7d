"""Local storage: whole files or none, one winner, and 'not there' kept apart from 'cannot tell'."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clip_train.storage.base import Entry
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def files_below(folder: Path) -> dict[str, bytes]:
    """Everything on disk, hidden files too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_put_read_list_delete(storage: LocalStorage) -> None:
    assert storage.list() == []
    assert storage.put_bytes("b/two", b"22")
    assert storage.put_bytes("a", b"1")
    assert storage.put_bytes("b/two", b"222")  # replaces
    assert storage.list() == [Entry("a", 1), Entry("b/two", 3)]
    assert storage.list("b") == [Entry("b/two", 3)]
    assert storage.list("nothing") == storage.list("a") == []
    assert (storage.read_bytes("b/two"), storage.size("b/two")) == (b"222", 3)
    assert storage.read_bytes("b/two", 1, 3) == b"22"
    storage.delete("a")
    storage.delete("a")
    storage.delete_tree("b")
    storage.delete_tree("b")
    assert not storage.exists("a") and not storage.exists("b/two")
    assert files_below(storage.root) == {}


@pytest.mark.parametrize("call", ["read_bytes", "size"])
def test_missing_is_file_not_found(storage: LocalStorage, call: str) -> None:
    with pytest.raises(FileNotFoundError):
        getattr(storage, call)("no/such")


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up"])
def test_a_name_cannot_leave_the_root(storage: LocalStorage, name: str) -> None:
    with pytest.raises(ValueError, match="relative"):
        storage.put_bytes(name, b"")


def test_the_root_cannot_be_deleted(storage: LocalStorage) -> None:
    with pytest.raises(ValueError, match="below the root"):
        storage.delete_tree("")


def test_put_file(storage: LocalStorage, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"content")
    storage.put_file(local, "x/y")
    assert local.exists()
    assert files_below(storage.root) == {"x/y": b"content"}
    with pytest.raises(FileNotFoundError):
        storage.put_file(tmp_path / "absent", "x/z")
    assert files_below(storage.root) == {"x/y": b"content"}


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_failed_write_leaves_nothing(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    storage.put_bytes("kept", b"before")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name in ("kept", "new"):
        with pytest.raises(OSError, match="No space"):
            storage.put_bytes(name, b"after", if_absent=if_absent)
    assert files_below(storage.root) == {"kept": b"before"}


def test_if_absent_keeps_the_first(storage: LocalStorage) -> None:
    assert storage.put_bytes("c", b"first", if_absent=True) is True
    assert storage.put_bytes("c", b"second", if_absent=True) is False
    assert files_below(storage.root) == {"c": b"first"}


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_if_absent_has_one_winner(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    for trial in range(20):
        gate, won = threading.Barrier(6), []

        def race(i: int, name: str, gate: threading.Barrier, won: list[int]) -> None:
            gate.wait()
            if storage.put_bytes(name, b"%d" % i, if_absent=True):
                won.append(i)

        threads = [
            threading.Thread(target=race, args=(i, f"commit/{trial}", gate, won)) for i in range(6)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(won) == 1
        assert files_below(storage.root)[f"commit/{trial}"] == b"%d" % won[0]
    assert len(files_below(storage.root)) == 20  # no temporary files are left


def test_a_reader_sees_the_old_or_the_new(storage: LocalStorage) -> None:
    contents = [bytes([c]) * 200_000 for c in b"xyz"]
    storage.put_bytes("f", contents[0])
    watching, stop = threading.Event(), threading.Event()
    seen: set[bytes] = set()
    listed: set[str] = set()

    def watch() -> None:
        while not stop.is_set():
            seen.add(storage.read_bytes("f"))
            listed.update(entry.name for entry in storage.list())
            watching.set()

    thread = threading.Thread(target=watch)
    thread.start()
    assert watching.wait(240)
    for i in range(60):
        storage.put_bytes("f", contents[i % 3])
    stop.set()
    thread.join()
    assert seen <= set(contents)
    assert listed == {"f"}


def test_a_folder_that_goes_meanwhile_is_no_error(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("goes", "stays"):
        storage.put_bytes(f"{folder}/f", b"1")
        (storage.root / folder / ".f.0123.part").write_bytes(b"half")
    scandir = os.scandir

    def removes(path: Path | str | int) -> object:
        if (
            not isinstance(path, int) and Path(path).name == "goes"
        ):  # as another process does between its parent's listing and its own
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removes)
    assert [entry.name for entry in storage.list(unfinished=True)] == [
        "stays/.f.0123.part",
        "stays/f",
    ]
    assert [entry.name for entry in storage.list()] == ["stays/f"]


def test_what_cannot_be_told_raises(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put_bytes("sub/f", b"1")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(PermissionError):
        storage.exists("sub/f")
    monkeypatch.undo()
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda p: denied() if str(p).endswith("sub") else real(p))
    with pytest.raises(PermissionError):
        storage.list()


def test_file_url_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "f").write_bytes(b"1")
    for url in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", "~/a b"):
        assert open_storage(url).list() == [Entry("f", 1)]


def test_a_local_run_does_not_import_fsspec(tmp_path: Path) -> None:
    code = (
        "import sys; from clip_train.storage.urls import open_read, expand_glob, open_storage\n"
        f"open_storage({str(tmp_path)!r}).put_bytes('f', b'1'); expand_glob({str(tmp_path)!r} + '/*')\n"
        f"open_read({str(tmp_path)!r} + '/f').close()\n"
        "sys.exit('fsspec' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
