"""Invalid samples: what is wrong, where and how often; when it is too much; their sum over ranks and epochs.

A sample that cannot be used keeps its place in the order, and another one fills it: global batches stay full.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from clip_train.callbacks import Callback
from clip_train.errors import DataError
from clip_train.storage.redact import redact

if TYPE_CHECKING:
    from clip_train.protocols import Batch

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
class InvalidLog(Callback):
    """Counts invalid samples over all ranks and epochs, by `Invalid.place`."""

    epoch_at: Callable[[int], int] = lambda step: 0  # step -> whole epochs of the data before it
    log: Callable[[str], None] = print  # takes a summary of each epoch
    write: Callable[[dict[str, Any], Literal["invalid"]], None] | None = None  # to the sinks
    step: int = 0
    mine: Counter[str] = field(default_factory=Counter)  # of this rank's batches
    total: Counter[str] = field(default_factory=Counter)  # of all ranks, when they last summed
    epoch: int = 0  # whole epochs so far
    # of each epoch that has ended: epoch, step, bad_samples
    epochs: list[dict[str, int]] = field(default_factory=list)
    # the first ones for each reason, on this rank, since the last start
    pictures: list[dict[str, str]] = field(default_factory=list)

    def after_step(self, record: dict[str, Any], batch: Batch) -> None:
        """Collective after the last step of an epoch."""
        self.step = record["step"]
        self.mine.update(batch.bad_samples)
        for picture in batch.bad_pictures:
            kept = [known for known in self.pictures if known["reason"] == picture["reason"]]
            if len(kept) < PICTURES:
                self.pictures.append(picture)
        epoch = self.epoch_at(self.step)
        if epoch <= self.epoch:
            return
        before = self.epochs[-1]["bad_samples"] if self.epochs else 0
        self.sum_and_write()
        invalid = self.total.total()
        self.epoch = epoch
        self.epochs.append({"epoch": epoch, "step": self.step, "bad_samples": invalid})
        ended = f"epoch {epoch} is done (step {self.step})"
        if invalid:
            counted = f"{invalid - before} invalid samples in it, {invalid} so far"
            self.log(f"{ended}: {counted}\n{table(self.total)}")
        else:
            self.log(f"{ended}: no invalid samples")

    def before_save(self, state: dict[str, Any]) -> None:
        """Collective."""
        self.sum_and_write()
        state.update(self.state())

    def on_error(self, error: BaseException | None, together: bool) -> None:
        """The report of a run that ends because of invalid samples shows them."""
        if together:
            self.sum_and_write()

    def resume(self, state: Mapping[str, Any]) -> None:
        """The checkpoint holds the sum over ranks: rank 0 takes it for its own."""
        from clip_train import dist

        self.step, self.epoch = state["step"], self.epoch_at(state["step"])
        self.total = Counter(state["bad_samples"])
        self.mine = Counter(self.total) if dist.is_main() else Counter()
        self.epochs = list(state["bad_epochs"])

    def sum_and_write(self) -> None:
        """Collective: sums over the ranks, then writes the sum and the pictures to the sinks."""
        from clip_train import dist  # torch: a recipe is read without

        counts = dist.gather_objects(dict(self.mine))
        self.total = sum(map(Counter, counts), Counter[str]())
        if self.total and self.write is not None:
            record = {"step": self.step, **self.state(), "pictures": self.pictures}
            self.write(record, "invalid")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {"bad_samples": dict(self.total), "bad_epochs": self.epochs}
