"""Read tar files as samples (ustar, GNU long names, pax; three times as fast as `tarfile`), and
write them.

Neighboring members that share a key (the name up to the first dot of its last part) make a sample,
as in webdataset. Unlike there, a damaged or cut archive is an error.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 512  # bytes: everything in a tar is padded to this
MAX_PADDING_BYTES = 1 << 20  # of zeros at the end; GNU tar writes up to 10 KiB
MAX_NAME_BYTES = 1 << 20  # of a long name or pax header; more is damage
# before one member: a long name, a long link and a pax header; more is damage
MAX_HEADER_BYTES = 1 << 22
MAX_SAMPLE_BYTES = 1 << 28  # larger samples are not read, because a block of samples is in memory
MAX_OFFSET = 1 << 50  # bytes; no shard is that long
MAX_MEMBERS = 64  # of a sample: a shard whose names share a dot would become one huge sample

# webdataset's additional files, such as __index__.json
_METADATA = re.compile(r"(^|/)__[^/]*__([./]|$)")


class TarError(Exception):
    """The archive is damaged or incomplete; `reason` is for counting, `offset` is in bytes."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at byte {offset}")
        self.reason = reason
        self.offset = offset


@dataclass
class TarSample:
    """One sample as it is in its archive."""

    key: str
    end: int = 0  # bytes: where the next sample begins; reading can resume here
    # lower-case extension -> content; None: with those before it more than MAX_SAMPLE_BYTES
    members: dict[str, bytes | None] = field(default_factory=dict)
    duplicate: bool = False  # an extension came twice: two samples with the same key


def iter_samples(
    file: BinaryIO,
    start: int = 0,
    unread: float = 0,
    is_read: Callable[[int], bool] | None = None,
) -> Iterator[TarSample]:
    """The samples from byte `start`, which must be 0 or the `end` of a sample.

    Args:
        unread: the number of samples at the start whose members are skipped by seek; the same
            damage is found.
        is_read: whether the members of a sample are read, by its number from `start`; None: of all
            behind `unread`.

    Raises:
        TarError: after the last sample before the damage. The sample that the damage cuts is not
            yielded.
        OSError: from `file`, or if it gives less than its size promises.
    """
    total, number = file.seek(0, 2), -1
    sample: TarSample | None = None
    for name, begin, content, size in _members(file, start, total):
        base = name.rfind("/") + 1
        dot = name.find(".", base)
        if name and (dot <= base or _METADATA.search(name)):
            continue  # not part of a sample: no extension, hidden (._b.jpg), or webdataset's own
        key, extension = name[:dot], name[dot + 1 :].lower()
        if sample is None or key != sample.key:
            if sample is not None:
                sample.end = begin
                yield sample
            if not name:
                break
            sample, number = TarSample(key), number + 1
        if total < content + size <= content + MAX_SAMPLE_BYTES:
            raise TarError("truncated shard", total)
        if number < unread or (is_read is not None and not is_read(number)):
            continue
        if extension in sample.members:
            sample.duplicate = True
        elif len(sample.members) < MAX_MEMBERS:
            held = sum(map(len, filter(None, sample.members.values())))
            too_large = held + size > MAX_SAMPLE_BYTES
            sample.members[extension] = None if too_large else _read(file, content, size, total)
    # Only a few zeros may follow the last member: a broken copy has holes, or just stops.
    if begin > total:  # a skipped member is cut: report the same damage as if it were read
        raise TarError("truncated shard", total)
    rest = _read(file, begin, min(total - begin, MAX_PADDING_BYTES + 1), total)
    if not rest:
        raise TarError("truncated shard: no end mark", total)
    if rest.count(0) != len(rest) or len(rest) > MAX_PADDING_BYTES:
        raise TarError("damaged shard: a hole of zeros", begin)


def _members(file: BinaryIO, offset: int, total: int) -> Iterator[tuple[str, int, int, int]]:
    """(name, where its first header begins, where its content begins, the content's size) of each
    regular file; at the end of the archive one without a name."""
    begin, long_name = offset, ""
    pax: dict[str, str] = {}
    while offset < total:
        header = _read(file, offset, BLOCK, total)
        if header == bytes(BLOCK):
            break
        kind, content = header[156:157], offset + BLOCK
        limit = MAX_NAME_BYTES if kind in b"Lxg" else MAX_OFFSET - content
        try:
            size = int(pax.get("size") or _number(header[124:136]))
            checksum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
            whole = checksum == _number(header[148:156]) and 0 <= size <= limit
            whole = whole and offset - begin <= MAX_HEADER_BYTES
        except ValueError:
            whole = False
        if not whole:
            raise TarError("damaged shard: bad header", offset)
        if kind == b"L":
            long_name = _text(_read(file, content, size, total).rstrip(b"\0"))
        elif kind == b"x":
            pax = _pax_records(_read(file, content, size, total), offset)
        offset = content + size + -size % BLOCK
        if kind in b"Lxg":
            continue  # of the member that follows
        name = pax.get("path") or long_name
        if not name:
            short, prefix = (field.split(b"\0", 1)[0] for field in (header[:100], header[345:500]))
            if prefix and header[257:263] == b"ustar\0":  # GNU tar keeps other things there
                short = prefix + b"/" + short
            name = _text(short)
        if name and kind in b"0\x007":
            yield name, begin, content, size
        begin, long_name, pax = offset, "", {}
    yield "", offset, offset, 0


def _read(file: BinaryIO, offset: int, count: int, total: int) -> bytes:
    if offset + count > total:
        raise TarError("truncated shard", total)
    file.seek(offset)
    data = file.read(count)
    if len(data) < count:  # the file is whole, the connection is not
        raise OSError(f"short read: {len(data)} of {count} bytes at {offset}")
    return data


def _number(digits: bytes) -> int:
    """Octal, or base 256 for sizes from 8 GiB. ValueError."""
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    return int(digits.split(b"\0", 1)[0].strip() or b"0", 8)


def _text(name: bytes) -> str:
    """Decode a name so that it can be written and hashed, whatever its bytes."""
    return name.decode("utf-8", "backslashreplace")


def _pax_records(data: bytes, offset: int) -> dict[str, str]:
    """Records "length key=value\\n"; a size among them is a number. In time linear in `data`."""
    records: list[tuple[str, str]] = []
    begin = 0
    try:
        while begin < len(data):
            space = data.index(b" ", begin, begin + 8)  # up to 7 digits, as MAX_NAME_BYTES has
            length = int(data[begin:space])
            if not space - begin < length <= len(data) - begin:
                raise ValueError
            name, _, value = data[space + 1 : begin + length - 1].partition(b"=")
            records.append((_text(name), _text(value)))
            begin += length
        by_name = dict(records)
        int(by_name.get("size") or 0)
    except ValueError:
        raise TarError("damaged shard: bad pax header", offset) from None
    return by_name


def write_shards(
    folder: str | os.PathLike[str],
    samples: Iterable[Mapping[str, Any]],
    per_shard: int,
    pattern: str = "{:05d}.tar",
) -> list[Path]:
    """Writes `samples` in order, `per_shard` to a file. Returns the shards' paths.

    Args:
        samples: dicts of "__key__" (without dots: a key ends at the first one) and extension ->
            content. webdataset encodes content that is not bytes according to its extension. The
            same samples give the same bytes.
        pattern: the file's name, formatted with the shard's number.

    Raises:
        ValueError: an empty key, or one with a dot; nothing of its shard is written.
        OSError: from the disk.
    """
    import webdataset  # late: it imports torch, and a recipe is read without torch

    paths: list[Path] = []
    iterator = iter(samples)
    while True:
        group = list(itertools.islice(iterator, per_shard))
        if not group:
            return paths
        for key in (sample["__key__"] for sample in group):
            if not key or "." in key.rsplit("/", 1)[-1]:
                raise ValueError(
                    f"sample key {key!r} must not be empty or contain a dot: readers end it at the "
                    "first one"
                )
        path = Path(folder) / pattern.format(len(paths))
        path.parent.mkdir(parents=True, exist_ok=True)
        # a fixed time: equal samples make equal shards
        with webdataset.TarWriter(str(path), mtime=0) as tar:
            for sample in group:
                tar.write(dict(sample))
        paths.append(path)
