"""One table of extensions: what the writer writes, the reader, folders and `caption` read."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from clip_train.data.formats import IMAGE_EXTENSIONS, walk_files
from clip_train.data.validation import ImageFolder, ValLoader
from launcher.cli.main import main
from tests.data.shards import counted, jpeg, write_shard

WRITTEN = {
    "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "jfif": "JPEG", "png": "PNG", "webp": "WEBP",
    "gif": "GIF", "bmp": "BMP", "dib": "DIB", "tif": "TIFF", "tiff": "TIFF", "ppm": "PPM",
    "pgm": "PPM", "jp2": "JPEG2000", "j2k": "JPEG2000", "avif": "AVIF",
}  # fmt: skip


def picture(number: int, kind: str) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def make_folder(folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    for number, (extension, kind) in enumerate(WRITTEN.items()):
        (folder / f"{number:02d}.{extension}").write_bytes(picture(number, kind))
        (folder / f"{number:02d}.txt").write_text(f"picture {number}")
    return sorted(path.name for path in folder.iterdir())


def test_every_format_passes_from_folder_through_shards_to_batch(tmp_path, capsys):
    make_folder(tmp_path / "photos")
    assert main(["shards", str(tmp_path / "photos"), str(tmp_path / "out"), "--workers", "1"]) == 0
    assert f"{len(WRITTEN)} samples" in capsys.readouterr().out
    with tarfile.open(tmp_path / "out" / "00000.tar") as tar:
        members = [name for name in tar.getnames() if not name.endswith(".txt")]
    assert {name.rpartition(".")[2] for name in members} <= {*IMAGE_EXTENSIONS}
    index = counted(f"{tmp_path}/out/*.tar")
    loader = ValLoader(index, image_size=16, context_length=8, batch_size=99)
    (batch,) = loader
    assert len(batch.keys) == len(WRITTEN) and not loader.invalid


def test_every_extension_is_read_in_shards_and_class_folders(tmp_path):
    members = []
    for number, (extension, kind) in enumerate(WRITTEN.items()):
        content = picture(number, kind)
        members += [(f"{number}.{extension}", content), (f"{number}.txt", b"a text")]
        place = tmp_path / "classes" / "a" / f"{number}.{extension.upper()}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    write_shard(tmp_path / "0.tar", members)
    loader = ValLoader(
        counted(str(tmp_path / "0.tar")), image_size=16, context_length=8, batch_size=99
    )
    (batch,) = loader
    assert len(batch.keys) == len(WRITTEN) and not loader.invalid
    folder = ImageFolder.find(str(tmp_path / "classes"), "evaluate.zero_shot_data")
    assert len(folder.images) == len(WRITTEN) and not folder.skipped.counts


def test_skipped_files_of_a_folder_are_counted_and_named(tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / ".hidden").mkdir()
    for name in ("0.jpg", "1.jpg", ".hidden/2.jpg", "._0.jpg"):
        (photos / name).write_bytes(jpeg(0))
    for name in ("0.txt", "1.txt", "lost.txt", "x.svg", "y.SVG", "z.heic", "notes.md"):
        (photos / name).write_text("a caption")
    out = photos / "out"  # inside of the source
    for _ in range(2):
        assert main(["shards", str(photos), str(out), "--workers", "1"]) == 0
        printed = capsys.readouterr().out
        assert "2 samples" in printed
        assert "skipped 5 files: 2 .svg (such as x.svg), " in printed
        for one in (".txt (such as lost.txt)", ".heic (such as z.heic)", ".md (such as notes.md)"):
            assert f"1 {one}" in printed


def test_images_missing_from_the_metadata_are_counted_and_named(tmp_path, capsys):
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    for name in ("0.jpg", "1.jpg", "2.jpg", "more/3.jpg", "logo.svg"):
        (photos / name).write_bytes(jpeg(0))
    lines = [{"file_name": name, "text": f"a text of {name}"} for name in ("0.jpg", "./more/3.jpg")]
    (photos / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["shards", str(photos), str(tmp_path / "out"), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2 samples" in printed
    assert "skipped 3 files: 2 .jpg (such as 1.jpg), 1 .svg (such as logo.svg)" in printed


def test_an_image_that_is_not_read_is_named_by_its_extension(tmp_path, capsys):
    members = [("0.svg", b"<svg/>"), ("0.txt", b"a text"), ("1.jpg", jpeg(1)), ("1.txt", b"b")]
    write_shard(tmp_path / "0.tar", members)
    assert main(["index", str(tmp_path / "0.tar")]) == 0
    assert "1 no image: .svg is not read" in capsys.readouterr().out


def test_links_that_lead_back_are_not_followed(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.jpg").write_bytes(b"")
    os.symlink(tmp_path / "a", tmp_path / "a" / "b" / "up")
    os.symlink(tmp_path / "a", tmp_path / "other")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "y.jpg").write_bytes(b"")
    os.symlink(tmp_path / "two", tmp_path / "one" / "to_two")
    os.symlink(tmp_path / "one", tmp_path / "two" / "to_one")
    found = [*walk_files(tmp_path)]
    assert found == ["a/x.jpg", "one/to_two/y.jpg", "other/x.jpg", "two/y.jpg"]


def test_a_sample_with_several_images_keeps_its_first_one():
    """The order of the table decides which member a sample's image is: it is a promise."""
    before = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")
    assert [each for each in IMAGE_EXTENSIONS if each in before] == list(before)
