"""A checkpoint that has been found, opened to be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint.bring import Brought
from clip_train.checkpoint.exchange import Exchange
from clip_train.checkpoint.files import fetch_ranges, sparse_files
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.local_file import LocalFile
from clip_train.checkpoint.locate import locate
from clip_train.checkpoint.reader import FragmentReader, read_header
from clip_train.checkpoint.resume import Places, Resolution, Skipped, list_places, resolve
from clip_train.checkpoint.shares import Ranges
from clip_train.errors import UserError
from clip_train.storage import LocalStorage, open_storage

HEADER_BYTES = 4096  # any of the first block brings all of it, and with it the header


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
    brought: Brought | None = None  # what came from the remote store

    @property
    def fetched(self) -> int:
        """Bytes that came from the remote store, over all ranks."""
        return 0 if self.brought is None else sum(self.brought.fetched)

    def describe(self) -> str:
        """Which step, from where, and instead of what."""
        brought = self.brought
        got = "nothing fetched"
        if brought is not None and self.fetched:
            got = f"{self.fetched / 1e6:,.1f} MB fetched in {brought.seconds:.1f} s"
            got += f" by {len(brought.fetched)} ranks" if len(brought.fetched) > 1 else ""
        passed = [f"  passed over    {each}" for each in self.skipped] or ["  passed over    nothing"]
        return "\n".join([f"resuming from step {self.step}", f"  source         {self.path} ({got})", *passed])


def open_found(places: Places, answer: Resolution) -> Resumed:
    """Called by all ranks. CheckpointError, on all ranks."""
    assert answer.found is not None
    prefix, manifest = answer.found.commit.prefix, answer.found.manifest
    main = places.remote if answer.in_remote else places.local
    assert main is not None
    same_world = manifest.world_size == dist.world_size()
    reader = _reader(places, answer, f"{main.url}/{prefix}")
    reader.prepare_named(dist.rank() if same_world else None)
    return Resumed(
        step=manifest.step,
        state=manifest.state,
        reader=reader,
        rank_tensors=dist.agreed(lambda: reader.rank_tensors(dist.rank()) if same_world else None),
        world_size=manifest.world_size,
        path=f"{main.url}/{prefix}",
        skipped=answer.skipped,
        brought=answer.brought,
    )


def _reader(places: Places, answer: Resolution, where: str) -> FragmentReader:
    """Over the local disk; over the shares of ranks that have no common one; or over the store itself."""
    assert answer.found is not None
    prefix, entries = answer.found.commit.prefix, answer.found.manifest.files
    names = [entry.name for entry in entries]
    brought = answer.brought
    if brought is not None and brought.sparse is None:
        cache = places.cache
        assert cache is not None
        return dist.agreed(
            lambda: FragmentReader({name: LocalFile(cache.path(f"{prefix}/{name}")) for name in names}, where)
        )
    if brought is not None:
        assert places.cache is not None and brought.sparse is not None
        sparse, exchange = brought.sparse, Exchange(places.cache, brought.sparse, brought.held)
        first = [i for i in range(len(names)) if exchange.holds(i, dist.rank())]
        told = dist.gather_objects(dist.agreed(lambda: {names[i]: read_header(sparse[i]) for i in first}))
        headers = {name: header for each in told for name, header in each.items()}

        def give(wanted: dict[str, Ranges]) -> None:
            exchange.prepare({names.index(name): ranges for name, ranges in wanted.items()})

        return dist.agreed(lambda: FragmentReader(dict(zip(names, sparse, strict=True)), where, headers, give))
    assert places.remote is not None
    files = dict(zip(names, sparse_files(places.remote, prefix, entries, None), strict=True))

    def fetch(wanted: dict[str, Ranges]) -> None:
        dist.agreed(lambda: fetch_ranges([(files[name], ranges) for name, ranges in wanted.items()]))

    fetch({name: [(0, min(HEADER_BYTES, file.size))] for name, file in files.items()})
    return dist.agreed(lambda: FragmentReader(files, where, bring=fetch))


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
    answer = resolve(places, only, fetch=False)
    if answer.found is None:
        reasons = "".join(f"\n  {each}" for each in answer.skipped)
        raise UserError(f"there is no whole checkpoint under {where}{reasons}; train first, or correct the place")
    return open_found(places, answer)


def places_of(place: str) -> tuple[Places, CommitRef | None]:
    """What a folder or a URL means, to look at it. UserError where there are no checkpoints."""
    root, only = dist.on_main(lambda: locate(place))
    storage = open_storage(root)
    if isinstance(storage, LocalStorage):
        return Places(storage, None, storage), only
    return Places(None, storage, None), only
