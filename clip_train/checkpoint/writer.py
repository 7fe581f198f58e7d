"""From tensors in a training loop to a committed checkpoint, in separate steps.

`take_snapshot` is the only one that the training loop has to wait for: after it, training may change its
tensors. `write_rank` (every rank) and `commit` (rank 0, when all have written) need nothing but the snapshot.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_train.checkpoint import layout
from clip_train.checkpoint.layout import Commit, FileEntry, Manifest
from clip_train.errors import CheckpointError
from clip_train.protocols import Fragment
from clip_train.storage import Storage

_CHUNK = 16 << 20  # bytes hashed and written at a time
_HEADROOM = 64 << 20  # bytes left free beside a checkpoint: manifests, and whoever else writes there
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, in host memory and owned by nobody else."""

    step: int
    rank: int
    tensors: dict[str, Tensor]  # key as in the file -> contiguous CPU tensor
    shapes: dict[str, tuple[int, ...]]  # of the whole parameters that `tensors` holds pieces of
    state: dict[str, Any]  # the trainer's

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def take_snapshot(
    step: int,
    rank: int,
    fragments: Iterable[Fragment],
    rank_tensors: dict[str, Tensor],
    state: dict[str, Any],
    shared_tensors: dict[str, Tensor] | None = None,
) -> Snapshot:
    """Copy everything to host memory. ValueError or TypeError for what a checkpoint cannot hold."""
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for fragment in fragments:
        shape = tuple(int(n) for n in fragment.shape)
        if shapes.setdefault(fragment.name, shape) != shape:
            raise ValueError(f"{fragment.name}: two shapes, {shapes[fragment.name]} and {shape}")
        _check_lengths(fragment, shape)
        for slot, tensor in fragment.tensors.items():
            key = layout.fragment_key(fragment.name, slot, fragment.start)
            if key in tensors:
                raise ValueError(f"{fragment.name}: two fragments start at {fragment.start}")
            tensors[key] = _host_copy(tensor)
    for name, tensor in rank_tensors.items():
        tensors[layout.rank_tensor_key(name)] = _host_copy(tensor)
    for name, tensor in (shared_tensors or {}).items() if rank == 0 else ():
        tensors[layout.shared_tensor_key(name)] = _host_copy(tensor)
    return Snapshot(step, rank, tensors, shapes, layout.decode_state(layout.encode_state(state)))


def _check_lengths(fragment: Fragment, shape: tuple[int, ...]) -> None:
    total = torch.Size(shape).numel()
    for slot, tensor in fragment.tensors.items():
        if tensor.dim() != 1 or fragment.start < 0 or fragment.start + tensor.numel() > total:
            raise ValueError(
                f"{fragment.name}: {slot} of shape {tuple(tensor.shape)} at {fragment.start} is no range of "
                f"the parameter's {total} elements"
            )
    if len({t.numel() for t in fragment.tensors.values()}) > 1:
        raise ValueError(f"{fragment.name}: slots of different lengths at {fragment.start}")


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def free_bytes(folder: Path) -> int:
    """Free space on the disk of `folder`, which need not exist yet."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: Path, needed: int, free: int) -> None:
    """CheckpointError when `needed` bytes will not fit into `free`."""
    if needed + _HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {_HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or lower "
            "checkpoint.keep_last"
        )


def write_rank(storage: Storage, staging: Path, prefix: str, snapshot: Snapshot) -> list[FileEntry]:
    """Write this rank's files into the attempt's folder. OSError where the disk does not take them.

    staging: a local folder, on the storage's own disk if that is local: the file is written there, hashed on
    the way, fsynced, and only then published.
    """
    staging.mkdir(parents=True, exist_ok=True)
    name = layout.rank_file(snapshot.rank)
    local = staging / f"{prefix.replace('/', '+')}+{name}"
    try:
        size, sha256 = write_safetensors(local, snapshot.tensors, {"shapes": json.dumps(snapshot.shapes)})
        storage.put_file(local, f"{prefix}/{name}", move=True)
    finally:
        local.unlink(missing_ok=True)
    entries = [FileEntry(name, size, sha256, snapshot.rank)]
    body = {entry.name: {"size": entry.size, "sha256": entry.sha256} for entry in entries}
    storage.put_bytes(f"{prefix}/{layout.rank_manifest(snapshot.rank)}", json.dumps(body, indent=1).encode())
    return entries


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[int, str]:
    """A safetensors file, fsynced; returns its size in bytes and its sha256.

    The library's own writer is not used because it would have to be read back to be hashed.
    """
    # the widest first, so that every tensor is aligned to its element
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for key in order:
        tensor = tensors[key]
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as f:

        def put(data: bytes | memoryview) -> None:
            nonlocal size
            for i in range(0, len(data), _CHUNK):
                part = data[i : i + _CHUNK]
                digest.update(part)
                f.write(part)
            size += len(data)

        put(len(encoded).to_bytes(8, "little") + encoded)
        for key in order:
            if tensors[key].numel():
                put(tensors[key].reshape(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())
    return size, digest.hexdigest()


def commit(
    storage: Storage, prefix: str, snapshot: Snapshot, *, epoch: int, world_size: int, files: list[FileEntry]
) -> Commit:
    """Rank 0, once every rank has written: the manifest, then the marker that makes it a checkpoint.

    CheckpointError if a rank's file is not there as it was written, or if somebody else has committed this
    step; OSError where the disk does not take it.
    """
    for entry in files:
        try:
            size: int | str = storage.size(f"{prefix}/{entry.name}")
        except FileNotFoundError:
            size = "nothing"
        if size != entry.size:
            raise CheckpointError(
                f"rank {entry.rank} wrote {entry.size} bytes to {prefix}/{entry.name}, but rank 0 sees "
                f"{size} under {storage.url}: that folder must be one that all ranks share"
            )
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest = Manifest(snapshot.step, epoch, world_size, files, snapshot.state, created).to_bytes()
    storage.put_bytes(f"{prefix}/{layout.MANIFEST}", manifest)
    marker = Commit(epoch, snapshot.step, prefix, layout.sha256_of(manifest))
    if not storage.put_bytes(marker.ref.name, marker.to_bytes(), if_absent=True):
        raise CheckpointError(
            f"{storage.url}/{marker.ref.name} exists already: is another run writing to the same folder?"
        )
    return marker
