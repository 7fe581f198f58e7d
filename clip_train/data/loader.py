"""The training loader: this rank's share of each global batch, in canonical order."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.sharedctypes import RawValue
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from clip_train.batch import BatchSizes, shares
from clip_train.data.bad_samples import BadSampleLimit
from clip_train.data.config import DataConfig, resolve_lanes
from clip_train.data.dealing import samples_below
from clip_train.data.index import index_of
from clip_train.data.memory import ImageMemory
from clip_train.data.order import plan_order
from clip_train.data.pipeline import (
    GROUP_SIGNALS,
    Collate,
    Decode,
    Failure,
    Piece,
    PieceStream,
    Plan,
    SlotSource,
    Stage,
    unpack,
)
from clip_train.data.shard_list import ShardList, go_on
from clip_train.data.shares import RankShare
from clip_train.data.sources import Reading
from clip_train.data.transforms import TrainTransform
from clip_train.errors import DataError, UserError
from clip_train.protocols import Batch, text_lengths
from clip_train.storage import StorageConfig

PRELOAD = ["torch", "webdataset", "clip_train.data.pipeline"]  # once in the fork server, not in every worker


class WorkerTraceback(Exception):
    """Where in the worker it happened."""


class TrainLoader:
    """Batches without end; the next is that of step `step`.

    Each carries the cursors behind it, so prefetching cannot skew a checkpoint. A lane that no batch has reached yet
    stands where `cursors` says.

    Args:
        image_size: S, pixels.
        global_size: samples in the global batch of all ranks, or their sizes as a function of the step.
        seed: the run's; it orders the shards, permutes the blocks and seeds the samples.
        cursors: the position to resume from: lane -> cursor for ALL lanes, as all ranks' batches together
            had them (`merge_cursors`), which also says at which step; None starts at the beginning.
        pin_memory: batches in pinned memory, for asynchronous copies to a GPU.
        stages: webdataset stages between reading and decoding (such as `webdataset.map(f)`), each of which
            must map one sample (a dict of bytes) to one. They travel to the workers: they must be picklable.
        storage: how patiently remote shards are read.
        shards_then: `shard_list` of the run that wrote `cursors`; None: unknown.

    Raises:
        UserError: fewer samples than ranks, shards that do not exist, cursors of another order.
        DataError (while iterating): shards cannot be read, or too many samples are bad. Local to this rank:
            the trainer tells the others.
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
        cursors: dict[int, dict[str, Any]] | None = None,
        pin_memory: bool = False,
        stages: Sequence[Stage] = (),
        storage: StorageConfig | None = None,
        shards_then: str | None = None,
    ) -> None:
        self._sizes = BatchSizes.constant(global_size) if isinstance(global_size, int) else global_size
        self._sizes.check_ranks(world_size)
        self.lanes = resolve_lanes(config.lanes, self._sizes)
        self.index = index_of(config, storage or StorageConfig())
        reading = Reading(storage or StorageConfig(), self.index.checksums)
        self.plan = plan_order(config, self.index, reading, seed, self.lanes)
        self.shard_list = ShardList.of(self.index).pack()
        if cursors:
            self.plan = _as_begun(self.plan, cursors)
            cursors = go_on(cursors, shards_then, self.index, self.plan, config.allow_changed_shards)
        self.cursors = cursors or {}  # where it begins; moved where shards have changed
        parsed = _parse(cursors, self.plan)
        self.step = _step_at(parsed, self.plan, self._sizes)
        workers = RankShare.of(self._sizes, self.lanes, rank, world_size).workers(config.workers, self.step)
        source = SlotSource(self.plan, workers, self.step, parsed)
        decode = Decode(TrainTransform(image_size, config.aug_scale), config.caption_key, tuple(stages))
        collate = Collate(context_length, image_size, workers, self.step)
        self._stream = PieceStream(source, tuple(stages), decode, collate)
        self._world_size = world_size
        self._workers = len(workers) if config.workers else 0
        self._pieces_per_batch = len(workers)
        self._largest_piece = max(worker.most() for worker in workers)
        self._image_size = image_size
        self._memory: ImageMemory | None = None
        self._prefetch = config.prefetch
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._limit = BadSampleLimit(config.bad_sample_limit)
        self._pieces: Iterator[Piece | Failure] | Iterator[Tensor] | None = None  # packed by workers
        self._closed = False

    def __iter__(self) -> Iterator[Batch]:
        return self

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

    def close(self) -> None:
        """Ends the workers. The loader gives nothing more."""
        self._closed = True
        if self._stream.closing is not None:
            self._stream.closing.value = 1
        pieces, self._pieces = self._pieces, None
        shut_down = getattr(pieces, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def bad_sample_table(self) -> str:
        """All bad samples that this rank met so far, by reason and shard."""
        return str(self._limit.table)

    def _start(self) -> Iterator[Piece | Failure] | Iterator[Tensor]:
        if not self._workers:
            return iter(self._stream)
        _check_picklable(self._stream)
        self._memory = ImageMemory(self._workers, self._prefetch, self._largest_piece, self._image_size)
        self._stream.collate_into(self._memory)
        self._stream.closing = RawValue("b", 0)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        _start_fork_server()
        return iter(
            DataLoader(
                self._stream,
                batch_size=None,
                num_workers=self._workers,
                prefetch_factor=self._prefetch,
                multiprocessing_context=context,
                generator=torch.Generator(),  # else its seed is drawn from the generator that the model draws from
                persistent_workers=True,
            )
        )

    def _next_piece(self) -> Piece:
        assert self._pieces is not None
        try:
            piece = next(self._pieces)
        except (EOFError, ConnectionError, FileNotFoundError) as e:  # killed while it handed a batch over
            raise _worker_died(e) from e
        except RuntimeError as e:
            if "exited unexpectedly" not in str(e) and "killed by signal" not in str(e):
                raise
            raise _worker_died(e) from e
        if isinstance(piece, Tensor):
            piece = unpack(piece)
        if isinstance(piece, Failure):
            raise piece.error from (WorkerTraceback(piece.traceback) if piece.traceback else None)
        return piece

    def _assemble(self, pieces: list[Piece]) -> Batch:
        """The workers' pieces, in canonical order -> one batch. DataError above the limit of bad samples."""
        pieces = [piece for piece in pieces if piece.keys]
        bads = [bad for piece in pieces for bad in piece.bads]
        texts = torch.cat([p.texts for p in pieces])
        batch = Batch(
            images=self._images(pieces),
            texts=texts,
            sample_seeds=torch.cat([p.seeds for p in pieces]),
            keys=[key for p in pieces for key in p.keys],
            cursors={lane: cursor for p in pieces for lane, cursor in p.cursors.items()},
            bad_samples=dict(Counter(f"{bad.reason}\t{bad.shard}" for bad in bads)),
            shares=tuple(shares(self._sizes.at(self.step), self._world_size)),
            text_lengths=text_lengths(texts),
        )
        self.step += 1
        self._limit.add(len(batch), bads)
        if self._pin_memory:
            batch.texts, batch.sample_seeds = batch.texts.pin_memory(), batch.sample_seeds.pin_memory()
        return batch

    def _images(self, pieces: list[Piece]) -> Tensor:
        """The only copy that the trainer makes: from shared into pinned memory, which torch keeps and hands out
        again once the device has read it."""
        first = pieces[0].images
        if len(pieces) == 1 and first is not None and not self._pin_memory:
            return first
        shape = (sum(len(p.keys) for p in pieces), 3, self._image_size, self._image_size)
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin_memory)
        at = 0
        for piece in pieces:
            count, images = len(piece.keys), piece.images
            if images is None:
                assert self._memory is not None
                images = self._memory.at(piece.place, count)
            out[at : at + count] = images
            at += count
        return out


def _worker_died(cause: Exception) -> DataError:
    why = str(cause) or type(cause).__name__
    return DataError(
        f"a loader worker died ({why}); if memory ran out (see dmesg), lower data.workers, "
        "data.shuffle_block or data.prefetch; a container may need more shared memory (--shm-size)"
    )


def _start_fork_server() -> None:
    """With the signals ignored, as it inherits them, that a launcher sends to the group: the trainer must outlive them.

    Blocked here meanwhile, so that none of them is lost.
    """
    if threading.current_thread() is not threading.main_thread():  # no signals to be set from here
        forkserver.ensure_running()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in GROUP_SIGNALS}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set by Python
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def merge_cursors(positions: Iterable[Mapping[Any, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Cursors as several ranks, or several batches, had them -> the newest of each lane."""
    newest: dict[int, dict[str, Any]] = {}
    for text, cursor in (item for cursors in positions for item in cursors.items()):
        lane = int(text)  # from JSON it is one
        if lane not in newest or cursor["count"] > newest[lane]["count"]:
            newest[lane] = cursor
    return newest


def _as_begun(plan: Plan, cursors: dict[int, dict[str, Any]]) -> Plan:
    """A run that began without an index, of all its sources or some, keeps its order when one is made: the index then
    only verifies."""
    begun = {cursor.get("source") for cursor in cursors.values()}
    return next((each for each in plan.as_it_may_have_begun() if each.fingerprint() in begun), plan)


def _parse(cursors: dict[int, dict[str, Any]] | None, plan: Plan) -> dict[int, Any]:
    """Cursors from a checkpoint, where JSON may have made texts of the lanes' numbers."""
    if not cursors:
        return {}
    numbered = {int(lane): dict(cursor) for lane, cursor in cursors.items()}
    same = all(cursor.pop("source", None) == plan.fingerprint() for cursor in numbered.values())
    if not same and set(numbered) != set(range(plan.lanes)):
        raise UserError(
            f"data.lanes ({plan.lanes}): the checkpoint's data position is of {len(numbered)} lanes; "
            f"set data.lanes={len(numbered)} to go on with the same order"
        )
    if not same:
        raise UserError(
            "data.train (its weights, resampling or index), data.shuffle_block, data.caption_key or run.seed is not "
            "what it was when the checkpoint was written, so its data position means nothing; restore them, or start a "
            "new run from its weights"
        )
    return {lane: plan.parse(cursor) for lane, cursor in numbered.items()}


def _step_at(cursors: dict[int, Any], plan: Plan, sizes: BatchSizes) -> int:
    """The step that begins where the cursors are. A lane that no batch has reached yet has none."""
    taken = {lane: cursors[lane].count if lane in cursors else 0 for lane in range(plan.lanes)}
    position = sum(taken.values())
    step = sizes.whole_steps(position)
    begins = sizes.before(step) == position
    if not begins or any(count != samples_below(position, lane, plan.lanes) for lane, count in taken.items()):
        raise UserError(
            "batch.global_size or batch.schedule is not what it was when the checkpoint was written: no step begins at "
            f"its data position, {position} samples from the start; restore them, or start a new run from its weights"
        )
    return step


def _check_picklable(stream: PieceStream) -> None:
    try:
        pickle.dumps(stream)
    except Exception as e:
        raise UserError(
            f"a data stage cannot travel to the loader's workers ({e}); use functions of a module instead of "
            "lambdas, or data.workers=0"
        ) from e
