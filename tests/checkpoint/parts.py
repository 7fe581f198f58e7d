"""A made-up model's state, cut in any way, and checkpoints as seen by code that is not ours."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_train.task import Fragment

SHAPES = {
    "visual.conv1.weight": (5, 3, 2, 2),
    "ln.weight": (7,),
    "logit_scale": (1,),
    "odd|name": (3, 11),
}
SLOTS = ("param", "exp_avg", "exp_avg_sq")


def whole(seed: int) -> dict[tuple[str, str], Tensor]:
    """(name, slot) -> flat fp32, with values that a detour over text or a lower precision would change."""
    g = torch.Generator().manual_seed(seed)
    state = {
        (name, slot): torch.randn(torch.Size(shape).numel(), generator=g) * 1e-3
        for name, shape in SHAPES.items()
        for slot in SLOTS
    }
    state["ln.weight", "param"][:4] = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45])
    return state


def cut(state: dict[tuple[str, str], Tensor], rank: int, world_size: int) -> list[Fragment]:
    """This rank's share as ZeRO cuts it: all parameters end to end, divided regardless of their borders."""
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    fragments, begin = [], 0
    for name, shape in SHAPES.items():
        end = begin + torch.Size(shape).numel()
        first, last = max(begin, low), min(end, high)
        if first < last:
            tensors = {slot: state[name, slot][first - begin : last - begin] for slot in SLOTS}
            fragments.append(Fragment(name, shape, first - begin, tensors))
        begin = end
    return fragments


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def committed(folder: Path) -> dict[int, Path]:
    """step -> data folder of every checkpoint that is whole, by reading the files as their format says."""
    found = {}
    for marker in (
        sorted((folder / "commit").glob("e*-s*.json")) if (folder / "commit").is_dir() else []
    ):
        body: dict[str, Any] = json.loads(marker.read_bytes())
        data = folder / body["prefix"]
        manifest = (data / "_MANIFEST.json").read_bytes()
        assert hashlib.sha256(manifest).hexdigest() == body["manifest_sha256"]
        for entry in json.loads(manifest)["files"]:
            content = (data / entry["name"]).read_bytes()
            assert len(content) == entry["size"] and block_sums(content) == entry["blocks"]
        found[body["step"]] = data
    return found


def block_sums(content: bytes) -> list[str]:
    """sha256 of every 16 MiB."""
    return [
        hashlib.sha256(content[at : at + (16 << 20)]).hexdigest()
        for at in range(0, len(content), 16 << 20)
    ]


def rewrite(folder: Path, step: int, version: int) -> None:
    """A committed checkpoint that says it has format `version`."""
    (marker,) = (folder / "commit").glob(f"e*-s{step:010d}.json")
    commit = json.loads(marker.read_bytes())
    path = folder / commit["prefix"] / "_MANIFEST.json"
    manifest = {**json.loads(path.read_bytes()), "format": version}
    path.write_text(json.dumps(manifest))
    commit = {
        **commit,
        "format": version,
        "manifest_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    del commit["sha256"]
    body = json.dumps(commit, sort_keys=True, separators=(",", ":")).encode()
    commit["seal" if version < 3 else "sha256"] = hashlib.sha256(body).hexdigest()
    marker.write_text(json.dumps(commit))
