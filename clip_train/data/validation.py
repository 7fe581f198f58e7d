"""The evaluation data: shards or a folder of images. Each sample is on exactly one rank, in
order."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_train.batch import share_of
from clip_train.data import decode
from clip_train.data.benchmark import benchmark_shards
from clip_train.data.decode import CaptionKey, Stage
from clip_train.data.fields import metadata, scalar
from clip_train.data.formats import SkippedFiles, extension_of, is_hidden, is_image, walk_files
from clip_train.data.images import to_square
from clip_train.data.index import ShardIndex
from clip_train.data.invalid import Invalid, InvalidSample
from clip_train.data.order import Segment
from clip_train.data.pixels import Alpha
from clip_train.data.reader import Fields, Files, Item, SegmentReader
from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.errors import DataError, UserError, unreadable
from clip_train.inputs import layout_of
from clip_train.resizing import AS_CLIP, Resize
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.storage.urls import is_remote, local_path

NAMES_SHOWN = 12  # of folders and classes, in a message


@dataclass
class ValBatch:
    """Up to `batch_size` validation samples."""

    images: Tensor  # uint8 [b, 3, S, S], not normalized; with inputs [b, B], as in `Batch`
    texts: Tensor  # int64 [t, context_length]: the captions of the first image, then of the second
    captions: list[list[str]]  # b lists with t captions in all; empty for some labelled images
    keys: list[str]
    metadata: list[dict[str, Any]]  # the keys of the .json, and the .cls as "cls"
    shards: list[str] = field(default_factory=list)  # b paths or URLs: keys of two may be equal


@dataclass(frozen=True)
class ImageFolder:
    """Labelled images in a folder for each class. Until `label_by` is called, the label is the place
    of the folder by name, or its number if all are numbers."""

    root: str
    classes: list[str]  # the names of the folders, sorted
    files: list[tuple[str, int]]  # path below root, number of its folder
    # other files there, such as .svg; images beside the folders
    skipped: SkippedFiles = field(default_factory=SkippedFiles)
    labels: list[int] = field(default_factory=list)  # of each folder

    @classmethod
    def find(cls, place: str, field: str) -> "ImageFolder | None":
        """None if it is something else: shards or their folder. UserError for a folder without
        images."""
        root = None if is_remote(place) else local_path(place)
        if root is None or not root.is_dir() or benchmark_shards(place) is not None:
            return None
        try:
            classes = sorted(
                entry.name
                for entry in root.iterdir()
                if entry.is_dir() and not is_hidden(entry.name)
            )
            # as torchvision orders them
            paths = sorted(walk_files(root), key=os.path.split)
        except OSError as e:
            raise unreadable(e, f"{field} ({place}) cannot be listed: {e}") from e
        numbers = {name: number for number, name in enumerate(classes)}
        files: list[tuple[str, int]] = []
        skipped = SkippedFiles()
        for path in paths:
            folder, slash, _ = path.partition(os.sep)
            if slash and is_image(path):
                files.append((path, numbers[folder]))
            else:
                skipped.add(path)
        if not files:
            raise UserError(
                f"{field} ({place}) has no images in a folder for each class: give the folder "
                f"above them, or shards such as {place}/*.tar"
            )
        labels = list(range(len(classes)))
        if all(name.isdecimal() for name in classes):
            labels = [int(name) for name in classes]
        return cls(str(root), classes, files, skipped, labels)

    def label_by(self, classnames: Sequence[str]) -> "ImageFolder":
        """The same folder with the labels of these classes.

        Folders named as the classes have their labels. Otherwise folders that are numbers are the
        labels themselves (ImageNet-V2), and other folders belong to the classes in the order of
        their names, as in torchvision's `ImageFolder`. UserError if something contradicts that.
        """
        places: dict[str, int] = {folded(name): label for label, name in enumerate(classnames)}
        folders = [folded(name) for name in self.classes]
        has_unique_names = len(places) == len(classnames) and len(set(folders)) == len(folders)
        if has_unique_names and set(folders) == set(places):
            return replace(self, labels=[places[name] for name in folders])
        if all(name.isdecimal() for name in self.classes):
            if max(self.labels) >= len(classnames):
                raise self._mismatch(classnames, "labels are numbers from 0 on")
            if len(set(self.labels)) < len(self.labels):
                raise self._mismatch(classnames, "two folders are the same number")
            return self
        if len(self.classes) != len(classnames):
            raise self._mismatch(classnames, "their numbers differ")
        if sorted(self.classes, key=natural) != self.classes:
            raise self._mismatch(classnames, "the folders sort differently as text and by numbers")
        for label, name in enumerate(folders):
            if places.get(name, label) != label and folded(classnames[label]) != name:
                raise self._mismatch(
                    classnames,
                    f"folder {label} is {self.classes[label]!r}, and class {label} is "
                    f"{classnames[label]!r}",
                )
        return self

    def _mismatch(self, classnames: Sequence[str], reason: str) -> UserError:
        return UserError(
            f"{self.root} has {len(self.classes)} folders of classes ({listed(self.classes)}), and "
            f"evaluate.zero_shot_classes has {len(classnames)} classes ({listed(classnames)}): "
            f"{reason}, so it is not known which folder is which class. Name the folders as the "
            "classes, or give the classes of this folder in the order of its names"
        )

    def read(self, segment: Segment) -> list[Item]:
        """As `SegmentReader.read`. DataError."""
        items: list[Item] = []
        for path, folder in self.files[segment.start : segment.stop]:
            try:
                data = Path(self.root, path).read_bytes()
            except OSError as e:
                raise DataError(f"cannot read {path} of {self.root}: {e}") from e
            items.append(
                {
                    extension_of(path): data,
                    "cls": str(self.labels[folder]).encode(),
                    "__key__": path,
                    "__url__": self.root,
                }
            )
        return items


def folded(name: str) -> str:
    """A class's name without case, underscores and repeated blanks."""
    return " ".join(name.casefold().replace("_", " ").split())


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `class2` before `class10`."""
    parts = re.split(r"(\d+)", name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]


def listed(names: Sequence[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")


class ValLoader:
    """This rank's validation batches. The ranks have contiguous shares of all samples, in order,
    which differ by one at most; a rank reads no others. Iterating again starts again.

    Samples that cannot be used are left out and listed in `invalid`.

    Args:
        index: of the shards, with all counts, or an `ImageFolder`.
        labelled: images need no captions.
        workers: threads that decode (the decoders release Python's lock); at least one.
        stages, inputs, alpha: as the keys of `data`; here nothing is seeded.
        resize: the architecture's.

    Raises:
        DataError (while iterating): a shard cannot be read.
    """

    def __init__(
        self,
        index: ShardIndex | ImageFolder,
        *,
        image_size: int,
        context_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        caption_key: CaptionKey = None,
        labelled: bool = False,
        workers: int = 2,
        storage: StorageConfig | None = None,
        tokenizer: Tokenize | None = None,
        stages: Sequence[Stage | str] | None = None,
        inputs: Mapping[str, str] | None = None,
        alpha: Alpha = "white",
        resize: Resize = AS_CLIP,
    ) -> None:
        self.files: Files | ImageFolder
        if isinstance(index, ImageFolder):
            self.files = index
        else:
            self.files = Files.of(index, storage or StorageConfig())
        self.labelled = labelled
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.caption_key = caption_key
        self.workers = max(1, workers)
        self.invalid: list[Invalid] = []  # in this rank's share, when it was last read
        self.image_size, self.alpha, self.resize = image_size, alpha, resize
        self.stages, self.layout = stages or (), layout_of(inputs, image_size)
        self._no_texts = torch.zeros(0, context_length, dtype=torch.int64)
        self._tokenizer = tokenizer or Tokenizer(context_length)

    def __iter__(self) -> Iterator[ValBatch]:
        self.invalid = []
        items = self._items()
        with ThreadPoolExecutor(self.workers) as pool:
            while True:
                group = list(itertools.islice(items, self.batch_size))
                if not group:
                    break
                decoded = list(pool.map(self._decode, group))
                self.invalid += [result for result in decoded if isinstance(result, Invalid)]
                good = [result for result in decoded if not isinstance(result, Invalid)]
                if good:
                    images, captions, samples = zip(*good, strict=True)
                    texts = [text for image_captions in captions for text in image_captions]
                    yield ValBatch(
                        images=torch.stack(images),
                        texts=self._no_texts if self.labelled else self._tokenizer(texts),
                        captions=list(captions),
                        keys=[fields["__key__"] for fields in samples],
                        metadata=[metadata_of(fields) for fields in samples],
                        shards=[redact(fields["__url__"]) for fields in samples],
                    )

    def _items(self) -> Iterator[Item]:
        """This rank's samples, in order."""
        if isinstance(self.files, ImageFolder):
            reader: ImageFolder | SegmentReader = self.files
            shard_sizes: Sequence[int] = [len(self.files.files)]
        else:
            reader = SegmentReader(self.files, keep_open=True)
            shard_sizes = self.files.places
        begin, end = share_of(sum(shard_sizes), self.rank, self.world_size)
        for shard, count in enumerate(shard_sizes):
            # samples [begin, end) of this shard and those behind it
            for start in range(max(begin, 0), min(end, count), self.batch_size):
                stop = min(start + self.batch_size, end, count)
                yield from reader.read(Segment(shard, start, stop))
            begin, end = begin - count, end - count

    def _decode(self, item: Item) -> tuple[Tensor, list[str], Fields] | Invalid:
        """The row of a sample, its captions (at least one, unless images are labelled), and its
        members."""
        if isinstance(item, Invalid):
            return item
        try:
            place = {"__key__": item["__key__"], "__url__": item["__url__"]}
            fields = {**decode.staged(item, self.stages), **place}
            try:
                texts = list(itertools.chain(*decode.captions(fields, self.caption_key).values()))
            except InvalidSample:
                if not self.labelled:
                    raise
                texts = []
            row = decode.own_inputs({**fields, "__seed__": None}, self.layout, self._image)
        except InvalidSample as e:
            return Invalid(str(e), item["__url__"], item["__key__"])
        return row, texts, fields

    def _image(self, fields: Mapping[str, Any]) -> Tensor:
        """uint8 [3, S, S]. InvalidSample."""
        image = decode.image_of(fields, alpha=self.alpha)
        return to_square(image, self.image_size, self.resize)


def metadata_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the .json, and "cls": the .cls member's number, as in ImageNet's shards."""
    values = dict(metadata(fields))
    label = scalar(fields.get("cls"))
    if label is not None:
        values["cls"] = label
    return values
