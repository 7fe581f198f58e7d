"""One save's way from the ranks to their savers: a snapshot on every rank, and an agreement that all have one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import layout
from clip_train.checkpoint.client import SaverClient
from clip_train.checkpoint.disk import check_space, free_bytes
from clip_train.checkpoint.order import explain
from clip_train.checkpoint.outcomes import LastGood, Losses, Outcomes
from clip_train.checkpoint.snapshot import SharedBuffer, plan_file
from clip_train.errors import CheckpointError
from clip_train.protocols import Fragment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Content:
    """What a checkpoint of the run after `step` consists of."""

    step: int
    fragments: Iterable[Fragment]  # this rank's
    rank_tensors: dict[str, Tensor]  # this rank's
    shared_tensors: dict[str, Tensor] | None  # the same on all ranks; rank 0's are written
    state: dict[str, Any]  # rank 0's


class StillWritingError(CheckpointError):
    """A rank's last snapshot is still being written, and so its buffer cannot take another."""


class _Snapshot(NamedTuple):
    """What lies in this rank's buffer."""

    step: int
    num_bytes: int
    state: Any  # rank 0's, encoded


class _Offer(NamedTuple):
    """What a rank brings to the moment at which all decide about a save."""

    error: str | None  # why it cannot
    writing: str | None  # the attempt that its buffer is still needed for
    num_bytes: int
    free: int  # bytes, on the disk
    losses: Losses
    prefix: str  # rank 0's holds, and so for the next two
    failures: int
    last_good: LastGood | None
    fatal: str | None


class HandOver:
    """A rank's buffer and saver. All ranks make the same calls in the same order.

    shared_disk: all ranks see `folder`.
    """

    def __init__(self, folder: Path, saver: SaverClient, epoch: int, outcomes: Outcomes, *, shared_disk: bool) -> None:
        self._folder = folder
        self._saver = saver
        self._epoch = epoch
        self._outcomes = outcomes
        self._shared_disk = shared_disk
        self._buffer: SharedBuffer | None = None
        self._snapshot: _Snapshot | None = None
        self._attempts: tuple[int, list[str]] = (-1, [])  # at the last step that was handed over

    def hear(self, timeout: float = 0.0) -> None:
        """What the saver has told since, waiting up to `timeout` seconds for the first."""
        for told in self._saver.news(timeout):
            self._outcomes.hear(told)

    def save(self, content: Content) -> None:
        """CheckpointError or StillWritingError, on all ranks alike, if any cannot."""
        error = None
        try:
            self._reach_saver()
            if self._outcomes.writing is None:
                self._take(content)
        except Exception as e:
            error = explain(e)
            logger.debug("the snapshot failed on this rank", exc_info=True)
        self._hand_over(error)

    def again(self) -> None:
        """Hand over once more, in a new attempt, what lies in the buffers since the last `save`; raises as that."""
        error = None
        try:
            self._reach_saver()
        except CheckpointError as e:
            error = explain(e)
        self._hand_over(error)

    def note(self, name: str, body: dict[str, Any]) -> None:
        """On this rank alone: something that its saver must know sooner or later, whatever becomes of it."""
        with contextlib.suppress(CheckpointError):
            self._reach_saver()
        self._saver.keep(name, body)

    def _reach_saver(self) -> None:
        """The saver may have died: what it had under way is then lost, and another takes its place."""
        self.hear()
        if not self._saver.connected:
            self._saver.connect()

    def _take(self, content: Content) -> None:
        rank = dist.rank()
        state = layout.encode_state(content.state) if rank == 0 else None
        self._snapshot = None
        plan = plan_file(rank, content.fragments, content.rank_tensors, content.shared_tensors)
        if self._buffer is None or self._buffer.capacity < plan.num_bytes:
            self.close()
            pin = any(tensor.is_cuda for _, tensor in plan.places)
            self._buffer = SharedBuffer(plan.num_bytes, pin=pin)
            self._saver.keep("buffer", {"do": "buffer"}, self._buffer.fd)
        self._buffer.fill(plan)
        self._snapshot = _Snapshot(content.step, plan.num_bytes, state)

    def _hand_over(self, error: str | None) -> None:
        prefix = self._agree(error)
        snapshot = self._snapshot
        assert snapshot is not None
        # a saver may have committed, and died before it could say so
        earlier = self._attempts[1] if self._attempts[0] == snapshot.step else []
        self._attempts = (snapshot.step, [*earlier, prefix])
        body = {
            "do": "save", "step": snapshot.step, "prefix": prefix, "epoch": self._epoch, "rank": dist.rank(),
            "world_size": dist.world_size(), "size": snapshot.num_bytes, "state": snapshot.state,
            "earlier": earlier,
        }  # fmt: skip
        why = None
        try:
            self._reach_saver()  # agreeing takes a moment
        except CheckpointError as e:
            why = str(e)
        self._outcomes.handed_over(snapshot.step, prefix)
        try:
            if why is None:
                self._saver.send(body)
        except CheckpointError as e:
            why = str(e)
        if why is not None:  # on this rank alone: the others hear of it at the next save
            self.hear()
            self._outcomes.hear({"told": "failed", "step": snapshot.step, "prefix": prefix, "why": why})
            self._outcomes.hear({"told": "written", "prefix": prefix})

    def _agree(self, error: str | None) -> str:
        """Collective: the new attempt's folder. CheckpointError, on all ranks, where one cannot."""
        outcomes, snapshot = self._outcomes, self._snapshot
        free = 0
        try:
            free = free_bytes(self._folder)
        except OSError as e:
            error = error or explain(e)
        offer = _Offer(
            error,
            outcomes.writing,
            snapshot.num_bytes if snapshot else 0,
            free,
            outcomes.take_losses(),
            layout.new_prefix(self._epoch, snapshot.step if snapshot else 0),
            outcomes.failures,
            outcomes.last_good,
            outcomes.fatal,
        )
        offers = dist.gather_objects(offer)
        first = offers[0]
        outcomes.failures, outcomes.last_good, outcomes.fatal = first.failures, first.last_good, first.fatal
        if first.fatal is not None:
            raise CheckpointError(first.fatal)
        self._stop_waiting_for([each.losses for each in offers])
        errors = [f"rank {r}: {each.error}" for r, each in enumerate(offers) if each.error is not None]
        if errors:
            more = f" (and {len(errors) - 3} more ranks)" if len(errors) > 3 else ""
            raise CheckpointError("; ".join(errors[:3]) + more)
        if any(each.writing is not None for each in offers):
            raise StillWritingError(f"the last snapshot is still being written to {self._folder}")
        # where ranks share the disk the sum must fit where the least is free
        free = min(each.free for each in offers)
        check_space(self._folder, sum(each.num_bytes for each in offers) if self._shared_disk else 0, free)
        return first.prefix

    def wait_together(self, waiting: Callable[[], bool], end: float) -> bool:
        """Hear the savers until no rank is `waiting`; False if `end` comes first, by rank 0's clock. Collective.

        No rank sits in a collective for longer than a second, and what one has lost the others hear at once.
        """
        while True:
            self.hear(min(1.0, max(end - time.monotonic(), 0.0)) if waiting() else 0.0)
            words = dist.gather_objects((waiting(), time.monotonic() >= end, self._outcomes.take_losses()))
            self._stop_waiting_for([losses for _, _, losses in words])
            if not any(still for still, _, _ in words):
                return True
            if words[0][1]:
                return False

    def _stop_waiting_for(self, everyone: list[Losses]) -> None:
        """Rank 0's saver waits for all ranks' words; some will not come."""
        for prefix, why in self._outcomes.learn_losses(everyone).items():
            if self._saver.connected:
                with contextlib.suppress(CheckpointError):
                    self._saver.send({"do": "cancel", "prefix": prefix, "why": why})

    def close(self) -> None:
        """The snapshot's memory goes; the saver is the caller's."""
        self._snapshot = None
        if self._buffer is not None:
            self._saver.forget("buffer")
            self._buffer.close()
            self._buffer = None
