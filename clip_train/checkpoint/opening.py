"""A checkpoint that has been found, opened to be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint.files import ByteSource, LocalFile, RemoteFile
from clip_train.checkpoint.layout import CommitRef, FileEntry
from clip_train.checkpoint.locate import locate
from clip_train.checkpoint.reader import FragmentReader
from clip_train.checkpoint.resume import Places, Resolution, Skipped, list_places, resolve
from clip_train.errors import UserError
from clip_train.storage import LocalStorage, open_storage


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from."""

    step: int
    state: dict[str, Any]  # as given to `save`; dicts with integer keys have them back, tuples are lists
    reader: FragmentReader
    rank_tensors: dict[str, Tensor] | None  # this rank's; None if the number of ranks has changed
    world_size: int  # of the run that wrote it
    path: str  # where it lies: a folder or a URL
    skipped: list[Skipped] = field(default_factory=list)  # newer ones that are not whole, and why
    fetched: int = 0  # bytes that came from the remote store

    def describe(self) -> str:
        """One line, and a table of what was passed over."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        got = f", {self.fetched / 1e6:,.1f} MB fetched" if self.fetched else ""
        lines = [f"resuming from step {self.step} ({self.path}, written by {ranks}{got})"]
        return "\n".join(lines + [f"  passed over {each}" for each in self.skipped])


def open_found(places: Places, answer: Resolution, *, everything_here: bool) -> Resumed:
    """Called by all ranks. everything_here: all ranks see all files in `places.cache`, verified; else each
    rank sees those that it has brought, and fetches blocks of the others as they are read. CheckpointError."""
    found = answer.found
    assert found is not None
    prefix, manifest = found.commit.prefix, found.manifest
    main = places.remote if answer.in_remote else places.local
    assert main is not None

    def source(i: int, entry: FileEntry) -> ByteSource:
        name = f"{prefix}/{entry.name}"
        brought = places.cache is not None and i % dist.world_size() == dist.rank()
        if places.cache is not None and (everything_here or brought):
            return LocalFile(places.cache.path(name))
        if places.remote is not None and answer.in_remote:
            return RemoteFile(places.remote, name, entry)
        assert places.local is not None
        return LocalFile(places.local.path(name))

    def read() -> tuple[FragmentReader, dict[str, Tensor] | None]:
        files = {entry.name: source(i, entry) for i, entry in enumerate(manifest.files)}
        reader = FragmentReader(files, f"{main.url}/{prefix}")
        same_world = manifest.world_size == dist.world_size()
        return reader, reader.rank_tensors(dist.rank()) if same_world else None

    reader, rank_tensors = dist.agreed(read)
    return Resumed(
        step=manifest.step,
        state=manifest.state,
        reader=reader,
        rank_tensors=rank_tensors,
        world_size=manifest.world_size,
        path=f"{main.url}/{prefix}",
        skipped=answer.skipped,
        fetched=answer.fetched,
    )


def open_to_look(places: Places, step: int | None = None, only: CommitRef | None = None) -> Resumed:
    """The newest whole checkpoint, or that of `step`, to export or evaluate: nothing is written anywhere.

    Of a remote one only the blocks that are read are fetched, each verified. UserError, CheckpointError.
    """
    where = " or ".join(each.url for each in places[:2] if each is not None)
    if step is not None:
        known = dist.on_main(lambda: list_places(places))
        refs = sorted(set(known[0]) | set(known[1]), reverse=True)
        only = next((ref for ref in refs if ref.step == step), None)
        if only is None:
            there = sorted({ref.step for ref in refs})
            raise UserError(f"--step ({step}): {where} has no such checkpoint; it has {there or 'none'}")
    answer = resolve(places, only)
    if answer.found is None:
        reasons = "".join(f"\n  {each}" for each in answer.skipped)
        raise UserError(f"there is no whole checkpoint under {where}{reasons}; train first, or correct the place")
    return open_found(places, answer, everything_here=not answer.in_remote)


def places_of(place: str) -> tuple[Places, CommitRef | None]:
    """What a folder or a URL means, to look at it. UserError where there are no checkpoints."""
    root, only = dist.on_main(lambda: locate(place))
    storage = open_storage(root)
    if isinstance(storage, LocalStorage):
        return Places(storage, None, storage), only
    return Places(None, storage, None), only
