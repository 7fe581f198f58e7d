"""The validation set: read once, in order, every sample on exactly one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from clip_train.data.reader import Fields, Files, SegmentReader
from clip_train.data.shards import Reading
from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.errors import DataError
from clip_train.storage.config import StorageConfig


@dataclass
class ValBatch:
    """Up to `batch_size` validation samples."""

    images: Tensor  # uint8 [b, 3, S, S], not normalised
    texts: Tensor  # int64 [b, context_length]
    captions: list[str]
    keys: list[str]
    metadata: list[dict[str, Any]] = field(default_factory=list)  # the .json's keys, and the .cls as "cls"

    def __len__(self) -> int:
        return len(self.images)


class ValLoader:
    """This rank's validation batches: of all samples, in order, the ranks have contiguous shares, which differ by one
    at most; a rank reads no others. Iterating again starts again.

    Samples that cannot be used are left out and listed in `invalid`.

    Args:
        shards: as `data.val` is written.
        workers: threads that decode (the decoders let go of Python's lock); at least one.
        index: of these shards, with all counts; None: it is looked up, and what nobody has counted is counted here.

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
        workers: int = 2,
        index: ShardIndex | None = None,
        storage: StorageConfig | None = None,
        tokenizer: Tokenize | None = None,
    ) -> None:
        storage = storage or StorageConfig()
        if index is None:
            index = count_missing(index_of(shards, "auto", storage, "data.val"), storage, together=False)
        self.files = Files.of(index, index.shards, caption_key, Reading(storage, index.checksums))
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.caption_key = caption_key
        self.workers = max(1, workers)
        self.invalid: list[Invalid] = []  # of this rank's share, when it was last read
        self._transform = EvalTransform(image_size)
        self._tokenizer = tokenizer or Tokenizer(context_length)

    def __iter__(self) -> Iterator[ValBatch]:
        self.invalid = []
        with ThreadPoolExecutor(self.workers) as pool:
            samples = self._mine()
            while group := list(itertools.islice(samples, self.batch_size)):
                decoded = list(pool.map(self._decode, group))
                self.invalid += [each for each in decoded if isinstance(each, Invalid)]
                good = [(image, s) for image, s in zip(decoded, group, strict=True) if isinstance(image, Tensor)]
                if good:
                    captions = [decode.caption(fields, self.caption_key) for _, fields in good]
                    yield ValBatch(
                        images=torch.stack([image for image, _ in good]),
                        texts=self._tokenizer(captions),
                        captions=captions,
                        keys=[fields["__key__"] for _, fields in good],
                        metadata=[_metadata(fields) for _, fields in good],
                    )

    def _mine(self) -> Iterator[Fields]:
        """The samples of this rank that can be used, as far as one sees without decoding."""
        counts = shares(sum(self.files.counts), self.world_size)
        begin = sum(counts[: self.rank])
        end = begin + counts[self.rank]
        segments = SegmentReader(self.files, keep_open=True)
        usable = False
        for shard, count in enumerate(self.files.counts):  # samples [begin, end) of this shard and those behind it
            for start in range(max(begin, 0), min(end, count), self.batch_size):
                for item in segments.read(Segment(shard, start, min(start + self.batch_size, end, count))):
                    if isinstance(item, Invalid):
                        self.invalid.append(item)
                    else:
                        usable = True
                        yield item
            begin, end = begin - count, end - count
        if not usable and self.world_size == 1:
            num = len(self.files.shards)
            raise DataError(f"data.val: no sample in {num} shards can be used\n{table_of(self.invalid)}")

    def _decode(self, fields: Fields) -> Tensor | Invalid:
        try:
            return self._transform(decode.decode_image(decode.image_bytes(fields)))
        except InvalidSample as e:
            return Invalid(e.reason, fields["__url__"], fields["__key__"])


def _metadata(fields: Fields) -> dict[str, Any]:
    """The .json's keys, and "cls": the .cls member's number, as ImageNet's shards have it."""
    out = dict(decode.json_of(fields))
    if "cls" in fields:
        out["cls"] = fields["cls"].decode("utf-8", "replace").strip()
    return out
