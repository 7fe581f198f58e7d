"""The tar reader against Python's tarfile, and on damaged archives."""

import io
import os
import tarfile

import pytest

from clip_train.data.tar import TarError, iter_samples
from tests.data.shards import tar_bytes

MEMBERS = [
    (f"dir/{i:03d}.{ext}", bytes([i]) * (i * 37 % 1500))
    for i in range(20)
    for ext in ("jpg", "txt")
]


def by_tarfile(data: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar if m.isfile()]


def by_us(data: bytes, start: int = 0) -> list[tuple[str, bytes]]:
    samples = iter_samples(io.BytesIO(data), start)
    return [(f"{s.key}.{ext}", content) for s in samples for ext, content in s.members.items()]


LONG = [
    ("a" * 90 + "/" + "b" * 90 + ".jpg", b"long"),
    ("c" * 300 + "é.png", b"longer"),
    ("ü.txt", b"x"),
]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_equals_tarfile(format):
    members = MEMBERS + (LONG if format != tarfile.USTAR_FORMAT else LONG[:1])
    data = tar_bytes(members, format)
    assert by_us(data) == by_tarfile(data) == members


def test_pax_and_base256_sizes():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size, info.pax_headers = 5, {"size": "5", "path": "renamed.jpg", "comment": "x" * 700}
        tar.addfile(info, io.BytesIO(b"hello"))
    assert by_us(buffer.getvalue()) == [("renamed.jpg", b"hello")]
    header = bytearray(tar_bytes([("b.jpg", b"hello")]))
    header[124:136] = b"\x80" + (5).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    assert by_us(bytes(header)) == [("b.jpg", b"hello")]


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_headers_without_end_are_damage(kind):
    """5 MiB of them before one member; reading them all would take minutes a shard."""
    info = tarfile.TarInfo("x")
    info.size, info.type = 512, kind
    content = b"9 a=bcde\n" * 50 if kind == tarfile.XHDTYPE else b"n"
    data = (info.tobuf(tarfile.GNU_FORMAT) + content.ljust(512, b"n")[:512]) * 5_000
    if kind == tarfile.XHDTYPE:
        data = data.replace(b"bcde\n" + b"n" * 62, b"bcde\n" + b"62 b=" + b"n" * 56 + b"\n")
    with pytest.raises(TarError, match="bad header at byte 41"):
        by_us(data + tar_bytes(MEMBERS))


def test_a_sample_holds_no_more_than_its_limit(tmp_path):
    """Three members of 100 MiB, of which the disk holds nothing; 256 MiB are let in."""
    path, size = tmp_path / "large.tar", 100 << 20
    with path.open("wb") as file:
        for name in ("a.jpg", "a.bin", "a.seg", "b.jpg"):
            info = tarfile.TarInfo(name)
            info.size = size
            file.write(info.tobuf())
            file.seek(size, os.SEEK_CUR)
        file.write(bytes(1024))
    with path.open("rb") as file:
        found = [[c and len(c) for c in s.members.values()] for s in iter_samples(file)]
    assert found == [[size, size, None], [size]]


def test_directories_hidden_files_and_metadata_are_no_samples():
    buffer = io.BytesIO(
        tar_bytes([("._a.jpg", b"1"), ("a.jpg", b"2"), ("README", b"3"), ("__index__.json", b"4")])
    )
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "a.jpg"
        tar.addfile(link)
    assert by_us(buffer.getvalue()) == [("a.jpg", b"2")]


def test_reading_goes_on_at_the_end_of_any_sample():
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        data = tar_bytes(MEMBERS[:6] + LONG + MEMBERS[6:12], format)
        samples = list(iter_samples(io.BytesIO(data)))
        for i, sample in enumerate(samples):
            assert [s.key for s in iter_samples(io.BytesIO(data), sample.end)] == [
                s.key for s in samples[i + 1 :]
            ]


def test_the_first_samples_can_be_passed_over_without_reading():
    data = tar_bytes([(f"{i}.jpg", b"x" * 5000) for i in range(50)])

    class Counting(io.BytesIO):
        count = 0

        def read(self, n=-1):
            out = super().read(n)
            self.count += len(out)
            return out

    file = Counting(data)
    samples = list(iter_samples(file, 0, 48))
    assert [s.key for s in samples] == [str(i) for i in range(50)]
    assert [len(s.members) for s in samples] == [0] * 48 + [1] * 2
    assert file.count < 60_000  # of 276,000: two samples and the headers


@pytest.mark.parametrize("at", range(0, 9000, 100))
def test_damage_is_found_whether_members_are_read_or_not(at):
    """A count has to be that of the samples that are read later."""
    data = tar_bytes([(f"{i}.{ext}", b"x" * 700) for i in range(3) for ext in ("jpg", "txt")])[:at]
    found = []
    for unread in (0, 2, 9):
        keys = []
        try:
            keys += (s.key for s in iter_samples(io.BytesIO(data), 0, unread))
        except TarError as e:
            keys.append(str(e))
        found.append(keys)
    assert found[0] == found[1] == found[2] and "truncated" in found[0][-1]


def test_a_repeated_member_marks_the_sample():
    data = tar_bytes([("a.jpg", b"1"), ("a.txt", b"2"), ("a.jpg", b"3"), ("b.jpg", b"4")])
    assert [(s.key, s.duplicate) for s in iter_samples(io.BytesIO(data))] == [
        ("a", True),
        ("b", False),
    ]


def test_extensions_are_lower_case_and_may_hold_dots():
    data = tar_bytes([("x.JPG", b"1"), ("x.seg.PNG", b"2")])
    assert list(next(iter_samples(io.BytesIO(data))).members) == ["jpg", "seg.png"]


def collect(data: bytes) -> tuple[list[str], str]:
    keys = []
    try:
        for sample in iter_samples(io.BytesIO(data)):
            keys.append(sample.key)
    except TarError as e:
        return keys, e.reason
    return keys, ""


def test_every_cut_is_noticed():
    whole = tar_bytes([(f"{i}.jpg", b"x" * 700) for i in range(4)])
    end = 4 * (512 + 1024)
    for cut in range(0, end + 1, 128):
        keys, reason = collect(whole[:cut])
        assert "truncated" in reason, cut
        assert keys == [str(i) for i in range(4)][: len(keys)]
        assert len(keys) >= cut // 1536 - 1
    assert collect(whole) == (["0", "1", "2", "3"], "")


def test_damage_is_noticed():
    whole = tar_bytes([(f"{i}.jpg", b"x" * 700) for i in range(4)])
    garbage = whole[:1536] + b"\xaa" * 512 + whole[2048:]
    assert collect(garbage) == ([], "damaged shard: bad header")
    hole = whole[:1536] + bytes(1536) + whole[3072:]  # a download with a hole
    assert collect(hole) == (["0"], "damaged shard: a hole of zeros")
    assert "hole" in collect(whole[:1536] + bytes(3 << 20))[1]
    assert collect(b"<html>not found</html>" * 100)[1].startswith("damaged")
    assert collect(b"")[1].startswith("truncated")


def test_a_short_read_of_a_whole_file_is_an_io_error():
    data = tar_bytes([("a.jpg", b"x" * 5000)])

    class Broken(io.BytesIO):
        def read(self, n=-1):
            return b"" if self.tell() >= broken_from else super().read(n)

    for start in (0, 512, 5632):
        broken_from = start
        with pytest.raises(OSError, match="short read"):
            list(iter_samples(Broken(data)))
