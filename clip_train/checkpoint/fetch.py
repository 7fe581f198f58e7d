"""The files of one checkpoint as a rank reads them: copies on its disk, completed from the remote store.

Every block has been verified before a byte of it is given out. Ranks that see one folder share hashing and fetching,
and find each other's blocks there; a rank on another disk fetches what it needs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import READS, DamagedError, Found, in_parallel, readable
from clip_train.checkpoint.manifest import BLOCK_BYTES, FileEntry, num_blocks
from clip_train.checkpoint.retention import check_space, free_bytes
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage, fsync_file

PARALLEL_BLOCKS = 4  # hashed or fetched at a time by one rank: 64 MiB
_PROGRESS_SECONDS = 10.0  # between lines about a fetch that takes long
Block = tuple[int, int]  # file (its place in the manifest), number in it


def fetch_block(storage: Storage, name: str, entry: FileEntry, number: int) -> bytes:
    """One block, verified. DamagedError, OSError."""
    start, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, entry.size)
    try:
        for _ in range(READS):
            data = storage.read_range(name, start, end)
            if hashlib.sha256(data).hexdigest() == entry.blocks[number]:
                return data
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    raise DamagedError(
        f"{name} does not have its sha256 in bytes {start} to {end}: one has changed since"
    )


def blocks_of(entry: FileEntry, start: int, end: int) -> range:
    """Those with bytes of `[start, end)`."""
    return (
        range(start // BLOCK_BYTES, num_blocks(min(end, entry.size))) if start < end else range(0)
    )


class CheckpointFiles:
    """One checkpoint's files.

    local: where copies may lie; None: nowhere. remote: where blocks come from; None: what is not here is missing.
    to_look: `local` stays as it is; what is fetched goes to the system's temporary folder, until this object goes.
    ranks: those that see the same `local`, this one too. log: takes how far a fetch is; rank 0's is shown.
    """

    def __init__(
        self,
        found: Found,
        local: LocalStorage | None,
        remote: Storage | None,
        *,
        to_look: bool = False,
        ranks: Sequence[int] = (0,),
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """OSError where it cannot be found out which copies there are."""
        self.entries = found.manifest.files
        self.fetched, self.seconds = 0, 0.0  # bytes, by this rank; of fetching
        self._found, self._remote, self._ranks, self._log = found, remote, ranks, log
        self._blocks = [
            (i, number)
            for i, entry in enumerate(self.entries)
            for number in range(len(entry.blocks))
        ]
        self._ready: set[Block] = set()  # verified, where `_paths` has their file
        self._maps: dict[int, Tensor] = {}
        self._spool: Path | None = None
        if to_look:
            self._spool = Path(tempfile.mkdtemp(prefix="clip-train-"))
            weakref.finalize(self, shutil.rmtree, self._spool, ignore_errors=True)
        self._local = local or LocalStorage(self._spool or "")
        self._paths = [*self._places()]

    def _places(self) -> Iterator[Path]:
        """Of each file: that of a copy of its size, and of one that shall stay; else one that goes later. OSError."""
        prefix = self._found.commit.prefix
        own = (
            self._ranks if len(self.entries) == dist.world_size() else []
        )  # each rank's file stays on its disk
        all_stay = self._remote is None or (
            self._spool is None and len(self._ranks) == dist.world_size()
        )
        sizes = {} if all_stay else {entry.name: entry.size for entry in self._local.list(prefix)}
        for i, entry in enumerate(self.entries):
            name = f"{prefix}/{entry.name}"
            stays = all_stay or (self._spool is None and i in own)
            if stays or sizes.get(name) == entry.size:
                yield self._local.path(name)
            elif self._spool is not None:
                yield self._spool / entry.name
            else:
                yield self._local.path(manifest.staged_name(prefix, entry.name))

    def _length(self, block: Block) -> int:
        return min(BLOCK_BYTES, self.entries[block[0]].size - block[1] * BLOCK_BYTES)

    # -- reading

    def read(self, file: int, start: int, end: int) -> Tensor:
        """Bytes `[start, end)`, uint8 [end - start]; fetched if need be. CheckpointError."""
        blocks = [(file, number) for number in blocks_of(self.entries[file], start, end)]
        if not self._ready.issuperset(blocks):
            self._surely(lambda: self.verify(blocks))
        if file not in self._maps:
            path, size = self._paths[file], self.entries[file].size
            try:  # private: torch wants memory that it could write to; it holds no file descriptor
                self._maps[file] = torch.from_file(
                    str(path), shared=False, size=size, dtype=torch.uint8
                )
            except (
                OSError,
                RuntimeError,
            ) as e:  # torch's own, where it cannot open it or finds it shorter by now
                raise CheckpointError(f"{path}: {type(e).__name__}: {e}") from e
        return self._maps[file][start:end]

    def prepare(self, blocks: Collection[Block]) -> None:
        """Collective: what this rank is going to read. Ranks on one disk fetch it together. CheckpointError, on all."""
        if len(self._ranks) == dist.world_size() or self._spool is not None or self._remote is None:
            return dist.agreed(lambda: self._surely(lambda: self.verify(blocks)))
        missing = set(dist.agreed(lambda: self._verify(blocks)))
        of_all = dist.gather_objects(bytes(block in missing for block in self._blocks))
        wanted = zip(*(of_all[rank] for rank in self._ranks), strict=True)
        needs = [
            block
            for block, by in zip(self._blocks, wanted, strict=True)
            if any(by) and block not in self._ready
        ]
        here = self._ranks.index(dist.rank())
        mine = needs[
            len(needs) * here // len(self._ranks) : len(needs) * (here + 1) // len(self._ranks)
        ]
        dist.agreed(lambda: self._surely(lambda: self._fetch(mine)))
        self._ready.update(needs)

    def verify_all(self) -> str | None:
        """Collective: every block is verified by some rank, or fetched by it; what is damaged, the same on all ranks.

        Where all ranks see one folder the files lie in it afterwards. CheckpointError, on all ranks, where one cannot
        read for another reason than damage.
        """
        mine = self._share(dist.rank())

        def damage() -> str | None:
            try:
                self.verify(mine)
            except DamagedError as e:
                return str(e)
            return None

        why = dist.agreed(damage)
        if dist.any_rank(why is not None):
            return next(each for each in dist.gather_objects(why) if each)
        for rank in self._ranks:
            self._ready.update(self._share(rank))
        return None

    def _share(self, rank: int) -> list[Block]:
        """The blocks that one rank verifies: its own file's where as many ranks wrote them; else an even part."""
        world_size, blocks = dist.world_size(), self._blocks
        if len(self.entries) == world_size:
            return [block for block in blocks if block[0] == rank]
        return blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size]

    def _surely(self, action: Callable[[], None]) -> None:
        """CheckpointError, for damage too: it is too late to step back."""
        try:
            action()
        except DamagedError as e:
            raise CheckpointError(f"{e}; resume from an older one, or from another copy") from e

    # -- verifying and fetching

    def verify(self, blocks: Collection[Block] | None = None) -> None:
        """On this rank alone: these (None: all) are whole here, or fetched. DamagedError, CheckpointError."""
        blocks = self._blocks if blocks is None else blocks
        missing = self._verify(blocks)
        damaged = {
            file for file, _ in missing if self._spool and self._paths[file].parent != self._spool
        }
        if (
            damaged and self._remote is not None
        ):  # it is only looked at: such a copy is not mended, and used no more
            for file in damaged:
                self._paths[file] = self._spool / self.entries[file].name  # type: ignore[operator]
                self._maps.pop(file, None)
            self._ready = {block for block in self._ready if block[0] not in damaged}
            missing = self._verify(blocks)
        self._fetch(missing)

    def _verify(self, blocks: Collection[Block]) -> list[Block]:
        """Those that are neither verified nor whole on this disk. CheckpointError."""
        missing: set[Block] = set()

        def verify(block: Block) -> None:
            file, number = block
            digest = hashlib.sha256()
            with contextlib.suppress(FileNotFoundError), self._paths[file].open("rb") as f:
                f.seek(number * BLOCK_BYTES)
                left = self._length(block)
                while left and (data := f.read(min(left, 1 << 20))):
                    digest.update(data)
                    left -= len(data)
            if digest.hexdigest() != self.entries[file].blocks[number]:
                missing.add(block)

        unknown = [block for block in blocks if block not in self._ready]
        readable(self._local, lambda _: [*in_parallel(verify, unknown, PARALLEL_BLOCKS)])
        self._ready.update(block for block in unknown if block not in missing)
        return sorted(missing)

    def _fetch(self, blocks: Sequence[Block]) -> None:
        """To the places of their files. DamagedError, CheckpointError."""
        if not blocks:
            return
        if self._remote is None:
            path = self._paths[blocks[0][0]]
            changed = "does not have its sha256: a byte has changed since it was written"
            raise DamagedError(f"{path} {changed if path.exists() else 'is missing'}")
        remote, began = self._remote, time.monotonic()
        total = sum(map(self._length, blocks))
        paths = {self._paths[file] for file, _ in blocks}
        with self._own_disk():
            for folder in {path.parent for path in paths}:
                folder.mkdir(parents=True, exist_ok=True)
            check_space(folder, total, free_bytes(folder))

        def fetch(block: Block) -> None:
            entry = self.entries[block[0]]
            data = fetch_block(remote, f"{self._found.commit.prefix}/{entry.name}", entry, block[1])
            with self._own_disk():
                self._keep(block, data)

        def fetch_all() -> None:
            next_line, done = began + _PROGRESS_SECONDS, 0
            for block in in_parallel(fetch, blocks, PARALLEL_BLOCKS):
                done += self._length(block)
                if (now := time.monotonic()) >= next_line and done < total:
                    next_line, rate = now + _PROGRESS_SECONDS, done / (now - began)
                    self._log(
                        f"fetching the checkpoint of step {self._found.commit.step}: {done / 1e6:,.0f} of rank 0's "
                        f"{total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s, {(total - done) / rate:.0f} s to go"
                    )

        try:
            readable(remote, lambda _: fetch_all())
        except DamagedError as e:
            raise DamagedError(f"{remote.url}: {e}") from None
        with self._own_disk():
            for path in paths:
                fsync_file(path)
        self._ready.update(blocks)
        self.fetched += total
        self.seconds += time.monotonic() - began

    def _keep(self, block: Block, data: bytes) -> None:
        """Several ranks may write to the same file. One that is not whole yet does not have its hashes."""
        fd = os.open(
            self._paths[block[0]], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        try:
            if os.fstat(fd).st_size != self.entries[block[0]].size:
                os.ftruncate(fd, self.entries[block[0]].size)
            done = 0
            while done < len(data):  # not through a map, where a full disk would end the process
                done += os.pwrite(fd, memoryview(data)[done:], block[1] * BLOCK_BYTES + done)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _own_disk(self) -> Iterator[None]:
        """CheckpointError, which is not the store's, where this disk does not take it."""
        try:
            yield
        except OSError as e:
            root, step = self._spool or self._local.root, self._found.commit.step
            where = f"{root}, to which the checkpoint of step {step} is fetched"
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "make room there, or lower checkpoint.keep_last"
                raise CheckpointError(
                    f"the disk is full at {where} ({e.strerror}): {remedy}"
                ) from e
            raise CheckpointError(
                f"cannot write at {where}: {type(e).__name__}: {e}; mend it, or set run.dir"
            ) from e

    def total_fetched(self) -> tuple[int, float, int]:
        """Collective: bytes over all ranks, the longest of them in seconds, and how many ranks fetched."""
        total, ranks = dist.sum_scalars(self.fetched, self.fetched > 0)
        return int(total), dist.max_scalars(self.seconds)[0], int(ranks)
