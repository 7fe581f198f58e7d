"""Shards as the world brings them, each with what is wrong in it planted and known: `write_hostile(folder)`.

Written with Python's tarfile, struct and Pillow: no code of the package under test.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.shards import jpeg, sample, tar_bytes

Members = list[tuple[str, bytes]]
CAPTION_KEY = "caption"


@dataclass(frozen=True)
class Kind:
    """One shard."""

    name: str
    data: bytes
    usable: tuple[str, ...]  # keys that train, in the shard's order
    bad: dict[str, int]  # reason -> how often an epoch must count it
    undecodable: int = 0  # of those, how many only decoding can find


# -- images


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    rng = np.random.default_rng(len(mode) + size[0])
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 4), dtype=np.uint8), "RGBA")
    return small.resize(size, Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def png_bomb(side: int) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    pixels = zlib.compress(bytes(side * 3 + 1) * 64)
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")


def png_text_bomb() -> bytes:
    """64 MB of text in 64 kB."""
    whole = encoded(picture(), "PNG")
    text = b"Comment\0\0" + zlib.compress(bytes(64 << 20), 9)
    return whole[:33] + png_chunk(b"zTXt", text) + whole[33:]


def jpeg_bomb(side: int) -> bytes:
    data = bytearray(jpeg(0))
    at = data.index(b"\xff\xc0") + 5  # height and width in the frame header
    data[at : at + 4] = struct.pack(">HH", side, side)
    return bytes(data)


def gif_bomb() -> bytes:
    data = bytearray(encoded(picture("P"), "GIF"))
    data[6:10] = struct.pack("<HH", 65_000, 65_000)
    return bytes(data)


def rotated() -> bytes:
    """A 40 x 30 JPEG that asks to be shown upright."""
    image, exif = picture(), Image.Exif()
    exif[0x0112] = 6
    return encoded(image, "JPEG", quality=95, exif=exif)


def animation(kind: str) -> bytes:
    frames = [picture().rotate(angle) for angle in (0, 90, 180)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"><image href="file:///etc/passwd"/></svg>'


# -- shards


def around(name: str, hostile: Members) -> Members:
    """A good sample before and one after, so that going on is part of the test."""
    return [*sample(f"{name}-a", 1), *hostile, *sample(f"{name}-z", 2)]


def broken(
    name: str, reason: str, hostile: Members, count: int = 1, undecodable: bool = False
) -> Kind:
    data = tar_bytes(around(name, hostile), tarfile.PAX_FORMAT)
    return Kind(
        name, data, (f"{name}-a", f"{name}-z"), {reason: count}, count if undecodable else 0
    )


def odd(name: str, hostile: Members, *keys: str) -> Kind:
    """Unusual, but usable: as `keys`."""
    data = tar_bytes(around(name, hostile), tarfile.PAX_FORMAT)
    return Kind(name, data, (f"{name}-a", *(keys or (name,)), f"{name}-z"), {})


def image(name: str, data: bytes, extension: str = "jpg") -> Kind:
    return odd(name, [(f"{name}.{extension}", data), (f"{name}.txt", b"a picture")])


def bad_image(
    name: str, data: bytes, reason: str = "image does not decode", extension: str = "jpg"
) -> Kind:
    return broken(
        name,
        reason,
        [(f"{name}.{extension}", data), (f"{name}.txt", b"a picture")],
        undecodable=bool(data),
    )


def damaged(name: str, reason: str, spoil: Callable[[bytes], bytes], usable: int) -> Kind:
    """A shard of four samples that is spoilt; the first `usable` of them are left."""
    whole = tar_bytes([m for i in range(4) for m in sample(f"{name}-{i}", i)])
    return Kind(name, spoil(whole), tuple(f"{name}-{i}" for i in range(usable)), {reason: 1})


def with_header(data: bytes, at: int, size_field: bytes) -> bytes:
    """The header at byte `at` claims another size, with a checksum that agrees."""
    header = bytearray(data[at : at + 512])
    header[124:136] = size_field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + 512 :]


def pax_header(content: bytes) -> bytes:
    """A pax header with `content` for records, before a shard of two samples."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(content)
    return (
        info.tobuf()
        + content
        + bytes(-len(content) % 512)
        + tar_bytes(sample("x", 0) + sample("y", 1))
    )


def special_files() -> Kind:
    """A folder, a link, a hidden file, a file without extension, a shard's index."""
    members = [("._s.jpg", b"1"), ("README", b"2"), ("__index__.json", b"3")]
    buffer = io.BytesIO(tar_bytes([*members, *sample("special", 3)]))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        kinds = {
            "folder.d": tarfile.DIRTYPE,
            "link.jpg": tarfile.SYMTYPE,
            "pipe.jpg": tarfile.FIFOTYPE,
        }
        for name, kind in kinds.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "special.jpg"
            tar.addfile(info)
    return Kind("special-files", buffer.getvalue(), ("special",), {})


def strange_names() -> Kind:
    """A name in Latin-1, one with a terminal's escape codes, one of 5,000 letters."""
    long = "n" * 5000
    members = [*sample("esc\x1b[2J", 4), *sample(long, 5)]
    data = tar_bytes(members, tarfile.GNU_FORMAT)[: -tarfile.RECORDSIZE % 512 or None]
    latin = bytearray(tar_bytes(sample("caf?", 6)))
    for at in (0, 512 + -(-len(jpeg(6)) // 512) * 512):
        header = bytearray(latin[at : at + 512])
        header[3] = 0xE9  # é
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        latin[at : at + 512] = header
    end = 2 * 512 + sum(-(-len(content) // 512) * 512 for _, content in sample("caf?", 6))
    return Kind("strange-names", bytes(latin[:end]) + data, ("caf\\xe9", "esc\x1b[2J", long), {})


def shard_kinds() -> list[Kind]:
    """What is wrong with the file."""
    first = 512 + -(-len(jpeg(0)) // 512) * 512 + 1024  # bytes of the first of `damaged`'s samples
    truncated, header = "truncated shard", "damaged shard: bad header"
    no_end, hole = "truncated shard: no end mark", "damaged shard: a hole of zeros"
    return [
        Kind("empty-file", b"", (), {no_end: 1}),
        Kind("html", b"<html>404 not found</html>" * 100, (), {header: 1}),
        Kind("only-an-end-mark", bytes(10_240), (), {}),
        damaged("gzipped", header, gzip.compress, 0),
        damaged("cut-in-header", truncated, lambda d: d[: first + 100], 0),
        damaged("cut-in-image", truncated, lambda d: d[: first + 700], 1),
        damaged("cut-in-caption", truncated, lambda d: d[: 2 * first - 510], 1),
        damaged("cut-in-padding", truncated, lambda d: d.rstrip(b"\0") + bytes(100), 4),
        damaged("cut-before-end", no_end, lambda d: d[: -(-len(d.rstrip(b"\0")) // 512) * 512], 4),
        damaged("header-hit", header, lambda d: d[:first] + b"\xaa" * 512 + d[first + 512 :], 0),
        damaged("hole", hole, lambda d: d[:first] + bytes(first) + d[2 * first :], 1),
        damaged("two-in-one", hole, lambda d: d + d, 4),
        Kind(
            "claims-8-tib",
            with_header(
                tar_bytes(sample("c", 0) + sample("d", 0)),
                first,
                b"\x80" + (8 << 40).to_bytes(11, "big"),
            ),
            ("c",),
            {"member is too large": 1, truncated: 1},  # of the sample, and of what seems to follow
        ),
        damaged(
            "claims-200-mib",
            truncated,
            lambda d: with_header(d, first, b"%011o\0" % (200 << 20)),
            1,
        ),
        damaged(
            "claims-less-than-nothing", header, lambda d: with_header(d, first, b"-0000001000\0"), 0
        ),
        Kind(
            "pax-of-many-digits",
            pax_header(b"9" * 6000 + b" size=3\n"),
            (),
            {"damaged shard: bad pax header": 1},
        ),
        Kind(
            "pax-of-strange-digits",
            pax_header("11 size=²²\n".encode()),
            (),
            {"damaged shard: bad pax header": 1},
        ),
        special_files(),
        strange_names(),
    ]


def sample_kinds() -> list[Kind]:
    """What is wrong with a sample's members or its caption."""
    p, out_of_order = jpeg(7), "out-of-order"
    interleaved = [("o.jpg", p), ("q.jpg", p), ("o.txt", b"x"), ("q.txt", b"y")]
    dotted = [
        (f"photo.{i}.{ext}", content)
        for i in (1, 2)
        for ext, content in (("jpg", p), ("txt", b"x"))
    ]
    extras = [
        (f"extras.{ext}", b"\x93NUMPY" * 500)
        for ext in ("npy", "mp4", "cls", "seg.png", "__key__", "__url__")
    ]

    def caption(name: str, text: bytes) -> Members:
        return [(f"{name}.jpg", p), (f"{name}.txt", text)]

    return [
        Kind(
            out_of_order,
            tar_bytes(around(out_of_order, interleaved)),
            (f"{out_of_order}-a", f"{out_of_order}-z"),
            {"no caption": 2, "no image": 2},
        ),
        odd("caption-first", [("caption-first.txt", b"x"), ("caption-first.jpg", p)]),
        broken("same-key", "duplicate key", [*sample("twin", 1), *sample("twin", 2)]),
        odd(
            "same-key-apart",
            [*sample("far", 1), *sample("between", 2), *sample("far", 3)],
            "far",
            "between",
            "far",
        ),
        broken("dots-in-keys", "no image: dots in the key", dotted),
        odd("extra-members", [*sample("extras", 3), *extras], "extras"),
        odd("upper-case", [("upper-case.JPG", p), ("upper-case.TXT", b"x")]),
        broken(
            "no-caption",
            "no caption",
            [("n1.jpg", p), ("n2.jpg", p), ("n3.json", b"{}"), ("n3.jpg", p)],
            3,
        ),
        broken("no-image", "no image", [("n.txt", b"x"), ("m.npy", b"y")], 2),
        broken(
            "empty-caption", "caption is empty", caption("e1", b"") + caption("e2", b" \n\t"), 2
        ),
        broken(
            "latin-1-caption", "caption is not UTF-8", caption("l", "un café".encode("latin-1"))
        ),
        broken("utf-16-caption", "caption is not UTF-8", caption("u", "a cat".encode("utf-16"))),
        broken("document", "caption is too long", caption("d", b"word " * 100_000)),
        odd(
            "endless-word",
            caption("endless-word", bytes(ord("a") + i * i % 23 for i in range(32_000))),
        ),
        odd(
            "odd-caption", caption("odd-caption", "\ufeff\0\U0001f408 &amp;amp; zalgơ̷\x07".encode())
        ),
    ]


def image_kinds() -> list[Kind]:
    """What is unusual about an image, or wrong with it."""
    gray16 = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50
    see_through = picture("RGBA").convert("P")
    bomb = "image has too many pixels"
    return [
        image("cmyk", encoded(picture("CMYK"), "JPEG")),
        image("gray-jpeg", encoded(picture("L"), "JPEG")),
        image("exif-rotated", rotated()),
        image("png-called-jpg", encoded(picture(), "PNG")),
        image("rgba", encoded(picture("RGBA"), "PNG"), "png"),
        image("gray-alpha", encoded(picture("LA"), "PNG"), "png"),
        image("palette", encoded(picture("RGB").convert("P"), "PNG"), "png"),
        image("palette-transparent", encoded(see_through, "PNG", transparency=3), "png"),
        image("one-bit", encoded(picture("1"), "PNG"), "png"),
        image("16-bit-png", encoded(Image.fromarray(gray16), "PNG"), "png"),
        image("16-bit-tiff", encoded(Image.fromarray(gray16), "TIFF"), "tif"),
        image("animated-gif", animation("GIF"), "gif"),
        image("animated-webp", animation("WEBP"), "webp"),
        image("animated-png", animation("PNG"), "png"),
        image("one-pixel", encoded(picture(size=(1, 1)), "JPEG")),
        image("one-pixel-high", encoded(picture(size=(3000, 1)), "PNG"), "png"),
        bad_image(
            "float-tiff", encoded(picture("F"), "TIFF"), "image has floating-point pixels", "tif"
        ),
        bad_image("empty-image", b"", "image is empty"),
        bad_image("text-image", b"this is no image"),
        bad_image("cut-jpeg", jpeg(8)[:-120]),
        bad_image("cut-png", encoded(picture(), "PNG")[:-300], extension="png"),
        bad_image("cut-webp", encoded(picture(), "WEBP")[:-60], extension="webp"),
        bad_image("png-bomb", png_bomb(30_000), bomb, "png"),
        bad_image("jpeg-bomb", jpeg_bomb(30_000), bomb),
        bad_image("gif-bomb", gif_bomb(), bomb, "gif"),
        bad_image(
            "letters", b"P3\n1 1\n255\n7 7 7\n", "image is a PPM with its numbers in letters"
        ),
        bad_image("text-bomb", png_text_bomb(), extension="png"),
        bad_image("eps", EPS),
        bad_image("svg", SVG, extension="png"),
    ]


def kinds() -> list[Kind]:
    """All, for captions in `.txt`."""
    return [*shard_kinds(), *sample_kinds(), *image_kinds()]


def json_kinds() -> list[Kind]:
    """For `data.caption_key: caption`: each a shard of a good sample, the kind, a good sample."""

    def meta(value: object) -> bytes:
        return json.dumps({"caption": value}).encode()

    lists = [meta(["one", "two", "three"]), meta(["", 3, "left"])]
    return [
        _json("json-list", {}, *lists),
        _json("json-no-key", {"no caption": 3}, b"{}", meta(None), b'{"captions": "x"}'),
        _json("json-broken", {"json does not parse": 3}, b"{", b"", b'{"caption": "\xff"}'),
        _json("json-no-object", {"json does not parse": 2}, b'["x"]', b'"x"'),
        _json(
            "json-deep",
            {"json does not parse": 1},
            b'{"caption": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ),
        _json("json-number", {"caption is not a text": 2}, meta(3), meta({"en": "x"})),
        _json(
            "json-empty", {"caption is empty": 4}, meta(""), meta("  "), meta([]), meta(["", " "])
        ),
        _json("json-half-surrogate", {"caption is not UTF-8": 1}, b'{"caption": "\\ud83d"}'),
        _json("json-long", {"caption is too long": 1}, meta("word " * 100_000)),
        _json("json-list-of-numbers", {"caption is not a text": 1}, meta([1, 2])),
    ]


def _json(name: str, bad: dict[str, int], *contents: bytes) -> Kind:
    good = json.dumps({"caption": "a good one"}).encode()
    keys = [f"{name}-a", *(f"{name}{i}" for i in range(len(contents))), f"{name}-z"]
    members: Members = []
    for key, content in zip(keys, [good, *contents, good], strict=True):
        members += [(f"{key}.jpg", jpeg(9)), (f"{key}.json", content)]
    return Kind(name, tar_bytes(members), tuple(keys if not bad else (keys[0], keys[-1])), bad)


def write_hostile(folder: Path, chosen: list[Kind]) -> str:
    """A shard for each; returns what `data.train` would say."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in chosen:
        (folder / f"{kind.name}.tar").write_bytes(kind.data)
    return str(folder / "*.tar")


def planted(chosen: list[Kind]) -> Counter[tuple[str, str]]:
    """(reason, shard's name) -> count, of one epoch."""
    return Counter(
        {(reason, f"{kind.name}.tar"): n for kind in chosen for reason, n in kind.bad.items()}
    )
