"""Files, weights, recipes and servers from somebody who means harm."""

from __future__ import annotations

import gzip
import json
import os
import socket
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

from scripts.attack import lab
from scripts.attack.case import SECRET, SKIPPED, Case, said
from tests.data.hostile import encoded, jpeg_bomb, pax_header, picture, png_bomb, png_chunk
from tests.data.shards import jpeg, sample, tar_bytes
from tests.launcher.conftest import metrics

GOOD = 24  # samples beside the hostile ones, enough for a global batch
ONCE = ("run.steps=2", "batch.global_size=16", "batch.micro_size=8", "schedule.warmup_steps=1")
ONE_LANE = (*ONCE, "run.steps=5", "data.lanes=1", "data.shuffle_block=10000", "data.workers=1")
Members = list[tuple[str, bytes]]


# -- shards


def good(first: int = 0) -> Members:
    return [member for i in range(first, first + GOOD) for member in sample(f"g{i}", i)]


def trained(folder: Path, shard: Path, *reasons: str, more: tuple[str, ...] = ()) -> str:
    """Training on a good shard and this one: to the end, or refused; nothing is written elsewhere."""
    (folder / "a.tar").write_bytes(tar_bytes(good()))
    victim = folder / "victim"
    victim.write_text("mine")
    train = f"{{{folder}/a.tar,{shard}}}"
    status, out = lab.run(lab.recipe(folder, train), *ONE_LANE, *more)
    assert victim.read_text() == "mine"
    assert "Traceback" not in out, out
    if status == 0:
        assert [line["step"] for line in metrics(folder / "run")] == [1, 2, 3, 4, 5], out
        assert all(reason in out for reason in reasons), (reasons, out)
        return SKIPPED
    return said(status, out, *(reasons or ("b.tar",)))


def one_shard(build: Callable[[], bytes], *reasons: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        (folder / "b.tar").write_bytes(build())
        return trained(folder, folder / "b.tar", *reasons)

    return attack


def a_file(make: Callable[[Path], object], *reasons: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        make(folder / "b.tar")
        return trained(folder, folder / "b.tar", *reasons)

    return attack


def header(name: str, size: int = 0, kind: bytes = b"0", link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info.tobuf(tarfile.GNU_FORMAT)


def resized(block: bytes, field: bytes) -> bytes:
    """A header that claims another size, with a checksum that agrees."""
    changed = bytearray(block)
    changed[124:136] = field
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


def named(name: str, kind: bytes = b"0", link: str = "") -> bytes:
    """A shard in which one member of `kind` has this name, then good samples."""
    return (
        header(f"{name}.jpg", 0, kind, link)
        + header(f"{name}.txt", 0, kind, link)
        + tar_bytes(good(100))
    )


def many_empty(count: int) -> bytes:
    """So many members without content, of one name."""
    return header("x.jpg") * count + bytes(1024)


def many_keys(path: Path) -> None:
    """100,000 samples without content, each with its own name."""
    with path.open("wb") as file:
        file.writelines(header(f"{i}.jpg") for i in range(100_000))
        file.write(bytes(1024))


def large_members(path: Path, count: int, kind: str) -> None:
    """Samples of 200 MiB each, on a disk that need not hold their zeros."""
    with path.open("wb") as file:
        for i in range(count):
            file.write(header(f"{i}.{kind}", 200 << 20))
            file.seek(200 << 20, os.SEEK_CUR)
            file.write(header(f"{i}.txt", 512) + b"a".ljust(512))
        file.write(bytes(1024))


def one_large_sample(path: Path) -> None:
    """One sample of 60 members of 250 MiB each."""
    with path.open("wb") as file:
        for i in range(60):
            file.write(header(f"x.e{i}", 250 << 20))
            file.seek(250 << 20, os.SEEK_CUR)
        file.write(tar_bytes(sample("x", 1)))


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(4 << 30)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


SHARDS: dict[str, Callable[[Path], str]] = {
    "a name with an absolute path": one_shard(partial(named, "/etc/cron.d/x")),
    "a name with ../../": one_shard(partial(named, "../../victim")),
    "a name of 255 dots": one_shard(partial(named, "." * 80)),
    "a name with newlines and a terminal's codes": one_shard(partial(named, "a\n\x1b]0;x\x07\r")),
    "a name with a NUL": one_shard(lambda: named("a\0b")),
    "a name that is half a UTF-8 letter": one_shard(lambda: named("a\udce9")),
    "a link to a file": one_shard(partial(named, "x", tarfile.SYMTYPE, "/etc/passwd")),
    "a hard link out": one_shard(partial(named, "x", tarfile.LNKTYPE, "../victim")),
    "a device": one_shard(partial(named, "x", tarfile.CHRTYPE)),
    "a member of unknown kind": one_shard(partial(named, "x", b"?")),
    "a million empty members": one_shard(partial(many_empty, 1_000_000)),
    "100,000 empty samples": a_file(many_keys),
    "a pax header of 200,000 records": one_shard(lambda: pax_header(b"5 a=\n" * 200_000)),
    "a pax header of 16 MiB": one_shard(lambda: pax_header(b"9 a=bcde\n" * 2_000_000)),
    "a pax record that is longer than its header": one_shard(lambda: pax_header(b"999999 a=b\n")),
    "a pax path with ../": one_shard(lambda: pax_header(b"28 path=../../../victim.jpg\n")),
    "a pax size below zero": one_shard(lambda: pax_header(b"11 size=-9\n"), "b.tar"),
    "a pax size of 100 digits": one_shard(
        lambda: pax_header(b"110 size=" + b"9" * 100 + b"\n"), "b.tar"
    ),
    "pax headers without end": one_shard(
        lambda: (header("p", 512, tarfile.XHDTYPE) + b"9 a=bcde\n".ljust(512, b"\0")) * 300_000
    ),
    "long names without end": one_shard(
        lambda: (header("p", 512, tarfile.GNUTYPE_LONGNAME) + b"n" * 512) * 300_000
    ),
    "a long name of 1 MiB": one_shard(
        lambda: (
            header("p", 1 << 20, tarfile.GNUTYPE_LONGNAME) + b"n" * (1 << 20) + tar_bytes(good(100))
        )
    ),
    "a size below zero, in base 256": one_shard(
        lambda: resized(header("x.jpg"), b"\xff" * 12) + tar_bytes(good(100)), "b.tar"
    ),
    "a size of 2^88": one_shard(
        lambda: resized(header("x.jpg"), b"\x80" + b"\xff" * 11) + tar_bytes(good(100)), "b.tar"
    ),
    "a size that is no number": one_shard(
        lambda: resized(header("x.jpg"), b"0x00000000ff") + tar_bytes(good(100)), "b.tar"
    ),
    "a size that hides the next member": one_shard(
        lambda: resized(header("x.jpg"), b"%011o\0" % 4096) + tar_bytes(good(100))
    ),
    "GNU sparse": one_shard(partial(named, "x", tarfile.GNUTYPE_SPARSE)),
    "pax sparse of 2^60 bytes": one_shard(
        lambda: pax_header(b"39 GNU.sparse.realsize=11529215046068470\n")
    ),
    "tars one behind the other": one_shard(lambda: tar_bytes(good(100)) + tar_bytes(good(200))),
    "4 GiB of NUL": a_file(hole),
    "a tar in gzip": one_shard(lambda: gzip.compress(tar_bytes(good(100)))),
    "20 images of 200 MiB": a_file(partial(large_members, count=20, kind="jpg")),
    "20 unused members of 200 MiB": a_file(partial(large_members, count=20, kind="bin")),
    "a sample of 60 members of 250 MiB": a_file(one_large_sample),
    "a folder for a shard": a_file(Path.mkdir),
    "a pipe for a shard": a_file(os.mkfifo, "b.tar"),
    "a socket for a shard": a_file(listening, "b.tar"),
    "/dev/zero for a shard": a_file(lambda path: path.symlink_to("/dev/zero"), "b.tar"),
    "a link to itself for a shard": a_file(lambda path: path.symlink_to(path), "b.tar"),
}

# -- samples


def in_a_shard(*members: tuple[str, bytes]) -> bytes:
    """One sample of these behind good ones."""
    return tar_bytes([*good(100), *((f"bad.{name}", data) for name, data in members)])


def an_image(data: Callable[[], bytes], extension: str, *reasons: str) -> Callable[[Path], str]:
    return one_shard(lambda: in_a_shard((extension, data()), ("txt", b"a picture")), *reasons)


def idle_tiff(side: int, entries: int = 0, loop: bool = False) -> bytes:
    """A TIFF that claims so many pixels; its next folder is itself."""
    tags = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, side), (279, 4, 1, 0xFFFFFFFF)]
    tags += [(60_000 + i % 5_000, 4, 0x3FFFFFFF, 8) for i in range(entries)]
    body = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + body + struct.pack("<I", 8 * loop)


def webp_bomb() -> bytes:
    """Black, 16,383 on each side, in some kilobytes."""
    data = bytearray(encoded(Image.new("RGB", (64, 64)), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    bits = int.from_bytes(data[at : at + 4], "little") | 0x0FFFFFFF
    data[at : at + 4] = bits.to_bytes(4, "little")
    return bytes(data)


def huge_png() -> bytes:
    """2^31 - 1 on each side."""
    return png_bomb(100).replace(struct.pack(">II", 100, 100), struct.pack(">II", *[2**31 - 1] * 2))


def png_profile_bomb() -> bytes:
    whole = encoded(picture(), "PNG")
    profile = b"x\0\0" + zlib.compress(bytes(256 << 20), 9)
    return whole[:33] + png_chunk(b"iCCP", profile) + whole[33:]


def png_many_chunks() -> bytes:
    whole = encoded(picture(), "PNG")
    return whole[:33] + png_chunk(b"tEXt", b"a\0b") * 1_000_000 + whole[33:]


def slow_scans() -> bytes:
    """As many pixels as are let in, in 99 scans."""
    data = encoded(Image.new("L", (9_450, 9_450)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 90 + b"\xff\xd9"


def plain_ppm() -> bytes:
    return b"P3\n3000 3000\n255\n" + b"7 " * (3 * 3000 * 3000)


IMAGES: dict[str, Callable[[Path], str]] = {
    "PNG of 65,535 on each side": an_image(lambda: png_bomb(65_535), "png", "too many pixels"),
    "PNG of 2^31 - 1 on each side": an_image(huge_png, "png", "b.tar"),
    "JPEG of 65,535 on each side": an_image(lambda: jpeg_bomb(65_535), "jpg", "b.tar"),
    "WEBP of 16,383 on each side": an_image(webp_bomb, "webp", "b.tar"),
    "TIFF of 65,535 on each side": an_image(lambda: idle_tiff(65_535), "tif", "too many pixels"),
    "TIFF that is its own next page": an_image(lambda: idle_tiff(8, loop=True), "tif"),
    "TIFF with 60,000 tags of 4 GiB": an_image(lambda: idle_tiff(8, 60_000), "tif"),
    "PNG of 65,535 x 1": an_image(lambda: encoded(Image.new("RGB", (65_535, 1)), "PNG"), "png"),
    "PNG of 1 x 65,535": an_image(lambda: encoded(Image.new("RGB", (1, 65_535)), "PNG"), "png"),
    "PNG with a profile of 256 MiB": an_image(png_profile_bomb, "png"),
    "PNG with a million chunks": an_image(png_many_chunks, "png"),
    "JPEG of 90 megapixels in 99 scans": an_image(slow_scans, "jpg"),
    "PPM in letters": an_image(plain_ppm, "ppm"),
    "PPM that claims a million on each side": an_image(
        lambda: b"P6 1000000 1000000 255\n", "ppm", "too many pixels"
    ),
    "BMP with a height below zero": an_image(
        lambda: encoded(picture(), "BMP")[:22] + struct.pack("<i", -(2**31)) + bytes(64), "bmp"
    ),
    "GIF without end": an_image(
        lambda: encoded(picture("P"), "GIF")[:-1] + b"!\xfe\x01a\0" * 1_000_000, "gif"
    ),
    "a program for an image": an_image(lambda: Path("/bin/sh").read_bytes(), "jpg", "b.tar"),
}


def a_caption(data: Callable[[], bytes], *reasons: str) -> Callable[[Path], str]:
    return one_shard(lambda: in_a_shard(("jpg", jpeg(1)), ("txt", data())), *reasons)


def a_json(data: Callable[[], bytes], *reasons: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        members = [(name.replace("txt", "json"), content) for name, content in good()]
        whole = [
            (name, json.dumps({"c": "good"}).encode() if "json" in name else content)
            for name, content in members
        ]
        bad = [("bad.jpg", jpeg(1)), ("bad.json", data())]
        (folder / "b.tar").write_bytes(tar_bytes([*whole, *bad]))
        (folder / "a.tar").write_bytes(tar_bytes(whole))
        train = f"{{{folder}/a.tar,{folder}/b.tar}}"
        status, out = lab.run(lab.recipe(folder, train), *ONE_LANE, "data.caption_key=c")
        assert status == 0 and "Traceback" not in out, out
        assert all(reason in out for reason in reasons), (reasons, out)
        return SKIPPED

    return attack


CAPTIONS: dict[str, Callable[[Path], str]] = {
    "a caption of 10 MB": a_caption(lambda: b"word " * 2_000_000, "caption is too long"),
    "a caption that is not UTF-8": a_caption(lambda: b"\xff\xfe\x80", "caption is not UTF-8"),
    "a caption of 32,000 combining marks": a_caption(lambda: "a\u0301".encode() * 10_000),
    "a caption of one letter 32,000 times": a_caption(lambda: b"a" * 32_000),
    "a caption of digits": a_caption(lambda: b"1" * 32_000),
    "a caption of HTML entities": a_caption(lambda: b"&amp;" * 6_000),
    "a caption of mojibake": a_caption(lambda: "Ã\u0083Â\u00a9".encode() * 3_000),
    "a caption of a script": a_caption(lambda: b"<script>alert(1)</script>"),
    "JSON 10 million deep": a_json(lambda: b"[" * 10_000_000, "json does not parse"),
    "JSON with a number of 10 million digits": a_json(
        lambda: b'{"c": ' + b"9" * 10_000_000 + b"}", "b.tar"
    ),
    "JSON with a million keys": a_json(
        lambda: b'{"c": "x", ' + b'"k": 1, ' * 1_000_000 + b'"z": 1}'
    ),
    "JSON with NaN for a caption": a_json(lambda: b'{"c": NaN}', "caption is not a text"),
    "JSON with a million captions": a_json(lambda: json.dumps({"c": ["x"] * 1_000_000}).encode()),
}

# -- weights and models


class Runs:
    """Code that runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def weights(make: Callable[[Path], Path], *words: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        file = make(folder)
        status, out = lab.run(lab.recipe(folder), *ONCE, f"model.init_from={file}")
        assert not (folder / "ran").exists()
        return said(status, out, "model.init_from" if "init_from" in out else str(file), *words)

    return attack


def with_code(folder: Path, name: str = "w.pt") -> Path:
    torch.save({"state_dict": {"x": Runs(folder / "ran")}}, folder / name)
    return folder / name


def old_pickle(folder: Path) -> Path:
    torch.save({"x": Runs(folder / "ran")}, folder / "w.pt", _use_new_zipfile_serialization=False)
    return folder / "w.pt"


def script(folder: Path) -> Path:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "w.pt")
    return folder / "w.pt"


def zip_bomb(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "w.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", bytes(1 << 20))
        with archive.open("w/data/0", "w", force_zip64=True) as member:
            for _ in range(40):
                member.write(bytes(64 << 20))
    return folder / "w.pt"


def safe(head: bytes, length: int | None = None, body: bytes = b"") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        file = folder / "w.safetensors"
        size = struct.pack("<Q", len(head) if length is None else length)
        file.write_bytes(size + head + body)
        return file

    return make


def tensor(**fields: object) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **fields}
    return json.dumps({"visual.proj": entry}).encode()


def another_model(folder: Path) -> Path:
    save_file({"visual.proj": torch.zeros(3, 3)}, folder / "w.safetensors")
    return folder / "w.safetensors"


WEIGHTS: dict[str, Callable[[Path], str]] = {
    "a .pt with code": weights(with_code, "code to unpickle is refused"),
    "a .pt of old format with code": weights(old_pickle, "code to unpickle is refused"),
    "a .bin with code": weights(partial(with_code, name="w.bin"), "code to unpickle is refused"),
    "a TorchScript archive": weights(script),
    "a .pt that unpacks to 2.5 GiB": weights(zip_bomb),
    "safetensors with a header of 2^60 bytes": weights(safe(b"{}", 1 << 60)),
    "safetensors with a header of 0 bytes": weights(safe(b"", 0)),
    "safetensors of 3 bytes": weights(lambda folder: raw(folder / "w.safetensors", b"abc")),
    "safetensors with a header that is deep": weights(safe(b"[" * 1_000_000)),
    "safetensors beyond their end": weights(safe(tensor(data_offsets=[0, 1 << 40]))),
    "safetensors with offsets backwards": weights(
        safe(tensor(data_offsets=[16, 0]), body=b"x" * 16)
    ),
    "safetensors with a shape of 2^62": weights(safe(tensor(shape=[1 << 31, 1 << 31]))),
    "safetensors with another type": weights(safe(tensor(dtype="F999"), body=b"x" * 16)),
    "weights of another model": weights(another_model, "does not fit the model", "model.name"),
    "a pipe for weights": weights(lambda folder: pipe(folder / "w.safetensors")),
}


def raw(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def model(content: Callable[[dict], object], *words: str) -> Callable[[Path], str]:
    """A model's JSON from somebody else."""

    def attack(folder: Path) -> str:
        recipe = lab.recipe(folder)
        file = folder / "small.json"
        changed = content(json.loads(file.read_text()))
        file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
        (folder / "stranger.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
        status, out = lab.run(recipe, *ONCE, environ={"PYTHONSAFEPATH": ""})
        assert not (folder / "ran").exists()
        if status == 0:  # what names code is nothing that a model is built of
            return SKIPPED
        return said(status, out, "small.json", *words)

    return attack


def towers(kind: str, **fields: object) -> Callable[[dict], dict]:
    return lambda given: {**given, kind: {**given[kind], **fields}}


MODELS: dict[str, Callable[[Path], str]] = {
    "a config that names code for a tower": model(
        towers("vision_cfg", timm_model_name="stranger.run"), "timm_model_name"
    ),
    "a config that names code for a model": model(lambda m: {**m, "own": "stranger.run"}),
    "a config with a class to import": model(lambda m: {**m, "_target_": "os.system"}, "_target_"),
    "a config with a Hugging Face tower": model(
        towers("text_cfg", hf_model_name="../stranger", trust_remote_code=True), "hf_model_name"
    ),
    "a config with a tokenizer's code": model(
        towers("text_cfg", hf_tokenizer_name="stranger", tokenizer_kwargs={"trust_remote_code": 1})
    ),
    "a config a million brackets deep": model(lambda m: "[" * 1_000_000),
    "a config with a width of 2^62": model(towers("vision_cfg", width=1 << 62)),
    "a config with a billion layers": model(towers("text_cfg", layers=10**9), "layers"),
    "a config with a width of NaN": model(towers("text_cfg", width=float("nan")), "width"),
    "a config that is a list": model(lambda m: [m]),
    "a config with NUL": model(lambda m: "\0" * 100),
}

# -- recipes


def recipe_of(text: Callable[[str], str | bytes], *words: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        changed = text(file.read_text())
        file.write_bytes(changed.encode() if isinstance(changed, str) else changed)
        status, out = lab.run(file, *ONCE)
        assert not (folder / "ran").exists()
        return said(status, out, *words)

    return attack


def override(*overrides: str, words: tuple[str, ...] = ()) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        status, out = lab.run(lab.recipe(folder), *ONCE, *overrides)
        return said(status, out, *words)

    return attack


def laughs(text: str) -> str:
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join([*lines, text])


def odd_recipe(make: Callable[[Path], object], *words: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        make(folder / "odd.yaml")
        status, out = lab.run(folder / "odd.yaml", *ONCE)
        return said(status, out, "odd.yaml", *words)

    return attack


RECIPES: dict[str, Callable[[Path], str]] = {
    "a recipe of a billion laughs": recipe_of(laughs),
    "laughs for a value": recipe_of(lambda t: laughs("").replace("x11:", "run:")),
    "a recipe with a python tag": recipe_of(
        lambda t: f"{t}\nz: !!python/object/apply:os.system ['touch ran']", "not YAML"
    ),
    "a recipe that is not UTF-8": recipe_of(lambda t: t.encode("utf-16"), ".yaml"),
    "a recipe with NUL": recipe_of(lambda t: t + "\0", ".yaml"),
    "a recipe a hundred thousand brackets deep": recipe_of(
        lambda t: f"z: {'[' * 100_000}", ".yaml"
    ),
    "a recipe that is a list": recipe_of(lambda t: "- a\n", ".yaml"),
    "a recipe with a terminal's codes for a key": recipe_of(lambda t: f'{t}\n"\\e[2J": 1'),
    "a recipe that holds itself": recipe_of(lambda t: f"{t}\nz: &z [*z]"),
    "a recipe with itself for a section": recipe_of(lambda t: "run: &r {name: *r}", "run.name"),
    "a folder for a recipe": odd_recipe(Path.mkdir),
    "/dev/zero for a recipe": odd_recipe(lambda path: path.symlink_to("/dev/zero")),
    "a billion shards in braces": override("data.train={0..999999999}.tar", words=("data.train",)),
    "2^40 shards in braces": override("data.train=" + "{a,b}" * 40, words=("data.train",)),
    "braces a hundred thousand deep": override(
        "data.train=" + "{" * 100_000 + "}" * 100_000, words=("data.train",)
    ),
    "a pipe: of a shell": override("data.train='pipe:touch ran'", words=("data.train", "pipe:")),
    "steps of 400 digits": override("run.steps=" + "9" * 400, words=("run.steps",)),
    "a rate that is NaN": override("optim.lr=.nan", words=("optim.lr", "nan")),
    "a rate that is infinite": override("optim.lr=.inf", words=("optim.lr", "inf")),
    "a run directory with NUL": override('run.dir="a\\0b"', words=("run.dir",)),
    "a run directory of 5,000 letters": override(f"run.dir={'a' * 5_000}", words=("run.dir",)),
    "/proc for a run directory": override("run.dir=/proc/1/x", words=("run.dir",)),
    "2^31 workers": override("data.workers=2147483648", words=("data.workers",)),
    "a global batch of 2^62": override(
        f"batch.global_size={1 << 62}", words=("batch.global_size",)
    ),
    "2^40 lanes": override(f"data.lanes={1 << 40}", words=("data.lanes",)),
}

# -- servers


@cache
def packed_gibibyte() -> bytes:
    """Made before the clock starts: the server is to be quick."""
    return gzip.compress(bytes(1 << 30), 9)


class Hostile(BaseHTTPRequestHandler):
    """Answers as `kind` says."""

    kind = ""
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.asked.append(self.path)
        getattr(self, self.kind)(self.command == "GET")

    do_HEAD = do_GET  # noqa: N815

    def headers_out(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def to_loopback(self, content: bool) -> None:
        self.headers_out(302, Location="http://127.0.0.1:1/latest/meta-data", Content_Length=0)

    def to_a_file(self, content: bool) -> None:
        self.headers_out(302, Location="file:///etc/passwd", Content_Length=0)

    def in_circles(self, content: bool) -> None:
        self.headers_out(302, Location=f"{self.path}x", Content_Length=0)

    def grows_by_gzip(self, content: bool) -> None:
        packed = packed_gibibyte() if content else b""
        self.headers_out(
            200, Content_Length=len(packed) if content else 4096, Content_Encoding="gzip"
        )
        self.wfile.write(packed)

    def without_end(self, content: bool) -> None:
        self.headers_out(206 if content else 200, Content_Length=1 << 40)
        while content:
            self.wfile.write(bytes(1 << 20))

    def negative(self, content: bool) -> None:
        self.headers_out(200, Content_Length=-5)

    def in_drops(self, content: bool) -> None:
        self.headers_out(206 if content else 200, Content_Length=10_240)
        while content:
            self.wfile.write(b"\0")
            self.wfile.flush()
            threading.Event().wait(5)

    def headers_without_end(self, content: bool) -> None:
        self.send_response(200)
        for number in range(1_000_000):
            self.send_header(f"X-{number}", "y" * 1_000)
            self.end_headers() if number == 999_999 else self.flush_headers()

    def a_listing(self, content: bool) -> None:
        names = "".join(f'<a href="{i}&#10;x.tar">x</a>' for i in range(100_000))
        body = f"<html>{names}</html>".encode() if content else b""
        self.headers_out(200, Content_Type="text/html", Content_Length=len(body))
        self.wfile.write(body)

    def buckets(self, content: bool) -> None:
        """An S3 listing of 100,000 names with newlines, page after page of the same."""
        self.page_of("&#10;.tar", 100_000)

    def names(self, content: bool) -> None:
        """An S3 listing of names without end."""
        self.page_of(f"-{len(self.asked)}.tar", 1_000)

    def slow_names(self, content: bool) -> None:
        """The same, every 5 seconds a page."""
        threading.Event().wait(5)
        self.names(content)

    def page_of(self, ending: str, count: int) -> None:
        """So many names of an S3 listing, and word that more follow."""
        keys = "".join(
            f"<Contents><Key>x/{i}{ending}</Key><Size>1</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for i in range(count)
        )
        body = (
            "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t"
            f"</NextContinuationToken>{keys}</ListBucketResult>"
        ).encode()
        self.headers_out(200, Content_Type="application/xml", Content_Length=len(body))
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def server(kind: str) -> Iterator[str]:
    handler = type("Handler", (Hostile,), {"kind": kind, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as up:
        up.daemon_threads, up.block_on_close = True, False
        up.handle_error = lambda *args: None  # type: ignore[method-assign]
        threading.Thread(target=up.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{up.server_port}"
        up.shutdown()


IMPATIENT = ("storage.patience_seconds=5",)


def served(kind: str, path: str = "a.tar", *words: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        with server(kind) as host:
            url = f"http://reader:{SECRET}@{host}/{path}"
            status, out = lab.run(lab.recipe(folder, url), *ONCE, *IMPATIENT)
        return said(status, out, host, *words)

    return attack


def bucket(kind: str, *words: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        with server(kind) as host:
            environ = {"AWS_ENDPOINT_URL": f"http://{host}", "AWS_ALLOW_HTTP": "true"}
            environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": SECRET}
            train = lab.recipe(folder, "s3://b/x/*.tar")
            status, out = lab.run(train, *ONCE, *IMPATIENT, environ=environ)
        return said(status, out, "s3://b/x", "data.train", *words)

    return attack


def url(address: str, *words: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        status, out = lab.run(lab.recipe(folder, address), *ONCE, *IMPATIENT)
        return said(status, out, *words)

    return attack


SERVERS: dict[str, Callable[[Path], str]] = {
    "a redirect to loopback": served("to_loopback"),
    "a redirect to file://": served("to_a_file"),
    "redirects in circles": served("in_circles"),
    "an answer that unpacks to 1 GiB": served("grows_by_gzip"),
    "an answer without end": served("without_end"),
    "a length below zero": served("negative"),
    "a byte every 5 seconds": served("in_drops", "a.tar", "storage.attempts"),
    "a million headers": served("headers_without_end"),
    "a listing of 100,000 names with newlines over http": served("a_listing", "x/*.tar"),
    "an S3 listing of 100,000 names with newlines, without end": bucket(
        "buckets", "rename or remove"
    ),
    "an S3 listing without end": bucket("names", "name a folder with fewer"),
    "an S3 listing without end, 1,000 names in 5 seconds": bucket(
        "slow_names", "CLIP_TRAIN_S3_PATIENCE_SECONDS"
    ),
    "the metadata address": url("http://169.254.169.254/latest/a.tar", "169.254.169.254"),
    "a closed port of loopback": url("http://127.0.0.1:1/a.tar", "127.0.0.1:1"),
    "IPv6 loopback": url("http://[::1]:1/a.tar", "[::1]:1"),
    "file:// of a secret": url("file:///etc/passwd", "/etc/passwd"),
    "file:// of another host": url("file://host/etc/passwd", "data.train"),
    "an unknown protocol": url("gopher://host/a.tar", "gopher", "correct it"),
    "a chain of protocols": url("zip://a::simplecache::http://127.0.0.1:1/b.zip"),
    "a protocol with code's name": url("os.system://x/a.tar", "os.system"),
    "a store with code's name": override(
        "checkpoint.remote=subprocess.run://x", words=("subprocess.run", "Storage")
    ),
    "a store that cannot be written": override(
        "checkpoint.remote=http://127.0.0.1:1/x", words=("127.0.0.1:1",)
    ),
}

# -- indexes


def index(content: Callable[[dict], object], *words: str) -> Callable[[Path], str]:
    """An index beside the shards that is not theirs."""

    def attack(folder: Path) -> str:
        (folder / "a.tar").write_bytes(tar_bytes(good()))
        status, out = lab.run(folder / "a.tar", verb="index")
        assert status == 0, out
        file = folder / "clip_train_index.json"
        changed = content(json.loads(file.read_text()))
        file.write_text(changed if isinstance(changed, str) else json.dumps(changed, indent=1))
        status, out = lab.run(lab.recipe(folder, str(folder / "a.tar")), *ONE_LANE)
        if status == 0:
            assert len(metrics(folder / "run")) == 5 and "Traceback" not in out, out
            return SKIPPED
        return said(status, out, *words)

    return attack


def entry(**fields: object) -> Callable[[dict], dict]:
    def change(content: dict) -> dict:
        content["shards"]["a.tar"].update(fields)
        return content

    return change


INDEXES: dict[str, Callable[[Path], str]] = {
    "an index of -5 samples": index(entry(samples=-5), "clip_train_index.json"),
    "an index of 10^18 samples": index(entry(samples=10**18), "clip_train_index.json"),
    "an index of 200 samples more": index(entry(samples=224), "clip_train_index.json"),
    "an index with offsets outside": index(entry(samples=24, offsets=[1 << 40])),
    "an index with another sha256": index(entry(sha256="0" * 64)),
    "an index with blocks of 0 bytes": index(entry(block_bytes=0), "clip_train_index.json"),
    "an index of text": index(lambda c: "x", "clip_train_index.json"),
    "an index of nothing": index(lambda c: {}, "clip_train_index.json"),
    "an index a million deep": index(lambda c: "[" * 1_000_000, "clip_train_index.json"),
    "an index of another place": index(
        lambda c: {**c, "shards": {"../../../etc/passwd": c["shards"]["a.tar"]}}
    ),
}

WAITS = {
    "a store that cannot be written": "CLIP_TRAIN_S3_PATIENCE_SECONDS",
    "a byte every 5 seconds": "storage.attempts",
    "an S3 listing without end, 1,000 names in 5 seconds": "CLIP_TRAIN_S3_PATIENCE_SECONDS",
}
PREPARE = {"an answer that unpacks to 1 GiB": packed_gibibyte}
CHEAP = {"a pipe for a shard", "a pipe for weights", "a billion shards in braces"}
CASES = [
    Case(name, attack, name in CHEAP, WAITS.get(name, ""), PREPARE.get(name))
    for group in (SHARDS, IMAGES, CAPTIONS, WEIGHTS, MODELS, RECIPES, SERVERS, INDEXES)
    for name, attack in group.items()
]
