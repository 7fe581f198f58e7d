"""What is evaluated on: read once, in order, every sample on exactly one rank. Shards, or a folder of images."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_train.batch import shares
from clip_train.data import decode
from clip_train.data.decode import CaptionKey
from clip_train.data.images.transforms import EvalTransform
from clip_train.data.index import ShardIndex, index_of
from clip_train.data.inspect import count_missing
from clip_train.data.invalid import Invalid, InvalidSample, table_of
from clip_train.data.order import Segment
from clip_train.data.reader import Fields, Files, Item, SegmentReader
from clip_train.data.shards import NSHARDS, Reading, is_folder
from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.errors import DataError, UserError, unreadable
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import is_remote, local_path


@dataclass
class ValBatch:
    """Up to `batch_size` validation samples."""

    images: Tensor  # uint8 [b, 3, S, S], not normalised
    texts: Tensor  # int64 [t, context_length]: all captions of the first image, then of the second, ...
    captions: list[list[str]]  # b lists, of t in all; of labelled images they may be empty
    keys: list[str]
    metadata: list[dict[str, Any]] = field(
        default_factory=list
    )  # the .json's keys, and the .cls as "cls"

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class ImageFolder:
    """Labelled images in a folder for each class, as torchvision's `ImageFolder` has them: the label is the place of
    the class among the sorted names of the folders. Where all names are numbers they are the labels (ImageNet-V2)."""

    root: str
    classes: list[str]
    numbered: bool
    files: list[tuple[str, int]]  # path below root, label

    @classmethod
    def find(cls, place: str, field: str) -> ImageFolder | None:
        """None where it is something else: shards or their folder. UserError for a folder without images."""
        root = None if is_remote(place) else local_path(place)
        if root is None or not root.is_dir() or (root / NSHARDS).exists():
            return None
        try:
            classes = sorted(each.name for each in root.iterdir() if each.is_dir())
            numbered = all(name.isdecimal() for name in classes)
            files = [
                (os.path.relpath(Path(folder, name), root), int(class_name) if numbered else label)
                for label, class_name in enumerate(classes)
                for folder, _, names in sorted(os.walk(root / class_name, followlinks=True))
                for name in sorted(names)
                if Path(name).suffix.lower().removeprefix(".") in decode.IMAGE_EXTENSIONS
            ]
        except OSError as e:
            raise unreadable(e, f"{field} ({place}) cannot be listed: {e}") from e
        if not files:
            raise UserError(
                f"{field} ({place}) has no images in a folder for each class, nor clip_benchmark's {NSHARDS}: give the "
                f"folder above them, or shards such as {place}/*.tar"
            )
        return cls(str(root), classes, numbered, files)

    def check_classes(self, number: int) -> None:
        """UserError if there are not as many folders as classes: labels would mean other classes."""
        if not self.numbered and len(self.classes) != number:
            raise UserError(
                f"{self.root} has {len(self.classes)} folders of classes and evaluate.zero_shot_classes {number} "
                "classes: a label is the place of its folder; give the classes of this folder in the order of its names"
            )

    @property
    def shards(self) -> list[str]:
        return [self.root]

    @property
    def counts(self) -> list[int]:
        return [len(self.files)]

    def read(self, segment: Segment) -> list[Item]:
        """DataError."""
        return [self._fields(*each) for each in self.files[segment.start : segment.stop]]

    def _fields(self, path: str, label: int) -> Fields:
        try:
            data = Path(self.root, path).read_bytes()
        except OSError as e:
            raise DataError(f"cannot read {path} of {self.root}: {e}") from e
        extension = Path(path).suffix.lower().removeprefix(".")
        return {extension: data, "cls": str(label).encode(), "__key__": path, "__url__": self.root}


class ValLoader:
    """This rank's validation batches: of all samples, in order, the ranks have contiguous shares, which differ by one
    at most; a rank reads no others. Iterating again starts again.

    Samples that cannot be used are left out and listed in `invalid`.

    Args:
        shards: as `data.val` is written. In a folder of clip_benchmark's each line of a `.txt` is a caption.
        labelled: images may lack captions.
        workers: threads that decode (the decoders let go of Python's lock); at least one.
        index: of these shards, with all counts; None: it is looked up, and what nobody has counted is counted here.
            An `ImageFolder` stands for itself.

    Raises:
        UserError: nothing matches.
        DataError (while iterating): a shard cannot be read, or a single rank has no sample to validate.
    """

    def __init__(
        self,
        shards: str,
        *,
        image_size: int,
        context_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        caption_key: CaptionKey = None,
        labelled: bool = False,
        workers: int = 2,
        index: ShardIndex | ImageFolder | None = None,
        storage: StorageConfig | None = None,
        tokenizer: Tokenize | None = None,
    ) -> None:
        storage = storage or StorageConfig()
        if index is None:
            index = count_missing(
                index_of(shards, "auto", storage, "data.val"), storage, together=False
            )
        self.files: Files | ImageFolder
        if isinstance(index, ImageFolder):
            self.files = index
        else:
            files = Files.of(index, index.shards, caption_key, Reading(storage, index.checksums))
            self.files = replace(files, needs_caption=not labelled)
        self.labelled, self.lines = labelled, is_folder(shards)
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.caption_key = caption_key
        self.workers = max(1, workers)
        self.invalid: list[Invalid] = []  # of this rank's share, when it was last read
        self._transform = EvalTransform(image_size)
        self._no_texts = torch.zeros(0, context_length, dtype=torch.int64)
        self._tokenizer = tokenizer or Tokenizer(context_length)

    def __iter__(self) -> Iterator[ValBatch]:
        self.invalid = []
        with ThreadPoolExecutor(self.workers) as pool:
            samples = self._mine()
            while group := list(itertools.islice(samples, self.batch_size)):
                decoded = list(pool.map(self._decode, group))
                self.invalid += [each for each in decoded if isinstance(each, Invalid)]
                good = [
                    (image, s)
                    for image, s in zip(decoded, group, strict=True)
                    if isinstance(image, Tensor)
                ]
                if good:
                    captions = [self._captions(fields) for _, fields in good]
                    texts = [text for each in captions for text in each]
                    yield ValBatch(
                        images=torch.stack([image for image, _ in good]),
                        texts=self._no_texts if self.labelled else self._tokenizer(texts),
                        captions=captions,
                        keys=[fields["__key__"] for _, fields in good],
                        metadata=[metadata_of(fields) for _, fields in good],
                    )

    def _mine(self) -> Iterator[Fields]:
        """The samples of this rank that can be used, as far as one sees without decoding."""
        counts = shares(sum(self.files.counts), self.world_size)
        begin = sum(counts[: self.rank])
        end = begin + counts[self.rank]
        files = self.files
        segments = files if isinstance(files, ImageFolder) else SegmentReader(files, keep_open=True)
        usable = False
        for shard, count in enumerate(
            self.files.counts
        ):  # samples [begin, end) of this shard and those behind it
            for start in range(max(begin, 0), min(end, count), self.batch_size):
                for item in segments.read(
                    Segment(shard, start, min(start + self.batch_size, end, count))
                ):
                    if isinstance(item, Invalid):
                        self.invalid.append(item._replace(members=None))
                    else:
                        usable = True
                        yield item
            begin, end = begin - count, end - count
        if not usable and self.world_size == 1:
            num = len(self.files.shards)
            raise DataError(
                f"data.val: no sample in {num} shards can be used\n{table_of(self.invalid)}"
            )

    def _captions(self, fields: Fields) -> list[str]:
        """At least one, but of a labelled image."""
        found: list[str] = []
        with contextlib.suppress(*([InvalidSample] if self.labelled else [])):
            found = decode.captions(fields, self.caption_key)
        return (
            [line for text in found for line in text.splitlines() if line.strip()]
            if self.lines
            else found
        )

    def _decode(self, fields: Fields) -> Tensor | Invalid:
        try:
            return self._transform(decode.decode_image(decode.image_bytes(fields)))
        except InvalidSample as e:
            return Invalid(e.reason, fields["__url__"], fields["__key__"])


def metadata_of(fields: Fields) -> dict[str, Any]:
    """The .json's keys, and "cls": the .cls member's number, as ImageNet's shards have it."""
    out = dict(decode.json_of(fields))
    if "cls" in fields:
        out["cls"] = fields["cls"].decode("utf-8", "replace").strip()
    return out
