"""Checkpoints as seen by code that is not the package's: json, hashlib, and the format as its documentation has it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path


def damage(marker: bytes, read: Callable[[str], bytes]) -> str | None:
    """What is wrong with a committed checkpoint; None if it is whole. read: a file by its name under the root;
    LookupError where there is none."""
    try:
        body = json.loads(marker)
        folder = body["prefix"]
        manifest = read(f"{folder}/_MANIFEST.json")
        if hashlib.sha256(manifest).hexdigest() != body["manifest_sha256"]:
            return "another manifest"
        body = json.loads(manifest)
        names = [entry["name"] for entry in body["files"]]
        if names != [f"rank{rank:05d}.safetensors" for rank in range(body["world_size"])]:
            return f"{body['world_size']} ranks, and files {names}"
        pieces: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        shapes: dict[str, list[int]] = {}
        if hashlib.sha256(read(f"{folder}/_LAYOUT.bin")).hexdigest() != body["layout_sha256"]:
            return "another layout"
        for entry in body["files"]:
            content = read(f"{folder}/{entry['name']}")
            if len(content) != entry["size"] or block_sums(content) != entry["blocks"]:
                return f"{entry['name']} differs"
            _look_into(content, pieces, shapes)
    except LookupError as e:
        return f"{e} is missing"
    return _gap(pieces, shapes)


def block_sums(content: bytes) -> list[str]:
    """sha256 of every 16 MiB."""
    return [
        hashlib.sha256(content[at : at + (16 << 20)]).hexdigest()
        for at in range(0, len(content), 16 << 20)
    ]


def _look_into(
    content: bytes,
    pieces: dict[tuple[str, str], list[tuple[int, int]]],
    shapes: dict[str, list[int]],
) -> None:
    """Of a safetensors file: which elements of which parameter's slots it has."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    shapes |= json.loads(header.pop("__metadata__")["shapes"])
    for key, body in header.items():
        if not key.startswith("@"):
            slot, start, name = key.split("|", 2)
            pieces[name, slot].append((int(start), int(start) + math.prod(body["shape"])))


def _gap(
    pieces: dict[tuple[str, str], list[tuple[int, int]]], shapes: dict[str, list[int]]
) -> str | None:
    """Every slot must have every element of its parameter once."""
    slots = {slot for _, slot in pieces}
    for name, shape in shapes.items():
        for slot in slots:
            at = 0
            for start, end in sorted(pieces[name, slot]):
                if start != at:
                    return f"{slot} of {name}: {at} is followed by {start}"
                at = end
            if at != math.prod(shape):
                return f"{slot} of {name} ends at {at} of {math.prod(shape)}"
    return None


def damaged_in(folder: Path) -> list[str]:
    """Of all checkpoints that are committed in a folder, those that are not whole."""

    def read(name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except FileNotFoundError:
            raise LookupError(name) from None

    wrong = []
    for marker in sorted(folder.glob("commit/e*.json")):
        why = damage(marker.read_bytes(), read)
        if why is not None and marker.exists():  # else it has been removed since, its data after it
            wrong.append(f"{marker}: {why}")
    return wrong


def orphans_in(names: list[str], markers: list[bytes]) -> list[str]:
    """What does not belong to a committed checkpoint, of all that is stored."""
    body = [json.loads(marker) for marker in markers]
    folders = tuple(f"{each['prefix']}/" for each in body)
    refs = {f"e{each['epoch']:06d}-s{each['step']:010d}.json" for each in body}
    known = {f"{kind}/{ref}" for kind in ("commit", "metric") for ref in refs}
    return [
        name for name in names if not name.startswith(("lease/", *folders)) and name not in known
    ]


def newest_in(folder: Path) -> list[tuple[int, int]]:
    """(epoch, step) of every marker."""
    return [
        (body["epoch"], body["step"])
        for path in folder.glob("commit/e*.json")
        if (body := json.loads(path.read_bytes()))
    ]
