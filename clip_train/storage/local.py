"""Local disk, or a mounted shared file system. A completed write survives a power cut."""

import contextlib
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from clip_train.errors import UserError
from clip_train.storage.base import Entry, Storage, checked_name

# File systems without hard links answer with one of these.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
# Some network file systems cannot fsync a folder: they order renames themselves.
_NO_FSYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF}
_PART = ".*.part"  # hidden files of unfinished writes: .NAME.RANDOM.part


def open_own(path: str | os.PathLike[str], mode: str) -> IO[Any]:
    """Open a file of a run's folder, unbuffered if binary. OSError.

    UserError for a symbolic link, a folder or a pipe. The creator of the run's folder must not
    redirect writes or make them block.
    """

    def open_no_link(name: str, flags: int) -> int:
        if Path(name).is_fifo():
            raise OSError(errno.ENXIO, "a pipe")
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, buffering=0 if "b" in mode else -1, opener=open_no_link)
    except OSError as e:
        kinds = {errno.ELOOP: "symbolic link", errno.EISDIR: "folder", errno.ENXIO: "pipe"}
        if e.errno not in kinds:
            raise
        what = f"{path} is a {kinds[e.errno]}, and clip-train writes only to plain files"
        raise UserError(f"{what}; remove it") from None


def no_wait(name: str, flags: int) -> int:
    """An opener for `open`: a pipe in place of a file is read as empty instead of blocking."""
    return os.open(name, flags | os.O_NONBLOCK)


class LocalStorage(Storage):
    """`Storage` over a folder. The first write makes the folder; reading never makes it.

    A write goes to a hidden file beside its target, is fsynced and renamed; then the folder is
    fsynced.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)

    def path(self, name: str) -> Path:
        """Return the path of `name` on disk. ValueError if the name leaves the root."""
        return self.root / checked_name(name)

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with open(self.path(name), "rb", opener=no_wait) as f:
            if start:
                f.seek(start)  # only if needed: a pipe cannot seek
            data = f.read(-1 if end is None else end - start)
        if end is not None and len(data) != end - start:
            raise OSError(errno.EIO, f"{self.path(name)} ends before byte {end}")
        return data

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a path to write to. Afterwards, the file is stored under `name`. OSError."""
        target = self.path(name)
        with _part_file(target) as part:
            yield part
            _fsync(part)
            os.replace(part, target)

    def put_file(self, local_path: str | os.PathLike, name: str) -> None:
        with self.writing(name) as part:
            shutil.copyfile(local_path, part)

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        target = self.path(name)
        with _part_file(target) as part:
            part.write_bytes(data)
            _fsync(part)
            try:
                if if_absent:
                    _claim(target, part)
            except FileExistsError:
                return False
            os.replace(part, target)  # no effect if `_claim` has linked `part` as `target`
        return True

    def list(self, prefix: str = "", *, unfinished: bool = False) -> list[Entry]:
        """unfinished: list the hidden files of unfinished writes as well."""

        def on_error(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        entries = []
        for folder, _, names in os.walk(self.path(prefix), onerror=on_error, followlinks=True):
            for path in (Path(folder, name) for name in names):
                if path.match(_PART) and not unfinished:
                    continue
                with contextlib.suppress(FileNotFoundError):  # another process removed the file
                    stat = path.stat()
                    name = path.relative_to(self.root).as_posix()
                    entries.append(Entry(name, stat.st_size, stat.st_mtime))
        return sorted(entries)

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def delete(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.path(name).unlink()
                _fsync(self.path(name).parent)

    def delete_tree(self, prefix: str) -> None:
        target = self.path(prefix)
        if target == self.root:
            raise ValueError("delete_tree needs a folder below the root")
        errors: list[OSError] = []

        def on_error(function: Any, path: str, error: Any) -> None:
            if isinstance(error, tuple):  # `onerror` gets (type, error, traceback)
                error = error[1]
            # another process may have removed a file meanwhile
            if not isinstance(error, FileNotFoundError):
                errors.append(error)

        if target.is_symlink():  # remove the link only, not the folder behind it
            self.delete(prefix)
            return
        # with a handler, it continues after a file that cannot be removed
        if sys.version_info >= (3, 12):
            shutil.rmtree(target, onexc=on_error)
        else:
            shutil.rmtree(target, onerror=on_error)
        if errors:
            raise errors[0]
        with contextlib.suppress(FileNotFoundError):
            _fsync(target.parent)


@contextlib.contextmanager
def _part_file(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` to write to. Fsync every folder that gained an entry."""
    parents = (target.parent, *target.parent.parents)
    missing = [folder for folder in parents if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _fsync(folder.parent)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
    _fsync(target.parent)


def _claim(target: Path, part: Path) -> None:
    """Make the name exist, by one system call. FileExistsError for all writers except one."""
    try:
        os.link(part, target)
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        target.touch(exist_ok=False)  # empty for a moment: readers take it for damaged


def _fsync(path: Path) -> None:
    """Make a file, or the renames in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _NO_FSYNC or not path.is_dir():
            raise
    finally:
        os.close(fd)
