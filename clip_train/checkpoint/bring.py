"""The files of a checkpoint, whole and verified: what lies on a disk is hashed, the rest fetched; ranks share the work.

Where all ranks see one folder the files lie in it afterwards. Where they do not, each rank has its share of the
blocks on its own disk, and gives the others of it what they need (`exchange.py`): however many disks there are, and
whatever the layout, a byte comes from the store once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from clip_train import dist
from clip_train.checkpoint.disk import check_space, free_bytes
from clip_train.checkpoint.files import (
    DamagedBlockError,
    SparseFile,
    fetch_block,
    first_damage,
    in_parallel,
    sparse_files,
    wrong_size,
)
from clip_train.checkpoint.layout import BLOCK_BYTES
from clip_train.checkpoint.local_file import LocalFile
from clip_train.checkpoint.marks import Found, readable
from clip_train.checkpoint.part import Part, new_token, remove_abandoned
from clip_train.checkpoint.shares import Range, Span, deal
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage, Storage

TELL_SECONDS = 10.0  # between lines about a fetch that takes long
Problems = dict[int, str]  # file -> what is wrong with it


@dataclass
class Brought:
    """What has become of it."""

    problem: str | None = None  # the first damage that any rank met
    fetched: list[int] = field(default_factory=list)  # bytes, by rank
    seconds: float = 0.0  # of fetching
    seen_by_all: bool = True  # every rank had found all files, in their sizes, before anything was fetched
    # Where ranks share no disk: the files, and which of their bytes each rank has, by rank and file.
    sparse: list[SparseFile] | None = None
    held: list[dict[int, list[Range]]] = field(default_factory=list)


class Bringer:
    """One checkpoint's files on their way to `local`. Called by all ranks.

    shared: all ranks see `local`. remote: where they are fetched from; None: what is not here is missing.
    log: told, on rank 0, how far it is.
    """

    def __init__(
        self, local: LocalStorage, remote: Storage | None, found: Found, *, shared: bool, log: Callable[[str], None]
    ) -> None:
        self._local, self._remote, self._shared, self._log = local, remote, shared, log
        self._step, self._files = found.commit.step, found.manifest.files
        self._names = [f"{found.commit.prefix}/{entry.name}" for entry in self._files]
        self._paths = [local.path(name) for name in self._names]
        self._sparse: list[SparseFile] | None = None
        if not shared:
            store: Storage = local if remote is None else remote
            self._sparse = sparse_files(store, found.commit.prefix, self._files, local.root)

    def bring(self) -> Brought:
        """CheckpointError, on all ranks, where something cannot be read for another reason than damage."""
        sizes = dist.gather_objects(dist.agreed(lambda: self._readable(self._wrong_sizes)))
        good, problems = self._look(sizes)
        out = Brought(fetched=[0] * dist.world_size(), seen_by_all=not any(sizes))
        shares = good
        if problems and self._remote is None:
            out.problem = problems[min(problems)]
        elif problems:
            began = time.monotonic()
            everyone = range(dist.world_size())
            to_fetch = deal(self._files, dict.fromkeys(problems, everyone), dist.world_size())
            out.problem = self._fetch_all(to_fetch)
            out.seconds = time.monotonic() - began
            out.fetched = [sum(self._length(span) for span in spans) for spans in to_fetch]
            shares = [[*a, *b] for a, b in zip(good, to_fetch, strict=True)]
        if out.problem is None and self._sparse is not None:
            out.sparse = self._sparse
            out.held = [self._held(spans) for spans in shares]
        return out

    def _length(self, span: Span) -> int:
        start, end = span.range(self._files[span.file].size)
        return end - start

    def _held(self, spans: list[Span]) -> dict[int, list[Range]]:
        held: dict[int, list[Range]] = {}
        for span in spans:
            held.setdefault(span.file, []).append(span.range(self._files[span.file].size))
        return held

    # -- what is here

    def _look(self, sizes: list[Problems]) -> tuple[list[list[Span]], Problems]:
        """Who has verified which blocks of the files that are whole on a disk, and why the others are not.

        sizes: by rank, the files that are not there in their size.
        """
        holders = {
            i: ranks
            for i in range(len(self._files))
            if (ranks := [rank for rank, wrong in enumerate(sizes) if i not in wrong])
        }
        problems: Problems = {i: sizes[0][i] for i in range(len(self._files)) if i not in holders}
        dealt = deal(self._files, holders, dist.world_size())
        for damage in dist.gather_objects(
            dist.agreed(lambda: self._readable(lambda: self._verify(dealt[dist.rank()])))
        ):
            problems.update(damage)
        good = [[span for span in spans if span.file not in problems] for spans in dealt]
        if self._sparse is not None:
            for i, ranges in self._held(good[dist.rank()]).items():
                self._sparse[i].adopt(LocalFile(self._paths[i]), ranges)
        return good, problems

    def _wrong_sizes(self) -> Problems:
        found = {i: wrong_size(self._paths[i], entry) for i, entry in enumerate(self._files)}
        return {i: why for i, why in found.items() if why is not None}

    def _verify(self, spans: list[Span]) -> Problems:
        problems: Problems = {}
        for i, first, end in spans:
            why = None if i in problems else first_damage(self._paths[i], self._files[i], first, end)
            if why is not None:
                problems[i] = why
        return problems

    def _readable(self, action: Callable[[], Problems]) -> Problems:
        return readable(self._local, lambda _: action())

    # -- what is not

    def _fetch_all(self, dealt: list[list[Span]]) -> str | None:
        """The first damage that any rank met; else all is on the disks."""
        mine = dealt[dist.rank()]
        token = dist.broadcast_object(new_token()) if self._shared else new_token()
        total = sum(self._length(span) for spans in dealt for span in spans)
        own = sum(self._length(span) for span in mine)
        sweeps = dist.is_main() or not self._shared  # else those whose process was killed would fill the disk
        dist.agreed(lambda: remove_abandoned(self._local) if sweeps else None)
        dist.agreed(lambda: check_space(self._local.root, total if self._shared else own, free_bytes(self._local.root)))
        targets = dist.agreed(lambda: self._targets(mine, token))
        try:
            reasons = dist.gather_objects(dist.agreed(lambda: self._fetch(mine, targets)))
            reason = next((each for each in reasons if each is not None), None)
            if reason is None:
                dist.agreed(lambda: self._finish(mine, targets))
                with contextlib.suppress(OSError):
                    os.listdir(self._paths[0].parent)  # NFS remembers for a while that a file was not there
            return reason
        finally:
            for target in targets.values():
                target.drop()

    def _targets(self, spans: list[Span], token: str) -> dict[int, Part]:
        """Files that will stay, by their name: all where all ranks write to the same ones; else this rank's own."""
        named = {}
        for i, first, end in spans:
            entry = self._files[i]
            whole = (first, end * BLOCK_BYTES >= entry.size) == (0, True)
            mine = entry.rank == dist.rank() and len(self._files) == dist.world_size()
            if self._shared or (whole and mine):
                with self._writing():
                    named[i] = Part(self._paths[i], token)
        return named

    def _fetch(self, spans: list[Span], targets: dict[int, Part]) -> str | None:
        """This rank's share; what is damaged or missing in the store. CheckpointError."""
        assert self._remote is not None
        remote = self._remote
        jobs = [Span(i, block, block + 1) for i, first, end in spans for block in range(first, end)]
        progress = _Progress(self._step, sum(self._length(job) for job in jobs), self._log)

        def fetch(job: Span) -> None:
            name = self._names[job.file]
            try:
                data = fetch_block(remote, name, self._files[job.file], job.first)
            except FileNotFoundError:
                raise DamagedBlockError(f"{name} is missing") from None
            with self._writing():
                self._sink(job.file, targets).put(job.first * BLOCK_BYTES, data)

        def fetch_all() -> None:
            for job in in_parallel(fetch, jobs):
                progress.add(self._length(job))
            with self._writing():
                for target in targets.values():
                    target.sync()
            for span in spans:
                entry = self._files[span.file]
                if not entry.blocks and self._sink(span.file, targets).sha256(entry.size) != entry.sha256:
                    raise DamagedBlockError(f"{self._names[span.file]} does not have its sha256")

        try:
            readable(remote, lambda _: fetch_all())
        except DamagedBlockError as e:
            return f"{remote.url}: {e}"
        return None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """CheckpointError, which is not the store's, where this disk does not take it."""
        try:
            yield
        except OSError as e:
            where = f"{self._local.root}, to which the checkpoint of step {self._step} is fetched"
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "make room there, or lower checkpoint.keep_last"
                raise CheckpointError(f"the disk is full at {where} ({e.strerror}): {remedy}") from e
            raise CheckpointError(f"cannot write at {where}: {type(e).__name__}: {e}; mend it, or set run.dir") from e

    def _sink(self, file: int, targets: dict[int, Part]) -> Part | SparseFile:
        if file in targets:
            return targets[file]
        assert self._sparse is not None
        return self._sparse[file]

    def _finish(self, spans: list[Span], targets: dict[int, Part]) -> None:
        for span in spans:
            if span.file in targets and span.first == 0:  # of those who wrote to it, one
                with self._writing():
                    targets[span.file].finish()
            if self._sparse is None:
                continue
            ranges = [span.range(self._files[span.file].size)]
            if span.file in targets:
                self._sparse[span.file].adopt(LocalFile(self._paths[span.file]), ranges)
            else:
                self._sparse[span.file].note(ranges)


class _Progress:
    """A line on rank 0 now and then, of a fetch that takes long."""

    def __init__(self, step: int, total: int, log: Callable[[str], None]) -> None:
        self._step, self._total, self._log = step, total, log
        self._done, self._began = 0, time.monotonic()
        self._next = self._began + TELL_SECONDS

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if not dist.is_main() or now < self._next or self._done == self._total:
            return
        self._next = now + TELL_SECONDS
        rate = self._done / (now - self._began)
        self._log(
            f"fetching the checkpoint of step {self._step}: {self._done / 1e6:,.0f} of rank 0's "
            f"{self._total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s, {(self._total - self._done) / rate:.0f} s to go"
        )
