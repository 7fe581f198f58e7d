"""Checks of a recipe's places, each written once.

`doctor` shows what they find; `submit` and `train --dry-run` require that those of `PLACES` pass.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from clip_train.checkpoint.config import preflight
from clip_train.errors import ClipTrainError, UserError
from clip_train.models.clip import count_parameters
from clip_train.places import broken_link
from clip_train.storage.urls import is_remote, local_path, open_storage
from launcher.config.recipe import RunConfig
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


def check_store(config: RunConfig, patience_seconds: float = 5.0) -> Iterator[Finding]:
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


def check_disk(config: RunConfig) -> Iterator[Finding]:
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


def check_places(config: RunConfig, site: Site) -> Iterator[Finding]:
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


PLACES: dict[str, Callable[[RunConfig], Iterator[Finding]]] = {
    "disk": check_disk,
    "store": check_store,
}
"""The checks of a recipe's paths and stores: `doctor` shows them, `submit` and `train --dry-run`
require them."""


def require_places(config: RunConfig, *, store: bool = True) -> None:
    """Raise errors that would otherwise occur later: a full or read-only disk, an unsuitable store.

    store: check the store as well. UserError for the first error; warnings are logged.
    """
    for name, check in PLACES.items():
        for finding in check(config) if store or name != "store" else ():
            if finding.level == "error":
                raise UserError(f"{finding.message}; {finding.remedy}")
            if finding.level == "warning":
                warn(f"{finding.message}. {finding.remedy}")
