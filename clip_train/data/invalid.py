"""Invalid samples: what is wrong, where and how often; when it is too much; their sum over ranks and epochs.

A sample that cannot be used keeps its place in the order, and another one fills it: global batches stay full.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clip_train.errors import DataError
from clip_train.storage.redact import redact

WINDOW = 10_000  # samples
MIN_INVALID = 20  # before the limit may stop a run: one of the first ten means little
KEYS_SHOWN = 3
KEY_LENGTH = 60  # characters of a key that are shown
ROWS_SHOWN = 20
PICTURES = 3  # of a reason, which are kept


class InvalidSample(Exception):
    """This sample cannot be used; `reason` is short and the same for all of its kind, to be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Invalid(NamedTuple):
    """One sample that cannot be used, or the place where a damaged shard breaks off."""

    reason: str
    shard: str  # path or URL
    key: str
    members: Mapping[str, Any] | None = (
        None  # the sample's, until it is known whether a picture of it is wanted
    )
    picture: str = ""  # a data URI, where something of the image can be seen

    @property
    def place(self) -> str:
        """As `Batch.bad_samples` counts them."""
        return f"{self.reason}\t{redact(self.shard)}"

    def shown(self) -> dict[str, str]:
        """As `Batch.bad_pictures` has them."""
        return {
            "reason": self.reason,
            "shard": redact(self.shard),
            "key": self.key[:KEY_LENGTH],
            "picture": self.picture,
        }


def table(counts: Mapping[str, int], keys: Mapping[str, Sequence[str]] | None = None) -> str:
    """`Invalid.place` -> samples, for people: the most frequent first, with the first keys of each."""
    rows = Counter(counts).most_common(ROWS_SHOWN)
    width = max((place.index("\t") for place, _ in rows), default=0)
    lines = [f"    count  {'reason':{width}}  shard" + ("  first keys" if keys else "")]
    for place, count in rows:
        reason, shard = place.split("\t", 1)
        # from an unknown shard: escaped for the terminal
        shown = ", ".join(
            repr(key[:KEY_LENGTH])[1:-1] for key in (keys or {}).get(place, ())[:KEYS_SHOWN]
        )
        lines.append(f"{count:9}  {reason:{width}}  {shard}  {shown}".rstrip())
    left_out = len(counts) - len(rows)
    return "\n".join(lines + ([f"and {left_out} more rows"] if left_out else []))


def table_of(found: Iterable[Invalid]) -> str:
    keys: dict[str, list[str]] = defaultdict(list)
    for each in found:
        keys[each.place].append(each.key)
    return table({place: len(each) for place, each in keys.items()}, keys)


class InvalidLimit:
    """Stops a run whose data is mostly broken, by what one rank has met of late."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._window: deque[tuple[int, list[Invalid]]] = (
            deque()
        )  # (samples, those invalid) of each recent batch
        self._samples = 0

    def add(self, samples: int, found: list[Invalid]) -> None:
        """Counts one batch of `samples`, of whose places so many held an invalid sample.

        Raises:
            DataError: with the table, above the limit.
        """
        self._window.append((samples, found))
        self._samples += samples
        while self._samples - self._window[0][0] >= WINDOW:
            self._samples -= self._window.popleft()[0]
        invalid = sum(len(each) for _, each in self._window)
        if invalid >= MIN_INVALID and invalid > self.limit * self._samples:
            raise DataError(
                f"{invalid} of the last {self._samples} samples were invalid, more than data.bad_sample_limit "
                f"({self.limit:g}); repair the shards or raise the limit\n"
                + table_of(each for _, batch in self._window for each in batch)
            )


@dataclass
class InvalidLog:
    """Over all ranks and epochs. Counts are by `Invalid.place`, as `Batch.bad_samples` has them."""

    mine: Counter[str] = field(default_factory=Counter)  # of this rank's batches
    total: Counter[str] = field(default_factory=Counter)  # of all ranks, when they last summed
    epoch: int = 0  # that has been reached
    epochs: list[dict[str, int]] = field(
        default_factory=list
    )  # of each that has ended: epoch, step, bad_samples
    pictures: list[dict[str, str]] = field(
        default_factory=list
    )  # the first of each reason here, since the last start

    def add(self, counts: Mapping[str, int], pictures: Iterable[dict[str, str]] = ()) -> None:
        """Those of one batch."""
        self.mine.update(counts)
        for each in pictures:
            if sum(each["reason"] == other["reason"] for other in self.pictures) < PICTURES:
                self.pictures.append(each)

    def sum(self) -> None:
        """Collective: `total` is up to date then."""
        from clip_train import dist  # torch: a recipe is read without

        self.total = sum(
            (Counter(counts) for counts in dist.gather_objects(dict(self.mine))), Counter[str]()
        )

    def reached(self, epoch: int, step: int) -> str | None:
        """Collective where `epoch`, the same on all ranks, is a new one: a summary of the one that has ended."""
        if epoch <= self.epoch:
            return None
        before = self.epochs[-1]["bad_samples"] if self.epochs else 0
        self.sum()
        invalid = self.total.total()
        self.epoch = epoch
        self.epochs.append({"epoch": epoch, "step": step, "bad_samples": invalid})
        if not invalid:
            return f"epoch {epoch} is done (step {step}): no invalid samples"
        counted = f"{invalid - before} invalid samples in it, {invalid} so far"
        return f"epoch {epoch} is done (step {step}): {counted}\n{table(self.total)}"

    def state(self) -> dict[str, Any]:
        """As JSON; after `sum`."""
        return {"bad_samples": dict(self.total), "bad_epochs": self.epochs}

    @classmethod
    def load(cls, state: Mapping[str, Any], epoch: int) -> InvalidLog:
        """From a checkpoint's state, in epoch `epoch`. It holds the sum over ranks: rank 0 takes it for its own."""
        from clip_train import dist

        total = Counter[str](state["bad_samples"])
        return cls(
            Counter(total) if dist.is_main() else Counter[str](),
            total,
            epoch,
            list(state["bad_epochs"]),
        )
