"""What could not be used, over all ranks and epochs: for the summary of an epoch, the checkpoint and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clip_train import dist
from clip_train.data.bad_samples import BadTable

NO_EPOCH = 1 << 31  # of a batch without cursors: above every other


def epoch_of(cursors: Mapping[int, Mapping[str, Any]]) -> int:
    """The epoch that the slowest of these lanes is in; of several sources, in the one that it has seen least of."""
    positions = (position for cursor in cursors.values() for position in cursor.get("sources", [cursor]))
    return min((position["epoch"] for position in positions), default=NO_EPOCH)


@dataclass
class BadSampleLog:
    """Counts are "reason<TAB>shard" -> samples, as `Batch.bad_samples` has them."""

    mine: Counter[str] = field(default_factory=Counter)  # of this rank's batches
    total: Counter[str] = field(default_factory=Counter)  # of all ranks, when they last summed
    epoch: int = 0  # that all lanes have reached
    epochs: list[dict[str, int]] = field(default_factory=list)  # of each that has ended: epoch, step, bad_samples

    def add(self, counts: Mapping[str, int]) -> None:
        """Those of one batch."""
        self.mine.update(counts)

    def sum(self) -> None:
        """Collective: brings `total` up to date."""
        self.total = sum((Counter(counts) for counts in dist.gather_objects(dict(self.mine))), Counter[str]())

    def reached(self, epoch: int, step: int) -> str | None:
        """Collective where `epoch`, which all ranks agree on, is a new one: what there is to tell about the last."""
        if not self.epoch < epoch < NO_EPOCH:
            return None
        before = self.epochs[-1]["bad_samples"] if self.epochs else 0
        self.sum()
        bad = sum(self.total.values())
        self.epoch = epoch
        self.epochs.append({"epoch": epoch, "step": step, "bad_samples": bad})
        if not bad:
            return f"epoch {epoch} is done (step {step}): no bad samples"
        return f"epoch {epoch} is done (step {step}): {bad - before} bad samples in it, {bad} so far\n{self.table()}"

    def table(self) -> BadTable:
        """`total`, to print."""
        table = BadTable()
        for place, count in self.total.items():
            reason, _, shard = place.partition("\t")
            table.counts[reason, shard] = count
        return table

    def state(self) -> dict[str, Any]:
        """As JSON; after `sum`."""
        return {"bad_samples": dict(self.total), "bad_epochs": self.epochs}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> BadSampleLog:
        """From a checkpoint's state. It holds the sum over ranks: rank 0 takes it for its own."""
        total = Counter[str](state["bad_samples"])
        mine = Counter(total) if dist.is_main() else Counter[str]()
        epoch = epoch_of(state["cursors"])
        return cls(mine, total, 0 if epoch == NO_EPOCH else epoch, list(state.get("bad_epochs", [])))
