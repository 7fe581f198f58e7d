"""A worker's part of each step, as a `webdataset.DataPipeline`: slots -> (user stages) -> decoded -> a piece.

This module runs inside the loader's workers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
import webdataset
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clip_train.data import raw
from clip_train.data.bad_samples import Bad, BadSample, BadTable
from clip_train.data.lanes import Lane, LanePlan, Raw, Slot
from clip_train.data.memory import ImageMemory
from clip_train.data.mixture import MixedLane, Mixture
from clip_train.data.shares import LaneShare, RankShare
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.transforms import TrainTransform, decode_image
from clip_train.errors import ClipTrainError, DataError, UserError

Sample = dict[str, Any]
Plan = LanePlan | Mixture
Stage = Callable[[Iterable[Sample]], Iterable[Sample]]  # such as webdataset.map(f)
MAX_OPEN_LANES = 64  # in a worker: with more, their shards are opened for each block: files and buffers are few
MAX_SUBSTITUTES = 10_000  # as many samples in a row that do not decode are no accident


@dataclass
class Piece:
    """One worker's part of one step."""

    images: Tensor | None  # uint8 [p, 3, S, S]; None where they are in shared memory
    texts: Tensor  # int64 [p, context_length]
    seeds: Tensor  # int64 [p]
    keys: list[str]  # p
    cursors: dict[int, dict[str, Any]]  # lane -> cursor after this step; none where there are no samples
    bads: list[Bad] = field(default_factory=list)
    place: tuple[int, int] = (0, 0)  # in `ImageMemory`

    @classmethod
    def empty(cls) -> Piece:
        """Of a step that needs nothing of this worker's lanes. Who takes a sample tells the lane's cursor."""
        return cls(None, torch.empty(0), torch.empty(0), [], {})


@dataclass
class Failure:
    """An error in a worker, on its way to the trainer."""

    error: Exception
    traceback: str  # empty where the error speaks for itself

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
    """What a worker hands over, as uint8 [bytes]: only the name of a shared memory goes through the workers' one pipe.

    A message of more than PIPE_BUF is written in parts: a worker killed between two of them, which holds the pipe's
    lock, would leave the trainer waiting for the rest of it without end.
    """
    return torch.frombuffer(bytearray(pickle.dumps(made)), dtype=torch.uint8)


def unpack(packed: Tensor) -> Piece | Failure:
    made: Piece | Failure = pickle.loads(packed.numpy().tobytes())
    return made


@dataclass
class _StepSlot:
    """A slot, numbered; the last of a step carries the cursors behind it."""

    number: int
    slot: Slot
    cursors: dict[int, dict[str, Any]] | None = None


class SlotSource:
    """The first stage: samples in canonical order, raw, each with its slot under "__slot__".

    A worker also reads what others take from its lanes, so as to stay in step; only its own are decoded.
    """

    def __init__(self, plan: Plan, workers: list[RankShare], start: int, cursors: dict[int, Any]) -> None:
        self.plan, self.workers, self.start, self.cursors = plan, workers, start, cursors

    def __call__(self) -> Iterator[Sample]:
        fingerprint = self.plan.fingerprint()
        lanes: dict[int, Lane | MixedLane] = {}
        number = 0
        for shares in own_steps(self.workers, self.start):
            old, lanes = lanes, {}  # a lane that is needed no more goes
            waiting: _StepSlot | None = None
            for lane_number, first, last, size in shares:
                lane = old.get(lane_number) or self.plan.open(
                    lane_number, self.cursors.get(lane_number), keep_open=len(shares) <= MAX_OPEN_LANES
                )
                lanes[lane_number] = lane
                for j in range(size):
                    if not first <= j < last:
                        lane.skip()
                        continue
                    slot = lane.take()
                    if waiting is not None:
                        yield {**waiting.slot.sample.fields, "__slot__": waiting}
                    waiting = _StepSlot(number, slot)
                    number += 1
            if waiting is not None:
                waiting.cursors = {n: {**lane.cursor.to_dict(), "source": fingerprint} for n, lane in lanes.items()}
                yield {**waiting.slot.sample.fields, "__slot__": waiting}


def own_steps(workers: list[RankShare], start: int) -> Iterator[list[LaneShare]]:
    """What the worker that asks has of each step from `start` on."""
    info = get_worker_info()
    return workers[info.id if info else 0].steps(start)


@dataclass
class _Decoded:
    image: Tensor | None  # uint8 [3, S, S]; None once it is collated
    caption: str
    key: str
    slot: _StepSlot
    bads: list[Bad]


class Decode:
    """The second stage: decodes and augments; what does not decode is replaced, always by the same sample."""

    def __init__(self, transform: TrainTransform, caption_key: str | None, stages: tuple[Stage, ...]) -> None:
        self.transform, self.caption_key, self.stages = transform, caption_key, stages

    def __call__(self, samples: Iterable[Sample]) -> Iterator[_Decoded]:
        for sample in samples:
            if "__slot__" not in sample:
                raise UserError(f"a data stage must keep the fields whose names begin with __, of {sample}")
            step_slot: _StepSlot = sample["__slot__"]
            slot = step_slot.slot
            bads = list(slot.sample.skipped)
            try:
                image, text = self._decode(sample, slot.seed)
            except BadSample as e:
                bads.append(Bad(e.reason, slot.sample.fields["__url__"], slot.sample.fields["__key__"]))
                sample, image, text = self._substitute(slot)  # noqa: PLW2901
            yield _Decoded(image, text, sample["__key__"], step_slot, bads)

    def _decode(self, sample: Sample, seed: int) -> tuple[Tensor, str]:
        image = decode_image(raw.image_bytes(sample))
        return self.transform(image, seed), raw.caption(sample, self.caption_key, draw=seed)

    def _substitute(self, slot: Slot) -> tuple[Sample, Tensor, str]:
        """The first that decodes. Those that do not are not counted here: they have slots of their own."""
        table = BadTable()
        for tried, other in enumerate(slot.substitutes()):
            try:
                sample = self._through_stages(other)
                return sample, *self._decode(sample, slot.seed)
            except BadSample as e:
                table.add([Bad(e.reason, other.fields["__url__"], other.fields["__key__"])])
            if tried == MAX_SUBSTITUTES:
                break
        raise DataError(f"{MAX_SUBSTITUTES} samples in a row do not decode\n{table}")

    def _through_stages(self, other: Raw) -> Sample:
        samples: Iterable[Sample] = [dict(other.fields)]
        for stage in self.stages:
            samples = stage(samples)
        return next(iter(samples))


class Collate:
    """The last stage: one piece per step."""

    def __init__(self, context_length: int, image_size: int, workers: list[RankShare], start: int) -> None:
        self.tokenizer = Tokenizer(context_length)
        self.image_size = image_size
        self.workers, self.start = workers, start
        self.memory: ImageMemory | None = None

    def __call__(self, decoded: Iterable[_Decoded]) -> Iterator[Piece]:
        samples = enumerate(decoded)
        for shares in own_steps(self.workers, self.start):
            step: list[_Decoded] = []
            count = sum(map(len, shares))
            images, place = self._new_images(count)
            for number, sample in itertools.islice(samples, count):
                if sample.slot.number != number:
                    raise UserError(
                        "a data stage dropped, repeated or reordered samples: each must map one sample to one, "
                        "or the order would depend on the number of workers"
                    )
                assert sample.image is not None
                images[len(step)] = sample.image  # at once, while it is in the cache
                sample.image = None
                step.append(sample)
            if not step:
                yield Piece.empty()
                continue
            assert step[-1].slot.cursors is not None
            piece = self._piece(step, step[-1].slot.cursors)
            yield replace(piece, images=images) if self.memory is None else replace(piece, place=place)

    def _new_images(self, count: int) -> tuple[Tensor, tuple[int, int]]:
        if self.memory is not None and count:
            return self.memory.next(count)
        return torch.empty((count, 3, self.image_size, self.image_size), dtype=torch.uint8), (0, 0)

    def _piece(self, step: list[_Decoded], cursors: dict[int, dict[str, Any]]) -> Piece:
        """All but its images."""
        return Piece(
            images=None,
            texts=self.tokenizer([s.caption for s in step]),
            seeds=torch.tensor([s.slot.slot.seed for s in step], dtype=torch.int64),
            keys=[s.key for s in step],
            cursors=cursors,
            bads=[bad for s in step for bad in s.bads],
        )


# What launchers and terminals send to a whole process group; also the trainer's own TERM for its workers.
GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class PieceStream(IterableDataset):
    """The pipeline in a worker: pieces without end, or one `Failure`, with the error as it was raised; packed there."""

    def __init__(self, source: SlotSource, stages: tuple[Stage, ...], decode: Decode, collate: Collate) -> None:
        self.pipeline = webdataset.DataPipeline(source, *stages, decode, collate)
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
