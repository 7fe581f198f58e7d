"""A server's disk by sftp: `sftp://host/path`, through paramiko.

Users, keys, ports and known hosts are those of OpenSSH's `~/.ssh/config`, or of the file that
`CLIP_TRAIN_SSH_CONFIG` names. fsspec's own client accepts any host key, cannot create a file only
if it is absent, and writes to a file's final name.
"""

import asyncio
import builtins
import contextlib
import functools
import getpass
import os
import re
import socket
import stat
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clip_train.errors import UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import ChangedError, FailureError, TransferError
from clip_train.storage.redact import redact
from clip_train.storage.remote import Pace, RemoteStorage, checked_length

if TYPE_CHECKING:
    from clip_train.storage.sftp_client import SftpClient

CONFIG = "CLIP_TRAIN_SSH_CONFIG"  # environment: the file in place of ~/.ssh/config
KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")  # besides those of the settings
_CONNECT_SECONDS = 20
_UNWANTED_SECONDS = 5.0  # how long to wait for an answer that the caller does not want any more
_MOST_LISTED = 1000  # requests for the names in one folder; an answer has about a hundred
_PART = ".part"  # the end of the names of unfinished files: .NAME.RANDOM.part
_SERVER = re.compile(r"(?:([^@]*)@)?(\[[^][@]+\]|[^][@:]+)(?::(\d{1,5}))?")  # user, host, port
# after these errors, the session can be used
_ANSWERS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    ChangedError,
    FailureError,
    NotImplementedError,  # the server lacks an extension: another attempt cannot help
)
T = TypeVar("T")


@dataclass
class Connection:
    """One session with a server, which answers one thread at a time.

    Its users are tasks of fsspec's event loop.
    """

    client: Any = None  # paramiko.SSHClient
    sftp: "SftpClient | None" = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    # unfinished files that could not be removed, because the connection had ended
    leftovers: set[str] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return self.client is not None and self.client.get_transport().is_active()

    def close(self) -> None:
        client, self.client, self.sftp = self.client, None, None
        if client is not None:
            client.close()


# by process and server: all storages of a process share them, and a forked one opens its own
_connections: dict[tuple[int, str], Connection] = {}


class SftpStorage(RemoteStorage):
    """`Storage` over `sftp://[user@]host[:port]/path`.

    A file is written under a hidden name, fsynced if the server can, and renamed. Renaming to a
    name that exists fails, and is decided by the server's file system, so one of several racing
    writers wins.
    """

    def __init__(self, url: str, **limits: Any) -> None:
        """UserError for a URL with a password, or without a host or a path."""
        # not by `urlsplit`: a path may have a `#` or `?`, and an alias of a host upper case
        server, _, path = url.partition("://")[2].partition("/")
        match = _SERVER.fullmatch(server)
        is_valid = (
            match is not None and ":" not in (match[1] or "") and int(match[3] or 0) < 1 << 16
        )
        if match is None or not is_valid or not path.strip("/"):
            raise UserError(
                f"{redact(url)}: write sftp://host/path, with the port as a number if there is one, "
                "and without a password: log in by a key, which ~/.ssh/config or an agent has"
            )
        super().__init__(url, f"/{path}", **limits)
        self._user, self._name = match[1], match[2].strip("[]")
        self._port = int(match[3] or 0)

    @property
    def _connection(self) -> Connection:
        return _connections.setdefault((os.getpid(), self.host), Connection())

    async def connect(self) -> None:
        connection = self._connection
        async with connection.turn:
            if connection.is_open:
                return
            connection.close()
            connection.client, connection.sftp = await asyncio.to_thread(self._open)

    def _open(self) -> "tuple[Any, SftpClient]":
        """Log in. PermissionError if the server refuses the keys; ValueError for an unknown server
        or wrong settings; another OSError."""
        try:
            import paramiko

            from clip_train.storage.sftp_client import SftpClient
        except ImportError as e:
            raise UserError(f"{self.url}: {e}; pip install 'clip-train[sftp]'") from e
        settings = _settings(self._name)
        host = settings["hostname"]
        port = self._port or int(settings.get("port", 22))
        user = self._user or settings.get("user") or getpass.getuser()
        identities = settings.get("identityfile", [])
        # OpenSSH ignores missing ones, paramiko does not
        keys = [path for path in identities if os.path.exists(path)]
        client = paramiko.SSHClient()  # refuses unknown hosts
        known_files = [*KNOWN_HOSTS]
        for name in ("userknownhostsfile", "globalknownhostsfile"):
            known_files += settings.get(name, "").split()
        host_name = host if port == 22 else f"[{host}]:{port}"
        for key in _known_keys(known_files, settings.get("hostkeyalias", host_name)):
            client.get_host_keys().add(host_name, key.get_name(), key)
        try:
            client.connect(
                host,
                port=port,
                username=user,
                key_filename=keys,
                timeout=_CONNECT_SECONDS,
                banner_timeout=_CONNECT_SECONDS,
                auth_timeout=_CONNECT_SECONDS,
                channel_timeout=_CONNECT_SECONDS,
            )
            transport = client.get_transport()
            transport.set_keepalive(15)
            # requests are small: without this, each waits for the answer to the one before
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = transport.open_session(timeout=_CONNECT_SECONDS)
            channel.settimeout(_CONNECT_SECONDS)
            # the answer to this request has no time limit of paramiko's
            timer = threading.Timer(_CONNECT_SECONDS, client.close)
            timer.start()
            try:
                channel.invoke_subsystem("sftp")
            finally:
                timer.cancel()
            return client, SftpClient(channel)
        except Exception as e:
            client.close()
            missing = "".join(f"; there is no {path}" for path in identities if path not in keys)
            explained = _explained(e, self._name, f"user {user}{missing}")
            if explained is None:
                raise
            raise explained from None

    async def _call(
        self,
        pace: Pace,
        call: "Callable[[SftpClient], T]",
        *,
        num_bytes: int = 0,
        num_requests: int = 1,
    ) -> T:
        """The result of a call with the session, in a thread.

        It may take `pace.seconds` for each answer, and in all as long as ten requests in this time,
        besides the time for its bytes.
        """
        in_all = replace(pace, seconds=pace.seconds * (1 + num_requests / 10))
        connection = self._connection
        async with connection.turn:
            if connection.sftp is None:  # closed since `connect`
                raise TransferError("the connection was closed")
            connection.sftp.limit_silence(pace.seconds)
            answer = asyncio.ensure_future(asyncio.to_thread(call, connection.sftp))
            # if nobody awaits its error any more, nobody needs to know it
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                return await in_all.hold(asyncio.shield(answer), num_bytes)
            except _ANSWERS:
                raise
            except asyncio.CancelledError:
                # others use the connection: close it only if the answer does not come soon
                await asyncio.wait([answer], timeout=_UNWANTED_SECONDS)
                if not answer.done():
                    connection.close()
                raise
            except TimeoutError as e:  # of the channel
                connection.close()
                raise TransferError(f"no answer within {pace.seconds:.3g} s{pace.keys}") from e
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
        def read(sftp: "SftpClient") -> bytes:
            with sftp.reading(key) as handle:
                found = sftp.state(handle)
                if tag not in (None, _tag(found)):
                    raise ChangedError(f"it was {tag} when it was opened and is {_tag(found)}")
                last = found.st_size if end is None else min(end, found.st_size)
                return sftp.read(handle, begin, last)

        num_bytes = self.part_bytes if end is None else end - begin
        data = await self._call(pace, read, num_bytes=num_bytes)
        return data if end is None else checked_length(data, num_bytes)

    async def listing(self, folder: str, pace: Pace) -> builtins.list[Entry]:
        return await self._walk(folder, pace, follow=True)

    async def _walk(self, folder: str, pace: Pace, *, follow: bool) -> builtins.list[Entry]:
        """All files below a folder. follow: a link counts as what it points to, as on a disk."""
        entries: builtins.list[Entry] = []
        folders = [folder.rstrip("/")]
        while folders:
            parent = folders.pop()
            try:
                look = functools.partial(_look_into, parent, follow)
                found = await self._call(pace, look, num_requests=_MOST_LISTED)
            except FileNotFoundError:  # removed since, or never there
                continue
            for path, state in found:
                if stat.S_ISDIR(state.st_mode):
                    folders.append(path)
                else:
                    entries.append(Entry(path, state.st_size, float(state.st_mtime)))
        return entries

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        return [entry for entry in self.list_all(prefix) if not _is_unfinished(entry.name)]

    def list_all(self, prefix: str = "") -> builtins.list[Entry]:
        return super().list(prefix)

    def delete_tree(self, prefix: str) -> None:
        """Removes links, not the files behind them."""
        if not prefix.strip("/"):
            raise ValueError("delete_tree needs a folder below the root")

        async def remove_tree(pace: Pace) -> None:
            entries = await self._walk(self.key(prefix), pace, follow=False)
            await self.remove([entry.name for entry in entries], pace)

        self.wait(f"deleting {prefix}", remove_tree)

    async def put(self, key: str, source: bytes | Path, if_absent: bool, pace: Pace) -> object:
        from clip_train.storage.sftp_client import POSIX_RENAME

        folder, _, name = key.rpartition("/")
        part = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}{_PART}"
        leftovers = self._connection.leftovers
        num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        fsync_seconds = pace.seconds + num_bytes / pace.rate if pace.rate else None

        def write(sftp: "SftpClient") -> None:
            _remove_all(sftp, leftovers)
            try:
                changed_folders = [*_make_folders(sftp, folder), folder]
                with sftp.writing(part) as handle:
                    if not if_absent and POSIX_RENAME not in sftp.extensions:
                        raise NotImplementedError(f"the server does not offer {POSIX_RENAME}")
                    sftp.write(handle, _pieces(source, self.part_bytes))
                    sftp.fsync(handle, fsync_seconds)
                _publish(sftp, part, key, if_absent)
                for changed in changed_folders:
                    _fsync_folder(sftp, changed, pace.seconds)
            except FileNotFoundError as e:  # another process has removed the empty folder
                raise TransferError(f"{folder} cannot be made, or was removed") from e
            except BaseException as e:
                leftovers.add(part)
                # otherwise the connection may have ended: the next one removes it
                if isinstance(e, _ANSWERS):
                    _remove_all(sftp, leftovers)
                raise

        return await self._call(pace, write, num_bytes=num_bytes)

    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        def remove_all(sftp: "SftpClient") -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    sftp.remove(key)
                _remove_empty_folders(sftp, key.rpartition("/")[0], self.root)

        return await self._call(pace, remove_all, num_requests=len(keys))


def _settings(name: str) -> Any:
    """What ssh's configuration says of a host or an alias. ValueError."""
    import paramiko

    named = os.environ.get(CONFIG)
    file = Path(named or "~/.ssh/config").expanduser()
    config = paramiko.SSHConfig()
    try:
        if named or file.exists():
            config = paramiko.SSHConfig.from_path(str(file))
        settings = config.lookup(name)
    except (OSError, UnicodeError, ImportError, paramiko.SSHException) as e:
        raise ValueError(
            f"{file} cannot be read: {e}; correct it, or name another file in {CONFIG}"
        ) from e
    for key in ("proxyjump", "proxycommand"):
        if settings.get(key, "none").lower() != "none":
            raise ValueError(
                f"{file} has {key} for {name}, which is not supported: open a tunnel "
                f"(ssh -L), and name its port in the URL or in {CONFIG}"
            )
    return settings


def _known_keys(files: Sequence[str], host: str) -> Iterator[Any]:
    """The keys that these files in the format of known_hosts have for a host. Lines of other hosts
    are not read: paramiko fails at some. OSError if a file cannot be read; missing ones are ignored.
    """
    import paramiko
    from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

    lines: list[str] = []
    for name in files:
        path = Path(name).expanduser()
        if path.is_file():
            lines += path.read_text(errors="replace").splitlines()
    records = [line.split() for line in lines if line.strip()]
    revoked = {words[3] for words in records if words[0] == "@revoked" and len(words) > 3}
    for words in records:
        if len(words) < 3 or words[2] in revoked:
            continue
        for entry in words[0].split(","):
            is_host = entry == host
            if entry.startswith("|1|"):
                is_host = HostKeys.hash_host(host, entry) == entry
            if is_host:
                found = None
                with contextlib.suppress(InvalidHostKey, paramiko.SSHException):
                    found = HostKeyEntry.from_line(" ".join(words))
                if found is not None:  # a kind of key that paramiko knows
                    yield found.key


def _explained(error: Exception, host: str, login: str) -> Exception | None:
    """An error of a log-in as one that says whether another attempt may help; None if it says so
    itself. A FileNotFoundError does not: it would mean that the server lacks a file."""
    import paramiko

    if isinstance(error, paramiko.BadHostKeyException):
        return ValueError(f"{host} has another host key than known_hosts: {error}")
    if isinstance(error, paramiko.AuthenticationException):
        return PermissionError(f"{error} ({login})")
    if isinstance(error, paramiko.SSHException):
        if "not found in known_hosts" in str(error):
            return ValueError(f"{error}: run `ssh {host}` once, and compare its key")
        if "No authentication methods" in str(error):
            return PermissionError(f"there is no key to log in with ({login})")
        return ConnectionError(str(error) or type(error).__name__)
    # of several addresses: the reason of the first
    reasons = list(getattr(error, "errors", {}).values())
    if reasons:
        return reasons[0]
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{error}: needed to log in to {host}")
    return None


def _pieces(source: bytes | Path, piece_bytes: int) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as local:
        while piece := local.read(piece_bytes):
            yield piece


def _look_into(folder: str, follow: bool, sftp: "SftpClient") -> builtins.list[tuple[str, Any]]:
    """What a folder has: paths, and their sizes and times."""
    try:
        found = sftp.listdir_attr(folder)
    except UnicodeDecodeError as e:
        name = e.object.decode(errors="replace")
        raise ValueError(f"{folder} has a name that is not UTF-8 ({name}); rename it") from e
    states: dict[str, Any] = {f"{folder}/{state.filename}": state for state in found}
    if follow:
        links = [path for path, state in states.items() if stat.S_ISLNK(state.st_mode)]
        for path, target in zip(links, sftp.states(links), strict=True):
            states[path] = target
            points_nowhere = target is None
            if points_nowhere or (stat.S_ISDIR(target.st_mode) and _is_above(sftp, path, folder)):
                del states[path]
    return [*states.items()]


def _is_above(sftp: "SftpClient", link: str, folder: str) -> bool:
    """Whether a link points to a folder that contains the link: it would have no end."""
    return f"{sftp.normalize(folder)}/".startswith(f"{sftp.normalize(link)}/")


def _tag(found: Any) -> str:
    return f"{found.st_size} bytes of {found.st_mtime}"


def _is_unfinished(name: str) -> bool:
    name = name.rpartition("/")[2]
    return name.startswith(".") and name.endswith(_PART)


def _publish(sftp: "SftpClient", part: str, key: str, if_absent: bool) -> None:
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


def _fsync_folder(sftp: "SftpClient", folder: str, seconds: float) -> None:
    """Make the names in a folder durable, if the server offers fsync and opens folders as OpenSSH
    does."""
    from clip_train.storage.sftp_client import FSYNC

    if FSYNC in sftp.extensions:
        with (
            contextlib.suppress(FailureError, ValueError, PermissionError, FileNotFoundError),
            sftp.reading(folder) as handle,
        ):
            sftp.fsync(handle, seconds)


def _make_folders(sftp: "SftpClient", folder: str) -> list[str]:
    """Make a folder and those above it, if they do not exist. Returns the folders that have a new
    name in them."""
    try:
        sftp.stat(folder)
        return []
    except FileNotFoundError:
        pass
    parent = folder.rpartition("/")[0]
    changed = _make_folders(sftp, parent) if parent else []
    try:
        sftp.mkdir(folder)
    except OSError as e:
        try:
            sftp.stat(folder)  # another process has just made it
        except FileNotFoundError:
            raise e from None
    return [*changed, parent or "/"]


def _remove_all(sftp: "SftpClient", paths: set[str]) -> None:
    """Remove unfinished files; afterwards the set is empty. Failures only cost space."""
    while paths:
        with contextlib.suppress(*_ANSWERS, ValueError):
            sftp.remove(paths.pop())


def _remove_empty_folders(sftp: "SftpClient", folder: str, root: str) -> None:
    """Remove a folder and those above it, up to `root`, as long as they are empty."""
    while folder.startswith(f"{root}/"):
        try:
            sftp.rmdir(folder)
        except OSError:
            return
        folder = folder.rpartition("/")[0]
