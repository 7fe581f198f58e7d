"""The training loader: this rank's share of each global batch, in canonical order, from any step on; and the thread
that has the next one on the device while this one is computed."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from clip_train.batch import BatchSizes, shares
from clip_train.data.config import DataConfig, order_keys, resolve_workers
from clip_train.data.images.transforms import TrainTransform
from clip_train.data.index import ShardIndex, index_of
from clip_train.data.inspect import count_missing
from clip_train.data.invalid import InvalidLimit
from clip_train.data.order import Partition, hash64
from clip_train.data.reader import make_order
from clip_train.data.shards import pack_rows
from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.data.worker import ImageMemory, Piece, PieceStream, Stage
from clip_train.errors import DataError, UserError
from clip_train.protocols import Batch, text_lengths
from clip_train.stop import SIGNALS
from clip_train.storage.config import StorageConfig

WAIT_SECONDS = 2.0  # after which a wait for a worker looks whether it has been closed, and goes on
CLOSE_SECONDS = 10.0  # for the prefetching thread to end
PRELOAD = ["torch", "clip_train.data.worker"]  # once in the fork server, not in every worker


class WorkerTraceback(Exception):
    """Where in the worker it happened."""


class TrainLoader(Iterator[Batch]):
    """Batches without end; the first is that of step `step`.

    Args:
        image_size: S, pixels.
        global_size: samples in the global batch of all ranks, or their sizes as a function of the step.
        seed: the run's; it orders the shards, permutes the blocks and seeds the samples.
        step: of the run, from 0, whose batch comes first.
        began: the step at which this order began: 0, unless the data of a run has begun anew.
        index: of `data.train`, with all counts; None: it is looked up, and what nobody has counted is counted here.
        pin_memory: batches in pinned memory, for asynchronous copies to a GPU.
        stages: webdataset stages between reading and decoding (such as `webdataset.map(f)`), each of which
            must map one sample (a dict of bytes) to one. They travel to the workers: they must be picklable.
        storage: how patiently remote shards are read.
        tokenizer: picklable; None: CLIP's own.
        lengths: int64 [n, context_length] -> n, where each text ends, for a model that reads nothing behind it.

    Raises:
        UserError: fewer samples than ranks, shards that do not exist or hold no sample.
        DataError: shards cannot be read, or (while iterating) too many samples are invalid. Local to this rank:
            the trainer reports it to the others.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        image_size: int,
        context_length: int,
        global_size: int | BatchSizes,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        step: int = 0,
        began: int = 0,
        index: ShardIndex | None = None,
        pin_memory: bool = False,
        stages: Sequence[Stage] = (),
        storage: StorageConfig | None = None,
        tokenizer: Tokenize | None = None,
        lengths: Callable[[Tensor], list[int]] | None = text_lengths,
    ) -> None:
        storage = storage or StorageConfig()
        self._sizes = (
            BatchSizes.constant(global_size) if isinstance(global_size, int) else global_size
        )
        self._sizes.check_ranks(world_size)
        if index is None:
            index = count_missing(
                index_of(config.train, config.verify, storage), storage, together=False
            )
        self.index, self.step, self._began = index, step, began
        self._keys = order_keys(config, self._sizes, seed)
        self.streams = self._keys["data.lanes"]
        self.order, files = make_order(
            config, index, storage, self._keys, hash64(seed, began, -5) if began else seed
        )
        partition = Partition.of(self._sizes, self.streams, rank, world_size, began)
        number = (
            config.workers
            if config.workers != "auto"
            else resolve_workers(len(os.sched_getaffinity(0)), "cpu")
        )
        workers = partition.workers(number)
        transform = TrainTransform(image_size, **config.augmentation)
        self._lengths = lengths
        self._stream = PieceStream(
            self.order, files, workers, step, transform, tokenizer or Tokenizer(context_length), config.caption_key,
            tuple(stages),
        )  # fmt: skip
        self._world_size = world_size
        self._workers = len(workers) if number else 0
        self._pieces_per_batch = len(workers)
        self._largest_piece = max(worker.most() for worker in workers)
        self._prefetch = config.prefetch
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._limit = InvalidLimit(config.bad_sample_limit)
        self._pieces: Iterator[Any] | None = None  # packed by workers
        self._closed = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside its step, as JSON: see `resume_data`."""
        return {
            "data_began": self._began,
            "shards": pack_rows(self.index.rows()),
            "order": self._keys,
        }

    def epoch(self, step: int) -> int:
        """Whole epochs that are done before a step, since the data began."""
        return self.order.epoch(self._sizes.before(step) - self._sizes.before(self._began))

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._pieces is None:
            self._pieces = self._start()
        try:
            return self._assemble([self._next_piece() for _ in range(self._pieces_per_batch)])
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Nothing more is wanted: who waits for a piece, in another thread, ends within seconds."""
        self._closed = True
        if self._stream.closing is not None:
            self._stream.closing.value = 1

    def close(self) -> None:
        """Ends the workers. The loader gives nothing more."""
        self.stop()
        atexit.unregister(self.close)
        pieces, self._pieces = self._pieces, None
        if self._workers and pieces is not None:
            pieces._shutdown_workers()  # type: ignore[attr-defined]

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> Iterator[Any]:
        if not self._workers:
            self._stream.closing = RawValue("b", 0)
            return iter(self._stream)
        try:
            pickle.dumps(self._stream)
        except Exception as e:
            raise UserError(
                f"a data stage cannot travel to the loader's workers ({e}); use functions of a module instead of "
                "lambdas, or data.workers=0"
            ) from e
        S = self._stream.transform.image_size
        self._stream.memory = ImageMemory(self._workers, self._prefetch, self._largest_piece, S)
        self._stream.closing = RawValue("b", 0)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        _start_fork_server()
        atexit.register(
            self.close
        )  # workers ignore what `multiprocessing` would end them with, and it would wait
        return iter(
            DataLoader(
                self._stream,
                batch_size=None,
                num_workers=self._workers,
                prefetch_factor=self._prefetch,
                multiprocessing_context=context,
                generator=torch.Generator(),  # else its seed is drawn from the generator that the model draws from
                persistent_workers=True,
                timeout=WAIT_SECONDS,
            )
        )

    def _next_piece(self) -> Piece:
        assert self._pieces is not None
        if not self._workers:
            return next(self._pieces)
        try:
            made = pickle.loads(self._wait().numpy().tobytes())
        except (
            EOFError,
            ConnectionError,
            FileNotFoundError,
            RuntimeError,
        ) as e:  # killed, in mid-message perhaps
            why = str(e) or type(e).__name__
            if (
                isinstance(e, RuntimeError)
                and "exited unexpectedly" not in why
                and "killed by signal" not in why
            ):
                raise
            raise DataError(
                f"a loader worker died ({why}); if memory ran out (see dmesg), lower data.workers, "
                "data.shuffle_block or data.prefetch; a container may need more shared memory (--shm-size)"
            ) from e
        if isinstance(made, Piece):
            return made
        error, where = made
        raise error from (WorkerTraceback(where) if where else None)

    def _wait(self) -> Tensor:
        """A worker's next piece; StopIteration once it is not wanted any more."""
        assert self._pieces is not None
        while not self._closed:
            try:
                return next(self._pieces)
            except RuntimeError as e:
                if "timed out" not in str(e):
                    raise
        raise StopIteration

    def _assemble(self, pieces: list[Piece]) -> Batch:
        """The workers' pieces, in canonical order -> one batch. DataError above the limit of invalid samples."""
        invalid = [each for piece in pieces for each in piece.invalid]
        texts = torch.cat([p.texts for p in pieces])
        batch = Batch(
            images=self._images(pieces),
            texts=texts,
            sample_seeds=torch.cat([p.seeds for p in pieces]),
            keys=[key for p in pieces for key in p.keys],
            bad_samples=dict(Counter(each.place for each in invalid)),
            bad_pictures=[each.shown() for each in invalid if each.picture],
            shares=tuple(shares(self._sizes.at(self.step), self._world_size)),
            text_lengths=None if self._lengths is None else self._lengths(texts),
        )
        self.step += 1
        self._limit.add(len(batch), invalid)
        if self._pin_memory:
            batch.texts, batch.sample_seeds = (
                batch.texts.pin_memory(),
                batch.sample_seeds.pin_memory(),
            )
        return batch

    def _images(self, pieces: list[Piece]) -> Tensor:
        """The only copy that the trainer makes: from shared into pinned memory, which torch keeps and hands out
        again once the device has read it."""
        memory, S = self._stream.memory, self._stream.transform.image_size
        if memory is None and not self._pin_memory:
            (piece,) = pieces
            assert piece.images is not None
            return piece.images
        out = torch.empty(
            (sum(len(p.keys) for p in pieces), 3, S, S),
            dtype=torch.uint8,
            pin_memory=self._pin_memory,
        )
        for part, piece in zip(out.split([len(p.keys) for p in pieces]), pieces, strict=True):
            images = (
                piece.images
                if memory is None
                else memory.at(piece.worker, piece.number, len(piece.keys))
            )
            assert images is not None
            part.copy_(images)
        return out


class Prefetcher(Iterator[Batch]):
    """Batches of `source` on `device`, in its order, one ahead. Closing it closes the source.

    A thread takes them from the source and, on a GPU, copies them from pinned memory on a stream of its own; the
    stream that computes waits for the copy, and the host for nothing. What the source raises is raised here.
    """

    def __init__(self, source: TrainLoader, device: torch.device) -> None:
        self.source, self.device = source, device
        self._ready: queue.SimpleQueue[tuple[Batch, torch.cuda.Event | None] | BaseException] = (
            queue.SimpleQueue()
        )
        self._wanted = threading.Semaphore(0)  # batches that the thread may take from the source
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._thread is None:
            first = self._to_device(
                next(self.source)
            )  # here: what the source starts needs the main thread
            self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
            self._thread.start()
            self._wanted.release()
            return self._received(*first)
        got = self._ready.get()
        if isinstance(got, BaseException):
            self.close()
            raise got
        self._wanted.release()
        return self._received(*got)

    def close(self) -> None:
        """Nothing more is given."""
        self._closed = True
        self.source.stop()
        self._wanted.release()
        if self._thread is not None:
            self._thread.join(
                timeout=CLOSE_SECONDS
            )  # the source is not closed under it, unless it hangs
        self.source.close()

    def _fill(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self.device)
            while self._wanted.acquire() and not self._closed:
                self._ready.put(self._to_device(next(self.source)))
        except BaseException as e:
            self._ready.put(e)

    def _to_device(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return batch.to(self.device), None
        try:
            with torch.cuda.stream(self._stream):
                return batch.to(self.device), self._stream.record_event()
        except torch.OutOfMemoryError:  # beside the step under way; between two there is room
            return batch, None

    def _received(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        if copied is None:
            return batch.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for tensor in (batch.images, batch.texts, batch.sample_seeds):
            tensor.record_stream(
                current
            )  # its memory is not the copying stream's again before this one is done
        return batch


def _start_fork_server() -> None:
    """With the signals ignored, as it inherits them, that a launcher sends to the group: the trainer must outlive them.

    Blocked here meanwhile, so that none of them is lost.
    """
    if threading.current_thread() is not threading.main_thread():  # no signals to be set from here
        forkserver.ensure_running()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set by Python
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
