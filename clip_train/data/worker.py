"""A loader worker's part of each step: undecoded samples -> (user stages) -> decoded -> a piece of
the batch.

This module runs inside the loader's workers. Their images are in shared memory.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clip_train.batch import BatchSizes
from clip_train.data import decode
from clip_train.data.config import DataConfig, resolve_workers
from clip_train.data.decode import Stage
from clip_train.data.formats import quiet_pillow
from clip_train.data.images import TrainTransform, seeded, synthetic_sample
from clip_train.data.invalid import Invalid, InvalidSample, table_of
from clip_train.data.order import Order, Partition
from clip_train.data.pixels import Alpha, jpeg_size
from clip_train.data.reader import Files, Item, StreamReader
from clip_train.data.shards import SYNTHETIC
from clip_train.data.tokenizer import Tokenize
from clip_train.errors import ClipTrainError, DataError, RankError
from clip_train.inputs import Input
from clip_train.processes import usable_cores
from clip_train.stop import SIGNALS
from clip_train.storage.blocks import BlockCache
from clip_train.task import sample_ids

# in a worker: with more, their shards are opened for each block, to keep files and buffers few
MAX_OPEN_STREAMS = 64
IDLE_STEPS = 100  # after which a stream that others have taken over is closed and forgotten
MAX_TRIED = 10_000  # this many unusable samples in a row mean broken data


def shared_shape(
    workers: Sequence[Partition], prefetch: int, row: tuple[int, ...]
) -> tuple[int, ...]:
    """[workers, slots, samples of the largest piece, *row] of a rank's `shared_images`.

    The trainer asks for piece k of a worker after it has fetched piece k - prefetch, and finishes
    with that one before it fetches the next. So prefetch + 1 slots are enough. Workers that take
    the steps in turn prefetch together.

    row: as `PieceStream.row`.
    """
    samples = max(worker.most() for worker in workers)
    return (len(workers), -(-prefetch // workers[0].turns) + 1, samples, *row)


def shared_images(shape: tuple[int, ...]) -> Tensor:
    """uint8 of a `shared_shape` in shared memory, filled by workers over and over, each its slots
    in turn. RankError without room.

    The loader's queue would copy every piece once more, into new pages that the kernel has to
    clear: a quarter of the whole cost of a 256 px image.
    """
    try:  # as torch's own collate allocates
        storage = torch.UntypedStorage._new_shared(torch.Size(shape).numel())
    except RuntimeError as e:
        raise RankError(
            f"data.workers ({shape[0]}) and data.prefetch ({shape[1] - 1}) need "
            f"{math.prod(shape) >> 20} MiB of shared memory: {e}; enlarge /dev/shm (a container's "
            "--shm-size) and the shell's ulimit -f, or lower data.workers (0: none)"
        ) from None
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def shared_bytes(data: DataConfig, sizes: BatchSizes, row: tuple[int, ...], ranks: int) -> int:
    """Bytes of /dev/shm for the `shared_images` of so many ranks on this machine, which are all.

    data: with a number as `data.lanes`. row: as `PieceStream.row`.
    """
    workers = data.workers
    if workers == "auto":
        cores = usable_cores() // ranks
        workers = resolve_workers(cores, "cuda" if torch.cuda.is_available() else "cpu")
    parts = [Partition(sizes, int(data.lanes), rank, ranks) for rank in range(ranks)]
    shapes = [shared_shape(part.workers(workers), data.prefetch, row) for part in parts]
    return sum(map(math.prod, shapes)) if workers else 0


@dataclass
class Piece:
    """One worker's part of one step."""

    images: Tensor | None  # uint8 [p, *row]; None where they are in `shared_images`
    texts: Tensor  # int64 [p, context_length], or [p, T, context_length]
    seeds: Tensor  # int64 [p]
    teacher_features: Tensor | None  # float32 [p, F], as in `Batch`
    keys: list[str]  # p
    shards: list[int]  # p, as in `Batch`
    ids: Tensor | None  # int64 [p], of their groups, with `loss.groups`
    invalid: list[Invalid]


@dataclass
class Usable:
    """One sample of a piece, without its row."""

    texts: list[str]
    key: str
    shard: int
    seed: int
    group: str | None = None  # as `decode.group`


@dataclass(eq=False)
class PieceStream(IterableDataset):
    """In a worker: its pieces without end, packed, or one error and its origin. Otherwise: the
    pieces of the rank."""

    order: Order
    files: Sequence[Files]
    workers: list[Partition]  # what each worker decodes
    start: int  # the first step
    transform: TrainTransform
    tokenizer: Tokenize
    texts_of: Callable[..., list[str]]  # from a sample and `draw` to its `num_texts` texts
    num_texts: int  # T
    stages: Sequence[Stage | str]  # or their import paths; each maps one sample to one or none
    layout: Sequence[Input]  # of `data.inputs`
    row: tuple[int, ...]  # `row_shape` of the layout
    groups: str | None  # as `loss.groups`
    # of all teachers' stored features together; 0: they are not read; None: no augmentations either
    width: int | None = None
    alpha: Alpha = "white"  # as `data.alpha`
    memory: Tensor | None = None  # `shared_images`, for workers
    caches: Sequence[BlockCache] = ()  # for workers that share streams
    # from the first piece on: a byte that the trainer sets when it wants no more
    closing: Any = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            yield from self._pieces(0)
            return
        torch.set_num_threads(1)
        quiet_pillow()
        outlive_signals(self.closing)
        threading.Thread(target=end_with_the_trainer, daemon=True).start()
        try:
            for piece in self._pieces(info.id):
                yield packed(piece)
        except ClipTrainError as e:
            yield packed((e, ""))  # the message is enough
        except Exception as e:
            error: Exception = e
            try:
                pickle.loads(pickle.dumps(e))
            except Exception:  # an error that cannot be pickled would hang the queue
                error = DataError(f"{type(e).__name__}: {e}")
            yield packed((error, traceback.format_exc()))

    def _pieces(self, worker: int) -> Iterator[Piece]:
        readers: dict[int, StreamReader] = {}
        used: dict[int, int] = {}  # stream -> the last step that has needed it
        # steps are counted among those whose turn it is here
        for step, shares in enumerate(self.workers[worker].steps(self.start)):
            count = sum(map(len, shares.values()))
            if self.memory is None:
                images = torch.empty((count, *self.row), dtype=torch.uint8)
            else:
                images = self.memory[worker, step % self.memory.shape[1], :count]
            samples: list[Usable] = []
            stored: list[Tensor] = []
            invalid: list[Invalid] = []
            for stream, sample_numbers in shares.items():
                used[stream] = step
                if stream not in readers:
                    readers[stream] = StreamReader(
                        self.order,
                        self.files,
                        stream,
                        keep_open=len(shares) <= MAX_OPEN_STREAMS,
                        caches=self.caches,
                    )
                for number in sample_numbers:
                    if self.closing.value:
                        return
                    seed = self.order.sample_seed(stream, number)
                    row, sample = self._first_usable(
                        readers[stream].at(number), seed, invalid, stored
                    )
                    images[len(samples)] = row  # at once, while it is in the cache
                    samples.append(sample)
            all_texts = [text for sample in samples for text in sample.texts]
            yield Piece(
                images if self.memory is None else None,
                self.tokenizer(all_texts).unflatten(0, (count, self.num_texts)).squeeze(1),
                torch.tensor([sample.seed for sample in samples], dtype=torch.int64),
                torch.stack(stored) if stored else None,
                [sample.key for sample in samples],
                [sample.shard for sample in samples],
                None if self.groups is None else sample_ids(sample.group for sample in samples),
                invalid,
            )
            for stream in [stream for stream in readers if step - used[stream] > IDLE_STEPS]:
                del readers[stream]  # at a boundary between ranks that has moved on

    def _first_usable(
        self, candidates: Iterator[Item], seed: int, invalid: list[Invalid], stored: list[Tensor]
    ) -> tuple[Tensor, Usable]:
        """The row and the rest of the first one that decodes; its features go into `stored`.
        If the first of them cannot be used, it is added to `invalid`. The others are counted at
        their own places."""
        tried: list[Invalid] = []
        for item in itertools.islice(candidates, MAX_TRIED):
            if isinstance(item, Invalid):
                tried.append(item)
                continue
            key, url = item["__key__"], item["__url__"]
            if url.startswith(SYNTHETIC):
                row, texts = synthetic_sample(seed, self.transform.image_size, self.num_texts)
                return row, Usable(texts, key, item["__shard__"], seed)
            try:
                with seeded(seed) if self.stages or self.layout else contextlib.nullcontext():
                    fields = decode.staged(item, self.stages) if self.stages else item
                    fields = {**fields, "__seed__": seed}
                    row = (
                        decode.own_inputs(fields, self.layout, self._image)
                        if self.layout
                        else self._image(fields)
                    )
                    texts = self.texts_of(fields, draw=seed)
                    if self.width:
                        place, _ = decode.stored_augmentation(fields, seed)
                        stored.append(decode.stored_features(fields, place, texts, self.width))
            except InvalidSample as e:
                tried.append(Invalid(str(e), url, key))
                continue
            invalid += tried[:1]
            group = decode.group(fields, texts[0], self.groups) if self.groups else None
            return row, Usable(texts, key, item["__shard__"], seed, group)
        raise DataError(f"{MAX_TRIED} samples in a row cannot be used\n{table_of(tried)}")

    def _image(self, fields: Mapping[str, Any]) -> Tensor:
        """uint8 [3, S, S]. InvalidSample."""
        seed = fields["__seed__"]
        if self.width is not None:
            with decode.invalid_if_failing(decode.AUGMENTATIONS):
                _, augmentation = decode.stored_augmentation(fields, seed)
                image = decode.image_of(fields, alpha=self.alpha)
                return self.transform.stored(image, augmentation)
        size = None
        if self.transform.scaled_decode:
            size = jpeg_size(decode.image_bytes(fields))
        divisor = self.transform.divisor(*size, seed) if size else 1
        return self.transform(decode.image_of(fields, divisor, alpha=self.alpha), seed, size)


def packed(made: Piece | tuple[Exception, str]) -> Tensor:
    """Put the piece into shared memory, so that only its name goes through the workers' one pipe.

    A message longer than PIPE_BUF is written in parts. A worker killed between two parts would keep
    the pipe's lock, and the trainer would wait forever.
    """
    return torch.frombuffer(bytearray(pickle.dumps(made)), dtype=torch.uint8)


def outlive_signals(closing: Any) -> None:
    """In a worker: Ctrl-C and a launcher's signals go to the whole process group, but only the
    trainer may act.

    It still wants batches until its checkpoint is committed, and then ends the workers, by SIGTERM
    if necessary.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if closing.value:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # as the fork server has them


def end_with_the_trainer() -> None:
    """torch watches the parent of a worker, which is the fork server, and that lives as long as its
    workers."""
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)
