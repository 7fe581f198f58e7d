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
    """Those of the recipe, in its order, and then those `given` by a program. Their methods get
    views that they can only read.

    An error in one is a warning and a line in VERDICT; with `log.strict_callbacks` it ends the run
    on all ranks: a ClipTrainError as it is, any other as a UserError. UserError.
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
    guard = None if config.strict_callbacks else skipped
    for path, callback in callbacks.items():
        for name in METHODS:
            where = f"{name} of log.callbacks ({path})"
            setattr(callback, name, partial(_call, guard, where, getattr(callback, name)))
    return list(callbacks.values())


def _call(
    skipped: Skipped | None, where: str, method: Callable[..., None], *arguments: Any
) -> None:
    action = partial(method, *map(_read_only, arguments))
    if skipped is not None:
        skipped.attempt(where, action, remedy="correct it, or take it out")
        return
    try:
        action()
    except ClipTrainError:  # it says itself what follows, and whether the node is to blame
        raise
    except Exception as e:
        raise UserError(
            f"{where} failed: {type(e).__name__}: {e}; correct it, or set "
            "log.strict_callbacks=false"
        ) from e


def _read_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType(value)
    return tuple(value) if isinstance(value, list) else value
