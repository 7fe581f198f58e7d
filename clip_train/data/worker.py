"""A loader worker's part of each step, as a `webdataset.DataPipeline`: undecoded samples -> (user stages) -> decoded ->
a piece of the batch. This module runs inside the loader's workers, whose pieces lie in shared memory.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import webdataset
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clip_train.data import decode
from clip_train.data.decode import TrainTransform
from clip_train.data.invalid import Invalid, InvalidSample, table_of
from clip_train.data.order import Order, Partition, StreamShare
from clip_train.data.reader import Files, StreamReader, Undecoded
from clip_train.data.tokenizer import Tokenizer
from clip_train.errors import ClipTrainError, DataError, UserError

Fields = dict[str, Any]
Stage = Callable[[Iterable[Fields]], Iterable[Fields]]  # such as webdataset.map(f)
MAX_OPEN_STREAMS = 64  # in a worker: with more, their shards are opened for each block: files and buffers are few
IDLE_STEPS = 100  # after which a stream that others have taken over is closed and forgotten
MAX_SUBSTITUTES = 10_000  # as many samples in a row that do not decode are no accident

# What launchers and terminals send to a whole process group; also the trainer's own TERM for its workers.
GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class ImageMemory:
    """Images in shared memory, [workers, slots, capacity, 3, S, S] of uint8, filled by workers over and over.

    Sent through the loader's queue, every piece would be copied once more, into fresh pages that the kernel has to
    clear: a quarter of what a 256 px image costs in all. A worker fills its slots in turn. It is asked for its k-th
    piece when the trainer has fetched piece k - prefetch, and the trainer is done with that one before it fetches the
    next: prefetch + 1 slots are enough.

    Args:
        capacity: samples in the largest piece.
    """

    def __init__(self, workers: int, prefetch: int, capacity: int, image_size: int) -> None:
        shape = (workers, prefetch + 1, capacity, 3, image_size, image_size)
        storage = torch.UntypedStorage._new_shared(torch.Size(shape).numel())  # as torch's own collate allocates
        self._images = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
        self._filled = 0  # pieces, by this worker

    def next(self, count: int) -> tuple[Tensor, tuple[int, int]]:
        """In a worker: where its next piece goes, [count, 3, S, S], and that place's name for `at`."""
        info = get_worker_info()
        assert info is not None
        place = (info.id, self._filled % self._images.shape[1])
        self._filled += 1
        return self.at(place, count), place

    def at(self, place: tuple[int, int], count: int) -> Tensor:
        """[count, 3, S, S], valid until the next batch is asked for."""
        worker, slot = place
        return self._images[worker, slot, :count]


@dataclass
class Piece:
    """One worker's part of one step."""

    images: Tensor | None  # uint8 [p, 3, S, S]; None where they are in shared memory
    texts: Tensor  # int64 [p, context_length]
    seeds: Tensor  # int64 [p]
    keys: list[str]  # p
    invalid: list[Invalid] = field(default_factory=list)
    place: tuple[int, int] = (0, 0)  # in `ImageMemory`


@dataclass
class Failure:
    """An error in a worker, on its way to the trainer."""

    error: Exception
    traceback: str  # empty where the message is enough

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, ClipTrainError):
            return cls(error, "")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error that cannot travel would hang the queue
            error = DataError(f"{type(error).__name__}: {error}")
        return cls(error, traceback.format_exc())


def pack(made: Piece | Failure) -> Tensor:
    """As uint8 [bytes]: only the name of a shared memory goes through the workers' one pipe.

    A message of more than PIPE_BUF is written in parts: a worker killed between two of them, which holds the pipe's
    lock, would leave the trainer waiting for the rest of it without end.
    """
    return torch.frombuffer(bytearray(pickle.dumps(made)), dtype=torch.uint8)


def unpack(packed: Tensor) -> Piece | Failure:
    made: Piece | Failure = pickle.loads(packed.numpy().tobytes())
    return made


@dataclass
class _Decoding:
    """A sample on its way through the stages."""

    number: int  # of the samples of this worker
    seed: int
    candidates: Iterator[Undecoded]  # for its place, if it does not decode
    own: bool  # it is the one that the order has there
    invalid: list[Invalid]
    key: str = ""
    caption: str = ""
    image: Tensor | None = None  # uint8 [3, S, S]; None once it is collated


class Samples:
    """The first stage: undecoded samples in canonical order, each with its `_Decoding` under "__decoding__"."""

    def __init__(self, order: Order, files: Sequence[Files], workers: list[Partition], start: int) -> None:
        self.order, self.files, self.workers, self.start = order, files, workers, start

    def __call__(self) -> Iterator[Fields]:
        readers: dict[int, StreamReader] = {}
        used: dict[int, int] = {}  # stream -> the last step that has needed it
        number = itertools.count()
        for step, shares in enumerate(own_steps(self.workers, self.start)):
            for share in shares:
                used[share.stream] = step
                if share.stream not in readers:
                    keep_open = len(shares) <= MAX_OPEN_STREAMS
                    readers[share.stream] = StreamReader(self.order, self.files, share.stream, keep_open=keep_open)
                for count in range(share.first, share.last):
                    sample = readers[share.stream].at(count)
                    candidates = sample.candidates()
                    first = next(candidates)
                    invalid = [sample.item] if isinstance(sample.item, Invalid) else []
                    decoding = _Decoding(next(number), sample.seed, candidates, not invalid, invalid)
                    yield {**first.fields, "__decoding__": decoding}
            for stream in [stream for stream in readers if step - used[stream] > IDLE_STEPS]:
                del readers[stream]  # at a boundary between ranks that has moved on


def own_steps(workers: list[Partition], start: int) -> Iterator[list[StreamShare]]:
    """What the worker that asks has of each step from `start` on."""
    info = get_worker_info()
    return workers[info.id if info else 0].steps(start)


class Decode:
    """The second stage: decodes and augments; what does not decode is replaced, always by the same sample."""

    def __init__(self, transform: TrainTransform, caption_key: str | None, stages: tuple[Stage, ...]) -> None:
        self.transform, self.caption_key, self.stages = transform, caption_key, stages

    def __call__(self, samples: Iterable[Fields]) -> Iterator[_Decoding]:
        for fields in samples:
            if "__decoding__" not in fields:
                raise UserError(f"a data stage must keep the fields whose names begin with __, of {fields}")
            decoding: _Decoding = fields["__decoding__"]
            try:
                self._decode(fields, decoding)
            except InvalidSample as e:
                if decoding.own:  # another one has a place of its own, and is counted there
                    decoding.invalid.append(Invalid(e.reason, fields["__url__"], fields["__key__"]))
                self._replace(decoding)
            yield decoding

    def _decode(self, fields: Fields, into: _Decoding) -> None:
        into.image = self.transform(decode.decode_image(decode.image_bytes(fields)), into.seed)
        into.caption = decode.caption(fields, self.caption_key, draw=into.seed)
        into.key = fields["__key__"]

    def _replace(self, decoding: _Decoding) -> None:
        """By the first candidate that decodes."""
        tried: list[Invalid] = []
        for other in itertools.islice(decoding.candidates, MAX_SUBSTITUTES):
            samples: Iterable[Fields] = [dict(other.fields)]
            for stage in self.stages:
                samples = stage(samples)
            try:
                return self._decode(next(iter(samples)), decoding)
            except InvalidSample as e:
                tried.append(Invalid(e.reason, other.fields["__url__"], other.fields["__key__"]))
        raise DataError(f"{MAX_SUBSTITUTES} samples in a row do not decode\n{table_of(tried)}")


class Collate:
    """The last stage: one piece per step."""

    def __init__(self, context_length: int, image_size: int, workers: list[Partition], start: int) -> None:
        self.tokenizer = Tokenizer(context_length)
        self.image_size = image_size
        self.workers, self.start = workers, start
        self.memory: ImageMemory | None = None

    def __call__(self, decoded: Iterable[_Decoding]) -> Iterator[Piece]:
        samples = enumerate(decoded)
        for shares in own_steps(self.workers, self.start):
            count = sum(map(len, shares))
            if not count:
                yield Piece(None, torch.empty(0), torch.empty(0), [])
                continue
            if self.memory is not None:
                images, place = self.memory.next(count)
            else:
                images, place = torch.empty((count, 3, self.image_size, self.image_size), dtype=torch.uint8), (0, 0)
            step: list[_Decoding] = []
            for number, sample in itertools.islice(samples, count):
                if sample.number != number:
                    raise UserError(
                        "a data stage dropped, repeated or reordered samples: each must map one sample to one, "
                        "or the order would depend on the number of workers"
                    )
                assert sample.image is not None
                images[len(step)] = sample.image  # at once, while it is in the cache
                sample.image = None
                step.append(sample)
            yield Piece(
                images=images if self.memory is None else None,
                texts=self.tokenizer([s.caption for s in step]),
                seeds=torch.tensor([s.seed for s in step], dtype=torch.int64),
                keys=[s.key for s in step],
                invalid=[invalid for s in step for invalid in s.invalid],
                place=place,
            )


class PieceStream(IterableDataset):
    """The pipeline in a worker: pieces without end, or one `Failure`, with the error as it was raised; packed there."""

    def __init__(self, samples: Samples, stages: tuple[Stage, ...], decode: Decode, collate: Collate) -> None:
        self.pipeline = webdataset.DataPipeline(samples, *stages, decode, collate)
        self._collate = collate
        self.closing: Any = None  # in workers: a shared byte that the trainer sets before it ends them

    def collate_into(self, memory: ImageMemory) -> None:
        """Before it goes to the workers."""
        self._collate.memory = memory

    def __iter__(self) -> Iterator[Piece | Failure] | Iterator[Tensor]:
        if get_worker_info() is None:
            return self._made()
        torch.set_num_threads(1)
        outlive_signals(self.closing)
        threading.Thread(target=end_with_the_trainer, daemon=True).start()
        return map(pack, self._made())

    def _made(self) -> Iterator[Piece | Failure]:
        try:
            yield from self.pipeline
        except Exception as e:
            yield Failure.of(e)


def outlive_signals(closing: Any) -> None:
    """In a worker: Ctrl-C and a launcher's signals go to the whole process group, but only the trainer may act.

    It still wants batches until its checkpoint is committed, and then ends the workers, by SIGTERM where need be.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if closing.value:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # as the fork server has them


def end_with_the_trainer() -> None:
    """torch looks at the parent of a worker, which is the fork server, and that one lives as long as its workers."""
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)
