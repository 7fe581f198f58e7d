"""Invalid samples: what is wrong, where and how often; when it is too much; their sum over ranks and epochs.

A sample that cannot be used keeps its place in the order, and another one fills it: global batches stay full.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clip_train.errors import DataError

WINDOW = 10_000  # samples
MIN_INVALID = 20  # before the limit may stop a run: one of the first ten means little
KEYS_SHOWN = 3
KEY_LENGTH = 60  # characters of a key that are shown
ROWS_SHOWN = 20


class InvalidSample(Exception):
    """This sample cannot be used; `reason` is short and the same for all of its kind, to be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Invalid:
    """One sample that cannot be used, or the place where a damaged shard breaks off."""

    reason: str
    shard: str  # path or URL
    key: str


class InvalidTable:
    """Counts by reason and shard, with the first keys of each."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.keys: dict[tuple[str, str], list[str]] = {}

    def add(self, found: Iterable[Invalid]) -> None:
        for invalid in found:
            self._add((invalid.reason, invalid.shard), 1, [_printable(invalid.key)])

    @classmethod
    def merged(cls, tables: Iterable[InvalidTable]) -> InvalidTable:
        """Of several ranks."""
        out = cls()
        for table in tables:
            for place, count in table.counts.items():
                out._add(place, count, table.keys.get(place, []))
        return out

    def _add(self, place: tuple[str, str], count: int, keys: list[str]) -> None:
        self.counts[place] += count
        self.keys[place] = [*self.keys.get(place, []), *keys][:KEYS_SHOWN]

    def __str__(self) -> str:
        """A table for people, the most frequent first."""
        rows = [("count", "reason", "shard", "first keys" if any(self.keys.values()) else "")]
        for (reason, shard), count in self.counts.most_common(ROWS_SHOWN):
            rows.append((str(count), reason, shard, ", ".join(self.keys.get((reason, shard), []))))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([r[0].rjust(widths[0]), r[1].ljust(widths[1]), r[2].ljust(widths[2]), r[3]]).rstrip()
            for r in rows
        ]
        left_out = len(self.counts) - ROWS_SHOWN
        return "\n".join(lines + ([f"and {left_out} more rows"] if left_out > 0 else []))


def table_of(found: Iterable[Invalid]) -> InvalidTable:
    table = InvalidTable()
    table.add(found)
    return table


def _printable(key: str) -> str:
    """A key from an unknown shard, safe for a terminal."""
    short = key if len(key) <= KEY_LENGTH else f"{key[:KEY_LENGTH]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


class InvalidLimit:
    """Stops a run whose data is mostly broken, by what one rank has met."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.table = InvalidTable()
        self._window: deque[tuple[int, int]] = deque()  # (samples, of those invalid) of each recent batch
        self._samples = self._invalid = 0

    def add(self, samples: int, found: list[Invalid]) -> None:
        """Counts one batch of `samples`, of whose places so many held an invalid sample.

        Raises:
            DataError: with the table, above the limit.
        """
        self.table.add(found)
        self._window.append((samples, len(found)))
        self._samples += samples
        self._invalid += len(found)
        while self._samples - self._window[0][0] >= WINDOW:
            oldest, invalid = self._window.popleft()
            self._samples -= oldest
            self._invalid -= invalid
        if self._invalid >= MIN_INVALID and self._invalid > self.limit * self._samples:
            raise DataError(
                f"{self._invalid} of the last {self._samples} samples were invalid, more than data.bad_sample_limit "
                f"({self.limit:g}); repair the shards or raise the limit\n{self.table}"
            )


@dataclass
class InvalidLog:
    """Over all ranks and epochs. Counts are "reason<TAB>shard" -> samples, as `Batch.bad_samples` has them."""

    mine: Counter[str] = field(default_factory=Counter)  # of this rank's batches
    total: Counter[str] = field(default_factory=Counter)  # of all ranks, when they last summed
    epoch: int = 0  # that has been reached
    epochs: list[dict[str, int]] = field(default_factory=list)  # of each that has ended: epoch, step, bad_samples

    def add(self, counts: Mapping[str, int]) -> None:
        """Those of one batch."""
        self.mine.update(counts)

    def sum(self) -> None:
        """Collective: `total` is up to date then."""
        from clip_train import dist  # torch: a recipe is read without

        self.total = sum((Counter(counts) for counts in dist.gather_objects(dict(self.mine))), Counter[str]())

    def reached(self, epoch: int, step: int) -> str | None:
        """Collective where `epoch`, the same on all ranks, is a new one: a summary of the one that has ended."""
        if epoch <= self.epoch:
            return None
        before = self.epochs[-1]["bad_samples"] if self.epochs else 0
        self.sum()
        invalid = sum(self.total.values())
        self.epoch = epoch
        self.epochs.append({"epoch": epoch, "step": step, "bad_samples": invalid})
        if not invalid:
            return f"epoch {epoch} is done (step {step}): no invalid samples"
        counted = f"{invalid - before} invalid samples in it, {invalid} so far"
        return f"epoch {epoch} is done (step {step}): {counted}\n{self.table()}"

    def table(self) -> InvalidTable:
        """`total`, to print."""
        table = InvalidTable()
        for place, count in self.total.items():
            reason, _, shard = place.partition("\t")
            table.counts[reason, shard] = count
        return table

    def state(self) -> dict[str, Any]:
        """As JSON; after `sum`."""
        return {"bad_samples": dict(self.total), "bad_epochs": self.epochs}

    @classmethod
    def load(cls, state: Mapping[str, Any], epoch: int) -> InvalidLog:
        """From a checkpoint's state, in epoch `epoch`. It holds the sum over ranks: rank 0 takes it for its own."""
        total = Counter[str](state["bad_samples"])
        from clip_train import dist

        return cls(Counter(total) if dist.is_main() else Counter[str](), total, epoch, list(state["bad_epochs"]))
