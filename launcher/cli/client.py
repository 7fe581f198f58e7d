"""The client of stores that a command line asks for: it must be known before the recipe's stores are
opened."""

import contextlib
from argparse import Namespace
from pathlib import Path
from typing import Any, get_args

from clip_train.errors import UserError
from clip_train.storage.config import Client
from clip_train.storage.urls import is_remote, local_path, use_client
from clip_train.yaml_text import YamlError, load_yaml

MOST_CHARACTERS = 1 << 20
KEY = "storage.client"


def choose_client(args: Namespace) -> None:
    """Use `storage.client` of the last override that sets it, else of the recipe, or of the run
    whose folder is named, in this process and in those that it starts."""
    use_client(_asked_client(args))


def _asked_client(args: Namespace) -> Client:
    """auto also stands for values that the recipe's checks will refuse."""
    client: Any = "auto"
    place = getattr(args, "recipe", None) or getattr(args, "place", None)
    if isinstance(place, str) and not is_remote(place):
        client = _client_in(local_path(place))
    for override in getattr(args, "overrides", ()):
        key, equals, text = override.partition("=")
        if key == KEY and equals:
            client = text.strip().strip("\"'")
    return client if client in get_args(Client) else "auto"


def _client_in(path: Path) -> Any:
    """The value in a recipe's file, or in the one of a run's folder; auto if there is none."""
    if path.is_dir():
        path = path / "recipe.yaml"
    if not path.is_file():
        return "auto"
    with contextlib.suppress(OSError, UnicodeError, YamlError, UserError), path.open() as file:
        recipe = load_yaml(file.read(MOST_CHARACTERS))
        storage = recipe.get("storage") if isinstance(recipe, dict) else None
        if isinstance(storage, dict):
            return storage.get("client", "auto")
    return "auto"
