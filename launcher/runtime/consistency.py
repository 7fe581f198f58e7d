"""Before training: every rank compares its recipe and its code with rank 0's, through the store."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch.distributed import Store

from clip_train.errors import UserError
from launcher.runtime.verdict import node_name

SOURCES = ("clip_train", "launcher")
PACKAGES = ("torch", "deepspeed", "numpy", "pillow", "simplejpeg", "ftfy", "regex")


def code_version() -> str:
    """Twelve hex digits over all sources of this project: a git commit does not know of changed files."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for package in SOURCES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """What has to be the same on all ranks beside the recipe: the code, and what reads, augments and computes."""
    found = {"clip-train's code": code_version(), "Python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def check(store: Store, rank: int, recipe: dict[str, Any], seconds: float) -> None:
    """UserError on a rank that differs from rank 0. recipe: as resolved. seconds: to wait for rank 0."""
    here = flat({"": versions(), **recipe})
    if rank == 0:
        return store.set("recipe", json.dumps([node_name(), here]))
    store.wait(["recipe"], datetime.timedelta(seconds=seconds))
    node, first = json.loads(store.get("recipe"))
    found = differences(first, json.loads(json.dumps(here)))
    if found:
        raise UserError(
            f"this rank differs from rank 0 on {node}: {'; '.join(found)} here; start all with the same line, from "
            "the same folder"
        )


def flat(sections: dict[str, Any]) -> dict[str, Any]:
    """section -> key -> value as `section.key` -> value."""
    return {f"{section}.{key}".lstrip("."): value for section, keys in sections.items() for key, value in keys.items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """`key: a against b` for every key that is not the same."""
    return [
        f"{key}: {one.get(key)!r} against {other.get(key)!r}"
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]
