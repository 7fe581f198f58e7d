"""Paths and URLs as users write them: `~`, `$VARIABLES` and links.

`clip_train.settings.Place` is the type of a recipe's key that holds one; `launcher.cli.arguments` has
the arguments of a command line.
"""

import os
import re
from pathlib import Path

from clip_train.errors import UserError

CACHES = ("simplecache", "filecache")  # `simplecache::URL` is one place (`storage/cached.py`)
_BETWEEN_SOURCES = re.compile("".join(rf"(?<!\b{cache})" for cache in CACHES) + "::")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expanded(place: str) -> str:
    """`place` with `~`, `~user`, `$NAME` and `${NAME}` replaced, as a shell would; each source, if
    several are joined by `::`.

    A `$` that belongs to the name of an existing file stays. UserError for a variable that is not
    set.
    """
    if "$" in place and not os.path.lexists(place):
        place = _VARIABLE.sub(_value, place)
    return "::".join(os.path.expanduser(source) for source in split_places(place))


def split_places(text: str) -> list[str]:
    """The places that `::` joins. A cache stays in front of its URL."""
    return _BETWEEN_SOURCES.split(text)


def _value(variable: re.Match[str]) -> str:
    value = os.environ.get(variable[1] or variable[2])
    if not value:
        raise UserError(
            f"{variable.string!r} has the variable {variable[0]}, which is not set here; set it, or "
            "write the path"
        )
    return value


def shipped(folder: str) -> Path:
    """A folder of files that come with the package: "recipes", "ds_configs" or "slurm".

    In an installation it is inside `clip_train` (setup.py). In a checkout, and in the frozen code
    of a Slurm job, it is beside `clip_train`.
    """
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def broken_link(path: Path) -> str | None:
    """A message if `path` or a folder above it is a link that leads nowhere, as to a disk that is
    not mounted; None otherwise."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            return f"{place} is a link to {os.readlink(place)}, which does not exist on this node"
    return None
