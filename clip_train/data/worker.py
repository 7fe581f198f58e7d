"""A loader worker's part of each step: undecoded samples -> (user stages) -> decoded -> a piece of
the batch.

This module runs inside the loader's workers. Their images are in shared memory.
"""

import itertools
import math
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clip_train import stacks
from clip_train.batch import BatchSizes
from clip_train.columns import Columns
from clip_train.data.config import DataConfig, resolve_workers
from clip_train.data.decode import Decoder
from clip_train.data.formats import quiet_pillow
from clip_train.data.invalid import InvalidRecord, InvalidSample, table_of
from clip_train.data.order import Order, Partition
from clip_train.data.reader import Files, Item, StreamReader
from clip_train.data.tokenizer import Tokenize
from clip_train.errors import ClipTrainError, DataError, RankError
from clip_train.processes import usable_cores
from clip_train.resizing import BudgetSchedule
from clip_train.stop import SIGNALS
from clip_train.storage.blocks import BlockCache
from clip_train.torch_internals import shared_storage

# The shards of this many streams stay open in a worker. With more streams, shards are opened for
# each block, so that there are few open files and buffers.
MAX_OPEN_STREAMS = 64
IDLE_STEPS = 100  # after which a stream that others have taken over is closed and forgotten
MAX_TRIED = 10_000  # this many unusable samples in a row mean broken data


def shared_shape(
    workers: Sequence[Partition], prefetch: int, row: tuple[int, ...]
) -> tuple[int, ...]:
    """[workers, slots, samples of the largest piece, *row] of a rank's `shared_images`.

    The trainer asks for piece k of a worker after it has fetched piece k - prefetch, and finishes
    with that one before it fetches the next. So prefetch + 1 slots are enough. If workers take the
    steps in turn, `prefetch` is divided among them and rounded up.

    row: as `PieceStream.row`.
    """
    samples = max(worker.most() for worker in workers)
    prefetch_of_worker = math.ceil(prefetch / workers[0].turns)
    return (len(workers), prefetch_of_worker + 1, samples, *row)


def shared_images(shape: tuple[int, ...]) -> Tensor:
    """uint8 of a `shared_shape` in shared memory. Each worker fills its own slots in turn, over and
    over. Raises RankError if there is not enough memory.

    The loader's queue would copy every piece once more, into new pages that the kernel has to
    clear: a quarter of the whole cost of a 256 px image.
    """
    try:
        storage = shared_storage(torch.Size(shape).numel())
    except RuntimeError as e:
        needed = math.prod(shape) / 2**20
        raise no_shared_memory(
            f"data.workers ({shape[0]}) and data.prefetch ({shape[1] - 1}) need {needed:,.1f} MiB",
            e,
        ) from None
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def no_shared_memory(need: str, error: Exception) -> RankError:
    """The error for shared memory that is too small. need: "... need 64 MiB"."""
    return RankError(
        f"{need} of shared memory: {error}; enlarge /dev/shm (a container's --shm-size) and the "
        "shell's ulimit -f, remove files that ended jobs left in it, or lower data.workers (0: none)"
    )


def shared_bytes(data: DataConfig, sizes: BatchSizes, row: tuple[int, ...], ranks: int) -> int:
    """Bytes of /dev/shm for the `shared_images` of all ranks, if this machine runs all of them.

    data: with a number as `data.lanes`. row: as `PieceStream.row`. ranks: their number.
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

    # p samples, with the columns of a `Batch`. If the images are in `shared_images`, there is no
    # column "images"; if p is 0, there is no column.
    columns: Columns
    invalid: list[InvalidRecord]


@dataclass
class WorkerError:
    """The error that ended a worker."""

    error: Exception
    traceback: str = ""  # empty if the message says enough


@dataclass(eq=False)
class PieceStream(IterableDataset):
    """In a worker: its pieces without end, each as `packed`; after an error, one `WorkerError`.
    Without workers, in the trainer: the pieces of the rank, not packed."""

    order: Order
    files: Sequence[Files]
    workers: list[Partition]  # what each worker decodes
    start: int  # the first step
    decoder: Decoder
    tokenizer: Tokenize
    row: tuple[int, ...]  # `row_shape` of the decoder's layout
    # of patches at native resolution, at each step; None: squares
    budgets: BudgetSchedule | None = None
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
        trainer = multiprocessing.parent_process()
        if trainer is not None:
            stacks.answer(f"worker of {trainer.pid}")
        try:
            for piece in self._pieces(info.id):
                yield packed(piece)
        except ClipTrainError as e:
            yield packed_error(WorkerError(e))
        except Exception as e:
            error: Exception = e
            try:
                pickle.loads(pickle.dumps(e))
            except Exception:
                # an error that cannot be pickled would hang the queue
                error = DataError(f"{type(e).__name__}: {e}")
            yield packed_error(WorkerError(error, traceback.format_exc()))

    def _pieces(self, worker: int) -> Iterator[Piece]:
        """The pieces of one worker."""
        readers: dict[int, StreamReader] = {}  # by stream
        last_used: dict[int, int] = {}  # by stream: the last step that needed it
        partition, decoder = self.workers[worker], self.decoder
        # `step` counts only the steps that this worker takes part in
        for step, shares in enumerate(partition.steps(self.start)):
            if self.budgets is not None:
                step_of_run = self.start + partition.turn + step * partition.turns
                decoder = decoder.with_budgets(self.budgets.at(step_of_run))
            count = sum(map(len, shares.values()))
            if self.memory is None:
                images = torch.empty((count, *self.row), dtype=torch.uint8)
            else:
                images = self.memory[worker, step % self.memory.shape[1], :count]
            samples: list[dict[str, Any]] = []
            invalid: list[InvalidRecord] = []
            for stream, sample_numbers in shares.items():
                last_used[stream] = step
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
                    candidates = readers[stream].at(number)
                    sample = first_usable(decoder, candidates, seed, invalid)
                    # copied at once, while it is in the processor's cache
                    images[len(samples)] = sample.pop("images")
                    samples.append(sample)
            columns = Columns.stacked(samples)
            if samples:
                columns = columns.plus(texts=self._tokens(columns["texts"]))
                if self.memory is None:
                    columns = columns.plus(images=images)
            yield Piece(columns, invalid)
            # other ranks have taken over the streams that are not used any more
            idle = [stream for stream in readers if step - last_used[stream] > IDLE_STEPS]
            for stream in idle:
                del readers[stream]

    def _tokens(self, texts_of_samples: Sequence[Sequence[str]]) -> Tensor:
        """int64 [p, context_length], or [p, T, context_length] of T > 1 texts of each sample."""
        texts = [text for texts in texts_of_samples for text in texts]
        return self.tokenizer(texts).unflatten(0, (len(texts_of_samples), -1)).squeeze(1)


def first_usable(
    decoder: Decoder, candidates: Iterator[Item], seed: int, invalid: list[InvalidRecord]
) -> dict[str, Any]:
    """The first sample that decodes, as `Decoder` returns it. Raises DataError.

    If the first candidate cannot be used, it is added to `invalid`. The other candidates are
    counted at their own places."""
    tried: list[InvalidRecord] = []
    for item in itertools.islice(candidates, MAX_TRIED):
        if isinstance(item, InvalidRecord):
            tried.append(item)
            continue
        try:
            sample = decoder(item, seed)
        except InvalidSample as e:
            tried.append(InvalidRecord(str(e), item["__url__"], item["__key__"]))
            continue
        invalid += tried[:1]
        return sample
    raise DataError(f"{MAX_TRIED} samples in a row cannot be used\n{table_of(tried)}")


def packed(message: Piece | WorkerError) -> Tensor:
    """Put the message into shared memory, so that only its name goes through the workers' one pipe.
    Raises RankError if there is no room.

    A message longer than PIPE_BUF is written in parts. A worker killed between two parts would keep
    the pipe's lock, and the trainer would wait forever.
    """
    content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
    try:
        # The queue's thread would only print the error, and the trainer would wait forever.
        return content.share_memory_()
    except RuntimeError as e:
        need = f"a loader worker's message needs {len(content) / 1024:,.1f} KiB"
        raise no_shared_memory(need, e) from None


def packed_error(message: WorkerError) -> Tensor | bytes:
    """As `packed`; without room, the error that says so, which is shorter than PIPE_BUF."""
    try:
        return packed(message)
    except RankError as e:
        return pickle.dumps(WorkerError(e))


def unpacked(message: Tensor | bytes) -> Piece | WorkerError:
    """What `packed` or `packed_error` have packed."""
    content = message if isinstance(message, bytes) else message.numpy().tobytes()
    unpickled: Piece | WorkerError = pickle.loads(content)
    return unpickled


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
    """In a worker: exit when the trainer has ended.

    torch only watches the worker's parent. That is the fork server, which lives as long as its
    workers.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)
