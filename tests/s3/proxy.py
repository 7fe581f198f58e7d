"""A proxy on the loopback that does to S3's answers what networks and busy servers do.

It runs in a thread of the test: `with FaultyProxy(port) as proxy: proxy.faults = [Fault("reset", every=3)]`.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

Action = Literal[
    "reset", "cut", "end", "short", "stall", "drip", "flip", "status", "hang", "expired", "other", "lost", "upflip",
    "unconditional", "hide", "slow", "crawl", "pages",
]  # fmt: skip

MOST_RUNNING = 6  # below the default of storage.attempts


@dataclass
class Fault:
    """What happens to GETs of a key that matches.

    reset: the connection is reset before an answer; cut: reset in mid-body; end: closed politely in mid-body,
    with the right Content-Length; short: a part of the body, with a Content-Length that fits; stall: a part of
    the body and then silence; drip: 200 bytes a second; flip: one bit of the body; other: other bytes, as many;
    status: an S3 error; hang: no answer; expired: 403 ExpiredToken.
    lost: carried out, then reset instead of the answer; upflip: one bit of the request's body; unconditional: the
    request without its If-None-Match;
    hide: the objects whose key contains `hidden` are left out of listings; slow: `seconds` late, and then as it is;
    crawl: both bodies through a link of `rate` that all such requests share fairly, and then as they are;
    pages: a listing comes in pages of two.
    """

    action: Action
    every: int = 1  # of the requests that match, one in so many is hit: drawn, since a rhythm misses places; more
    # than one: and none is hit more than MOST_RUNNING times running, by this or by another, so that it passes at last
    skip: int = 0  # and the first ones are not
    times: int | None = None  # at most so often
    burst: int = 1  # once hit, so many in a row
    key: str = r"\.tar$"  # regular expression, searched in the path
    query: str = ""  # regular expression, searched in what follows the path
    method: str = "GET"
    code: int = 503
    s3code: str = "SlowDown"
    access_key: str = ""  # only of requests that are signed with a key that begins so
    begin: int = 0  # only of ranges that begin there or later
    hidden: str = ""
    seconds: float = 0.05
    rate: int = 1 << 20  # bytes per second
    at: float | None = None  # where in the body, as a fraction; None: drawn
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)
    left: int = field(default=0, init=False)  # of the burst
    draws: random.Random = field(default_factory=lambda: random.Random(0), init=False)

    def hits(self, method: str, target: str, headers: bytes) -> bool:
        path, _, query = target.partition("?")
        path = unquote(path)  # some clients quote the "/" in keys
        if (
            method not in self.method.split("|")
            or not re.search(self.key, path)
            or not re.search(self.query, query)
        ):
            return False
        if self.access_key and f"Credential={self.access_key}".encode() not in headers:
            return False
        begins = re.search(rb"(?im)^range: *bytes=(\d+)-", headers)
        if self.begin and (begins is None or int(begins[1]) < self.begin):
            return False
        self.seen += 1
        if not self.left:
            if self.seen <= self.skip or self.draws.random() * self.every >= 1:
                return False
            if self.times is not None and self.fired >= self.times:
                return False
            self.left = self.burst
        self.left -= 1
        self.fired += 1
        return True


def fresh(faults: Iterable[Fault]) -> list[Fault]:
    """The same ones, their counters at zero."""
    return [replace(fault) for fault in faults]


@dataclass(frozen=True)
class Dialect:
    """What differs between stores in requests and listings."""

    condition: str = "If-None-Match"  # the header of a write that may not replace
    page: str = "max-keys"  # the query's limit of entries
    entry: str = "Contents"  # the element of an object in a listing
    signed: str = ""  # a request's headers that its signature covers, as a regular expression


class Answer(NamedTuple):
    """What went back for a request, as far as no fault spoiled it."""

    access_key: str  # whose credentials signed it
    request: str  # as in `FaultyProxy.requests`
    num_bytes: int  # of the body


class FaultyProxy:
    """Forwards to 127.0.0.1:`upstream`; `faults` may be replaced at any time.

    sign: `Server.sign`; requests that are changed on the way are signed again, where a server looks.
    """

    def __init__(
        self,
        upstream: int,
        sign: Callable[..., dict[str, str]] | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.upstream, self._sign, self._dialect = upstream, sign, dialect or Dialect()
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "GET /bucket/key bytes=0-9"
        self.heads: list[str] = []  # the request line and the headers of each
        self.answers: list[Answer] = []
        self.port = 0
        self.under_way = (
            0  # requests that have come, and are neither answered nor given up by who asks
        )
        self._link = asyncio.Lock()
        self._running: dict[str, int] = {}  # request -> faults since it last passed
        self._clients: set[asyncio.Task | None] = (
            set()
        )  # the loop holds them weakly, and some sleep for an hour

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def fired(self) -> int:
        return sum(fault.fired for fault in self.faults)

    def __enter__(self) -> FaultyProxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 20)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(asyncio.current_task())
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._clients.discard(asyncio.current_task())

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection lives on."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, path = head.split(b" ", 2)[:2]
        if re.search(rb"\r\nExpect:", head, re.IGNORECASE):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = _with_header(head, b"Expect", None)
        body = await reader.readexactly(_length(head))
        asked = re.search(rb"\r\nRange: *([^\r]+)", head, re.IGNORECASE)
        self.requests.append(
            f"{method.decode()} {path.decode()} {asked[1].decode() if asked else ''}".strip()
        )
        self.heads.append(head.decode())
        self.under_way += 1
        try:
            return await self._answer(head, body, reader, writer, self.requests[-1])
        finally:
            self.under_way -= 1

    async def _answer(
        self,
        head: bytes,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: str,
    ) -> bool:
        method, path = head.split(b" ", 2)[:2]
        hit = self._fault_of(request, method.decode(), path.decode(), head)
        action = hit.action if hit else None
        if action == "reset":
            return _reset(writer)
        if action == "hang":
            return await _silence(reader)
        if hit and action in ("slow", "crawl"):
            await (
                asyncio.sleep(hit.seconds)
                if action == "slow"
                else self._crawl(reader, len(body), hit.rate)
            )
        if hit and action in ("status", "expired"):
            code, name = (403, "ExpiredToken") if action == "expired" else (hit.code, hit.s3code)
            error = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>injected</Message></Error>".encode()
            kind = f"HTTP/1.1 {code} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(error)}\r\n\r\n"
            writer.write(kind.encode() + (b"" if method == b"HEAD" else error))
            await writer.drain()
            return True
        if action == "upflip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if action == "unconditional":
            head = _with_header(head, self._dialect.condition.encode(), None)
            head = self._signed(head, body)
        if action == "pages":
            head = self._signed(_in_pages(head, self._dialect.page.encode()), body)
        answer_head, answer = await self._forward(head, body, method == b"HEAD")
        if action == "lost":
            return _reset(writer)
        if hit and action == "hide":
            named = "|".join(
                map(re.escape, {hit.hidden, quote(hit.hidden, safe="")})
            )  # some servers quote keys
            tag = self._dialect.entry
            entry = rf"<{tag}>(?:(?!</{tag}>).)*(?:{named}).*?</{tag}>".encode()
            answer = re.sub(entry, b"", answer, flags=re.DOTALL)
            answer_head = _with_header(answer_head, b"Content-Length", str(len(answer)).encode())
        if hit is None or action in (
            "upflip",
            "unconditional",
            "hide",
            "slow",
            "crawl",
            "pages",
        ):
            if hit and action == "crawl":
                await self._crawl(reader, len(answer), hit.rate)
            signed = re.search(rb"Credential=([^/]+)/", head)
            self.answers.append(Answer(signed[1].decode() if signed else "", request, len(answer)))
            writer.write(answer_head + answer)
            await writer.drain()
            return True
        return await self._spoil(hit, answer_head, answer, reader, writer)

    async def _crawl(self, reader: asyncio.StreamReader, num_bytes: int, rate: int) -> None:
        """As long as that takes, in turns with the others; who has hung up takes no more of the link."""
        piece = 1 << 16
        for _ in range(0, num_bytes, piece):
            async with self._link:
                await asyncio.sleep(piece / rate)
            if reader.at_eof() or reader.exception() is not None:
                raise ConnectionResetError

    def _fault_of(self, request: str, method: str, target: str, head: bytes) -> Fault | None:
        tired = self._running.get(request, 0) >= MOST_RUNNING
        hit = next(
            (
                f
                for f in self.faults
                if not (tired and f.every > 1) and f.hits(method, target, head)
            ),
            None,
        )
        self._running[request] = self._running.get(request, 0) + 1 if hit else 0
        return hit

    def _signed(self, head: bytes, body: bytes) -> bytes:
        if self._sign is not None:
            method, target = head.decode().split(" ", 2)[:2]
            kept = dict(
                re.findall(r"(?m)^([^:\r\n]+): *([^\r\n]*)", head.decode().partition("\n")[2])
            )
            pattern = re.compile(self._dialect.signed or "$", re.IGNORECASE)
            kept = {name: value for name, value in kept.items() if pattern.fullmatch(name)}
            for name, value in self._sign(method, self.url, target, body, kept).items():
                head = _with_header(head, name.encode(), value.encode())
        return head

    async def _forward(self, head: bytes, body: bytes, no_body: bool) -> tuple[bytes, bytes]:
        """What the server answers; a GET is asked again where a busy server has an error, or cuts its answer short."""
        for _ in range(4):
            answer_head, answer, whole = await self._ask(head, body, no_body)
            well = whole and not answer_head.split(b" ", 2)[1].startswith(b"5")
            if well or not head.startswith((b"GET ", b"HEAD ")):
                break
            await asyncio.sleep(0.5)
        return answer_head, answer

    async def _ask(self, head: bytes, body: bytes, no_body: bool) -> tuple[bytes, bytes, bool]:
        """The answer's head and body, and whether all of it came."""
        up_reader, up_writer = await asyncio.open_connection(
            "127.0.0.1", self.upstream, limit=1 << 20
        )
        try:
            up_writer.write(_with_header(head, b"Connection", b"close") + body)
            await up_writer.drain()
            answer_head = await up_reader.readuntil(b"\r\n\r\n")
            while answer_head.split(b" ", 2)[1] == b"100":
                answer_head = await up_reader.readuntil(b"\r\n\r\n")
            if no_body or answer_head.split(b" ", 2)[1] in (b"204", b"304"):
                return _with_header(answer_head, b"Connection", b"keep-alive"), b"", True
            answer = await up_reader.read(-1)  # it was asked to close
            whole = len(answer) >= _length(answer_head)
            if re.search(rb"\r\nTransfer-Encoding: *chunked", answer_head, re.IGNORECASE):
                answer = _unchunked(answer)
            answer_head = _with_header(answer_head, b"Transfer-Encoding", None)
            answer_head = _with_header(answer_head, b"Content-Length", str(len(answer)).encode())
            return _with_header(answer_head, b"Connection", b"keep-alive"), answer, whole
        finally:
            up_writer.transport.abort()

    async def _spoil(
        self,
        fault: Fault,
        head: bytes,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        cut = int(len(body) * (fault.draws.random() if fault.at is None else fault.at))
        match fault.action:
            case "flip":
                writer.write(head + body[:cut] + bytes([body[cut] ^ 16]) + body[cut + 1 :])
            case "other":
                writer.write(head + bytes(b ^ 255 for b in body))
            case "short":
                writer.write(_with_header(head, b"Content-Length", str(cut).encode()) + body[:cut])
            case "drip":
                writer.write(head)
                for byte in range(0, len(body), 20):
                    writer.write(body[byte : byte + 20])
                    await writer.drain()
                    await asyncio.sleep(0.1)
            case "stall":
                writer.write(head + body[:cut])
                await writer.drain()
                return await _silence(reader)
            case "end":
                writer.write(head + body[:cut])
                await writer.drain()
                writer.close()
                return False
            case "cut":
                writer.write(head + body[:cut])
                await writer.drain()
                await asyncio.sleep(0.02)  # a reset at once would overtake the bytes
                return _reset(writer)
        await writer.drain()
        return True


async def _silence(reader: asyncio.StreamReader) -> bool:
    """Until who asks hangs up."""
    while await reader.read(1 << 16):
        pass
    return False


def _in_pages(head: bytes, limit: bytes) -> bytes:
    """The request for a listing, asking for two entries at most: the query stays sorted, as signatures want it."""
    method, target, rest = head.split(b" ", 2)
    path, _, query = target.partition(b"?")
    if query.startswith(b"uploads") or b"&uploads" in query:
        limit = b"max-uploads"
    pairs = [pair for pair in query.split(b"&") if not pair.startswith(limit + b"=")]
    return b" ".join([method, path + b"?" + b"&".join(sorted([*pairs, limit + b"=2"])), rest])


def _reset(writer: asyncio.StreamWriter) -> bool:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


def _length(head: bytes) -> int:
    found = re.search(rb"\r\nContent-Length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0


def _with_header(head: bytes, name: bytes, value: bytes | None) -> bytes:
    """The head with one header replaced; with None, without it."""
    lines = [
        line
        for line in head[:-4].split(b"\r\n")
        if not line.lower().startswith(name.lower() + b":")
    ]
    return (
        b"\r\n".join([*lines, *([name + b": " + value] if value is not None else [])]) + b"\r\n\r\n"
    )


def _unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size.split(b";")[0], 16)
        out, data = out + data[:count], data[count + 2 :]
    return out
