"""The training loader: this rank's share of each global batch, in canonical order, from any step
on; and the thread that copies the next batch to the device during a step."""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from clip_train.batch import BatchSizes, shares
from clip_train.columns import Columns
from clip_train.data.config import DataConfig, order_keys, resolve_workers
from clip_train.data.decode import Decoder, Stage, texts_of
from clip_train.data.images import TrainTransform, own_augmentation
from clip_train.data.index import ORDER_START_KEY, ShardIndex, index_of, resume_data
from clip_train.data.invalid import InvalidLimit
from clip_train.data.order import Partition, hash64
from clip_train.data.reader import count_missing, make_order
from clip_train.data.shards import pack_rows
from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.data.values import SampleValue
from clip_train.data.worker import (
    Piece,
    PieceStream,
    no_shared_memory,
    shared_images,
    shared_shape,
    unpacked,
)
from clip_train.errors import DataError, UserError
from clip_train.inputs import layout_of, row_shape
from clip_train.native import patch_counts
from clip_train.processes import fork_server, usable_cores
from clip_train.resizing import BudgetSchedule, Patches
from clip_train.stop import SIGNALS
from clip_train.storage.blocks import BlockCache
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import client_in_use
from clip_train.task import Batch, text_lengths
from clip_train.torch_internals import end_loader_workers, loader_workers

WAIT_SECONDS = 2.0  # between looks whether the loader was closed, while it waits for a worker
CLOSE_SECONDS = 4.0  # for the prefetching thread to end
WORKER_SECONDS = 3.0  # for all workers to end; one that hangs in a read is killed then
STOP_SECONDS = 1.0  # how long a batch is waited for after a stop request
LOOK_SECONDS = 0.25  # between looks whether a stop was requested, while a batch is waited for
# Workers that share streams keep blocks of remote shards in memory:
SAMPLE_BYTES = 1 << 16  # a sample is assumed to be this large; a larger one may be fetched twice
SPARE_BLOCKS = 8  # of a stream, beyond those between the workers' positions
MOST_BLOCKS = 256  # of a rank; each has an open file
# the last argument of hash64 for data that starts over: each use of a seed has its own
STARTS_OVER = -5
QUEUE_KIB = 32  # of a worker's queue: its semaphores take a page each
PRELOAD = ["torch", "clip_train.data.worker"]  # once in the fork server, not in every worker


class StoppedWaiting(Exception):
    """This rank was asked to stop while it waited for its next batch."""


class WorkerTraceback(Exception):
    """The traceback of a worker's error, as the cause of the error in the trainer."""


class TrainLoader(Iterator[Batch], contextlib.AbstractContextManager["TrainLoader"]):
    """Batches without end; the first is that of step `step`.

    Args:
        image_size: S, pixels.
        global_size: samples in the global batch of all ranks, or their sizes as a function of the
            step.
        seed: the run's; it orders the shards, permutes the blocks and seeds the samples.
        step: the step of the run, from 0, whose batch comes first.
        order_start: the step at which this order starts: 0, unless a run's data has started over.
        index: of `data.train`, with all counts; None: it is looked up, and shards without a count
            are counted here.
        pin_memory: batches in pinned memory, for asynchronous copies to a GPU.
        stages: webdataset stages between reading and decoding (such as `webdataset.map(f)`), after
            those of `config.stages`. Each maps one sample (a dict of bytes) to one, or drops it,
            which counts as invalid. They travel to the workers: they must be picklable.
        storage: how patiently remote shards are read.
        tokenizer: picklable; None: CLIP's own.
        lengths: int64 [n, context_length] -> n, the length of each text, for a model that reads
            nothing behind it. Several texts of an image: [n, T, context_length] -> n lists of T.
        pack_texts: the model computes texts without their padding.
        values: by the name of a column, what the loss reads of each sample beside its image and
            texts; see `Recipe.sample_values`.
        patches: native resolution, with the budgets of `config.tokens`; None: squares.

    Raises:
        UserError: fewer samples than ranks, shards that do not exist or hold no sample.
        DataError: shards cannot be read, or (while iterating) too many samples are invalid. Local
            to this rank: the trainer reports it to the others.
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
        order_start: int = 0,
        index: ShardIndex | None = None,
        pin_memory: bool = False,
        stages: Sequence[Stage] = (),
        storage: StorageConfig | None = None,
        tokenizer: Tokenize | None = None,
        lengths: Callable[[Tensor], list[Any]] | None = text_lengths,
        pack_texts: bool = False,
        values: Mapping[str, SampleValue] | None = None,
        patches: Patches | None = None,
    ) -> None:
        storage = storage or StorageConfig()
        # the fork server of workers may be older than this process's choice
        client = client_in_use(storage.client)
        self._storage = storage = storage.model_copy(update={"client": client})
        sizes = BatchSizes((global_size,)) if isinstance(global_size, int) else global_size
        sizes.check_ranks(world_size)
        if index is None:
            index = index_of(config.train, config.verify, storage, keep=config.kept)
            index = count_missing(index, storage, together=False)
        self.index = index
        self.step = step
        self._order_start = order_start
        self._sizes = sizes
        self._keys = order_keys(config, sizes, seed, index)
        self.streams = self._keys["data.lanes"]
        own_seed = hash64(seed, order_start, STARTS_OVER) if order_start else seed
        self.order, files = make_order(
            config,
            index,
            storage,
            self._keys,
            seed=own_seed,
            sizes=sizes,
            order_start=order_start,
        )
        workers = config.workers
        if workers == "auto":
            workers = resolve_workers(usable_cores(), "cpu")
        self._workers = workers  # 0: the pieces are made in this process
        parts = Partition(sizes, self.streams, rank, world_size, order_start).workers(workers)
        # the number of steps that are decoded at the same time, each by other workers
        self._turns = parts[0].turns
        augmentation, budgets = config.augmentation, None
        if patches is not None:
            budgets = config.budgets or BudgetSchedule(({patches.most: 1.0},))
            # or crops would not have the image's own shape
            augmentation = {**augmentation, "relative_ratio": True}
        transform = TrainTransform(
            image_size,
            scaled_decode=config.scaled_decode,
            augmentation=own_augmentation(config.aug_own, config.aug_own_options),
            patches=patches,
            **augmentation,
        )
        self.layout = layout_of(config.inputs, image_size)  # for `clip_train.inputs.unpack`
        choose_texts = partial(
            texts_of,
            caption_key=config.caption_key,
            count=config.texts_per_image,
            negatives=config.negative_texts,
        )
        decoder = Decoder(
            transform,
            choose_texts,
            config.num_texts,
            stages=(*(config.stages or ()), *stages),
            layout=self.layout,
            values=values or {},
            stored_augmentations=config.reinforced is not None,
            stored_width=sum(config.reinforced or ()),
            alpha=config.alpha,
        )
        self._stream = PieceStream(
            self.order,
            files,
            parts,
            start=step,
            decoder=decoder,
            tokenizer=tokenizer or Tokenizer(context_length),
            row=row_shape(self.layout, image_size, patches),
            budgets=budgets,
        )
        self._lengths, self._pack_texts = lengths, pack_texts
        self._is_native = patches is not None
        self._world_size = world_size
        self._shape = shared_shape(parts, config.prefetch, self._stream.row)
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._limit = InvalidLimit(config.bad_sample_limit)
        self._pieces: Iterator[Any] | None = None  # packed by workers
        self._closed = False

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores in addition to its step, as JSON: see
        `resume_data`."""
        return {
            ORDER_START_KEY: self._order_start,
            "shards": pack_rows(self.index.rows()),
            "order": self._keys,
        }

    def state_dict(self) -> dict[str, Any]:
        """`state` and the step of the next batch, for a loop of your own (torchdata's protocol)."""
        return {**self.state(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch that followed `state_dict`. The number of ranks and workers may
        differ.

        Raises:
            UserError: the shards or their order have changed, or this loader has given a batch.
        """
        order_start = resume_data(
            state, self.index, self._keys, allow_changed_shards=False, allow_changed_order=False
        ).order_start
        if self._pieces is not None or order_start != self._order_start:
            raise UserError(
                "load_state_dict needs a loader that has given no batch, whose data began at step "
                f"{order_start}; make a new TrainLoader(..., order_start={order_start})"
            )
        self.step = self._stream.start = state["step"]

    def epoch(self, step: int) -> int:
        """The number of epochs that are complete before a step, since the order of data started."""
        return self.order.epoch(self._sizes.before(step) - self._sizes.before(self._order_start))

    def __next__(self) -> Batch:
        """The workers' pieces, in canonical order, as one batch. Raises DataError above the limit
        of invalid samples.

        Images are copied once: from shared into pinned memory, which torch keeps and hands out
        again once the device has read it.
        """
        if self._closed:
            raise StopIteration
        if self._pieces is None:
            self._pieces = self._start()
        num_pieces = len(self._stream.workers) // self._turns
        pieces = [self._next_piece(self._pieces) for _ in range(num_pieces)]
        columns = Columns.cat([piece.columns for piece in pieces if len(piece.columns)])
        if self._lengths is not None:
            columns = columns.plus(text_lengths=self._lengths(columns["texts"]))
        if self._stream.memory is not None:
            columns = columns.plus(images=self._images([len(piece.columns) for piece in pieces]))
        if self._is_native:
            columns = columns.plus(patch_counts=patch_counts(columns["images"]))
        if self._pin_memory:
            columns = columns.pin()
        invalid = [sample for piece in pieces for sample in piece.invalid]
        self._limit.add(len(columns), invalid)
        samples_by_rank = shares(self._sizes.at(self.step), self._world_size)
        self.step += 1
        return Batch(
            columns,
            bad_samples=dict(Counter(sample.count_key for sample in invalid)),
            shares=tuple(samples_by_rank),
            pack_texts=self._pack_texts,
        )

    def _images(self, counts: list[int]) -> Tensor:
        """uint8 [n, *row]: the images of this step's pieces, copied out of shared memory.

        counts: samples of each piece.
        """
        memory = self._stream.memory
        assert memory is not None
        # workers take turns: in each round, every worker makes one piece
        round_number, turn = divmod(self.step - self._stream.start, self._turns)
        images = torch.empty(
            (sum(counts), *self._stream.row), dtype=torch.uint8, pin_memory=self._pin_memory
        )
        first_worker = turn * len(counts)
        for worker, part in enumerate(images.split(counts), first_worker):
            slots = memory[worker]
            # a worker fills its slots one after the other
            part.copy_(slots[round_number % len(slots), : len(part)])
        return images

    def stop(self) -> None:
        """Ask the workers to end. If another thread waits for a piece, it stops within seconds."""
        self._closed = True
        if self._stream.closing is not None:
            self._stream.closing.value = 1

    def close(self) -> None:
        """End the workers. The loader gives no more batches."""
        self.stop()
        atexit.unregister(self.close)
        pieces, self._pieces = self._pieces, None
        if self._workers and pieces is not None:
            workers = loader_workers(pieces)
            # torch waits up to 10 s for each, one after the other
            killer = threading.Timer(WORKER_SECONDS, _kill, [workers])
            killer.daemon = True
            killer.start()
            end_loader_workers(pieces)
            killer.cancel()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> Iterator[Any]:
        self._stream.closing = RawValue("b", 0)
        if not self._workers:
            return iter(self._stream)
        workers = self._stream.workers
        _, slots_of_worker, largest, *_ = self._shape
        # without turns, no two workers read the same bytes
        if self._turns > 1:
            most_streams = math.ceil(self.streams / self._world_size) + 1
            num_caches = most_streams * len(self._stream.files)
            block_bytes = self._storage.range_bytes
            # the distance between workers: each makes one piece and keeps another one ready
            distance_bytes = 2 * self._turns * largest * SAMPLE_BYTES
            wanted = distance_bytes // block_bytes + SPARE_BLOCKS
            memory_bytes = len(workers) * self._storage.read_ahead_bytes
            most_blocks = min(MOST_BLOCKS, memory_bytes // block_bytes)
            slots = max(SPARE_BLOCKS, min(wanted, most_blocks // num_caches))
            self._stream.caches = [BlockCache(slots) for _ in range(num_caches)]
        self._stream.memory = shared_images(self._shape)
        context = fork_server()
        context.set_forkserver_preload(PRELOAD)
        _start_fork_server()
        # workers ignore the signals that `multiprocessing` would end them with, and it would wait
        # for them
        atexit.register(self.close)
        loader = DataLoader(
            self._stream,
            batch_size=None,
            num_workers=len(workers),
            prefetch_factor=slots_of_worker - 1,
            multiprocessing_context=context,
            # without its own generator, it would draw a seed from the model's
            generator=torch.Generator(),
            persistent_workers=True,
            timeout=WAIT_SECONDS,
        )
        try:
            return iter(loader)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            needed = QUEUE_KIB * len(workers)
            raise no_shared_memory(
                f"the queues of data.workers ({len(workers)}) need about {needed} KiB", e
            ) from None

    def _next_piece(self, pieces: Iterator[Any]) -> Piece:
        """The next worker's piece. Raises StopIteration if the loader was closed meanwhile, and the
        worker's error or DataError if there is no piece."""
        if not self._workers:
            return next(pieces)
        while not self._closed:
            try:
                message = unpacked(next(pieces))
            except (EOFError, ConnectionError, FileNotFoundError, RuntimeError) as e:
                reason = str(e) or type(e).__name__
                # after WAIT_SECONDS: look whether the loader was closed, and wait again
                if "timed out" in reason:
                    continue
                raise DataError(
                    f"a loader worker died ({reason}); if memory ran out (see dmesg), lower "
                    "data.workers, data.shuffle_block or data.prefetch; a container may need more "
                    "shared memory (--shm-size)"
                ) from e
            if isinstance(message, Piece):
                return message
            # the worker has ended with its error: end the others
            self.stop()
            cause = WorkerTraceback(message.traceback) if message.traceback else None
            raise message.error from cause
        raise StopIteration


@dataclass(frozen=True)
class ReadyBatch:
    """A batch that the prefetching thread has fetched."""

    batch: Batch
    copied: torch.cuda.Event | None  # its copy to the device; None: it is not copied


class Prefetcher(Iterator[Batch]):
    """Batches of `source` on `device`, in its order, one ahead. Closing it closes the source.

    A thread takes them from the source. On a GPU it copies them from pinned memory on a stream of
    its own; the stream that computes waits for the copy, and the host waits for nothing. Errors of
    the source are raised here.

    asked_to_stop: if it becomes true during a wait for a batch, StoppedWaiting is raised. The first
    batch is always waited for.
    """

    def __init__(
        self,
        source: TrainLoader,
        device: torch.device,
        asked_to_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.source, self.device = source, device
        self._asked_to_stop = asked_to_stop
        self._ready: queue.SimpleQueue[ReadyBatch | BaseException] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(0)  # batches that the thread may take from the source
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._thread is None:
            # the first one is fetched here: the start of workers needs the main thread
            self._ready.put(self._to_device(next(self.source)))
            self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
            self._thread.start()
        ready = self._wait()
        if isinstance(ready, BaseException):
            self.close()
            raise ready
        self._wanted.release()
        if ready.copied is None:
            return ready.batch.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready.copied)
        # the copying stream may not reuse the memory before this stream is done with it
        ready.batch.columns.record_stream(current)
        return ready.batch

    def _wait(self) -> ReadyBatch | BaseException:
        """The next batch, or the error that ended the thread. Raises StoppedWaiting."""
        if self._asked_to_stop is None:
            return self._ready.get()
        # after a stop request: a batch may be about to come
        patience = STOP_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=LOOK_SECONDS)
            if self._asked_to_stop():
                patience -= LOOK_SECONDS
            if patience <= 0:
                raise StoppedWaiting

    def close(self) -> None:
        """End the thread, and close the source. No more batches are given."""
        self._closed = True
        self.source.stop()
        self._wanted.release()
        if self._thread is not None:
            # the source is not closed while the thread uses it, unless it hangs
            self._thread.join(timeout=CLOSE_SECONDS)
        self.source.close()

    def _fill(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self.device)
            while self._wanted.acquire() and not self._closed:
                self._ready.put(self._to_device(next(self.source)))
        except BaseException as e:
            self._ready.put(e)

    def _to_device(self, batch: Batch) -> ReadyBatch:
        if self._stream is None:
            return ReadyBatch(batch, None)
        try:
            with torch.cuda.stream(self._stream):
                return ReadyBatch(batch.to(self.device), self._stream.record_event())
        except torch.OutOfMemoryError:
            # the current step needs the memory: `__next__` copies the batch after it
            return ReadyBatch(batch, None)


def _kill(workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def _start_fork_server() -> None:
    """Start the fork server so that it ignores the signals that a launcher sends to the process
    group. The workers inherit this: they must outlive these signals.

    Meanwhile the signals are blocked in this process, so that none is lost.
    """
    # Python sets handlers of signals in the main thread only
    if threading.current_thread() is not threading.main_thread():
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
