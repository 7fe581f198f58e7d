"""The training loader: this rank's share of each global batch, in canonical order."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from clip_train.data.bad_samples import BadSampleLimit
from clip_train.data.config import DataConfig, resolve_lanes
from clip_train.data.index import index_of
from clip_train.data.lanes import Cursor, LanePlan
from clip_train.data.pipeline import (
    Collate,
    Decode,
    Failure,
    Piece,
    PieceStream,
    SlotSource,
    Stage,
    deal_to_workers,
    rank_shares,
)
from clip_train.data.sources import Reading
from clip_train.data.transforms import TrainTransform
from clip_train.errors import DataError, UserError
from clip_train.protocols import Batch
from clip_train.storage import StorageConfig

PRELOAD = ["torch", "webdataset", "clip_train.data.pipeline"]  # once in the fork server, not in every worker


class WorkerTraceback(Exception):
    """Where in the worker it happened."""


class TrainLoader:
    """Batches without end. Each carries the cursors behind it, so prefetching cannot skew a checkpoint.

    Args:
        image_size: S, pixels.
        global_size: N, samples in the global batch of all ranks.
        seed: the run's; it orders the shards, permutes the blocks and seeds the samples.
        cursors: the position to resume from: lane -> cursor for ALL lanes, as all ranks' batches together
            had them; None starts at the beginning.
        pin_memory: batches in pinned memory, for asynchronous copies to a GPU.
        stages: webdataset stages between reading and decoding (such as `webdataset.map(f)`), each of which
            must map one sample (a dict of bytes) to one. They travel to the workers: they must be picklable.
        storage: how patiently remote shards are read.

    Raises:
        UserError: sizes that do not divide, shards that do not exist, cursors of another order.
        DataError (while iterating): shards cannot be read, or too many samples are bad. Local to this rank:
            the trainer tells the others.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        image_size: int,
        context_length: int,
        global_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        cursors: dict[int, dict[str, Any]] | None = None,
        pin_memory: bool = False,
        stages: Sequence[Stage] = (),
        storage: StorageConfig | None = None,
    ) -> None:
        self.lanes = resolve_lanes(config.lanes, global_size, world_size)
        self.index = index_of(config, storage or StorageConfig())
        reading = Reading(storage or StorageConfig(), self.index.checksums)
        self.plan = LanePlan(self.index.shards, seed, self.lanes, config.shuffle_block, config.caption_key, reading)
        shares = deal_to_workers(rank_shares(global_size, self.lanes, rank, world_size), config.workers)
        source = SlotSource(self.plan, global_size // self.lanes, shares, _parse(cursors, self.plan))
        decode = Decode(TrainTransform(image_size, config.aug_scale), config.caption_key, tuple(stages))
        self._stream = PieceStream(source, tuple(stages), decode, Collate(context_length))
        self._workers = len(shares) if config.workers else 0
        self._pieces_per_batch = len(shares)
        self._prefetch = config.prefetch
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._limit = BadSampleLimit(config.bad_sample_limit)
        self._pieces: Iterator[Piece | Failure] | None = None
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

    def _start(self) -> Iterator[Piece | Failure]:
        if not self._workers:
            return iter(self._stream)
        _check_picklable(self._stream)
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
        if isinstance(piece, Failure):
            raise piece.error from (WorkerTraceback(piece.traceback) if piece.traceback else None)
        return piece

    def _assemble(self, pieces: list[Piece]) -> Batch:
        """The workers' pieces, in canonical order -> one batch. DataError above the limit of bad samples."""
        bads = [bad for piece in pieces for bad in piece.bads]
        batch = Batch(
            images=torch.cat([p.images for p in pieces]) if len(pieces) > 1 else pieces[0].images,
            texts=torch.cat([p.texts for p in pieces]),
            sample_seeds=torch.cat([p.seeds for p in pieces]),
            keys=[key for p in pieces for key in p.keys],
            cursors={lane: cursor for p in pieces for lane, cursor in p.cursors.items()},
            bad_samples=dict(Counter(f"{bad.reason}\t{bad.shard}" for bad in bads)),
        )
        self._limit.add(len(batch), bads)
        if self._pin_memory:
            batch.images, batch.texts = batch.images.pin_memory(), batch.texts.pin_memory()
            batch.sample_seeds = batch.sample_seeds.pin_memory()
        return batch


def _worker_died(cause: Exception) -> DataError:
    why = str(cause) or type(cause).__name__
    return DataError(
        f"a loader worker died ({why}); if memory ran out (see dmesg), lower data.workers, "
        "data.shuffle_block or data.prefetch; a container may need more shared memory (--shm-size)"
    )


def _start_fork_server() -> None:
    """With SIGTERM ignored, which it inherits: a launcher sends it to the group, and the trainer must outlive it."""
    if threading.current_thread() is not threading.main_thread():  # no signals to be set from here
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not set by Python


def _parse(cursors: dict[int, dict[str, Any]] | None, plan: LanePlan) -> dict[int, Cursor]:
    """Cursors from a checkpoint, where JSON may have made texts of the lanes' numbers."""
    if cursors is None:
        return {}
    numbered = {int(lane): dict(cursor) for lane, cursor in cursors.items()}
    if set(numbered) != set(range(plan.lanes)):
        raise UserError(
            f"data.lanes ({plan.lanes}): the checkpoint's data position is of {len(numbered)} lanes; "
            f"set data.lanes={len(numbered)} to go on with the same order"
        )
    if any(cursor.pop("source", None) != plan.fingerprint() for cursor in numbered.values()):
        raise UserError(
            "data.train, data.shuffle_block, data.caption_key or run.seed is not what it was when the "
            "checkpoint was written, so its data position means nothing; restore them, or start a new run "
            "from its weights"
        )
    return {lane: Cursor(**cursor) for lane, cursor in numbered.items()}


def _check_picklable(stream: PieceStream) -> None:
    try:
        pickle.dumps(stream)
    except Exception as e:
        raise UserError(
            f"a data stage cannot travel to the loader's workers ({e}); use functions of a module instead of "
            "lambdas, or data.workers=0"
        ) from e
