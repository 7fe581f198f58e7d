"""The evaluation data: shards or a folder of images. Ranks read contiguous shares of the samples, in
order; exactly one rank reads each sample."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clip_train.batch import share_of
from clip_train.data import decode
from clip_train.data.benchmark import benchmark_shards
from clip_train.data.decode import CaptionKey, Stage
from clip_train.data.fields import metadata, scalar
from clip_train.data.formats import SkippedFiles, extension_of, is_hidden, is_image, walk_files
from clip_train.data.images import for_evaluation
from clip_train.data.index import ShardIndex
from clip_train.data.invalid import InvalidRecord, InvalidSample
from clip_train.data.order import Segment
from clip_train.data.pixels import Alpha
from clip_train.data.reader import Fields, Files, Item, SegmentReader
from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.errors import DataError, UserError, unreadable
from clip_train.inputs import layout_of
from clip_train.resizing import AS_CLIP, Patches, Resize
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


class ImageFile(NamedTuple):
    """One image of an `ImageFolder`."""

    path: str  # below the root
    folder: int  # index of its folder in `ImageFolder.classes`


@dataclass(frozen=True)
class ImageFolder:
    """Labelled images in a folder for each class. Until `label_by` is called, the label is the index
    of the folder in sorted order. If all folders are named by numbers, it is that number."""

    root: str
    classes: list[str]  # the names of the folders, sorted
    images: list[ImageFile]
    # files that are not images, such as .svg, and images outside the folders
    skipped: SkippedFiles = field(default_factory=SkippedFiles)
    # one for each folder
    labels: list[int] = field(default_factory=list)

    @classmethod
    def find(cls, place: str, key: str) -> "ImageFolder | None":
        """Find the images of a place, which the recipe's key names. None if the place is something
        else: shards or their folder.

        Raises UserError for a folder without images.
        """
        root = None if is_remote(place) else local_path(place)
        if root is None or not root.is_dir() or benchmark_shards(place) is not None:
            return None
        try:
            classes = sorted(
                entry.name
                for entry in root.iterdir()
                if entry.is_dir() and not is_hidden(entry.name)
            )
            # the order of torchvision
            paths = sorted(walk_files(root), key=os.path.split)
        except OSError as e:
            raise unreadable(e, f"{key} ({place}) cannot be listed: {e}") from e
        folder_index = {name: index for index, name in enumerate(classes)}
        images: list[ImageFile] = []
        skipped = SkippedFiles()
        for path in paths:
            folder, slash, _ = path.partition(os.sep)
            if slash and is_image(path):
                images.append(ImageFile(path, folder_index[folder]))
            else:
                skipped.add(path)
        if not images:
            raise UserError(
                f"{key} ({place}) has no images in a folder for each class: give the folder "
                f"above them, or shards such as {place}/*.tar"
            )
        if all(name.isdecimal() for name in classes):
            labels = [int(name) for name in classes]
        else:
            labels = list(range(len(classes)))
        return cls(str(root), classes, images, skipped, labels)

    def label_by(
        self, classnames: Sequence[str], classes_key: str = "evaluate.zero_shot_classes"
    ) -> "ImageFolder":
        """Return the same folder with labels that are indices of `classnames`.

        1. If the folders have the names of the classes, each has the label of its class.
        2. Otherwise, if all folders are named by numbers, these are the labels (ImageNet-V2).
        3. Otherwise the sorted folders belong to the classes one after another, as in torchvision's
           `ImageFolder`.

        classes_key: names the classes in messages. Raises UserError if something contradicts that.
        """

        def mismatch(reason: str) -> UserError:
            return UserError(
                f"{self.root} has {len(self.classes)} folders of classes ({listed(self.classes)}), "
                f"and {classes_key} has {len(classnames)} classes ({listed(classnames)}): "
                f"{reason}, so it is not known which folder is which class. Name the folders as "
                "the classes, or give the classes of this folder in the order of its names"
            )

        label_of: dict[str, int] = {folded(name): label for label, name in enumerate(classnames)}
        folders = [folded(name) for name in self.classes]
        has_unique_names = len(label_of) == len(classnames) and len(set(folders)) == len(folders)
        if has_unique_names and set(folders) == set(label_of):
            return replace(self, labels=[label_of[name] for name in folders])
        if all(name.isdecimal() for name in self.classes):
            if max(self.labels) >= len(classnames):
                raise mismatch("labels are numbers from 0 on")
            if len(set(self.labels)) < len(self.labels):
                raise mismatch("two folders are the same number")
            return self
        if len(self.classes) != len(classnames):
            raise mismatch("their numbers differ")
        if sorted(self.classes, key=natural) != self.classes:
            raise mismatch("the folders sort differently as text and by numbers")
        for label, name in enumerate(folders):
            # two classes may share a name, and `label_of` has only the last of them
            if label_of.get(name, label) != label and folded(classnames[label]) != name:
                raise mismatch(
                    f"folder {label} is {self.classes[label]!r}, and class {label} is "
                    f"{classnames[label]!r}"
                )
        return self

    def read(self, segment: Segment) -> list[Item]:
        """Read samples as `SegmentReader.read` does, with the label as member `cls`.

        Raises DataError if an image cannot be read.
        """
        items: list[Item] = []
        for path, folder in self.images[segment.start : segment.stop]:
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
    """Fold a class's name to lower case, with single blanks in place of underscores and repeated
    blanks."""
    return " ".join(name.casefold().replace("_", " ").split())


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `class2` before `class10`."""
    parts = re.split(r"(\d+)", name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]


def listed(names: Sequence[str]) -> str:
    """Join the first names of a list for a message."""
    shown = ", ".join(names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        shown += ", ..."
    return shown


@dataclass(frozen=True)
class DecodedSample:
    """A validation sample as `ValBatch` needs it."""

    image: Tensor  # one row of `ValBatch.images`
    captions: list[str]  # at least one, unless images are labelled
    fields: Fields


class ValLoader:
    """This rank's validation batches. Ranks have contiguous shares of all samples, in order, whose
    sizes differ by one at most. A rank reads only its share. Each iteration starts from the first
    sample.

    Samples that cannot be used are left out, and are in the list `invalid`.

    Args:
        index: of the shards, with all counts, or an `ImageFolder`.
        labelled: images need no captions.
        workers: threads that decode (the decoders release Python's lock); at least one.
        stages, inputs, alpha: as the keys of `data`; here nothing is random.
        resize: how the model's architecture resizes images.

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
        patches: Patches | None = None,
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
        # of this rank's share, from the last iteration
        self.invalid: list[InvalidRecord] = []
        self.image_size, self.alpha, self.resize = image_size, alpha, resize
        self.patches = patches
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
                results = list(pool.map(self._decode, group))
                self.invalid += [result for result in results if isinstance(result, InvalidRecord)]
                samples = [result for result in results if isinstance(result, DecodedSample)]
                if samples:
                    yield self._batch(samples)

    def _batch(self, samples: list[DecodedSample]) -> ValBatch:
        if self.labelled:
            texts = self._no_texts
        else:
            texts = self._tokenizer([text for sample in samples for text in sample.captions])
        return ValBatch(
            images=torch.stack([sample.image for sample in samples]),
            texts=texts,
            captions=[sample.captions for sample in samples],
            keys=[sample.fields["__key__"] for sample in samples],
            metadata=[metadata_of(sample.fields) for sample in samples],
            shards=[redact(sample.fields["__url__"]) for sample in samples],
        )

    def _items(self) -> Iterator[Item]:
        """Read this rank's samples, in order."""
        if isinstance(self.files, ImageFolder):
            reader: ImageFolder | SegmentReader = self.files
            shard_sizes: Sequence[int] = [len(self.files.images)]
        else:
            reader = SegmentReader(self.files, keep_open=True)
            shard_sizes = self.files.places
        begin, end = share_of(sum(shard_sizes), self.rank, self.world_size)
        # the index of the shard's first sample among all samples
        shard_first = 0
        for shard, count in enumerate(shard_sizes):
            # this rank's part of the shard; empty if own_stop <= own_start
            own_start = max(begin - shard_first, 0)
            own_stop = min(end - shard_first, count)
            for start in range(own_start, own_stop, self.batch_size):
                stop = min(start + self.batch_size, own_stop)
                yield from reader.read(Segment(shard, start, stop))
            shard_first += count

    def _decode(self, item: Item) -> DecodedSample | InvalidRecord:
        if isinstance(item, InvalidRecord):
            return item
        try:
            # a stage may drop these two
            origin = {"__key__": item["__key__"], "__url__": item["__url__"]}
            fields = {**decode.staged(item, self.stages), **origin}
            try:
                texts = list(itertools.chain(*decode.captions(fields, self.caption_key).values()))
            except InvalidSample:
                if not self.labelled:
                    raise
                texts = []
            if self.layout:
                image = decode.own_inputs({**fields, "__seed__": None}, self.layout, self._image)
            else:
                image = self._image(fields)
        except InvalidSample as e:
            return InvalidRecord(str(e), item["__url__"], item["__key__"])
        return DecodedSample(image, texts, fields)

    def _image(self, fields: Mapping[str, Any]) -> Tensor:
        """Decode and resize an image: uint8 [3, S, S], or `Patches.row`.

        Raises InvalidSample.
        """
        image = decode.image_of(fields, alpha=self.alpha)
        return for_evaluation(image, self.image_size, self.resize, self.patches)


def metadata_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the keys of the .json, and as "cls" the number in the .cls, as in ImageNet's
    shards."""
    values = dict(metadata(fields))
    label = scalar(fields.get("cls"))
    if label is not None:
        values["cls"] = label
    return values
