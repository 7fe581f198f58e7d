"""Local disk, or a mounted shared file system. What it reports as written survives a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from clip_train.errors import UserError
from clip_train.storage.base import Entry, Storage, checked

# File systems without hard links answer with one of these.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}


def open_own(path: str | os.PathLike[str], mode: str) -> IO[Any]:
    """A file of a run's folder, unbuffered where binary. UserError where it is a symbolic link: whoever made the folder
    must not choose what is written to. OSError."""

    def open_no_link(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, buffering=0 if "b" in mode else -1, opener=open_no_link)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise UserError(
            f"{path} is a symbolic link, through which nothing is written; remove it"
        ) from None


class LocalStorage(Storage):
    """`Storage` over a folder. The folder is made by the first write; reading never makes it.

    A write goes to a hidden file beside its target, is fsynced, renamed, and the folder is fsynced.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)

    def path(self, name: str) -> Path:
        """Where `name` lies on disk. ValueError for a name that leaves the root."""
        return self.root / checked(name)

    def read_bytes(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with self.path(name).open("rb") as f:
            f.seek(start)
            data = f.read(end - start)
        if len(data) != end - start:
            raise OSError(errno.EIO, f"{self.path(name)} ends before byte {end}")
        return data

    def put_file(
        self, local_path: str | os.PathLike[str], name: str, *, move: bool = False
    ) -> None:
        source, target = Path(local_path), self.path(name)
        with _part_of(target) as part:
            renames = move and source.stat().st_dev == target.parent.stat().st_dev
            written = source if renames else shutil.copyfile(source, part)
            fsync_file(written)
            os.replace(written, target)
        if move:
            source.unlink(missing_ok=True)

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        target = self.path(name)
        with _part_of(target) as part:
            with part.open("xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            if if_absent:
                return _publish_if_absent(part, target)
            os.replace(part, target)
        return True

    def _files(self, prefix: str) -> Iterator[Path]:
        """All at any depth, also where others remove folders meanwhile. OSError."""

        def refuse(error: OSError) -> None:
            if not isinstance(
                error, FileNotFoundError | NotADirectoryError
            ):  # not there, or gone since
                raise error

        for folder, _, names in os.walk(self.path(prefix), onerror=refuse, followlinks=True):
            yield from (Path(folder, name) for name in names)

    def list(self, prefix: str = "") -> list[Entry]:
        entries: list[Entry] = []
        for path in self._files(prefix):
            if not _is_part(path.name):
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    found = path.stat()
                    entries.append(
                        Entry(path.relative_to(self.root).as_posix(), found.st_size, found.st_mtime)
                    )
        return sorted(entries)

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def delete(self, name: str) -> None:
        target = self.path(name)
        try:
            target.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        fsync_folder(target.parent)

    def delete_tree(self, prefix: str) -> None:
        target = self.path(prefix)
        if target == self.root:
            raise ValueError("delete_tree needs a folder below the root")
        try:
            shutil.rmtree(target)
        except FileNotFoundError:
            if (
                target.exists()
            ):  # another process removed a file under our hands; it is still our job
                shutil.rmtree(target, ignore_errors=True)
            return
        fsync_folder(target.parent)

    def clock(self) -> float:
        """The disk's own: a network file system stamps files by its server's clock."""
        part = _part_beside(self.root / "clock")
        try:
            part.touch(exist_ok=False)
            return part.stat().st_mtime
        except OSError:  # not there, or not to be written to
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def sweep(
        self, older_than: float, spare: Callable[[str], bool] = lambda name: False, prefix: str = ""
    ) -> int:
        count = 0
        for part in filter(lambda path: _is_part(path.name), self._files(prefix)):
            target = part.with_name(part.name[1:].rsplit(".", 2)[0]).relative_to(self.root)
            with contextlib.suppress(FileNotFoundError):  # gone since
                if part.stat().st_mtime < older_than and not spare(target.as_posix()):
                    part.unlink()
                    count += 1
        return count


@contextlib.contextmanager
def _part_of(target: Path) -> Iterator[Path]:
    """A name beside `target` to write it under: once published it survives a power cut; nothing else is left."""
    _make_folder(target.parent)
    part = _part_beside(target)
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
    fsync_folder(target.parent)


def _part_beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")


def _is_part(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")


def _publish_if_absent(part: Path, target: Path) -> bool:
    """Give the finished file its name unless that is taken: one system call, so only one racer can win."""
    try:
        os.link(part, target)
        return True
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
    try:  # without hard links: claim the name with an empty file, which readers take for a torn one
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    os.replace(part, target)
    return True


def _make_folder(folder: Path) -> None:
    """mkdir -p that also survives a power cut: every folder that gained an entry is fsynced."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        fsync_folder(each.parent)


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable. Some network file systems cannot: they order renames themselves."""
    try:
        fsync_file(folder)
    except OSError as e:
        if e.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.ENOENT}:
            raise
