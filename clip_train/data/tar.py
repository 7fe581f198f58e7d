"""Tar files read as samples (ustar, GNU long names, pax; four times as fast as `tarfile`), and written.

Neighbouring members that share a key (the name up to the first dot of its last part) make a sample, as
webdataset has it. Unlike there, an archive that is damaged or cut is an error.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 512  # bytes: everything in a tar is padded to this
ZEROS = bytes(BLOCK)
MAX_PADDING_BYTES = 1 << 20  # of zeros at the end; GNU tar writes up to 10 KiB
MAX_NAME_BYTES = 1 << 20  # of a long name or pax header; more is damage
MAX_MEMBER_BYTES = 1 << 28  # what is larger is not read: a whole block of samples is held in memory
MAX_OFFSET = 1 << 50  # bytes; no shard is that long
MAX_MEMBERS = 64  # kept of one sample: a shard whose file names share a dot would become one huge sample

_METADATA = re.compile(r"(^|/)__[^/]*__([./]|$)")  # what webdataset keeps beside samples: __index__.json


class TarError(Exception):
    """The archive is damaged or incomplete; `reason` is for counting, `offset` is in bytes."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at byte {offset}")
        self.reason = reason
        self.offset = offset


@dataclass
class TarSample:
    """One sample as it lies in its archive."""

    key: str
    start: int  # bytes: where its first header begins (a long name's header included)
    end: int = 0  # bytes: where whatever follows begins; reading can resume here
    members: dict[str, bytes] = field(default_factory=dict)  # lower-case extension -> content
    duplicate: bool = False  # an extension came twice: two samples of one key
    too_large: bool = False  # a member was left out for its size


def iter_samples(file: BinaryIO, start: int = 0, unread: float = 0) -> Iterator[TarSample]:
    """The samples from byte `start`, which must be 0 or the `end` of a sample.

    Args:
        unread: the members of so many of them, the first ones, are passed over by seek; the same damage is found.

    Raises:
        TarError: after the last sample before the damage. The sample that the damage cuts is not yielded.
        OSError: from `file`, and where the file gives less than its size promises.
    """
    sample: TarSample | None = None
    total = file.seek(0, 2)
    number = -1
    for item in _members(file, start):
        if sample is None or item.key != sample.key:
            if sample is not None:
                sample.end = item.start
                yield sample
            if item.key == "":
                _check_end(file, item.start)
                return
            sample = TarSample(item.key, item.start)
            number += 1
        if total < item.content + item.size <= item.content + MAX_MEMBER_BYTES:
            raise TarError("truncated shard", total)
        if number < unread:
            item.skip()
        elif item.extension in sample.members:
            sample.duplicate = True
            item.skip()
        elif item.size > MAX_MEMBER_BYTES:
            sample.too_large = True
            item.skip()
        elif len(sample.members) < MAX_MEMBERS:
            sample.members[item.extension] = item.read()
        else:
            item.skip()


@dataclass
class _Member:
    key: str  # never empty, but at the end
    extension: str
    start: int  # of its first header
    size: int  # of the content, bytes
    content: int  # where it begins
    file: BinaryIO

    @property
    def end(self) -> int:
        return self.content + self.size + -self.size % BLOCK

    def read(self) -> bytes:
        data = _read(self.file, self.size, self.content, "truncated shard")
        self.file.seek(self.end)
        return data

    def skip(self) -> None:
        self.file.seek(self.end)


def _members(file: BinaryIO, offset: int) -> Iterator[_Member]:
    """Regular files with a key and an extension, then one without a key where the archive ends."""
    file.seek(offset)
    start = offset
    long_name: str | None = None
    pax: dict[str, str] = {}
    while True:
        header = file.read(BLOCK)
        if header == ZEROS or not header:
            yield _Member("", "", offset, 0, offset, file)
            return
        if len(header) < BLOCK:
            header += _read(file, BLOCK - len(header), offset + len(header), "truncated shard")
        _verify(header, offset)
        kind = header[156:157]
        size = int(pax.get("size") or _number(header[124:136], offset))
        content = offset + BLOCK
        if not 0 <= size <= MAX_OFFSET - content:
            raise TarError("damaged shard: bad header", offset)
        if kind in b"Lxg":
            if size > MAX_NAME_BYTES:
                raise TarError("damaged shard: bad header", offset)
            data = _read(file, size, content, "truncated shard")
            if kind == b"L":
                long_name = _text(data.rstrip(b"\0"))
            elif kind == b"x":
                pax = _pax_records(data, offset)
            offset = content + size + -size % BLOCK
            file.seek(offset)
            continue
        if kind in b"0\x007":
            name = pax.get("path") or long_name or _header_name(header)
            key, extension = _split_name(name)
            if key is not None:
                yield _Member(key, extension, start, size, content, file)
        offset = content + size + -size % BLOCK
        file.seek(offset)
        start, long_name, pax = offset, None, {}


def _check_end(file: BinaryIO, offset: int) -> None:
    """Behind the last member only zeros may follow, not too many: a broken copy has holes, or just stops."""
    file.seek(offset)
    rest = file.read(MAX_PADDING_BYTES + 1)
    if len(rest) < BLOCK:
        size = file.seek(0, 2)
        if size >= offset + BLOCK:
            raise OSError(f"short read: {len(rest)} bytes at {offset}")
        if size < offset:  # a member that was skipped is cut: the same damage as when it is read
            raise TarError("truncated shard", size)
        raise TarError("truncated shard: no end mark", offset + len(rest))
    if rest.count(0) != len(rest) or len(rest) > MAX_PADDING_BYTES:
        raise TarError("damaged shard: a hole of zeros", offset)


def _read(file: BinaryIO, count: int, offset: int, reason: str) -> bytes:
    """Exactly `count` bytes, of which the first lies at `offset`."""
    data = file.read(count)
    while len(data) < count:
        more = file.read(count - len(data))
        if not more:
            file.seek(0, 2)
            if file.tell() >= offset + count:  # the file is whole: the connection is not
                raise OSError(f"short read: {len(data)} of {count} bytes at {offset}")
            raise TarError(reason, offset + len(data))
        data += more
    return data


def _verify(header: bytes, offset: int) -> None:
    expected = _number(header[148:156], offset)
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != expected:
        raise TarError("damaged shard: bad header", offset)


def _number(digits: bytes, offset: int) -> int:
    """Octal, or base 256 for sizes from 8 GiB."""
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    text = digits.split(b"\0", 1)[0].strip()
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise TarError("damaged shard: bad header", offset) from None


def _header_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    if prefix and header[257:263] == b"ustar\0":  # GNU tar keeps other things there
        name = prefix + b"/" + name
    return _text(name)


def _text(name: bytes) -> str:
    """A name that can be written down and hashed, whatever bytes it is made of."""
    return name.decode("utf-8", "backslashreplace")


def _pax_records(data: bytes, offset: int) -> dict[str, str]:
    """Records "length key=value\\n"."""
    records = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or len(length) > 9 or not 0 < int(length) <= len(data):
            raise TarError("damaged shard: bad pax header", offset)
        name, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[_text(name)] = _text(value)
        data = data[int(length) :]
    size = records.get("size") or "0"
    if not (size.isascii() and size.isdigit() and len(size) < 20):
        raise TarError("damaged shard: bad pax header", offset)
    return records


def _split_name(name: str) -> tuple[str | None, str]:
    """("a/b", "jpg") of a/b.jpg; (None, "") of what is no part of a sample."""
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base or _METADATA.search(name):  # no extension, or hidden as ._b.jpg is
        return None, ""
    return name[:dot], name[dot + 1 :].lower()


def write_shards(
    folder: str | os.PathLike[str],
    samples: Iterable[Mapping[str, Any]],
    per_shard: int,
    pattern: str = "{:05d}.tar",
) -> list[Path]:
    """Writes `samples` in order, `per_shard` to a file, each of which appears whole or not at all.

    Args:
        samples: dicts of "__key__" (without dots: a key ends at the first one) and extension -> content;
            bytes stay as they are, the rest is encoded by webdataset according to its extension. The same samples
            give the same bytes.
        pattern: the file's name, formatted with the shard's number.

    Returns:
        The shards' paths.

    Raises:
        ValueError: a key with a dot, or without content.
        OSError: from the disk.
    """
    import webdataset  # torch: a recipe is read without

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    iterator = iter(samples)
    while group := list(itertools.islice(iterator, per_shard)):
        path = folder / pattern.format(len(paths))
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as file:
                # a fixed time, so that equal samples make equal shards
                with webdataset.TarWriter(file, mtime=0) as tar:
                    for sample in group:
                        tar.write(_checked(sample))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        paths.append(path)
    return paths


def _checked(sample: Mapping[str, Any]) -> dict[str, Any]:
    key = sample["__key__"]
    if not key or "." in key.rsplit("/", 1)[-1]:
        raise ValueError(f"sample key {key!r} must not be empty or hold a dot: readers end the key at the first one")
    if len(sample) < 2:
        raise ValueError(f"sample {key!r} has no content")
    return dict(sample)
