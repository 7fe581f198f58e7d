"""A server's disk by sftp: `sftp://host/path`, through paramiko.

Users, keys, ports and known hosts are those of OpenSSH's `~/.ssh/config`, or of the file that
`CLIP_TRAIN_SSH_CONFIG` names. fsspec's own client accepts any host key, cannot create a file only
if it is absent, and writes to a file's final name.
"""

import asyncio
import builtins
import contextlib
import getpass
import itertools
import operator
import os
import stat
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from clip_train.errors import UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import ChangedError, TransferError
from clip_train.storage.remote import Pace, RemoteStorage, checked_length

CONFIG = "CLIP_TRAIN_SSH_CONFIG"  # environment: the file in place of ~/.ssh/config
_READ_BYTES = 32 << 10  # of one request, which every server answers; many are under way at once
_CONNECT_SECONDS = 20
_PART = ".part"  # the end of the names of unfinished files: .NAME.RANDOM.part
T = TypeVar("T")


@dataclass
class Connection:
    """One session with a server. paramiko mixes up the answers to several threads: one at a time.

    Its users are tasks of fsspec's event loop.
    """

    client: Any = None  # paramiko.SSHClient
    sftp: Any = None  # paramiko.SFTPClient
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def close(self) -> None:
        client, self.client, self.sftp = self.client, None, None
        if client is not None:
            client.close()


# by process and server: all storages of a process share them, and a forked one opens its own
_connections: dict[tuple[int, str], Connection] = {}


class SftpStorage(RemoteStorage):
    """`Storage` over `sftp://[user@]host[:port]/path`.

    A file is written under a hidden name and renamed. Renaming to a name that exists fails, and is
    decided by the server's file system, so one of several racing writers wins.
    """

    def __init__(self, url: str, **limits: Any) -> None:
        """UserError for a URL with a password, or without a host or a path."""
        parts = urlsplit(url)
        if not parts.hostname or not parts.path.strip("/") or parts.password is not None:
            raise UserError(
                f"sftp://{parts.hostname or ''}{parts.path}: write sftp://host/path, without a "
                "password: log in by a key, which ~/.ssh/config or an agent has"
            )
        super().__init__(url, parts.path, **limits)
        self._user, self._port = parts.username, parts.port

    @property
    def _connection(self) -> Connection:
        return _connections.setdefault((os.getpid(), self.host), Connection())

    async def connect(self) -> None:
        connection = self._connection
        async with connection.turn:
            if connection.sftp is None:
                await asyncio.to_thread(self._open, connection)

    def _open(self, connection: Connection) -> None:
        """PermissionError if the server refuses the keys; ValueError for an unknown server;
        another OSError."""
        try:
            import paramiko
        except ImportError as e:
            raise UserError(f"{self.url}: {e}; pip install 'clip-train[sftp]'") from e
        host = str(urlsplit(f"//{self.host}").hostname)
        file = Path(os.environ.get(CONFIG, "~/.ssh/config")).expanduser()
        config = paramiko.SSHConfig()
        if file.exists():
            config = paramiko.SSHConfig.from_path(str(file))
        settings = config.lookup(host)
        client = paramiko.SSHClient()  # refuses unknown hosts
        client.load_system_host_keys()
        for known in settings.get("userknownhostsfile", "").split():
            client.load_system_host_keys(os.path.expanduser(known))
        try:
            client.connect(
                settings["hostname"],
                port=self._port or int(settings.get("port", 22)),
                username=self._user or settings.get("user") or getpass.getuser(),
                key_filename=settings.get("identityfile"),
                timeout=_CONNECT_SECONDS,
                banner_timeout=_CONNECT_SECONDS,
                auth_timeout=_CONNECT_SECONDS,
            )
            client.get_transport().set_keepalive(15)
            connection.sftp = client.open_sftp()
            connection.client = client
        except paramiko.BadHostKeyException as e:
            client.close()
            raise ValueError(f"{host} has another host key than known_hosts: {e}") from e
        except (paramiko.AuthenticationException, paramiko.PasswordRequiredException) as e:
            client.close()
            raise PermissionError(f"{e} (user {self._user or settings.get('user')})") from e
        except paramiko.SSHException as e:
            client.close()
            if "not found in known_hosts" in str(e):
                raise ValueError(f"{e}: run `ssh {host}` once, and compare its key") from e
            raise ConnectionError(str(e) or type(e).__name__) from e
        except OSError as e:
            client.close()
            # of several addresses: the reason of the first
            reasons = list(getattr(e, "errors", {}).values())
            raise reasons[0] if reasons else e from None

    async def _call(self, pace: Pace, call: Callable[[Any], T], num_bytes: int = 0) -> T:
        """The result of a call with paramiko's client, in a thread."""
        connection = self._connection
        async with connection.turn:
            if connection.sftp is None:  # closed since `connect`
                raise TransferError("the connection was closed")
            try:
                return await pace.hold(asyncio.to_thread(call, connection.sftp), num_bytes)
            except (FileNotFoundError, FileExistsError, PermissionError, ChangedError):
                raise
            except BaseException:  # a thread may wait for an answer: end its connection
                connection.close()
                raise

    async def head(self, key: str, pace: Pace) -> Entry:
        found = await self._call(pace, lambda sftp: sftp.stat(key))
        if stat.S_ISDIR(found.st_mode):
            raise FileNotFoundError(f"{key} is a folder")
        return Entry(key, found.st_size, float(found.st_mtime), _tag(found))

    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        def read(sftp: Any) -> bytes:
            with sftp.open(key, "rb") as file:
                found = file.stat()
                if tag not in (None, _tag(found)):
                    raise ChangedError(f"it was {tag} when it was opened and is {_tag(found)}")
                last = found.st_size if end is None else min(end, found.st_size)
                cuts = [*range(begin, last, _READ_BYTES), last]
                pieces = [(a, b - a) for a, b in itertools.pairwise(cuts)]
                return b"".join(file.readv(pieces)) if pieces else b""

        num_bytes = self.part_bytes if end is None else end - begin
        data = await self._call(pace, read, num_bytes)
        return data if end is None else checked_length(data, num_bytes)

    async def listing(self, folder: str, pace: Pace) -> builtins.list[Entry]:
        entries: builtins.list[Entry] = []
        folders = [folder.rstrip("/")]
        while folders:
            parent = folders.pop()
            try:
                found = await self._call(pace, operator.methodcaller("listdir_attr", parent))
            except FileNotFoundError:  # removed since, or never there
                continue
            for each in found:
                path = f"{parent}/{each.filename}"
                if stat.S_ISDIR(each.st_mode):
                    folders.append(path)
                else:
                    entries.append(Entry(path, each.st_size, float(each.st_mtime)))
        return entries

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        return [entry for entry in self.list_all(prefix) if not _is_unfinished(entry.name)]

    def list_all(self, prefix: str = "") -> builtins.list[Entry]:
        return super().list(prefix)

    async def put(self, key: str, source: bytes | Path, if_absent: bool, pace: Pace) -> object:
        folder, _, name = key.rpartition("/")
        part = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}{_PART}"

        def write(sftp: Any) -> None:
            _make_folders(sftp, folder)
            try:
                file = sftp.open(part, "wb")
            except FileNotFoundError as e:  # another process has removed the empty folder
                raise TransferError(f"{folder} was removed") from e
            try:
                with file:
                    file.set_pipelined(True)
                    if isinstance(source, bytes):
                        file.write(source)
                    else:
                        with source.open("rb") as local:
                            while piece := local.read(self.part_bytes):
                                file.write(piece)
                _publish(sftp, part, key, if_absent)
            except BaseException:
                with contextlib.suppress(Exception):
                    sftp.remove(part)
                raise

        num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        return await self._call(pace, write, num_bytes)

    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        def remove_all(sftp: Any) -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    sftp.remove(key)
                _remove_empty_folders(sftp, key.rpartition("/")[0], self.root)

        return await self._call(pace, remove_all)


def _tag(found: Any) -> str:
    return f"{found.st_size} bytes of {found.st_mtime}"


def _is_unfinished(name: str) -> bool:
    name = name.rpartition("/")[2]
    return name.startswith(".") and name.endswith(_PART)


def _publish(sftp: Any, part: str, key: str, if_absent: bool) -> None:
    """Rename a complete file. FileExistsError if the name must be new and exists."""
    if not if_absent:
        sftp.posix_rename(part, key)
        return
    try:
        sftp.rename(part, key)  # the protocol's rename never replaces
    except OSError as e:
        try:
            sftp.stat(key)
        except FileNotFoundError:
            raise e from None
        raise FileExistsError(key) from e


def _make_folders(sftp: Any, folder: str) -> None:
    """Make a folder and those above it, if they do not exist."""
    try:
        sftp.stat(folder)
        return
    except FileNotFoundError:
        pass
    parent = folder.rpartition("/")[0]
    if parent:
        _make_folders(sftp, parent)
    try:
        sftp.mkdir(folder)
    except OSError:  # another process has just made it
        sftp.stat(folder)


def _remove_empty_folders(sftp: Any, folder: str, root: str) -> None:
    """Remove a folder and those above it, up to `root`, as long as they are empty."""
    while folder.startswith(f"{root}/"):
        try:
            sftp.rmdir(folder)
        except OSError:
            return
        folder = folder.rpartition("/")[0]
