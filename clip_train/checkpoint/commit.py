"""The protocol of commits: who may write, how a checkpoint is committed, how it is read. No torch.

Every writer takes the next epoch. Only the writer with the highest epoch may commit. Rank 0 commits
a checkpoint once every rank has written its file. Ranks learn about each other's files from the
rank manifests in the store, never through collectives.
"""

import contextlib
import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple, TypeVar

from clip_train.checkpoint import manifest
from clip_train.checkpoint.manifest import Commit, CommitRef, FileEntry, FormatError, Manifest
from clip_train.errors import CheckpointError, ClipTrainError
from clip_train.storage.base import Storage

J = TypeVar("J")
T = TypeVar("T")
READS = 3  # of a file whose sha256 does not match: a bit may have flipped on the way
_PARALLEL_READS = 32  # of rank manifests
# between two listings of the rank manifests
_FIRST_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0


class DamagedError(CheckpointError):
    """A committed checkpoint is damaged: the message says which file, and how."""


class SaveFailedError(CheckpointError):
    """This save has failed for good."""


class FencedError(CheckpointError):
    """Another process has taken over this run's checkpoints."""


class SupersededError(SaveFailedError):
    """This save was never uploaded: a newer one took its place."""


def error_text(e: BaseException) -> str:
    """An error for a message to the user; with its type if it is not this program's own."""
    return str(e) if isinstance(e, ClipTrainError) else f"{type(e).__name__}: {e}"


# -- who may write


class Lease(NamedTuple):
    """The right to write."""

    epoch: int
    token: str  # unique to the process that took it


NO_LEASE = Lease(0, "")


def epochs(storage: Storage) -> list[int]:
    """The epochs of all leases, ascending. OSError."""
    matches = [manifest.LEASE_NAME.fullmatch(entry.name) for entry in storage.list("lease")]
    return sorted(int(match[1]) for match in matches if match)


def acquire(storage: Storage, others: Sequence[Storage] = ()) -> Lease:
    """Take the epoch after the highest in `storage` and `others`. Processes that race for it get
    different epochs.

    The lease is also written to `others`, for processes that cannot reach `storage`.
    CheckpointError if the store is not writable.
    """
    taken_epochs = [-1]
    with writable(storage):
        for store in (storage, *others):
            taken_epochs += epochs(store)
            taken_epochs += [ref.epoch for ref in list_commits(store)]
        body = {
            "token": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        for epoch in itertools.count(max(taken_epochs) + 1):
            name = manifest.lease_name(epoch)
            data = manifest.add_checksum({**body, "epoch": epoch})
            if storage.put_bytes(name, data, if_absent=True):
                break
    for store in others:
        with contextlib.suppress(OSError):
            store.put_bytes(name, data)
    return Lease(epoch, str(body["token"]))


def check_lease(storage: Storage, lease: Lease) -> None:
    """FencedError if another process has taken a higher epoch; OSError.

    On a server that ignores If-None-Match, another process may have taken the same epoch; the token
    distinguishes them.
    """
    epoch = max([lease.epoch, *epochs(storage)])  # the highest
    holder = "another process"
    token = lease.token
    try:
        content = read_small(storage, manifest.lease_name(epoch), manifest.parse_checked)
        token = content["token"]
        holder = f"process {content['pid']} on {content.get('host')} since {content.get('since')}"
    except (DamagedError, KeyError):
        pass
    except FormatError:
        holder = "another process, of a newer clip-train,"
        token = ""
    if epoch > lease.epoch or token != lease.token:
        raise FencedError(
            f"{holder} writes to {storage.url} now (its epoch is {epoch}, this process's is "
            f"{lease.epoch}), so this process may not commit there any more: stop one of the two, "
            "or give them different run.name and checkpoint.remote"
        )


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
    fragments: dict[str, Any]  # the content of the file: `storage.tensors.FilePlan.fragments`
    state: Any = None  # rank 0: the trainer's state, encoded
    created: str = ""  # ISO 8601, UTC
    scores: dict[CommitRef, float] | None = None  # rank 0: the evaluations of `keep_best`
    since: float = field(default_factory=time.monotonic)  # seconds: when the snapshot was taken
    entry: FileEntry | None = None  # the file, once it is on the local disk


def put_rank_manifest(
    store: Storage, request: SaveRequest, error: BaseException | None = None
) -> None:
    """Write this rank's manifest: its file and fragments, or the reason why they are missing.
    OSError."""
    body: dict[str, Any] = {"rank": request.rank, "step": request.step}
    if error is not None:
        body |= {"error": error_text(error), "superseded": isinstance(error, SupersededError)}
    else:
        assert request.entry is not None
        body |= {"file": asdict(request.entry), "fragments": request.fragments}
    name = manifest.rank_manifest_name(request.prefix, request.rank)
    store.put_bytes(name, manifest.add_checksum(body))


def commit_checkpoint(
    store: Storage, request: SaveRequest, lease: Lease, timeout_seconds: float
) -> str:
    """On rank 0: wait for all ranks' manifests, then write layout, manifest and marker.

    Returns the URL of the committed attempt. timeout_seconds: how long to wait for the manifests,
    counted from the snapshot. FencedError, SaveFailedError; OSError or CheckpointError for failures
    that may be temporary.
    """
    prefix = request.prefix
    bodies = _rank_manifests(store, prefix, request.world_size, request.since + timeout_seconds)
    files = [FileEntry(**body["file"]) for body in bodies]
    check_sizes(store, prefix, files)
    layout = manifest.build_layout([body["fragments"] for body in bodies])
    checkpoint = Manifest(
        step=request.step,
        epoch=request.epoch,
        world_size=request.world_size,
        files=files,
        layout_sha256=manifest.sha256_of(layout),
        state=request.state,
        created=request.created,
    )
    data = manifest.add_checksum(asdict(checkpoint))
    store.put_bytes(f"{prefix}/{manifest.LAYOUT}", layout)
    store.put_bytes(f"{prefix}/{manifest.MANIFEST}", data)
    # Each store is asked for its own lease, so that local commits continue while the remote store
    # is down. A commit that comes too late sorts below the successor's.
    check_lease(store, lease)
    ref = CommitRef(request.epoch, request.step)
    marker = Commit(*ref, prefix, manifest.sha256_of(data), lease.token)
    if not store.put_bytes(ref.name, manifest.add_checksum(asdict(marker)), if_absent=True):
        # a writer of this process may have committed this step and died before reporting it
        committed = read_commit(store, ref)
        if committed.token != lease.token:
            raise FencedError(f"{store.url}/{ref.name} has been committed by another process")
        prefix = committed.prefix
    return f"{store.url}/{prefix}"


def _rank_manifests(
    store: Storage, prefix: str, world_size: int, end: float
) -> list[dict[str, Any]]:
    """All rank manifests of an attempt, in the order of ranks. end: when waiting ends, in
    `time.monotonic`.

    SaveFailedError if a manifest has an error or is never written; OSError.
    """
    bodies: dict[int, dict[str, Any]] = {}
    missing = {manifest.rank_manifest_name(prefix, rank): rank for rank in range(world_size)}
    read = partial(read_small, store, parse=manifest.parse_checked)
    pause = _FIRST_POLL_SECONDS
    while True:
        # read before the listing, so that a manifest that came in time is seen
        late = time.monotonic() > end
        listed = [entry.name for entry in store.list(prefix) if entry.name in missing]
        read_bodies = in_parallel(read, listed, _PARALLEL_READS)
        for name, body in zip(listed, read_bodies, strict=True):
            rank = missing.pop(name)
            if "error" in body:
                kind = SupersededError if body["superseded"] else SaveFailedError
                raise kind(f"rank {rank}: {body['error']}")
            bodies[rank] = body
        if not missing:
            return [bodies[rank] for rank in range(world_size)]
        if late:
            absent = ", ".join(map(str, list(missing.values())[:8]))
            raise SaveFailedError(
                f"no manifest of ranks {absent} under {store.url}/{prefix}: do all ranks "
                "share this place?"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)


# -- reading


@contextlib.contextmanager
def readable(url: str) -> Iterator[None]:
    """CheckpointError if the contents of a store cannot be determined."""
    try:
        yield
    except FormatError as e:
        raise CheckpointError(
            f"the newest checkpoint under {url} is not for this version: {e}"
        ) from e
    except OSError as e:
        raise CheckpointError(
            f"cannot read the checkpoints under {url}: {type(e).__name__}: {e}. This is not "
            "taken for a damaged or missing checkpoint; correct it, or set checkpoint.resume"
        ) from e


@contextlib.contextmanager
def writable(storage: Storage) -> Iterator[None]:
    """CheckpointError if the store is not writable."""
    try:
        yield
    except OSError as e:
        remedy = "make it writable, or choose another run.dir or checkpoint.remote"
        message = f"checkpoints cannot be written to {storage.url}: {error_text(e)}; {remedy}"
        raise CheckpointError(message) from e


@dataclass(frozen=True)
class CommittedCheckpoint:
    """The small files of a committed checkpoint, each verified when it was read."""

    ref: CommitRef
    commit: Commit
    manifest: Manifest
    layout: bytes  # LAYOUT
    url: str = ""  # of the store that they were read from


def list_commits(storage: Storage) -> list[CommitRef]:
    """All commit markers, newest first. OSError."""
    refs = [CommitRef.parse(entry.name) for entry in storage.list("commit")]
    return sorted((ref for ref in refs if ref is not None), reverse=True)


def read_small(
    storage: Storage,
    name: str,
    parse: Callable[[bytes], T],
    start: int = 0,
    end: int | None = None,
) -> T:
    """Read a small file, or the bytes [start, end) of a file, and return `parse` of them.

    If `parse` raises a ValueError, which a bit flipped in transit can cause, they are read again.
    DamagedError, FormatError, OSError.
    """
    problem = ""
    for _ in range(READS):
        try:
            return parse(storage.read_bytes(name, start, end))
        except FileNotFoundError:
            raise DamagedError(f"{storage.url}/{name} is missing") from None
        except (ValueError, RecursionError) as e:  # recursion: brackets nested thousands deep
            problem = str(e)
    raise DamagedError(f"{storage.url}/{name} is not readable: {problem}")


def read_commit(storage: Storage, ref: CommitRef) -> Commit:
    """The content of the marker `ref`. DamagedError, FormatError, OSError."""
    marker = read_small(storage, ref.name, lambda data: Commit(**manifest.parse_checked(data)))
    if manifest.parse_prefix(marker.prefix) != ref:
        raise DamagedError(f"{storage.url}/{ref.name} names the folder {marker.prefix!r}")
    return marker


def prefix_of(storage: Storage, ref: CommitRef) -> str | None:
    """The folder that a marker names; None if this version cannot read the marker. OSError."""
    try:
        return read_commit(storage, ref).prefix
    except (DamagedError, FormatError):
        return None


def read_checkpoint(storage: Storage, ref: CommitRef) -> CommittedCheckpoint:
    """Read the marker, the manifest and the layout, check their sha256, and check the size of every
    file.

    DamagedError, FormatError, OSError.
    """
    marker = read_commit(storage, ref)

    name = f"{marker.prefix}/{manifest.MANIFEST}"
    check = partial(manifest.verified, sha256=marker.manifest_sha256)
    data = read_small(storage, name, check)
    try:
        content = Manifest(**manifest.check_format(json.loads(data)))
        if len(manifest.blocks_of(content.files)) != content.world_size:
            raise ValueError(f"it has {len(content.files)} files, not {content.world_size}")
    except (ValueError, RecursionError) as e:
        raise DamagedError(f"{storage.url}/{name} is not readable: {e}") from e
    check = partial(manifest.verified, sha256=content.layout_sha256)
    layout = read_small(storage, f"{marker.prefix}/{manifest.LAYOUT}", check)
    check_sizes(storage, marker.prefix, content.files)
    return CommittedCheckpoint(ref, marker, content, layout, storage.url)


def check_sizes(storage: Storage, prefix: str, files: Sequence[FileEntry]) -> None:
    """DamagedError for the first file that is missing or has another size; OSError."""
    sizes = {entry.name: entry.size for entry in storage.list(prefix)}
    for entry in files:
        name = f"{prefix}/{entry.name}"
        if name not in sizes:
            raise DamagedError(f"{storage.url}/{name} is missing")
        if sizes[name] != entry.size:
            raise DamagedError(
                f"{storage.url}/{name} has {sizes[name]} bytes instead of {entry.size}"
            )


def in_parallel(action: Callable[[J], T], jobs: Sequence[J], workers: int) -> Iterator[T]:
    """Run the jobs, `workers` at a time, and return their results in order. The first error ends
    them."""
    pool = ThreadPoolExecutor(min(workers, max(len(jobs), 1)))
    try:
        yield from pool.map(action, jobs)
    finally:
        pool.shutdown(cancel_futures=True)
