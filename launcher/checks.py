"""Checks of a recipe's places, each written once.

`doctor` shows what they find; `submit` and `train --dry-run` require that those of `PLACES` pass.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from clip_train.checkpoint.config import preflight
from clip_train.checkpoint.restore import Stores, commit_urls, open_read_only
from clip_train.errors import ClipTrainError, UserError
from clip_train.models import hub
from clip_train.models.clip import count_parameters
from clip_train.models.config import AnyArchitecture, KeepPositions
from clip_train.models.loading import (
    Log,
    adapt,
    file_at,
    first_of,
    load_openclip,
    non_finite,
    trained_with,
)
from clip_train.places import broken_link
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.weights import KEYS, check_has_base, find_run, holds_weights
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import is_remote, local_path, open_storage
from launcher.runtime.log import warn
from launcher.slurm.profile import Site


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Literal["ok", "warning", "error"] = field(kw_only=True)
    message: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]
ok = partial(Finding, level="ok")
warning = partial(Finding, level="warning")
error = partial(Finding, level="error")


def warning_if(wrong: bool, check: str, message: str, remedy: str) -> Finding:
    return warning(check, message, remedy) if wrong else ok(check, message)


def check_store(config: Recipe, patience_seconds: float = 5.0) -> Iterator[Finding]:
    """Check that checkpoint.remote can hold checkpoints, as a run does before it builds its model.

    patience_seconds: how long one operation is tried; a run tries longer.
    """
    remote = config.checkpoint.remote
    if remote is None:
        yield ok(
            "store", f"no checkpoint.remote in this recipe: checkpoints stay in {config.run_dir}"
        )
        return
    storage = open_storage(remote, patience_seconds=patience_seconds)
    try:
        for text in preflight(storage):
            yield warning("store", *text.rsplit("; ", 1))
        yield ok(
            "store",
            f"checkpoint.remote ({storage.url}) can be listed, read, written to (conditionally, "
            "too) and have files deleted",
        )
    except ClipTrainError as e:
        yield error("store", *str(e).rsplit("; ", 1))


def check_disk(config: Recipe) -> Iterator[Finding]:
    """Check that run.dir can be written and has enough space."""
    run_dir = config.run_dir.absolute()
    link = broken_link(run_dir)
    if link is not None:
        yield error(
            "disk", f"run.dir ({run_dir}) cannot be written: {link}", "mount it, or choose another"
        )
        return
    folder = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    probe = folder / f".doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as e:
        yield error(
            "disk",
            f"run.dir ({run_dir}) cannot be written: {e}",
            "choose another, or correct its permissions",
        )
        return
    # fp32 weights and two moments of each parameter, for all kept checkpoints and one more
    needed = 12 * count_parameters(config.model.architecture()) * (config.checkpoint.keep_last + 1)
    free = shutil.disk_usage(folder).free
    message = (
        f"{free / 1e9:.1f} GB free for run.dir ({run_dir}), {needed / 1e9:.1f} needed by "
        "checkpoints"
    )
    remedy = "make room, choose another run.dir, or lower checkpoint.keep_last"
    yield error("disk", message, remedy) if needed > free else ok("disk", message)


def check_places(config: Recipe, site: Site) -> Iterator[Finding]:
    """Warn about node-local folders: a job that is requeued on another node loses its
    checkpoints."""
    places, remote = {"run.dir": config.run_dir.absolute()}, config.checkpoint.remote
    if remote is not None and not is_remote(remote):
        places["checkpoint.remote"] = local_path(remote).absolute()
    for key, place in places.items():
        local = next((path for path in site.local_paths if place.is_relative_to(path)), None)
        if local is not None:
            yield warning(
                "disk",
                f"{key} ({place}) is under {local}, which is local to each node",
                "choose a shared folder (or correct local_paths in the site file)",
            )


def continues(config: Recipe, network: bool = True) -> bool:
    """Whether a run would resume, and take all its weights from a checkpoint."""
    mode, remote = config.checkpoint.resume, config.checkpoint.remote
    if mode == "never" or config.model.lora is not None:
        return False
    if mode not in ("auto", "must"):  # another run's
        return True
    folder = config.run_dir / "checkpoints"
    stores = Stores(
        LocalStorage(folder) if folder.is_dir() else None,
        open_storage(remote, patience_seconds=5.0) if remote is not None and network else None,
    )
    try:
        return bool(commit_urls(stores))
    except ClipTrainError:  # `check_store` says what is wrong
        return False


def check_weights(config: Recipe, network: bool = True) -> Iterator[Finding]:
    """Check that initial weights and teachers exist, fit the model, and hold finite numbers.

    Local files are read. Weights at a URL or on the hub are not fetched.

    network: False: look at local places only.
    """
    model = config.model
    keys = [key for key in KEYS if getattr(model, key) is not None]
    if keys and continues(config, network):
        unread = ", ".join(f"model.{key}" for key in keys)
        yield ok("weights", f"the run continues from its checkpoints: {unread} is not read")
        keys = []
    for key in keys:
        weights = WeightsFor(
            key,
            str(getattr(model, key)),
            architecture=model.architecture().model_copy(update={"lora": None}),
            tower={"init_image_from": "image", "init_text_from": "text"}.get(key),
            keep_positions=model.keep_positions,
        )
        yield look_at_weights(weights, network)
    for alone in model.teachers():
        architecture, name_key = alone.teacher_architecture(), "model.teacher_name"
        weights = WeightsFor("teacher", str(alone.teacher), architecture, name_key=name_key)
        yield look_at_weights(weights, network)


@dataclass(frozen=True)
class WeightsFor:
    """A place of weights, and the model that they are for."""

    key: str
    place: str
    architecture: AnyArchitecture
    tower: str | None = None
    keep_positions: KeepPositions = 0
    name_key: str = "model.name"

    @property
    def what(self) -> str:
        return f"model.{self.key} ({self.place})"


def look_at_weights(weights: WeightsFor, network: bool) -> Finding:
    """Compare weights with the model. Local files are read, and searched for NaN."""
    notes: list[str] = []
    try:
        if hub.is_on_hub(weights.place):
            path = hub.cached(weights.place)
        elif is_remote(weights.place) and not network:
            path = None
        elif holds_weights(weights.place, weights.what):
            path = None if is_remote(weights.place) else local_path(weights.place)
        else:
            return compare_run(weights)
        if path is None:
            return ok("weights", f"{weights.what} is fetched when the run starts")
        bad = non_finite(load_for(weights, path, notes.append))
    except ClipTrainError as e:
        message, _, remedy = str(e).rpartition("; ")
        return error("weights", message or remedy, remedy if message else "correct the place")
    if bad:
        return error(
            "weights",
            f"{weights.what} has NaN or infinity in {first_of(bad)}",
            "give other weights: the first loss would not be finite",
        )
    return ok("weights", "; ".join([f"{weights.what} fits the model", *notes]))


def load_for(weights: WeightsFor, path: Path, log: Log) -> dict[str, torch.Tensor]:
    """UserError, CheckpointError."""
    file, architecture = file_at(path, f"model.{weights.key}"), weights.architecture
    if weights.key == "teacher":
        architecture = architecture.model_copy(update=trained_with(file))
    return load_openclip(
        file, architecture, log, weights.tower, weights.keep_positions, weights.name_key
    )


def compare_run(weights: WeightsFor) -> Finding:
    """Compare the newest checkpoint of a run with the model, by names and shapes. UserError,
    CheckpointError."""
    _, places, only = find_run(weights.place, [])
    found = open_read_only(places, only=only)
    check_has_base(weights.what, weights.place, found)
    shapes = {
        name: torch.empty(shape, device="meta") for name, shape in found.reader.shapes.items()
    }
    source = f"{weights.what}: step {found.step} of {found.path}"
    adapt(
        shapes,
        weights.architecture,
        source,
        weights.tower,
        weights.keep_positions,
        weights.name_key,
    )
    return ok("weights", f"{source} fits the model")


PLACES: dict[str, Callable[[Recipe], Iterator[Finding]]] = {
    "disk": check_disk,
    "store": check_store,
    "weights": check_weights,
}
"""The checks of a recipe's paths, stores and weights: `doctor` shows them, `submit` and `train --dry-run`
require them."""


def require_places(config: Recipe, *, store: bool = True) -> None:
    """Raise errors that would otherwise occur later: a full or read-only disk, an unsuitable store,
    initial weights that do not fit.

    store: check the store as well, and whatever else needs the network. UserError for the first
    error; warnings are logged.
    """
    checks = dict(PLACES)
    if not store:
        del checks["store"]
        checks["weights"] = partial(check_weights, network=False)
    for check in checks.values():
        for finding in check(config):
            if finding.level == "error":
                raise UserError(f"{finding.message}; {finding.remedy}")
            if finding.level == "warning":
                warn(f"{finding.message}. {finding.remedy}")
