"""Invalid samples: what is wrong, where and how often; when it is too much; their sum over ranks
and epochs.

A sample that cannot be used keeps its place in the order, and another one fills it: global batches
stay full.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from clip_train.callbacks import Callback
from clip_train.errors import DataError
from clip_train.storage.redact import redact

WINDOW = 10_000  # samples
MIN_INVALID = 20  # before the limit may stop a run: one of the first ten means little
KEYS_SHOWN = 3
KEY_LENGTH = 60  # characters of a key that are shown
ROWS_SHOWN = 20


class InvalidSample(Exception):
    """This sample cannot be used; the message is short, and the same for all of its kind: they are
    counted by it."""


class Invalid(NamedTuple):
    """One sample that cannot be used, or the place where a damaged shard breaks off."""

    reason: str
    shard: str  # path or URL
    key: str

    @property
    def place(self) -> str:
        """As `Batch.bad_samples` counts them."""
        return f"{self.reason}\t{redact(self.shard)}"


def table(counts: Mapping[str, int], keys: Mapping[str, Sequence[str]] | None = None) -> str:
    """`Invalid.place` -> samples, for people: the most frequent first, with the first keys of
    each."""
    rows = Counter(counts).most_common(ROWS_SHOWN)
    width = max((place.index("\t") for place, _ in rows), default=0)
    lines = [f"    count  {'reason':{width}}  shard" + ("  first keys" if keys else "")]
    for place, count in rows:
        reason, shard = place.split("\t", 1)
        first = keys[place][:KEYS_SHOWN] if keys else ()
        # keys come from an unknown shard: escaped for the terminal
        shown = ", ".join(repr(key[:KEY_LENGTH])[1:-1] for key in first)
        lines.append(f"{count:9}  {reason:{width}}  {shard}  {shown}".rstrip())
    if len(counts) > len(rows):
        lines.append(f"and {len(counts) - len(rows)} more rows")
    return "\n".join(lines)


def table_of(invalid: Iterable[Invalid]) -> str:
    keys: dict[str, list[str]] = defaultdict(list)
    for sample in invalid:
        keys[sample.place].append(sample.key)
    return table({place: len(found) for place, found in keys.items()}, keys)


@dataclass
class InvalidLimit:
    """Ends a run whose data is mostly broken, judged by the recent samples of one rank."""

    limit: float  # as `data.bad_sample_limit`
    # (samples, the invalid ones) of each recent batch
    _window: deque[tuple[int, list[Invalid]]] = field(default_factory=deque)
    _samples: int = 0  # in the window

    def add(self, samples: int, invalid: list[Invalid]) -> None:
        """Counts one batch of `samples` places and the invalid samples that they held.

        Raises:
            DataError: with the table, above the limit.
        """
        self._window.append((samples, invalid))
        self._samples += samples
        while self._samples - self._window[0][0] >= WINDOW:
            self._samples -= self._window.popleft()[0]
        recent = [sample for _, batch in self._window for sample in batch]
        if len(recent) >= MIN_INVALID and len(recent) > self.limit * self._samples:
            raise DataError(
                f"{len(recent)} of the last {self._samples} samples were invalid, more than "
                f"data.bad_sample_limit ({self.limit:g}); repair the shards or raise the "
                f"limit\n{table_of(recent)}"
            )


@dataclass
class InvalidLog(Callback):
    """Counts invalid samples over all ranks and epochs, by `Invalid.place`."""

    epoch_at: Callable[[int], int] = lambda step: 0  # step -> whole epochs of the data before it
    log: Callable[[str], None] = print  # takes a summary of each epoch
    write: Callable[[dict[str, Any], Literal["invalid"]], None] | None = None  # to the sinks
    step: int = 0
    mine: Counter[str] = field(default_factory=Counter)  # of this rank's batches
    # of all ranks, when they last summed, and this rank's part of it
    total: Counter[str] = field(default_factory=Counter)
    summed: Counter[str] = field(default_factory=Counter)

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        """Collective after the last step of an epoch."""
        self.step = record["step"]
        self.mine.update(invalid)
        epoch = self.epoch_at(self.step)
        if epoch <= self.epoch_at(self.step - 1):
            return
        self.sum_and_write()
        found = "no invalid samples"
        if self.total:
            found = f"{self.total.total()} invalid samples so far\n{table(self.total)}"
        self.log(f"epoch {epoch} is done (step {self.step}): {found}")

    def before_save(self, state: dict[str, Any]) -> None:
        """Collective."""
        self.sum_and_write()
        state["bad_samples"] = dict(self.total)

    def on_error(self, error: BaseException | None) -> None:
        """A run that ends because of invalid samples records those that this rank knows of: the
        last sum, and its own since then."""
        self.total += self.mine - self.summed
        self.summed = Counter(self.mine)
        self._write()

    def resume(self, state: Mapping[str, Any]) -> None:
        """The checkpoint holds the sum over ranks: rank 0 takes it for its own."""
        from clip_train import dist

        self.step, self.total = state["step"], Counter(state["bad_samples"])
        self.mine = Counter(self.total) if dist.is_main() else Counter()
        self.summed = Counter(self.mine)

    def sum_and_write(self) -> None:
        """Collective: sums over the ranks, then writes the sum to the sinks."""
        from clip_train import dist  # torch: a recipe is read without

        self.total = sum(map(Counter, dist.gather_objects(dict(self.mine))), Counter[str]())
        self.summed = Counter(self.mine)
        self._write()

    def _write(self) -> None:
        if self.total and self.write is not None:
            self.write({"step": self.step, "bad_samples": dict(self.total)}, "invalid")
