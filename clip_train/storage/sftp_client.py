"""paramiko's client of the sftp protocol, with what it lacks: the server's extensions, fsync, and the answers
to all requests that were sent ahead. No other module uses private names of paramiko.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import paramiko
from paramiko import sftp

from clip_train.storage.errors import FailureError

FSYNC = "fsync@openssh.com"
POSIX_RENAME = "posix-rename@openssh.com"
REQUEST_BYTES = 32 << 10  # of a read or a write: every server takes as many
_MOST_REQUESTS = 64  # that are under way at once
_READ = sftp.SFTP_FLAG_READ
_WRITE_NEW = sftp.SFTP_FLAG_WRITE | sftp.SFTP_FLAG_CREATE | sftp.SFTP_FLAG_TRUNC


class _Answers:
    """The answers to requests that were sent ahead. paramiko drops those that nobody waits for."""

    def __init__(self, client: "SftpClient") -> None:
        self._client = client
        self._received: dict[int, tuple[int, paramiko.Message]] = {}  # by number of the request

    def _async_response(self, kind: int, message: paramiko.Message, number: int) -> None:
        """paramiko calls this with each answer."""
        self._received[number] = (kind, message)

    def ask(self, *request: Any) -> int:
        """Send a request. Returns its number."""
        return self._client._async_request(self, *request)

    def to(self, number: int) -> tuple[int, paramiko.Message]:
        """Wait for the answer to a request. OSError, EOFError."""
        while number not in self._received:
            self._client._read_response()
        kind, message = self._received.pop(number)
        if kind == sftp.CMD_STATUS:
            self._client._convert_status(message)
        return kind, message


class SftpClient(paramiko.SFTPClient):
    """A session with a server, for one thread at a time."""

    extensions: frozenset[str] = frozenset()  # those that the server offers

    def _read_packet(self) -> tuple[int, bytes]:
        kind, data = super()._read_packet()
        if kind == sftp.CMD_VERSION:
            message = paramiko.Message(data)
            message.get_int()  # the version of the protocol
            texts = []  # the name of an extension and its version, in turn
            while message.get_remainder():
                texts.append(message.get_binary().decode(errors="replace"))
            self.extensions = frozenset(texts[::2])
        return kind, data

    def _convert_status(self, message: paramiko.Message) -> None:
        start = message.packet.tell()
        code, text = message.get_int(), message.get_text()
        if code == sftp.SFTP_FAILURE:
            raise FailureError(text)
        if code == sftp.SFTP_BAD_MESSAGE:
            raise ValueError(f"{text}: the name may be too long for the server's disk")
        message.packet.seek(start)
        super()._convert_status(message)

    def limit_silence(self, seconds: float | None) -> None:
        """From now on, raise TimeoutError if nothing can be sent or received for this long."""
        self.get_channel().settimeout(seconds)

    @contextlib.contextmanager
    def handle(self, path: str, flags: int) -> Iterator[bytes]:
        """Open a file, and close it. Unlike paramiko's, this raises the error of the close: a server
        may notice only then that its disk is full."""
        _, message = self._request(sftp.CMD_OPEN, path, flags, paramiko.SFTPAttributes())
        handle = message.get_binary()
        try:
            yield handle
        except (TimeoutError, EOFError, paramiko.SSHException):  # nothing answers any more
            raise
        except BaseException:
            with contextlib.suppress(Exception):
                self._request(sftp.CMD_CLOSE, handle)
            raise
        self._request(sftp.CMD_CLOSE, handle)

    def reading(self, path: str) -> contextlib.AbstractContextManager[bytes]:
        """The handle of a file, or of a folder for `fsync`."""
        return self.handle(path, _READ)

    def writing(self, path: str) -> contextlib.AbstractContextManager[bytes]:
        """The handle of an empty file."""
        return self.handle(path, _WRITE_NEW)

    def state(self, handle: bytes) -> paramiko.SFTPAttributes:
        """Size and times of an open file."""
        _, message = self._request(sftp.CMD_FSTAT, handle)
        return paramiko.SFTPAttributes._from_msg(message)

    def states(self, paths: Sequence[str]) -> list[Any]:
        """Sizes and times of files, links followed; None for a file that is missing. OSError."""
        answers = _Answers(self)
        asked: deque[int] = deque()
        states: list[Any] = []
        remaining = iter(paths)
        while len(states) < len(paths):
            for path in itertools.islice(remaining, _MOST_REQUESTS - len(asked)):
                asked.append(answers.ask(sftp.CMD_STAT, path))
            try:
                _, message = answers.to(asked.popleft())
                states.append(paramiko.SFTPAttributes._from_msg(message))
            except FileNotFoundError:
                states.append(None)
        return states

    def read(self, handle: bytes, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of an open file; fewer if it ends before. OSError."""
        answers = _Answers(self)
        asked: deque[tuple[int, int, int]] = (
            deque()
        )  # number of the request, its first byte, its end
        data = bytearray()
        next_byte = begin

        def ask(first: int, last: int) -> tuple[int, int, int]:
            number = answers.ask(sftp.CMD_READ, handle, sftp.int64(first), last - first)
            return number, first, last

        while next_byte < end or asked:
            while next_byte < end and len(asked) < _MOST_REQUESTS:
                last = min(end, next_byte + REQUEST_BYTES)
                asked.append(ask(next_byte, last))
                next_byte = last
            number, first, last = asked.popleft()
            try:
                piece = answers.to(number)[1].get_binary()
            except EOFError:
                break
            data += piece
            if piece and first + len(piece) < last:  # a server may send fewer than it was asked for
                asked.appendleft(ask(first + len(piece), last))
        return bytes(data)

    def write(self, handle: bytes, pieces: Iterable[bytes]) -> None:
        """Write into an open file, and wait until the server has accepted every byte. OSError."""
        answers = _Answers(self)
        asked: deque[int] = deque()
        position = 0
        for piece in pieces:
            for start in range(0, len(piece), REQUEST_BYTES):
                if len(asked) == _MOST_REQUESTS:
                    answers.to(asked.popleft())
                part = piece[start : start + REQUEST_BYTES]
                asked.append(answers.ask(sftp.CMD_WRITE, handle, sftp.int64(position), part))
                position += len(part)
        while asked:
            answers.to(asked.popleft())

    def fsync(self, handle: bytes, seconds: float | None) -> None:
        """Wait until an open file is on the server's disk, if the server offers that. OSError.

        seconds: the most that it may take; None: any time.
        """
        if FSYNC not in self.extensions:
            return
        usual = self.get_channel().gettimeout()
        self.limit_silence(seconds)
        self._request(sftp.CMD_EXTENDED, FSYNC, handle)
        self.limit_silence(usual)
