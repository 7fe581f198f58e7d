"""A run that a Python program starts: `clip_train.train`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_train.callbacks import Callback
from clip_train.errors import UserError, raise_all
from clip_train.recipe.recipe import Recipe, apply_overrides, check_config, read_recipe
from clip_train.settings import given
from clip_train.stop import StopRequest
from clip_train.storage.urls import use_client
from clip_train.versions import too_old
from launcher.runtime.environment import this_rank
from launcher.runtime.log import configure
from launcher.runtime.outcome import Outcome

if TYPE_CHECKING:
    import torch
    from torch import nn

    from clip_train.task import Objective


_ranks_have_met = False  # in this process, which was one of several ranks


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    *,
    model: Callable[..., nn.Module] | None = None,
    loss: Objective | type[Objective] | Callable[..., Any] | None = None,
    optimizer: type[torch.optim.Optimizer] | None = None,
    schedule: Callable[..., float] | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """Train, as `clip-train train` does, with objects in place of import paths.

    Call it from a program that `python` starts as one rank, or that a launcher (torchrun, srun,
    mpirun, ...) starts as several. Loader workers import the program, so the call must be under
    `if __name__ == "__main__":`. A process of several ranks trains one run.

    Args:
        recipe: a YAML file, its sections as nested mappings, or a checked `Recipe`.
        overrides: as on the command line, `key.path=value`.
        model: in place of `model.name`: a function or class that returns the model, with the
            attributes of docs/extending.md.
        loss: in place of `loss.kind`: an `Objective`, a subclass of it, or a function of all
            features. `loss.options` are the arguments of a class or a function.
        optimizer: in place of `optim.name`: a class; `optim.options` are its arguments.
        schedule: in place of `schedule.name`: a function of peak, step and steps.
        callbacks: beside those of `log.callbacks`; the same on all ranks.

    Returns the numbers of the last evaluation, the same on all ranks; none: empty.

    The recipe that a checkpoint stores has the import path of each object, so a resume notices
    another one. Arguments that an object was made with are not part of the recipe.

    SystemExit with the exit status of `clip-train train` (75: preempted after a commit, 2: a user's
    mistake, ...) if the run ends before its last step. The message and VERDICT are written, and the
    error is its `__cause__`. RuntimeError for a second call with several ranks.
    """
    global _ranks_have_met  # noqa: PLW0603
    if this_rank().world_size > 1:
        if _ranks_have_met:
            raise RuntimeError(
                "clip_train.train was called before in this process, and several ranks meet once "
                "at MASTER_PORT: start their launcher again for each run"
            )
        _ranks_have_met = True
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    stop, outcome = StopRequest(), Outcome()
    stop.listen()  # before the imports, during which a signal would otherwise kill the rank
    configure()
    try:
        for problem in too_old("torch"):
            raise UserError(problem)
        things = {
            "model.name": model,
            "loss.kind": loss,
            "optim.name": optimizer,
            "schedule.name": schedule,
        }
        things = {key: thing for key, thing in things.items() if thing is not None}
        raise_all(_mistakes(things, overrides, callbacks))
        paths = given(things)
        config = _checked(recipe, [*overrides, *(f"{key}={path}" for key, path in paths.items())])
        use_client(config.storage.client)
        from launcher.train import train as train_on_this_rank

        metrics = train_on_this_rank(config, outcome, stop, callbacks)
    except (Exception, KeyboardInterrupt) as e:
        raise SystemExit(outcome.finish(e)) from e
    finally:
        outcome.close()
    stop.restore()
    return metrics


def _mistakes(
    things: Mapping[str, Any], overrides: Sequence[str], callbacks: Sequence[Callback]
) -> Iterator[str]:
    """What the recipe's checks cannot find. things: the given objects, by key."""
    set_by_override = {override.partition("=")[0] for override in overrides}
    for key, thing in things.items():
        if not callable(thing):
            yield f"{key} ({thing!r}) must be an object here; give its name as {key}=NAME"
        elif key in set_by_override:
            yield f"{key} is given twice, by an override and as an object; leave one out"
    for callback in callbacks:
        if not isinstance(callback, Callback):
            yield f"callbacks ({callback!r}) must be objects of subclasses of clip_train.Callback"


def _checked(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with overrides. UserError lists every mistake."""
    if isinstance(recipe, str | Path):
        raw, source = read_recipe(str(recipe)), str(recipe)
    elif isinstance(recipe, Recipe):
        raw, source = recipe.model_dump(exclude_unset=True), "the recipe"
    else:
        raw, source = dict(recipe), "the recipe"
    return check_config(apply_overrides(raw, list(overrides)), source)
