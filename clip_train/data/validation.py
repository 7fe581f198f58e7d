"""The validation set: read once, in order, every sample on exactly one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from clip_train.data import raw
from clip_train.data.bad_samples import Bad, BadSample, BadTable
from clip_train.data.index import find_index, split
from clip_train.data.lanes import Raw, fingerprint, read_shard
from clip_train.data.sources import Reading, expand
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.transforms import EvalTransform, decode_image
from clip_train.errors import DataError
from clip_train.storage import StorageConfig


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
    """This rank's validation batches: sample i goes to rank i % W. Iterating again starts again.

    Ranks may differ by one sample, and so by one batch. Samples that cannot be used are left out and listed
    in `bad_sample_table()`.

    Args:
        shards: as `data.val` is written.
        workers: threads that decode (the decoders let go of Python's lock); 0 or 1 decodes in line.
        verify: as `data.verify` is written.

    Raises:
        UserError: nothing matches.
        DataError (while iterating): a shard cannot be read, or no rank has a sample to validate.
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
        caption_key: str | None = None,
        workers: int = 2,
        verify: Literal["auto", "off"] = "auto",
        storage: StorageConfig | None = None,
    ) -> None:
        self.shards = expand(shards, "data.val")
        storage = storage or StorageConfig()
        known = find_index(self.shards, storage).checksums if verify == "auto" else {}
        self._reading = Reading(storage, known)
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.caption_key = caption_key
        self.workers = workers
        self._transform = EvalTransform(image_size)
        self._tokenizer = Tokenizer(context_length)
        self._bads = BadTable()

    def __iter__(self) -> Iterator[ValBatch]:
        self._bads = BadTable()
        with ThreadPoolExecutor(self.workers) if self.workers > 1 else contextlib.nullcontext() as pool:
            group: list[Raw] = []
            for sample in self._mine():
                group.append(sample)
                if len(group) == self.batch_size:
                    yield from self._batch(group, pool)
                    group = []
            yield from self._batch(group, pool)

    def fingerprint(self) -> int:
        """Differs between ranks that do not see the same shards: their parts would not make a whole."""
        return fingerprint([split(shard)[1] for shard in self.shards])  # the folder may have another name there

    def bad_sample_table(self) -> str:
        """What this rank left out, by reason and shard; what no rank can use stands in every rank's."""
        return str(self._bads)

    @property
    def num_bad(self) -> int:
        return sum(self._bads.counts.values())

    def _mine(self) -> Iterator[Raw]:
        """Raw samples of this rank. All ranks read all, so all count alike."""
        number = 0
        for url in self.shards:
            for event in read_shard(url, 0, None, self.caption_key, self._reading):
                if isinstance(event, Bad):
                    self._bads.add([event])
                    continue
                if number % self.world_size == self.rank:
                    yield event
                number += 1
        if number == 0:
            raise DataError(f"data.val: no sample in {len(self.shards)} shards can be used\n{self._bads}")

    def _batch(self, group: list[Raw], pool: ThreadPoolExecutor | None) -> Iterator[ValBatch]:
        """One batch, or none where nothing decodes."""
        images = list(pool.map(self._decode, group)) if pool else [self._decode(s) for s in group]
        good = [(image, s.fields) for image, s in zip(images, group, strict=True) if isinstance(image, Tensor)]
        self._bads.add(bad for bad in images if isinstance(bad, Bad))
        if good:
            captions = [raw.caption(fields, self.caption_key) for _, fields in good]
            yield ValBatch(
                images=torch.stack([image for image, _ in good]),
                texts=self._tokenizer(captions),
                captions=captions,
                keys=[fields["__key__"] for _, fields in good],
                metadata=[_metadata(fields) for _, fields in good],
            )

    def _decode(self, sample: Raw) -> Tensor | Bad:
        try:
            return self._transform(decode_image(raw.image_bytes(sample.fields)))
        except BadSample as e:
            return Bad(e.reason, sample.fields["__url__"], sample.fields["__key__"])


def _metadata(fields: dict[str, Any]) -> dict[str, Any]:
    """The .json's keys, and "cls": the .cls member's number, as ImageNet's shards have it."""
    try:
        out = dict(raw.metadata(fields))
    except BadSample:
        out = {}
    if "cls" in fields:
        out["cls"] = fields["cls"].decode("utf-8", "replace").strip()
    return out
