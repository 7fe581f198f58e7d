"""Commits a checkpoint once every rank has written its file, and reads committed ones.

Ranks learn about each other's files from the rank manifests in the store, never through the
collectives of the training. No torch.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clip_train.checkpoint import manifest
from clip_train.checkpoint.manifest import Commit, CommitRef, FileEntry, FormatError, Manifest
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage

J = TypeVar("J")
T = TypeVar("T")
READS = 3  # of what does not have its sha256: a bit may have flipped on the way
_PARALLEL_READS = 32  # of rank manifests
_POLL_SECONDS = (0.05, 2.0)  # between two listings of the rank manifests: at first, at most
LATE_SECONDS = 30.0  # a manifest may appear so late on NFS, which caches that a file is missing


class DamagedError(Exception):
    """A committed checkpoint is not whole, and why."""


class RefusedError(CheckpointError):
    """This save has failed for good."""


class FencedError(CheckpointError):
    """Another process has taken over this run's checkpoints."""


class SupersededError(RefusedError):
    """This save was never uploaded: a newer one took its place."""


def explain(e: BaseException) -> str:
    return str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}"


# -- saving


@dataclass
class SaveRequest:
    """One rank's part of one save."""

    step: int
    prefix: str  # the attempt's folder
    epoch: int
    rank: int
    world_size: int
    size: int  # bytes at the start of the shared memory: the safetensors file
    fragments: dict[str, Any]  # what the file holds and where: `snapshot.Plan.fragments`
    state: Any = None  # rank 0: the trainer's, encoded
    created: str = ""  # ISO 8601, UTC
    scores: dict[CommitRef, float] = field(default_factory=dict)  # the evaluations of `keep_best`
    since: float = field(default_factory=time.monotonic)  # seconds
    entry: FileEntry | None = None  # once it is written, as is
    path: Path = Path()  # of the file on this rank's disk


def put_rank_manifest(store: Storage, request: SaveRequest, error: Exception | None = None) -> None:
    """Write this rank's manifest: its file and fragments, or why there is none. OSError."""
    body: dict[str, Any] = {"rank": request.rank, "step": request.step}
    if error is not None:
        body |= {"error": explain(error), "superseded": isinstance(error, SupersededError)}
    else:
        assert request.entry is not None
        body |= {"file": asdict(request.entry), "fragments": request.fragments}
    name = manifest.rank_manifest_name(request.prefix, request.rank)
    store.put_bytes(name, manifest.add_checksum(body))


def commit(
    store: Storage,
    request: SaveRequest,
    check_fence: Callable[[], None],
    token: str,
    end: Callable[[], float],
) -> str:
    """On rank 0: wait for all ranks' manifests, then write layout, manifest and marker.

    Returns the folder of the attempt that is committed.
    check_fence: raises FencedError if another process has taken over. end: when to stop waiting
    (`time.monotonic`).
    FencedError, RefusedError; OSError or CheckpointError for failures that may pass.
    """
    try:
        bodies = _rank_manifests(store, request, end)
        files = [FileEntry.from_json(body["file"]) for body in bodies]
        check_sizes(store, request.prefix, files)
    except DamagedError as e:
        raise CheckpointError(f"{store.url}: {e}") from e
    layout = manifest.build_layout([body["fragments"] for body in bodies])
    whole = Manifest(
        step=request.step,
        epoch=request.epoch,
        world_size=request.world_size,
        files=files,
        layout_sha256=manifest.sha256_of(layout),
        state=request.state,
        created=request.created,
    )
    data = whole.to_bytes()
    store.put_bytes(f"{request.prefix}/{manifest.LAYOUT}", layout)
    store.put_bytes(f"{request.prefix}/{manifest.MANIFEST}", data)
    check_fence()
    marker = Commit(request.epoch, request.step, request.prefix, manifest.sha256_of(data), token)
    if store.put_bytes(marker.ref.name, marker.to_bytes(), if_absent=True):
        return request.prefix
    # a checkpoint writer of this process may have committed this step and died before it said so
    there = read_commit(store, marker.ref)
    if there.token != token:
        raise FencedError(f"{store.url}/{marker.ref.name} has been committed by another process")
    return there.prefix


def _rank_manifests(
    store: Storage, request: SaveRequest, end: Callable[[], float]
) -> list[dict[str, Any]]:
    """All rank manifests, by rank.

    RefusedError if one has an error or is missing at `end`; DamagedError, OSError.
    """
    bodies: dict[int, dict[str, Any]] = {}
    missing = {
        manifest.rank_manifest_name(request.prefix, rank): rank
        for rank in range(request.world_size)
    }
    read = partial(read_small, store, parse=manifest.parse_checked)
    pause, longest_pause = _POLL_SECONDS
    while True:
        late = time.monotonic() > end()
        listed = [entry.name for entry in store.list(request.prefix) if entry.name in missing]
        read_bodies = in_parallel(read, listed, _PARALLEL_READS)
        for name, body in zip(listed, read_bodies, strict=True):
            rank = missing.pop(name)
            if "error" in body:
                kind = SupersededError if body["superseded"] else RefusedError
                raise kind(f"rank {rank}: {body['error']}")
            bodies[rank] = body
        if not missing:
            return [bodies[rank] for rank in range(request.world_size)]
        if late:
            absent = ", ".join(map(str, list(missing.values())[:8]))
            raise RefusedError(
                f"no manifest of ranks {absent} under {store.url}/{request.prefix}: do all ranks "
                "share this place?"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, longest_pause)


# -- reading


@contextlib.contextmanager
def readable(url: str) -> Iterator[None]:
    """CheckpointError if it cannot be determined what a store holds."""
    try:
        yield
    except FormatError as e:
        raise CheckpointError(
            f"the newest checkpoint under {url} is not for this version: {e}"
        ) from e
    except OSError as e:
        raise CheckpointError(
            f"cannot read the checkpoints under {url}: {type(e).__name__}: {e}. This is not "
            "taken for a damaged or missing checkpoint; mend it, or set checkpoint.resume"
        ) from e


@contextlib.contextmanager
def writable(storage: Storage) -> Iterator[None]:
    """CheckpointError where the store cannot be written to."""
    try:
        yield
    except OSError as e:
        why = f"checkpoints cannot be written to {storage.url}: {explain(e)}"
        raise CheckpointError(why) from e


@dataclass(frozen=True)
class Found:
    """A committed checkpoint: its small files, each verified when it was read."""

    commit: Commit
    manifest: Manifest
    manifest_bytes: bytes = b""  # as stored
    layout: bytes = b""  # LAYOUT, as stored
    url: str = ""  # of the store they were read from


def list_commits(storage: Storage) -> list[CommitRef]:
    """All commit markers, newest first. OSError."""
    refs = [CommitRef.parse(entry.name) for entry in storage.list("commit")]
    return sorted((ref for ref in refs if ref is not None), reverse=True)


def read_small(storage: Storage, name: str, parse: Callable[[bytes], T]) -> T:
    """`parse` of a small file; a ValueError may be a bit that flipped on the way: it is read again.

    DamagedError, FormatError, OSError.
    """
    why = ""
    for _ in range(READS):
        try:
            return parse(storage.read_bytes(name))
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except ValueError as e:
            why = str(e)
    raise DamagedError(f"{name} is not readable: {why}")


def read_commit(storage: Storage, ref: CommitRef) -> Commit:
    """The content of the marker `ref`. DamagedError, FormatError, OSError."""
    marker = read_small(storage, ref.name, Commit.from_bytes)
    if marker.ref != ref:
        raise DamagedError(f"{ref.name} is the marker of epoch {marker.epoch}, step {marker.step}")
    return marker


def prefix_of(storage: Storage, ref: CommitRef) -> str | None:
    """The folder that a marker names; None if this version cannot read the marker. OSError."""
    try:
        return read_commit(storage, ref).prefix
    except (DamagedError, FormatError):
        return None


def read_found(storage: Storage, ref: CommitRef) -> Found:
    """The marker, the manifest and the layout that have their sha256; all files have their size.

    DamagedError, FormatError, OSError.
    """
    marker = read_commit(storage, ref)
    check = partial(manifest.verified, sha256=marker.manifest_sha256, where="its commit marker")
    name = f"{marker.prefix}/{manifest.MANIFEST}"
    data = read_small(storage, name, check)
    try:
        whole = Manifest.from_bytes(data)
    except ValueError as e:
        raise DamagedError(f"{name} is not readable: {e}") from e
    check = partial(manifest.verified, sha256=whole.layout_sha256, where="the manifest")
    layout = read_small(storage, f"{marker.prefix}/{manifest.LAYOUT}", check)
    check_sizes(storage, marker.prefix, whole.files)
    return Found(marker, whole, data, layout, storage.url)


def copy_commit(found: Found, target: Storage) -> None:
    """Commit a checkpoint in `target`, which has its data. OSError."""
    prefix = found.commit.prefix
    target.put_bytes(f"{prefix}/{manifest.LAYOUT}", found.layout)
    target.put_bytes(f"{prefix}/{manifest.MANIFEST}", found.manifest_bytes)
    target.put_bytes(found.commit.ref.name, found.commit.to_bytes())


def check_sizes(storage: Storage, prefix: str, files: Sequence[FileEntry]) -> None:
    """DamagedError for the first file that is missing or has another size; OSError."""
    sizes = {entry.name: entry.size for entry in storage.list(prefix)}
    for entry in files:
        name = f"{prefix}/{entry.name}"
        if name not in sizes:
            raise DamagedError(f"{name} is missing")
        if sizes[name] != entry.size:
            raise DamagedError(f"{name} has {sizes[name]} bytes instead of {entry.size}")


def in_parallel(action: Callable[[J], T], jobs: Sequence[J], workers: int) -> Iterator[T]:
    """The results of the jobs, in their order, `workers` at a time; the first error ends it."""
    pool = ThreadPoolExecutor(min(workers, max(len(jobs), 1)))
    try:
        yield from pool.map(action, jobs)
    finally:
        pool.shutdown(cancel_futures=True)
