"""Callbacks, which observe a run: progress, records, the watchdog, a user's own."""

from collections.abc import Mapping, Sequence
from typing import Any


class Callback:
    """The trainer calls these methods; one that is not overridden does nothing.

    All ranks have the same callbacks in the same order. If a method raises on one rank, the run
    ends on all ranks. Methods of this package's own callbacks may use collectives, except
    `on_error` and `close`. Those of users must not: a failure on one rank is only logged, and the
    other ranks would wait.
    """

    def resume(self, state: Mapping[str, Any]) -> None:
        """state: what `before_save` put into the checkpoint that the run continues from."""

    def phase(self, name: str) -> None:
        """The rank begins a "step", a "save" or an "evaluate"; "end": it has left the loop;
        "close": the last save has ended; "finish": an error is about to be printed."""

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        """record: the step as written to `metrics.jsonl`. Later callbacks see the values that this
        one adds. keys, invalid: `Batch.names` and `Batch.bad_samples` of this rank's batch.
        """

    def before_save(self, state: dict[str, Any]) -> None:
        """Add to `state` the values that a resumed run needs, as JSON, equal on all ranks."""

    def after_evaluate(self, record: dict[str, Any]) -> None:
        """record: the step, and the evaluation's numbers by name."""

    def on_error(self, error: BaseException | None) -> None:
        """An error on this rank or another ends the run; called before `close`, on each rank by
        itself. error: this rank's own, or `RemoteRankError`, which names the rank that failed."""

    def close(self) -> None:
        """The run ends, with or without an error; the last checkpoint has been committed or
        abandoned."""
