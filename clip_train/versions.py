"""The oldest versions that are supported, and the newest that the tests have run with
(docs/versions.md).

Standard library only, and no recent syntax: an older Python has to read this file to print its
message.
"""

import platform
import re
from collections.abc import Iterator
from importlib import metadata

OLDEST = {"Python": "3.10", "torch": "2.13", "deepspeed": "0.19.8"}
# of `contrastive_step` and its losses, which need neither DeepSpeed nor the trainer
OLDEST_FOR_LIBRARY = "2.8"
NEWEST = {"Python": "3.13", "torch": "2.15", "deepspeed": "0.19.8"}


def version_tuple(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def installed(name: str) -> str | None:
    """The version of Python or of a package; None if the package is not installed."""
    if name == "Python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def too_old(name: str) -> Iterator[str]:
    """One message if what is installed is older than the oldest supported version."""
    found, oldest = installed(name), OLDEST[name]
    remedy = f"pip install -U '{name}>={oldest}'"
    if name == "Python":
        remedy = f"python{NEWEST[name]} -m venv .venv && .venv/bin/pip install ."
    if found is not None and version_tuple(found) < version_tuple(oldest):
        yield f"{name} ({found}) is too old, clip-train needs {oldest} or newer: {remedy}"
