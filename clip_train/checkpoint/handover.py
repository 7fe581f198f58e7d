"""One save's way from the ranks to their savers: a snapshot on every rank, and an agreement that all have one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import layout
from clip_train.checkpoint.client import SaverClient
from clip_train.checkpoint.disk import check_space, free_bytes
from clip_train.checkpoint.order import explain
from clip_train.checkpoint.outcomes import LastGood, Outcomes
from clip_train.checkpoint.snapshot import Plan, SharedBuffer, plan_file
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


class _Offer(NamedTuple):
    """What a rank brings to the moment at which all decide about a save."""

    error: str | None  # why it cannot
    num_bytes: int
    free: int  # bytes, on the disk
    lost: dict[int, str]  # earlier steps that this rank's saver has failed at
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

    def save(self, content: Content) -> None:
        """CheckpointError, on all ranks alike, if any cannot."""
        outcomes, step, rank = self._outcomes, content.step, dist.rank()
        plan, encoded, error = None, None, None
        try:
            encoded = layout.encode_state(content.state) if rank == 0 else None
            plan = self._snapshot(content)
        except Exception as e:
            error = explain(e)
            logger.debug("the snapshot failed on this rank", exc_info=True)
        prefix = self._agree(step, plan, error)
        assert plan is not None
        outcomes.handed_over(step, prefix)
        body = {
            "do": "save", "step": step, "prefix": prefix, "epoch": self._epoch, "rank": rank,
            "world_size": dist.world_size(), "size": plan.num_bytes, "state": encoded,
        }  # fmt: skip
        try:
            self._saver.send(body)
        except CheckpointError as e:  # of this rank alone: the others hear of it at the next save
            outcomes.hear({"told": "failed", "step": step, "why": str(e)})

    def _snapshot(self, content: Content) -> Plan:
        if not self._saver.connected:
            self._saver.connect()
            if self._buffer is not None:
                self._saver.send({"do": "buffer"}, self._buffer.fd)
        if self._outcomes.writing is not None:
            raise CheckpointError(f"step {self._outcomes.writing} is still being written to {self._folder}")
        plan = plan_file(dist.rank(), content.fragments, content.rank_tensors, content.shared_tensors)
        if self._buffer is None or self._buffer.capacity < plan.num_bytes:
            self.close()
            pin = any(tensor.is_cuda for _, tensor in plan.places)
            self._buffer = SharedBuffer(plan.num_bytes, pin=pin)
            self._saver.send({"do": "buffer"}, self._buffer.fd)
        self._buffer.fill(plan)
        return plan

    def _agree(self, step: int, plan: Plan | None, error: str | None) -> str:
        """Collective: the new attempt's folder. CheckpointError, on all ranks, where one cannot."""
        outcomes = self._outcomes
        lost, outcomes.lost = outcomes.lost, {}
        offer = _Offer(
            error,
            plan.num_bytes if plan else 0,
            free_bytes(self._folder),
            lost,
            layout.new_prefix(self._epoch, step),
            outcomes.failures,
            outcomes.last_good,
            outcomes.fatal,
        )
        offers = dist.gather_objects(offer)
        first = offers[0]
        outcomes.failures, outcomes.last_good, outcomes.fatal = first.failures, first.last_good, first.fatal
        if first.fatal is not None:
            raise CheckpointError(first.fatal)
        if dist.is_main():
            self._stop_waiting_for(offers)
        errors = [f"rank {r}: {each.error}" for r, each in enumerate(offers) if each.error is not None]
        if errors:
            more = f" (and {len(errors) - 3} more ranks)" if len(errors) > 3 else ""
            raise CheckpointError("; ".join(errors[:3]) + more)
        # where ranks share the disk the sum must fit where the least is free
        free = min(each.free for each in offers)
        check_space(self._folder, sum(each.num_bytes for each in offers) if self._shared_disk else 0, free)
        return first.prefix

    def _stop_waiting_for(self, offers: list[_Offer]) -> None:
        """Rank 0's saver waits for all ranks' words; some will not come."""
        for rank, offer in enumerate(offers):
            for step, why in offer.lost.items():
                if rank != 0 and step in self._outcomes.pending and self._saver.connected:
                    self._saver.send({"do": "cancel", "step": step, "why": f"rank {rank}: {why}"})

    def close(self) -> None:
        """The snapshot's memory goes; the saver is the caller's."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
