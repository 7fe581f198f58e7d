"""What a run starts from, wherever it is -> files on this node's disk, fetched by one rank of each node.

an export or a weights file          as it is; at a URL: fetched, compared with the sha256 beside it
a run (recipe, folder, URL, ...)     its newest committed checkpoint: its parameters alone, verified by the manifest
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

from clip_train import dist
from clip_train.checkpoint.inspect import open_to_look, places_of
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.restore import Places
from clip_train.errors import CheckpointError, UserError
from clip_train.models import hub
from clip_train.models.clip import parse_saved
from clip_train.models.config import ModelConfig
from clip_train.models.export import export_openclip
from clip_train.models.weights import CONFIG_NAME, WEIGHTS_NAMES, sha256_of
from clip_train.protocols import Wanted
from clip_train.storage.config import StorageConfig
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import is_remote, local_path, open_read, open_storage
from launcher.config.recipe import RunConfig, load_config
from launcher.runtime import environment as ranks
from launcher.runtime.log import log, warn
from launcher.runtime.verdict import node_name

KEYS = ("init_from", "init_image_from", "init_text_from")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
T = TypeVar("T")


@contextlib.contextmanager
def weights_here(
    config: ModelConfig, storage: StorageConfig, keys: Sequence[str] = KEYS
) -> Iterator[ModelConfig]:
    """Collective: `config` with places that this rank can open. Fetched files stay until the node's last rank leaves
    the block.

    UserError, CheckpointError, on all ranks.
    """
    given = {key: getattr(config, key) for key in keys}
    places = {key: place for key, place in given.items() if place is not None}
    if not places:
        yield config
        return
    fetches = ranks.detect(os.environ).local_rank == 0
    with _node_folder(fetches) as folder:
        here = {
            key: _place_here(key, place, folder / key if fetches else None, storage)
            for key, place in places.items()
        }
        yield config.model_copy(update=here)


@contextlib.contextmanager
def _node_folder(makes: bool) -> Iterator[Path]:
    """Collective: a temporary folder that the ranks of a node share; one rank of each node `makes` it.

    Each rank holds a shared lock while it uses the folder. A rank that leaves tries to turn its lock into an exclusive
    one, which only the last rank gets; the last rank removes the folder. The kernel releases the lock of a rank that
    dies, and nobody waits for another rank on the way out.
    """
    made = dist.agreed(lambda: (node_name(), _temporary_folder()) if makes else None)
    folder = dict(one for one in dist.gather_objects(made) if one is not None)[node_name()]
    with contextlib.ExitStack() as stack:
        lock = dist.agreed(lambda: stack.enter_context(_lock_shared(folder)))
        try:
            yield folder
        finally:
            with contextlib.suppress(BlockingIOError):  # another rank still uses the folder
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _lock_shared(folder: Path) -> IO[str]:
    lock = (folder / "in use").open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="clip-train-"))
    except OSError as e:
        raise UserError(
            f"no temporary folder can be made: {e}; set TMPDIR to one with room for the weights"
        ) from e


def _place_here(key: str, place: str, folder: Path | None, storage: StorageConfig) -> str:
    """folder: where this rank puts what it fetches for its node; None: another does."""

    def readable(action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as e:
            raise CheckpointError(f"model.{key} ({place}) cannot be read: {e}") from e

    def on_node(fetch: Callable[[Path], T]) -> T:
        """What the node's first rank has fetched."""
        got = dist.agreed(
            lambda: None if folder is None else (node_name(), readable(lambda: fetch(folder)))
        )
        return dict(each for each in dist.gather_objects(got) if each is not None)[node_name()]

    if hub.is_on_hub(place):
        return str(on_node(lambda to: hub.fetch(place)))
    if dist.on_main(lambda: readable(lambda: _is_weights(place))):
        return str(
            on_node(lambda to: _fetch(place, to, storage))
            if is_remote(place)
            else local_path(place)
        )
    try:  # collective: the newest whole checkpoint, or the one that is named
        _, places, only = find_run(place, [])
        found = open_to_look(places, only=only)
    except UserError as e:
        raise UserError(
            f"model.{key} ({place}) holds neither weights ({' or '.join(WEIGHTS_NAMES)}) nor a run's checkpoint: {e}"
        ) from e
    names = (
        found.reader.names() if folder is not None else {}
    )  # the node's other ranks read nothing
    wanted = {name: Wanted(name, "param", 0, math.prod(shape)) for name, shape in names.items()}
    found.reader.prepare(wanted.values())

    def write(to: Path) -> Path:
        state = {
            name: found.reader.read(*each).reshape(names[name]) for name, each in wanted.items()
        }
        return export_openclip(state, parse_saved(found.state["architecture"]), to)

    written = on_node(write)
    if dist.is_main():
        log(f"model.{key}: step {found.step} of {found.path}")
    return str(written)


def _is_weights(place: str) -> bool:
    """Whether it is a file or a folder of weights; else it is a run's."""
    if place.endswith(_SUFFIXES):
        return True
    if is_remote(place):
        return any(open_storage(place).exists(name) for name in WEIGHTS_NAMES)
    path = local_path(place)
    if path.is_dir():
        return any((path / name).exists() for name in WEIGHTS_NAMES)
    return path.suffix not in (".yaml", ".yml", ".json")


def holds_weights(place: str) -> bool:
    """Whether it is weights and nothing else: a file of them, an export's folder; not a run or its checkpoints."""
    if place.endswith(_SUFFIXES) or is_remote(place):
        return _is_weights(place)
    path = local_path(place)
    return path.is_dir() and not (path / "recipe.yaml").exists() and _is_weights(place)


def _fetch(place: str, folder: Path, storage: StorageConfig) -> Path:
    """A weights file, or an export's folder, from a URL. UserError, CheckpointError, OSError."""
    folder.mkdir()
    url, _, name = (
        place.rpartition("/") if place.endswith(_SUFFIXES) else (place.rstrip("/"), "", "")
    )
    there = open_storage(url)
    if there.exists(CONFIG_NAME):
        (folder / CONFIG_NAME).write_bytes(there.read_bytes(CONFIG_NAME))
    file = folder / (name or next(each for each in WEIGHTS_NAMES if there.exists(each)))
    try:
        with open_read(f"{url}/{file.name}", storage) as source, file.open("wb") as out:
            shutil.copyfileobj(source, out, storage.range_bytes)
    except FileNotFoundError as e:
        raise UserError(f"{place}: there is no such file; correct it") from e
    known = known_sha256(folder, file.name)
    if known is None:
        warn(
            f"{url}/{file.name} has no sha256 in a {CONFIG_NAME} beside it: it is taken as it has come"
        )
    elif known != sha256_of(file):
        raise CheckpointError(
            f"{url}/{file.name} does not have its sha256 ({CONFIG_NAME}): it has changed; export again"
        )
    return folder if not name else file


def known_sha256(folder: Path, name: str) -> str | None:
    """As the export's description has it; None: it says none. CheckpointError for a description that is no JSON."""
    try:
        content = (
            json.loads((folder / CONFIG_NAME).read_text())
            if (folder / CONFIG_NAME).exists()
            else {}
        )
    except ValueError as e:
        raise CheckpointError(f"{CONFIG_NAME} beside {name} is not JSON: {e}") from e
    known = content.get("sha256") if isinstance(content, dict) else None
    return known.get(name) if isinstance(known, dict) else None


# -- where a run's checkpoints are


def recipe_in(place: str) -> str | None:
    """The recipe that `place` is, or that a run's folder holds; None for a URL, or for checkpoints alone.

    UserError where there is nothing.
    """
    if is_remote(place):
        return None
    path = local_path(place)
    if path.is_dir():
        return str(path / "recipe.yaml") if (path / "recipe.yaml").exists() else None
    if not path.exists():
        raise UserError(
            f"{place}: no such file or folder; give a recipe, a run's folder, or a URL of checkpoints"
        )
    return (
        None if path.parent.name == "commit" and path.suffix == ".json" else place
    )  # one for each checkpoint


def find_run(place: str, overrides: list[str]) -> tuple[RunConfig | None, Places, CommitRef | None]:
    """What a recipe, a run's folder, or a place of checkpoints means: the recipe, None where it is in the checkpoints
    alone; where these are; which of them, if `place` names one. Collective. UserError where nothing was trained."""
    recipe = recipe_in(place)
    if recipe is None:
        return None, *places_of(place)
    config, here = load_config(recipe, overrides), local_path(place)
    folder = (
        here if (here / "checkpoints").is_dir() else config.run_dir
    ) / "checkpoints"  # it may have moved
    remote = open_storage(config.checkpoint.remote) if config.checkpoint.remote else None
    local = LocalStorage(folder) if folder.is_dir() else None
    if local is None and remote is None:
        raise UserError(
            f"{folder} is not there: train first (clip-train train ...), or correct run.dir or run.name"
        )
    return config, Places(local, remote), None
