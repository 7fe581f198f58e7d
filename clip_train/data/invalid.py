"""Invalid samples: their reasons and shards, the limit that ends a run, and their sum over ranks and
epochs.

A sample that cannot be used keeps its place in the order, and another one fills it: global batches
stay full. Recipes, batches, checkpoints and metrics name these samples `bad_samples`.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from clip_train.callbacks import Callback
from clip_train.errors import DataError
from clip_train.storage.redact import redact

# samples of one rank that the limit looks at
WINDOW = 10_000
# fewer invalid samples never stop a run: one of the first ten means little
MIN_INVALID = 20
# limits of `table`
ROWS_SHOWN = 20
KEYS_SHOWN = 3
KEY_LENGTH = 60  # characters


class InvalidSample(Exception):
    """This sample cannot be used. Samples are counted by the message, so it is short, and the same
    for all samples with this fault."""


class InvalidRecord(NamedTuple):
    """One sample that cannot be used, or the point where a damaged shard breaks off."""

    reason: str
    shard: str  # path or URL
    key: str

    @property
    def count_key(self) -> str:
        """The reason and the shard, as in `Batch.bad_samples`."""
        return f"{self.reason}\t{redact(self.shard)}"


def table(counts: Mapping[str, int], keys: Mapping[str, Sequence[str]] | None = None) -> str:
    """Format counts for people: the most frequent reasons and shards first.

    Args:
        counts: `InvalidRecord.count_key` -> samples.
        keys: `InvalidRecord.count_key` -> the keys of these samples. The table has the first ones.
    """
    rows = Counter(counts).most_common(ROWS_SHOWN)
    width = max((count_key.index("\t") for count_key, _ in rows), default=0)
    heading = f"    count  {'reason':{width}}  shard"
    if keys:
        heading += "  first keys"
    lines = [heading]
    for count_key, count in rows:
        reason, shard = count_key.split("\t", 1)
        first = keys[count_key][:KEYS_SHOWN] if keys else ()
        # keys come from an unknown shard: escape them for the terminal
        shown = ", ".join(repr(key[:KEY_LENGTH])[1:-1] for key in first)
        lines.append(f"{count:9}  {reason:{width}}  {shard}  {shown}".rstrip())
    if len(counts) > len(rows):
        lines.append(f"and {len(counts) - len(rows)} more rows")
    return "\n".join(lines)


def table_of(invalid: Iterable[InvalidRecord]) -> str:
    """Count the samples, and format the counts with the first keys of each."""
    keys: dict[str, list[str]] = defaultdict(list)
    for sample in invalid:
        keys[sample.count_key].append(sample.key)
    counts = {count_key: len(found) for count_key, found in keys.items()}
    return table(counts, keys)


class CheckedBatch(NamedTuple):
    """One batch in the window of `InvalidLimit`."""

    samples: int
    invalid: list[InvalidRecord]


@dataclass
class InvalidLimit:
    """Ends a run if too many of the recent samples of one rank are invalid."""

    limit: float  # `data.bad_sample_limit`, a fraction
    _window: deque[CheckedBatch] = field(default_factory=deque)  # the oldest first
    _samples: int = 0  # in the window

    def add(self, samples: int, invalid: list[InvalidRecord]) -> None:
        """Count one batch of `samples` places and the invalid samples that they held.

        Raises:
            DataError: more than `limit` of the samples in the window are invalid. The message has
                their table.
        """
        self._window.append(CheckedBatch(samples, invalid))
        self._samples += samples
        # drop the oldest batch while the others still have WINDOW samples
        while self._samples - self._window[0].samples >= WINDOW:
            self._samples -= self._window.popleft().samples
        recent = [sample for batch in self._window for sample in batch.invalid]
        if len(recent) >= MIN_INVALID and len(recent) > self.limit * self._samples:
            raise DataError(
                f"{len(recent)} of the last {self._samples} samples were invalid, more than "
                f"data.bad_sample_limit ({self.limit:g}); repair the shards or raise the "
                f"limit\n{table_of(recent)}"
            )


@dataclass
class InvalidLog(Callback):
    """Counts invalid samples over all ranks and epochs, by `InvalidRecord.count_key`."""

    # step -> whole epochs of the data before it
    epoch_at: Callable[[int], int] = lambda step: 0
    # takes a summary of each epoch
    log: Callable[[str], None] = print
    # writes a record to the sinks
    write: Callable[[dict[str, Any], Literal["invalid"]], None] | None = None
    step: int = 0
    # counts of this rank's batches
    mine: Counter[str] = field(default_factory=Counter)
    # counts of all ranks, from the last sum over ranks
    total: Counter[str] = field(default_factory=Counter)
    # `mine` at the time of that sum
    summed: Counter[str] = field(default_factory=Counter)

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        """Count the invalid samples of this rank's batch, and log a summary of each epoch.

        Collective after the last step of an epoch.
        """
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
        """Put the counts of all ranks into a checkpoint's state. Collective."""
        self.sum_and_write()
        state["bad_samples"] = dict(self.total)

    def on_error(self, error: BaseException | None) -> None:
        """Write the last sum over ranks and this rank's counts since then: the invalid samples may
        be the reason why the run ends."""
        self.total += self.mine - self.summed
        self.summed = Counter(self.mine)
        self._write()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the sum over ranks from a checkpoint. Rank 0 counts it as its own."""
        # imported late: it imports torch, and a recipe is read without torch
        from clip_train import dist

        self.step, self.total = state["step"], Counter(state["bad_samples"])
        # in the counts of one rank alone, so that the next sum over ranks has it once
        self.mine = Counter(self.total) if dist.is_main() else Counter()
        self.summed = Counter(self.mine)

    def sum_and_write(self) -> None:
        """Sum the counts over the ranks, then write the sum to the sinks. Collective."""
        # imported late, as in `resume`
        from clip_train import dist

        self.total = sum(map(Counter, dist.gather_objects(dict(self.mine))), Counter[str]())
        self.summed = Counter(self.mine)
        self._write()

    def _write(self) -> None:
        if self.total and self.write is not None:
            self.write({"step": self.step, "bad_samples": dict(self.total)}, "invalid")
