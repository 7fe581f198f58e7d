"""Before training: do all ranks run the same code, on the same recipe? If not, an error on all of them."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from clip_train import dist
from clip_train.errors import UserError
from launcher.runtime.error_reports import leave_ranks, node_name

SOURCES = ("clip_train", "launcher")


def code_version() -> str:
    """Twelve hex digits over all sources of this project: a git commit does not know of changed files."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for package in SOURCES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """What has to be the same on all ranks beside the recipe: the code, and every package that it builds on."""
    found = {"clip-train's code": code_version(), "Python": platform.python_version()}
    try:
        needed = [line for line in requires("clip-train") or () if "extra ==" not in line]
    except PackageNotFoundError:  # run from its folder
        needed = ["torch"]
    for package in (re.match(r"[\w.-]+", line)[0] for line in needed):  # type: ignore[index]
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def agree(recipe: dict[str, Any]) -> None:
    """UserError on all ranks where one differs. recipe: as resolved, overrides included. Collective."""
    mine = {**versions(), "the recipe": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]}
    everyone = dist.gather_objects((node_name(), mine))
    if dist.is_main():
        leave_ranks([node for node, _ in everyone])
    first = everyone[0][1]
    other = next((rank for rank, (_, found) in enumerate(everyone) if found != first), None)
    if other is None:
        return
    node, found = everyone[other]
    told = []
    for what in first:
        if found[what] != first[what]:
            told.append(f"{what} is {first[what]} on rank 0 ({everyone[0][0]}), {found[what]} on rank {other} ({node})")
    if found["the recipe"] != first["the recipe"]:
        recipes = dist.gather_objects(recipe)
        told.append(", ".join(differences(recipes[0], recipes[other])))
    raise UserError(f"the ranks differ: {'; '.join(told)}; start all with the same line, from the same folder")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """`section.key: a against b` for every key that is not the same."""
    return [
        f"{section}.{key}: {one.get(section, {}).get(key)!r} against {other.get(section, {}).get(key)!r}"
        for section in sorted(one.keys() | other.keys())
        for key in sorted({**one.get(section, {}), **other.get(section, {})})
        if one.get(section, {}).get(key) != other.get(section, {}).get(key)
    ]
