"""From "every rank's file is there" to "it is a checkpoint", and the reading of what is committed. No torch.

Ranks learn of each other's files through their manifests in the store, never through the training's collectives.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from clip_train.checkpoint import manifest
from clip_train.checkpoint.manifest import Commit, CommitRef, FileEntry, FormatError, Manifest
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage

T = TypeVar("T")
READS = 3  # of what does not have its sha256: the bit may have flipped on the way
_PARALLEL_READS = 32  # of rank manifests
_POLL_SECONDS = (0.05, 2.0)  # between looks for the other ranks' manifests: at first, at most
LATE_SECONDS = (
    30.0  # for a manifest to show after all ranks have written it: NFS caches what is not there
)


class DamagedError(Exception):
    """A committed checkpoint that is not whole, and why."""


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
    size: int  # bytes, at the start of the shared memory: a safetensors file as it will be
    fragments: dict[str, Any]  # what it holds and where: `snapshot.Plan.fragments`
    state: Any = None  # rank 0: the trainer's, encoded
    created: str = ""  # ISO 8601, UTC: the same bytes whoever repeats it
    in_memory: bool = True  # False: a repeated one, which the disk has
    repeated: bool = (
        False  # a writer before has begun it: what it finished is there under the same name
    )
    since: float = field(
        default_factory=time.monotonic
    )  # seconds, by the clock that all processes here have
    entry: FileEntry | None = None  # once written
    committed: str = (
        ""  # rank 0: the attempt that is; an earlier one of this process may have been first
    )

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.epoch, self.step)


def put_rank_manifest(store: Storage, request: SaveRequest, error: Exception | None = None) -> None:
    """This rank's manifest: its file and fragments, or why there is none. OSError."""
    body: dict[str, Any] = {"rank": request.rank, "step": request.step}
    if error is not None:
        body |= {"error": explain(error), "superseded": isinstance(error, SupersededError)}
    else:
        assert request.entry is not None
        body |= {"file": asdict(request.entry), "fragments": request.fragments}
    store.put_bytes(
        manifest.rank_manifest_name(request.prefix, request.rank), manifest.add_checksum(body)
    )


def written_before(store: Storage, request: SaveRequest) -> FileEntry | None:
    """The file of an attempt that is repeated, where the writer before has finished it. OSError."""
    try:
        body = read_checked(store, manifest.rank_manifest_name(request.prefix, request.rank))
        entry = FileEntry.from_json(body["file"])
        return entry if store.size(f"{request.prefix}/{entry.name}") == entry.size else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def commit(
    store: Storage,
    request: SaveRequest,
    check_fence: Callable[[], None],
    token: str,
    end: Callable[[], float],
) -> None:
    """Rank 0, when all ranks' manifests are there: layout, manifest, fence check, marker.

    check_fence: FencedError where another process has taken over. end: when to wait no longer (`time.monotonic`).
    FencedError, RefusedError; OSError or CheckpointError for what may go better the next time.
    """
    found = _rank_manifests(store, request, end)
    files = [FileEntry.from_json(body["file"]) for body in found]
    try:
        check_sizes(store, request.prefix, files)
    except DamagedError as e:
        raise CheckpointError(f"{store.url}: {e}") from e
    layout = manifest.build_layout([body["fragments"] for body in found])
    sha256 = manifest.sha256_of(layout)
    whole = Manifest(
        request.step,
        request.epoch,
        request.world_size,
        files,
        sha256,
        request.state,
        request.created,
    )
    data = whole.to_bytes()
    store.put_bytes(f"{request.prefix}/{manifest.LAYOUT}", layout)
    store.put_bytes(f"{request.prefix}/{manifest.MANIFEST}", data)
    check_fence()
    marker = Commit(request.epoch, request.step, request.prefix, manifest.sha256_of(data), token)
    request.committed = request.prefix
    if not store.put_bytes(request.ref.name, marker.to_bytes(), if_absent=True):
        there = read_commit(store, request.ref)
        if there.token != token:
            raise FencedError(
                f"{store.url}/{request.ref.name} has been committed by another process"
            )
        request.committed = there.prefix


def _rank_manifests(
    store: Storage, request: SaveRequest, end: Callable[[], float]
) -> list[dict[str, Any]]:
    """All ranks', in their order. RefusedError where a rank has failed, or has written none by `end`; OSError."""
    found: dict[int, dict[str, Any]] = {}

    def read(rank: int) -> None:
        try:
            body = read_checked(store, manifest.rank_manifest_name(request.prefix, rank))
        except FileNotFoundError:
            return
        except ValueError as e:
            raise CheckpointError(f"the manifest of rank {rank} is not readable: {e}") from e
        if "error" in body:
            raise (SupersededError if body["superseded"] else RefusedError)(
                f"rank {rank}: {body['error']}"
            )
        found[rank] = body

    missing = {
        manifest.rank_manifest_name(request.prefix, rank): rank
        for rank in range(request.world_size)
    }
    pause, most = _POLL_SECONDS
    while True:
        late = time.monotonic() > end()
        shown = [
            missing[entry.name] for entry in store.list(request.prefix) if entry.name in missing
        ]
        for _ in in_parallel(read, shown, _PARALLEL_READS):
            pass
        missing = {name: rank for name, rank in missing.items() if rank not in found}
        if not missing:
            return [found[rank] for rank in range(request.world_size)]
        if late:
            ranks = ", ".join(map(str, [*missing.values()][:8]))
            raise RefusedError(
                f"no manifest of ranks {ranks} under {store.url}/{request.prefix}: is it a place that all ranks share?"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, most)


# -- reading


def readable(storage: Storage, action: Callable[[Storage], T]) -> T:
    """`action(storage)`; CheckpointError where it cannot be found out what is there."""
    try:
        return action(storage)
    except FormatError as e:
        raise CheckpointError(
            f"the newest checkpoint under {storage.url} is not for this version: {e}"
        ) from e
    except OSError as e:
        raise CheckpointError(
            f"cannot read the checkpoints under {storage.url}: {type(e).__name__}: {e}. This is not taken "
            "for a damaged or missing checkpoint; mend it, or set checkpoint.resume"
        ) from e


@dataclass(frozen=True)
class Found:
    """A checkpoint as its small files describe it."""

    commit: Commit
    manifest: Manifest


def list_commits(storage: Storage) -> list[CommitRef]:
    """All commit markers, newest first. OSError."""
    refs = {CommitRef.parse(entry.name) for entry in storage.list("commit")}
    return sorted((ref for ref in refs if ref is not None), reverse=True)


def read_checked(storage: Storage, name: str) -> dict[str, Any]:
    """A small JSON file. FileNotFoundError; ValueError where it is damaged; FormatError; OSError."""
    return _read_again(storage, name, manifest.parse_checked)


def _read_again(storage: Storage, name: str, parse: Callable[[bytes], T]) -> T:
    for tries in itertools.count(1):
        try:
            return parse(storage.read_bytes(name))
        except ValueError:
            if tries >= READS:
                raise
    raise AssertionError("unreachable")


def read_commit(storage: Storage, ref: CommitRef) -> Commit:
    """The content of the marker `ref`. DamagedError, FormatError, OSError."""
    try:
        found = _read_again(storage, ref.name, Commit.from_bytes)
    except FileNotFoundError:
        raise DamagedError(f"{ref.name} is gone") from None
    except ValueError as e:
        raise DamagedError(f"{ref.name} is not readable: {e}") from e
    if found.ref != ref:
        raise DamagedError(f"{ref.name} is the marker of epoch {found.epoch}, step {found.step}")
    return found


def prefix_of(storage: Storage, ref: CommitRef) -> str | None:
    """The folder that a marker names; None if the marker is not readable by this version. OSError."""
    try:
        return read_commit(storage, ref).prefix
    except (DamagedError, FormatError):
        return None


def read_found(storage: Storage, ref: CommitRef) -> Found:
    """The marker and the manifest that it vouches for. DamagedError, FormatError, OSError."""
    marker = read_commit(storage, ref)
    name = f"{marker.prefix}/{manifest.MANIFEST}"
    data = read_with_sha256(storage, name, marker.manifest_sha256, "in its commit marker")
    try:
        return Found(marker, Manifest.from_bytes(data))
    except ValueError as e:
        raise DamagedError(f"{name}: {e}") from e


def read_layout(storage: Storage, found: Found) -> bytes:
    """LAYOUT as it was written. DamagedError, OSError."""
    name = f"{found.commit.prefix}/{manifest.LAYOUT}"
    return read_with_sha256(storage, name, found.manifest.layout_sha256, "in the manifest")


def read_with_sha256(storage: Storage, name: str, sha256: str, where: str) -> bytes:
    """The whole of a small file. DamagedError, OSError."""

    def verified(data: bytes) -> bytes:
        if manifest.sha256_of(data) != sha256:
            raise ValueError(f"does not have the sha256 {where}")
        return data

    try:
        return _read_again(storage, name, verified)
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    except ValueError as e:
        raise DamagedError(f"{name}: {e}") from e


def copy_commit(source: Storage, target: Storage, found: Found) -> None:
    """When `target` has all files of a checkpoint of `source`: commit it there too. DamagedError, OSError."""
    prefix, of = found.commit.prefix, found.commit
    target.put_bytes(f"{prefix}/{manifest.LAYOUT}", read_layout(source, found))
    name = f"{prefix}/{manifest.MANIFEST}"
    target.put_bytes(
        name, read_with_sha256(source, name, of.manifest_sha256, "in its commit marker")
    )
    target.put_bytes(of.ref.name, of.to_bytes())


def check_sizes(storage: Storage, prefix: str, files: Sequence[FileEntry]) -> None:
    """DamagedError for the first file that is not there in its size; OSError."""
    sizes = {entry.name: entry.size for entry in storage.list(prefix)}
    for entry in files:
        name = f"{prefix}/{entry.name}"
        if sizes.get(name) != entry.size:
            there = (
                f"has {sizes[name]} bytes instead of {entry.size}"
                if name in sizes
                else "is missing"
            )
            raise DamagedError(f"{name} {there}")


def in_parallel(action: Callable[[T], object], jobs: Sequence[T], workers: int) -> Iterator[T]:
    """Each job when it is done, in their order, `workers` at a time; the first error ends it."""
    pool = ThreadPoolExecutor(min(workers, max(len(jobs), 1)))
    try:
        for job, _ in zip(jobs, pool.map(action, jobs), strict=True):
            yield job
    finally:
        pool.shutdown(cancel_futures=True)
