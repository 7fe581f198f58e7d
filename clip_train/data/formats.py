"""The formats of image files and their extensions: one table for the reader, the writer, folders and
`doctor`. It imports no decoder: a recipe is read without one.
"""

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Pillow's name of each format that is read -> the extensions of its files. Shards are written with
# the first one. Some of Pillow's formats are left out on purpose: EPS would start Ghostscript.
FORMATS: dict[str, tuple[str, ...]] = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif"),
    "MPO": ("jpg", "mpo"),  # a JPEG with more pictures behind it, as cameras write
    "PNG": ("png", "apng"),
    "WEBP": ("webp",),
    "GIF": ("gif",),
    "BMP": ("bmp",),
    "DIB": ("dib",),
    "TIFF": ("tif", "tiff"),
    "PPM": ("ppm", "pgm", "pbm", "pnm"),
    "JPEG2000": ("jp2", "j2k", "jpf", "jpx", "jpc", "j2c"),
    "AVIF": ("avif", "avifs"),
}
# A sample's image is the member with the first of these.
IMAGE_EXTENSIONS = tuple(
    dict.fromkeys(extension for extensions in FORMATS.values() for extension in extensions)
)
# Pictures in formats that are not read: a sample without any other image is invalid.
UNREAD_EXTENSIONS = (
    "svg", "svgz", "heic", "heif", "jxl", "eps", "ai", "pdf", "psd", "xcf", "ico", "tga", "exr",
    "hdr", "dng", "cr2", "nef", "arw",
)  # fmt: skip


def quiet_pillow() -> None:
    """Hide Pillow's warnings about single files in this process: samples are counted by reason."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def extension_of(path: str | os.PathLike[str]) -> str:
    return Path(path).suffix.lower().removeprefix(".")


def is_image(path: str | os.PathLike[str]) -> bool:
    """Whether a file is read as an image, by its extension."""
    return extension_of(path) in IMAGE_EXTENSIONS


def extension_for(pillow_format: str | None) -> str:
    """The extension that a file of this format is written with. KeyError for a format that is not
    read."""
    if pillow_format is None:  # as of an image that was not read from a file
        raise KeyError(pillow_format)
    return FORMATS[pillow_format][0]


def is_hidden(name: str) -> bool:
    """Files and folders that programs leave behind: .DS_Store, ._x.jpg, .ipynb_checkpoints."""
    return name.startswith(".") or name in ("__MACOSX", "Thumbs.db", "desktop.ini")


def walk_files(root: str | os.PathLike[str]) -> Iterator[str]:
    """The paths below `root` of all files that are not hidden, folder by folder, by name. OSError
    if a folder cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        folders[:] = sorted(
            name
            for name in folders
            if not is_hidden(name) and not _is_loop(os.path.join(folder, name))
        )
        for name in sorted(names):
            if not is_hidden(name):
                yield os.path.relpath(os.path.join(folder, name), root)


def _is_loop(folder: str) -> bool:
    """Whether a folder is a link to one of its parents, which `os.walk` would follow forever."""
    if not os.path.islink(folder):
        return False
    target = os.path.realpath(folder)
    return any(os.path.realpath(above) == target for above in Path(folder).parents)


@dataclass
class SkippedFiles:
    """Files of a folder that were not read, by extension."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # an example of each

    @classmethod
    def of(cls, paths: Iterable[str | os.PathLike[str]]) -> "SkippedFiles":
        skipped = cls()
        for path in paths:
            skipped.add(path)
        return skipped

    def add(self, path: str | os.PathLike[str]) -> None:
        extension = extension_of(path)
        self.counts[extension] += 1
        self.first.setdefault(extension, str(path))

    def __str__(self) -> str:
        """`3 files: 2 .svg (such as a/x.svg), 1 .heic (such as y.heic)`"""
        kinds = []
        for extension, count in self.counts.most_common():
            kind = f".{extension}" if extension else "without an extension"
            kinds.append(f"{count:,} {kind} (such as {self.first[extension]})")
        total = self.counts.total()
        return f"{total:,} {'file' if total == 1 else 'files'}: {', '.join(kinds)}"
