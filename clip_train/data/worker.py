"""A loader worker's part of each step: undecoded samples -> (user stages) -> decoded -> a piece of
the batch.

This module runs inside the loader's workers. Their images are in shared memory.
"""

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clip_train.data import decode
from clip_train.data.decode import CaptionKey
from clip_train.data.images import TrainTransform, synthetic_sample
from clip_train.data.invalid import Invalid, InvalidSample, table_of
from clip_train.data.order import Order, Partition
from clip_train.data.reader import Fields, Files, Item, StreamReader
from clip_train.data.shards import SYNTHETIC
from clip_train.data.tokenizer import Tokenize
from clip_train.errors import ClipTrainError, DataError, UserError
from clip_train.stop import SIGNALS
from clip_train.storage.blocks import BlockCache

Stage = Callable[[Iterable[Fields]], Iterable[Fields]]  # such as webdataset.map(f)
# in a worker: with more, their shards are opened for each block, to keep files and buffers few
MAX_OPEN_STREAMS = 64
IDLE_STEPS = 100  # after which a stream that others have taken over is closed and forgotten
MAX_TRIED = 10_000  # as many samples in a row that cannot be used are no accident


def shared_images(workers: int, prefetch: int, capacity: int, image_size: int) -> Tensor:
    """uint8 [workers, slots, capacity, 3, S, S] in shared memory, filled by workers over and over.

    Sent through the loader's queue, every piece would be copied once more, into fresh pages that
    the kernel has to clear: a quarter of the whole cost of a 256 px image. A worker fills its slots
    in turn. It is asked for its k-th piece when the trainer has fetched piece k - prefetch, and the
    trainer is done with that one before it fetches the next: prefetch + 1 slots are enough.

    capacity: samples in the largest piece.
    """
    shape = (workers, prefetch + 1, capacity, 3, image_size, image_size)
    # as torch's own collate allocates
    storage = torch.UntypedStorage._new_shared(torch.Size(shape).numel())
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


@dataclass
class Piece:
    """One worker's part of one step."""

    images: Tensor | None  # uint8 [p, 3, S, S]; None where they are in `shared_images`
    texts: Tensor  # int64 [p, context_length]
    seeds: Tensor  # int64 [p]
    keys: list[str]  # p
    invalid: list[Invalid]


@dataclass(eq=False)
class PieceStream(IterableDataset):
    """In a worker: its pieces without end, packed, or one error with where it happened. Else: those
    of the rank."""

    order: Order
    files: Sequence[Files]
    workers: list[Partition]  # what each worker decodes
    start: int  # the first step
    transform: TrainTransform
    tokenizer: Tokenize
    caption_key: CaptionKey
    stages: Sequence[Stage]  # each maps one sample to one
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
        S = self.transform.image_size
        readers: dict[int, StreamReader] = {}
        used: dict[int, int] = {}  # stream -> the last step that has needed it
        # steps are counted among those whose turn it is here
        for step, shares in enumerate(self.workers[worker].steps(self.start)):
            count = sum(map(len, shares.values()))
            if self.memory is None:
                images = torch.empty((count, 3, S, S), dtype=torch.uint8)
            else:
                images = self.memory[worker, step % self.memory.shape[1], :count]
            keys: list[str] = []
            captions: list[str] = []
            seeds: list[int] = []
            invalid: list[Invalid] = []
            for stream, numbers in shares.items():
                used[stream] = step
                if stream not in readers:
                    keep_open = len(shares) <= MAX_OPEN_STREAMS
                    readers[stream] = StreamReader(
                        self.order, self.files, stream, keep_open=keep_open, caches=self.caches
                    )
                for number in numbers:
                    if self.closing.value:
                        return
                    seed = self.order.sample_seed(stream, number)
                    candidates = readers[stream].at(number)
                    image, caption, key = self._first_usable(candidates, seed, invalid)
                    images[len(keys)] = image  # at once, while it is in the cache
                    captions.append(caption)
                    keys.append(key)
                    seeds.append(seed)
            yield Piece(
                images if self.memory is None else None,
                self.tokenizer(captions),
                torch.tensor(seeds, dtype=torch.int64),
                keys,
                invalid,
            )
            for stream in [stream for stream in readers if step - used[stream] > IDLE_STEPS]:
                del readers[stream]  # at a boundary between ranks that has moved on

    def _first_usable(
        self, candidates: Iterator[Item], seed: int, invalid: list[Invalid]
    ) -> tuple[Tensor, str, str]:
        """Image [3, S, S], caption and key of the first one that decodes. The first of all goes
        into `invalid` if it cannot be used; the others have places of their own, where they are
        counted."""
        tried: list[Invalid] = []
        for item in itertools.islice(candidates, MAX_TRIED):
            if isinstance(item, Invalid):
                tried.append(item)
                continue
            key, url = item["__key__"], item["__url__"]
            if url.startswith(SYNTHETIC):
                return *synthetic_sample(seed, self.transform.image_size), key
            try:
                fields = self._staged(item) if self.stages else item
                data = decode.image_bytes(fields)
                caption = decode.caption(fields, self.caption_key, draw=seed)
                size = decode.jpeg_size(data) if self.transform.scaled_decode else None
                divisor = self.transform.divisor(*size, seed) if size else 1
                image = self.transform(decode.decode_image(data, divisor), seed, size)
            except InvalidSample as e:
                tried.append(Invalid(str(e), url, key))
                continue
            invalid += tried[:1]
            return image, caption, key
        raise DataError(f"{MAX_TRIED} samples in a row cannot be used\n{table_of(tried)}")

    def _staged(self, fields: Fields) -> Fields:
        """The sample after the user's stages, which see only samples with an image and a caption.
        InvalidSample."""
        decode.image_bytes(fields)
        decode.captions(fields, self.caption_key)
        samples: Iterable[Fields] = [dict(fields)]
        for stage in self.stages:
            samples = stage(samples)
        made = list(samples)
        if len(made) != 1:
            raise UserError(
                f"a data stage must map one sample to one, and made {len(made)} of "
                f"{fields['__key__']}"
            )
        return made[0]


def packed(made: Piece | tuple[Exception, str]) -> Tensor:
    """As bytes in shared memory, so that only its name goes through the workers' one pipe.

    A message of more than PIPE_BUF is written in parts: a worker killed between two of them would
    still hold the pipe's lock, and the trainer would wait for the rest without end.
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
