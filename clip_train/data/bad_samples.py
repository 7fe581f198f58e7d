"""Samples that cannot be used: what is wrong, where, how often, and when it is too much."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from clip_train.errors import DataError

WINDOW = 10_000  # samples
MIN_BAD = 20  # bad samples before the limit may stop a run: one of the first ten says little
KEYS_SHOWN = 3
KEY_LENGTH = 60  # characters of a key that are shown
ROWS_SHOWN = 20


class BadSample(Exception):
    """This sample cannot be used; `reason` is short and the same for all of its kind, to be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Bad:
    """One unusable sample, or one place where a shard breaks off."""

    reason: str
    shard: str
    key: str
    damage: bool = False  # of the shard: what follows in it is lost


class BadTable:
    """Counts by reason and shard, with the first keys of each."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.keys: dict[tuple[str, str], list[str]] = {}

    def add(self, bads: Iterable[Bad]) -> None:
        for bad in bads:
            place = (bad.reason, bad.shard)
            self.counts[place] += 1
            keys = self.keys.setdefault(place, [])
            if len(keys) < KEYS_SHOWN:
                keys.append(_shown(bad.key))

    def __str__(self) -> str:
        """A table for people, the most frequent first."""
        rows = [("count", "reason", "shard", "first keys" if self.keys else "")]
        for (reason, shard), count in self.counts.most_common(ROWS_SHOWN):
            rows.append((str(count), reason, shard, ", ".join(self.keys.get((reason, shard), []))))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([r[0].rjust(widths[0]), r[1].ljust(widths[1]), r[2].ljust(widths[2]), r[3]]).rstrip()
            for r in rows
        ]
        left_out = len(self.counts) - ROWS_SHOWN
        return "\n".join(lines + ([f"and {left_out} more rows"] if left_out > 0 else []))


def _shown(key: str) -> str:
    """A key from an unknown shard, safe for a terminal."""
    short = key if len(key) <= KEY_LENGTH else f"{key[:KEY_LENGTH]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


class BadSampleLimit:
    """Stops a run whose data is mostly broken, on one rank's view of it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.table = BadTable()
        self._window: deque[tuple[int, int]] = deque()  # (samples met, of those bad) of each recent batch
        self._met = self._bad = 0

    def add(self, delivered: int, bads: list[Bad]) -> None:
        """Counts one batch of `delivered` samples.

        Raises:
            DataError: with the table, above the limit.
        """
        self.table.add(bads)
        entry = (delivered + len(bads), len(bads))
        self._window.append(entry)
        self._met += entry[0]
        self._bad += entry[1]
        while self._met - self._window[0][0] >= WINDOW:
            met, bad = self._window.popleft()
            self._met -= met
            self._bad -= bad
        if self._bad >= MIN_BAD and self._bad > self.limit * self._met:
            raise DataError(
                f"{self._bad} of the last {self._met} samples were bad, more than data.bad_sample_limit "
                f"({self.limit:g}); repair the shards or raise the limit\n{self.table}"
            )
