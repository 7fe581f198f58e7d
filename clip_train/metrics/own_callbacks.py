"""Callbacks of a user's own. They only observe: the run would be the same without them."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from clip_train.callbacks import Callback
from clip_train.errors import UserError
from clip_train.metrics.config import LogConfig
from clip_train.metrics.skipped import Skipped
from clip_train.settings import import_path


class OwnCallback(Callback):
    """Calls the class at `path`, with views that it can only read.

    An error in it is a warning and a line in VERDICT; with `strict` it ends the run on all ranks in
    the next step.
    """

    def __init__(self, path: str, skipped: Skipped, *, strict: bool) -> None:
        self._path = path
        self._skipped = skipped
        self._strict = strict
        try:
            self._own: Callback = import_path("log.callbacks", path, Callback)()
        except TypeError as e:
            raise UserError(
                f"log.callbacks ({path}) cannot be made: {e}; it is called without arguments"
            ) from e

    def _call(self, method: str, *arguments: Any) -> None:
        action = partial(getattr(self._own, method), *arguments)
        where = f"{method} of log.callbacks ({self._path})"
        if not self._strict:
            self._skipped.attempt(where, action, remedy="correct it, or take it out")
            return
        try:
            action()
        except Exception as e:
            raise UserError(
                f"{where} failed: {type(e).__name__}: {e}; correct it, or set "
                "log.strict_callbacks=false"
            ) from e

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        self._call("after_step", MappingProxyType(record), tuple(keys), MappingProxyType(invalid))

    def before_save(self, state: dict[str, Any]) -> None:
        self._call("before_save", MappingProxyType(state))

    def after_evaluate(self, record: dict[str, Any]) -> None:
        self._call("after_evaluate", MappingProxyType(record))

    def on_error(self, error: BaseException | None) -> None:
        self._call("on_error", error)

    def close(self) -> None:
        self._call("close")


def own_callbacks(config: LogConfig, skipped: Skipped) -> list[Callback]:
    """Those of the recipe, in its order. UserError."""
    strict = config.strict_callbacks
    return [OwnCallback(path, skipped, strict=strict) for path in config.callbacks]
