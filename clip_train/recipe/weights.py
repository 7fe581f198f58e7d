"""Initial weights of a run: one rank of each node fetches them to the node's disk.

an export or a weights file       used as it is; from a URL: fetched, checked against its sha256
a run (recipe, folder, URL, ...)  parameters of its newest committed checkpoint, checked against
                                  the manifest
"""

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint.config import locate
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.restore import Resumed, Stores, open_read_only, stores_at
from clip_train.errors import CheckpointError, UserError, missing
from clip_train.models import hub
from clip_train.models.config import ModelConfig
from clip_train.models.files import (
    CONFIG_NAME,
    FOLDER_NAMES,
    TRANSFORMERS_CONFIGS,
    sha256_of,
)
from clip_train.models.loading import SUFFIXES, other_folder
from clip_train.models.lora import Lora
from clip_train.models.low_rank import merged
from clip_train.models.weights import base_digest, export_saved, initial_weights
from clip_train.processes import node_name
from clip_train.recipe.recipe import (
    Recipe,
    apply_overrides,
    check_config,
    load_config,
    read_recipe,
    without_removed,
)
from clip_train.storage.config import StorageConfig
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import is_remote, local_path, open_read, open_storage

LOGGER = logging.getLogger(__name__)
KEYS = ("init_from", "init_image_from", "init_text_from")
T = TypeVar("T")


@contextlib.contextmanager
def weights_here(
    config: ModelConfig, storage: StorageConfig, keys: Sequence[str] = KEYS
) -> Iterator[ModelConfig]:
    """Collective: `config` with places that this rank can open.

    Fetched files are in a temporary folder of each node until all ranks have left the block.
    UserError, CheckpointError, on all ranks.
    """
    places = config.model_dump(include=set(keys), exclude_none=True)
    if not places:
        yield config
        return
    fetches = dist.is_first_of_node()
    make = partial(tempfile.TemporaryDirectory, prefix="clip-train-", ignore_cleanup_errors=True)
    with contextlib.ExitStack() as cleanup:
        folder = _on_node(fetches, _readable, "TMPDIR", lambda: cleanup.enter_context(make()))
        here = {
            key: _place_here(f"model.{key} ({place})", place, Path(folder, key), fetches, storage)
            for key, place in places.items()
        }
        yield config.model_copy(update=here)
        dist.barrier()


def digest_of_base(config: Recipe) -> str | None:
    """Collective: the digest of the weights that adapters are trained on; None without adapters."""
    if config.model.lora is None:
        return None
    with weights_here(config.model, config.storage) as here:
        return dist.on_main(partial(base_digest, here, config.run.seed))


def _on_node(fetches: bool, fetch: Callable[..., T], *arguments: object) -> T:
    """Collective: call `fetch` on the rank of each node that `fetches`. Returns this node's
    result."""

    def fetch_here() -> tuple[str, T] | None:
        return (node_name(), fetch(*arguments)) if fetches else None

    results = dist.gather_objects(dist.agreed(fetch_here))  # (node, result), or None
    return dict(result for result in results if result is not None)[node_name()]


def _readable(what: str, action: Callable[..., T], *arguments: object) -> T:
    try:
        return action(*arguments)
    except (OSError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{what} cannot be read: {e}") from e


def _place_here(what: str, place: str, folder: Path, fetches: bool, storage: StorageConfig) -> str:
    """Collective: a path of this node. what: key and place, for messages. folder: for one place."""
    if hub.is_on_hub(place):
        return str(_on_node(fetches, _readable, what, hub.fetch, place))
    if dist.on_main(_readable, what, holds_weights, place, what):
        if not is_remote(place):
            return str(local_path(place))
        return str(_on_node(fetches, _readable, what, _fetch, place, folder, storage))
    try:  # the newest complete checkpoint, or the one that `place` names
        _, stores, only = find_run(place, [])
        checkpoint = open_read_only(stores, only=only)
    except UserError as e:
        raise UserError(
            f"{what} holds neither weights ({' or '.join(FOLDER_NAMES)}) nor a run's "
            f"checkpoint: {e}"
        ) from e
    check_has_base(what, place, checkpoint)
    # the node's other ranks read nothing
    like, read = checkpoint.reader.open_weights(here=fetches)
    architecture = checkpoint.state["architecture"]
    exported = _on_node(fetches, _readable, what, export_saved, like, architecture, folder, read)
    if dist.is_main():
        LOGGER.info(f"{what}: step {checkpoint.step} of {checkpoint.path}")
    return str(exported)


def check_has_base(what: str, place: str, checkpoint: Resumed) -> None:
    """UserError if the checkpoint has only adapters."""
    if checkpoint.state["architecture"].get("lora"):
        raise UserError(
            f"{what} is a run with adapters (model.lora), whose checkpoints lack the base model: "
            f"run clip-train export {place}, and give the folder that it writes"
        )


def place_mistakes(model: ModelConfig, *, must_exist: bool) -> list[UserError]:
    """The places of initial weights and teachers that no run could read.

    must_exist: local initial weights are needed, so they must exist on this machine.
    """
    mistakes: list[UserError] = []
    places = [(key, getattr(model, key)) for key in KEYS]
    # `ModelConfig.teacher_architecture` checks that a local teacher exists
    places += [("teacher", teacher.teacher) for teacher in model.teachers()]
    for key, place in places:
        if place is None:
            continue
        if hub.is_on_hub(place):
            try:
                hub.resolve(place)
            except UserError as e:
                mistakes.append(e)
        elif must_exist and key in KEYS and not is_remote(place) and not local_path(place).exists():
            what = f"model.{key} ({place}) does not exist"
            mistakes.append(missing(local_path(place), what, "correct the path"))
    return mistakes


def on_base(found: Resumed, state: dict[str, Tensor], config: Recipe | None) -> dict[str, Tensor]:
    """Collective: the state of a checkpoint, its adapters merged into their base, if it has any.

    The description of its model is then that of the plain model. config: names the base. UserError
    for another base, CheckpointError.
    """
    lora = found.state["architecture"].pop("lora", None)
    if lora is None:
        return state
    if config is None:
        raise UserError(
            f"{found.path} contains only adapters: export it by the run's recipe or folder, which "
            "names their base (model.init_from)"
        )
    with weights_here(config.model, config.storage) as here:
        digest = base_digest(here, config.run.seed)
        if digest != found.state["init_from"]:
            raise UserError(
                f"model.init_from ({config.model.init_from}) has the digest {digest}, and the "
                f"adapters in {found.path} were trained on {found.state['init_from']}; give the "
                "weights that the run began with"
            )
        base = initial_weights(here, config.run.seed).whole()
        return merged({**base, **state}, Lora.model_validate(lora))


def holds_weights(place: str, what: str | None = None) -> bool:
    """Whether the place is a file of weights, an export's folder, or on a hub. Otherwise it is a
    run. UserError for a folder with weights in a form that is not read.

    what: key and place, for the message.
    """
    if place.endswith(SUFFIXES) or hub.is_on_hub(place):
        return True
    folder = open_storage(place)
    if any(map(folder.exists, FOLDER_NAMES)):
        return True
    other = other_folder(folder.exists, place)
    if other is not None:
        raise UserError(f"{what or place} is {other}")
    return False


def _fetch(place: str, folder: Path, storage: StorageConfig) -> Path:
    """A weights file, or an export's folder, from a URL. UserError, CheckpointError, OSError.

    Verified by the sha256 in the export's description; without one, a warning says so.
    """
    folder.mkdir()
    is_file = place.endswith(SUFFIXES)
    if is_file:
        url, _, name = place.rpartition("/")
        store = open_storage(url)
    else:
        url = place.rstrip("/")
        store = open_storage(url)
        name = next(name for name in FOLDER_NAMES if store.exists(name))
    sha256 = None
    for config_name in (CONFIG_NAME, *TRANSFORMERS_CONFIGS):
        if store.exists(config_name):
            description = store.read_bytes(config_name)
            (folder / config_name).write_bytes(description)
            if config_name == CONFIG_NAME:
                sha256 = json.loads(description).get("sha256", {}).get(name)
    file = folder / name
    try:
        with open_read(f"{url}/{name}", storage) as source, file.open("wb") as out:
            shutil.copyfileobj(source, out, storage.range_bytes)
    except FileNotFoundError as e:
        raise UserError(f"{place}: this file does not exist; correct the URL") from e
    if sha256 is None:
        LOGGER.warning(
            f"{url}/{name} has no sha256 in a {CONFIG_NAME} beside it: it is not verified"
        )
    elif sha256 != sha256_of(file):
        raise CheckpointError(
            f"{url}/{name} does not have its sha256 ({CONFIG_NAME}): it has changed; export again"
        )
    return file if is_file else folder


# -- locating a run's checkpoints


def recipe_in(place: str) -> str | None:
    """The recipe at `place`, or in a run's folder. UserError if neither exists.

    None for a URL, or for checkpoints alone.
    """
    if is_remote(place):
        return None
    path = local_path(place)
    if path.is_dir():
        return str(path / "recipe.yaml") if (path / "recipe.yaml").exists() else None
    if not path.exists():
        raise UserError(
            f"{place}: no such file or folder; give a recipe, a run's folder, or a URL of "
            "checkpoints"
        )
    is_commit = path.parent.name == "commit" and path.suffix == ".json"  # of one checkpoint
    return None if is_commit else place


def find_run(place: str, overrides: list[str]) -> tuple[Recipe | None, Stores, CommitRef | None]:
    """Interpret a recipe, a run's folder, or a place of checkpoints.

    Returns the recipe (None if only the checkpoints have it), where the checkpoints are, and which
    of them if `place` names one. Collective. UserError if the run does not exist.
    """
    recipe = recipe_in(place)
    if recipe is None:
        root, only = dist.on_main(locate, place)
        return None, stores_at(root), only
    if local_path(place).is_dir():  # the run itself wrote its recipe, perhaps long ago
        raw = without_removed(read_recipe(recipe))
        config = check_config(apply_overrides(raw, overrides), recipe)
    else:
        config = load_config(recipe, overrides)
    folder = config.run_dir / "checkpoints"
    if (local_path(place) / "checkpoints").is_dir():  # the run's folder may have been moved
        folder = local_path(place) / "checkpoints"
    remote = open_storage(config.checkpoint.remote) if config.checkpoint.remote else None
    local = LocalStorage(folder) if folder.is_dir() else None
    if local is None and remote is None:
        raise UserError(
            f"{folder} does not exist: train first (clip-train train ...), or correct run.dir or "
            "run.name"
        )
    return config, Stores(local, remote), None
