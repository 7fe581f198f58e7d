"""Callbacks of a user's own. They only observe: the run would be the same without them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from clip_train.callbacks import Callback
from clip_train.errors import ClipTrainError, UserError
from clip_train.metrics.config import LogConfig
from clip_train.metrics.skipped import Skipped
from clip_train.settings import import_path

METHODS = [name for name in vars(Callback) if not name.startswith("_")]


def own_callbacks(
    config: LogConfig, skipped: Skipped, given: Sequence[Callback] = ()
) -> list[Callback]:
    """Those of the recipe, in its order, and then those `given` by a program, which stay as they
    are: a program may give the same ones to its next run. Their methods get views that they can
    only read.

    A ClipTrainError in one ends the run on all ranks. Any other error is a warning and a line in
    VERDICT. UserError for one that cannot be made.
    """
    callbacks: dict[str, Callback] = {}
    for path in config.callbacks:
        try:
            callbacks[path] = import_path("log.callbacks", path, Callback)()
        except TypeError as e:
            raise UserError(
                f"log.callbacks ({path}) cannot be made: {e}; it is called without arguments"
            ) from e
    for number, callback in enumerate(given):
        callbacks[f"{type(callback).__name__}, number {number} of callbacks"] = callback
    guarded = []
    for path, callback in callbacks.items():
        guard = Callback()
        for name in METHODS:
            where = f"{name} of log.callbacks ({path})"
            setattr(guard, name, partial(_call, skipped, where, getattr(callback, name)))
        guarded.append(guard)
    return guarded


def _call(skipped: Skipped, where: str, method: Callable[..., None], *arguments: Any) -> None:
    try:
        method(*map(_read_only, arguments))
    except ClipTrainError:  # it says itself what follows, and whether the node is to blame
        raise
    except Exception as e:
        skipped.note(where, e, remedy="correct it, or take it out")


def _read_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType(value)
    return tuple(value) if isinstance(value, list) else value
