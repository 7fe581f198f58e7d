"""The files of one checkpoint as a rank reads them: a copy on its disk, or blocks fetched from the remote store.

Every block has been verified before a byte of it is given out. Ranks that see one folder share hashing and fetching,
and find each other's blocks there; a rank on another disk fetches what it needs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import READS, DamagedError, Found, in_parallel, readable
from clip_train.checkpoint.manifest import BLOCK_BYTES, FileEntry, num_blocks
from clip_train.checkpoint.retention import check_space, free_bytes
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage

T = TypeVar("T")
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
    raise DamagedError(f"{name} does not have its sha256 in bytes {start} to {end}: one has changed since")


def blocks_of(entry: FileEntry, start: int, end: int) -> range:
    """Those with bytes of `[start, end)`."""
    return range(start // BLOCK_BYTES, num_blocks(min(end, entry.size))) if start < end else range(0)


def share(files: Sequence[FileEntry], chosen: Collection[int], rank: int, world_size: int) -> list[Block]:
    """The blocks of the `chosen` files that one rank verifies or fetches: its own file where as many ranks wrote them;
    else all blocks are cut evenly."""
    if len(files) == world_size:
        return [(rank, number) for number in range(len(files[rank].blocks)) if rank in chosen]
    blocks = [(i, number) for i in sorted(chosen) for number in range(len(files[i].blocks))]
    return blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size]


class CheckpointFiles:
    """One checkpoint's files.

    local: where copies may lie; None: nowhere. remote: where blocks come from; None: what is not here is missing.
    to_look: they are kept in the system's temporary folder, and go with this object; else beside the copies.
    ranks: those that see the same `local`, this one too. log: takes, on rank 0, how far a fetch is.
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
        self._found, self._local, self._remote = found, local, remote
        self._ranks, self._log = ranks, log
        self._together = len(ranks) == dist.world_size()
        self._spool: Path | None = None
        if to_look:
            self._spool = Path(tempfile.mkdtemp(prefix="clip-train-"))
            weakref.finalize(self, shutil.rmtree, self._spool, ignore_errors=True)
        self._ready: set[Block] = set()  # verified, in the copy or in the spool
        self._maps: dict[int, Tensor] = {}
        self._rounds = 0
        self._copies = self._right_sized()

    def _right_sized(self) -> set[int]:
        """The files of which there is a copy; OSError."""
        if self._local is None:
            return set()
        sizes = {entry.name: entry.size for entry in self._local.list(self._found.commit.prefix)}
        return {i for i, entry in enumerate(self.entries) if sizes.get(self._name(i)) == entry.size}

    def _name(self, file: int) -> str:
        return f"{self._found.commit.prefix}/{self.entries[file].name}"

    def _copy(self, file: int) -> Path:
        assert self._local is not None
        return self._local.path(self._name(file))

    def _spooled(self, file: int) -> Path:
        if self._spool is not None:
            return self._spool / self.entries[file].name
        assert self._local is not None
        return self._local.path(manifest.staged_name(self._found.commit.prefix, self.entries[file].name))

    def _length(self, block: Block) -> int:
        return min(BLOCK_BYTES, self.entries[block[0]].size - block[1] * BLOCK_BYTES)

    # -- reading

    def read(self, file: int, start: int, end: int) -> Tensor:
        """Bytes `[start, end)`, uint8 [end - start]; fetched if need be. CheckpointError."""
        blocks = [(file, number) for number in blocks_of(self.entries[file], start, end)]
        if not self._ready.issuperset(blocks):
            self._one_rank(lambda: self._make_ready(blocks))
        if file not in self._maps:
            path = self._copy(file) if file in self._copies else self._spooled(file)
            try:  # private: torch wants memory that it could write to; it holds no file descriptor
                size = self.entries[file].size
                self._maps[file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError) as e:  # torch's own, where it cannot open it or finds it shorter by now
                raise CheckpointError(f"{path}: {type(e).__name__}: {e}") from e
        return self._maps[file][start:end]

    def prepare(self, blocks: Collection[Block]) -> None:
        """Collective: what this rank is going to read. Ranks on one disk fetch it together. CheckpointError, on all."""
        if self._together or self._spool is not None or self._remote is None:
            return dist.agreed(lambda: self._one_rank(lambda: self._make_ready(blocks)))
        self._rounds += 1
        missing = dist.agreed(lambda: self._one_rank(lambda: self._verify(blocks)))
        dist.agreed(lambda: self._write_needs(missing))
        needs = dist.agreed(self._read_needs)
        here = self._ranks.index(dist.rank())
        mine = needs[len(needs) * here // len(self._ranks) : len(needs) * (here + 1) // len(self._ranks)]
        dist.agreed(lambda: self._one_rank(lambda: self._fetch(mine)))
        self._ready.update(needs)

    def _needs_file(self, rank: int) -> Path:
        return self._spooled(0).with_name(f"{self._spooled(0).name}.needs{self._rounds}-{rank}")

    def _write_needs(self, missing: list[Block]) -> None:
        path = self._needs_file(dist.rank())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(missing))

    def _read_needs(self) -> list[Block]:
        """What any rank on this disk misses, in the same order on all of them."""
        of_each = [json.loads(self._needs_file(rank).read_text()) for rank in self._ranks]
        return sorted({(file, number) for needs in of_each for file, number in needs} - self._ready)

    def _one_rank(self, action: Callable[[], T]) -> T:
        """CheckpointError, for damage too."""
        try:
            return action()
        except DamagedError as e:
            raise CheckpointError(f"{e}; resume from an older one, or from another copy") from e

    def _make_ready(self, blocks: Collection[Block]) -> None:
        self._fetch(self._verify(blocks))

    # -- verifying and fetching

    def _verify(self, blocks: Collection[Block]) -> list[Block]:
        """Those that are neither verified nor whole in a copy. A copy with a damaged block is used no more."""
        damaged: set[int] = set()
        hashed = [block for block in blocks if block not in self._ready and block[0] in self._copies]

        def verify(block: Block) -> None:
            file, number = block
            digest = hashlib.sha256()
            with self._copy(file).open("rb") as f:
                f.seek(number * BLOCK_BYTES)
                left = self._length(block)
                while left and (data := f.read(min(left, 1 << 20))):
                    digest.update(data)
                    left -= len(data)
            if digest.hexdigest() != self.entries[file].blocks[number]:
                damaged.add(file)

        if hashed:
            assert self._local is not None
            readable(self._local, lambda _: [*in_parallel(verify, hashed, PARALLEL_BLOCKS)])
        self._ready.update(block for block in hashed if block[0] not in damaged)
        again = {block for block in self._ready if block[0] in damaged}
        self._drop_copies(damaged)
        return sorted(again | {block for block in blocks if block not in self._ready})

    def _drop_copies(self, files: Collection[int]) -> None:
        self._copies.difference_update(files)
        self._ready = {block for block in self._ready if block[0] not in files}
        for file in files:
            self._maps.pop(file, None)

    def _fetch(self, blocks: Sequence[Block]) -> None:
        """Into the spool. DamagedError, CheckpointError."""
        if not blocks:
            return
        if self._remote is None:
            raise DamagedError(self._why_damaged(blocks[0][0]))
        remote, began = self._remote, time.monotonic()
        total = sum(map(self._length, blocks))
        with self._own_disk():
            (folder := self._spooled(0).parent).mkdir(parents=True, exist_ok=True)
            check_space(folder, total, free_bytes(folder))

        def fetch(block: Block) -> None:
            data = fetch_block(remote, self._name(block[0]), self.entries[block[0]], block[1])
            with self._own_disk():
                self._keep(block, data)

        def fetch_all() -> None:
            next_line, done = began + _PROGRESS_SECONDS, 0
            for block in in_parallel(fetch, blocks, PARALLEL_BLOCKS):
                done += self._length(block)
                if dist.is_main() and (now := time.monotonic()) >= next_line and done < total:
                    next_line, rate = now + _PROGRESS_SECONDS, done / (now - began)
                    self._log(
                        f"fetching the checkpoint of step {self._found.commit.step}: {done / 1e6:,.0f} of rank 0's "
                        f"{total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s, {(total - done) / rate:.0f} s to go"
                    )

        try:
            readable(remote, lambda _: fetch_all())
        except DamagedError as e:
            raise DamagedError(f"{remote.url}: {e}") from None
        self._ready.update(blocks)
        self.fetched += total
        self.seconds += time.monotonic() - began

    def _why_damaged(self, file: int) -> str:
        path = self._copy(file)
        return (
            f"{path} is missing"
            if not path.exists()
            else f"{path} does not have its sha256: a byte has changed since it was written"
        )

    def _keep(self, block: Block, data: bytes) -> None:
        """Several ranks may write the same bytes to the same place."""
        fd = os.open(self._spooled(block[0]), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
            root = self._spool or (self._local.root if self._local is not None else "")
            where = f"{root}, to which the checkpoint of step {self._found.commit.step} is fetched"
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "make room there, or lower checkpoint.keep_last"
                raise CheckpointError(f"the disk is full at {where} ({e.strerror}): {remedy}") from e
            raise CheckpointError(f"cannot write at {where}: {type(e).__name__}: {e}; mend it, or set run.dir") from e

    # -- all of it, before a run goes on from it

    def verify_all(self) -> str | None:
        """Collective: every block is verified by some rank, or fetched by it; what is damaged, the same on all ranks.

        Where all ranks see one folder the files lie in it afterwards. CheckpointError, on all ranks, where one cannot
        read for another reason than damage.
        """
        everything = range(len(self.entries))
        mine = share(self.entries, everything, dist.rank(), dist.world_size())
        if not self._together:
            if (problem := self._all(lambda: self._make_ready(mine))) is None:
                own = {file for file, _ in mine if len(self.entries) == dist.world_size()} - self._copies
                self._publish(own, own)  # for the next time
                self._copies = dist.agreed(self._right_sized)
                for rank in self._ranks:  # what they have fetched lies on this disk too
                    blocks = share(self.entries, everything, rank, dist.world_size())
                    self._ready.update(block for block in blocks if block[0] not in self._copies)
            return problem
        self._copies = dist.broadcast_object(self._copies)
        damaged = {file for file, _ in dist.agreed(lambda: self._verify(mine))}
        if dist.any_rank(bool(damaged)):
            damaged = set().union(*dist.gather_objects(damaged))
            self._drop_copies(damaged)
            mine = share(self.entries, damaged, dist.rank(), dist.world_size())
            problem = self._all(lambda: self._fetch(mine))
            if problem is not None:
                return problem
            self._publish({file for file, _ in mine}, {file for file, number in mine if number == 0})
            self._right_sized()  # a listing: NFS remembers for a while that a file was not there
        self._copies = set(everything)
        self._ready = {(i, number) for i, entry in enumerate(self.entries) for number in range(len(entry.blocks))}
        return None

    def _publish(self, written: Collection[int], mine: Collection[int]) -> None:
        """Collective: spooled files become copies. written: by this rank, with others; mine: those that it renames."""

        def sync() -> None:
            with self._own_disk():
                for file in written:
                    with self._spooled(file).open("rb") as f:
                        os.fsync(f.fileno())

        def rename() -> None:
            with self._own_disk():
                for file in mine:
                    self._copy(file).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(self._spooled(file), self._copy(file))

        dist.agreed(sync)
        dist.agreed(rename)

    def verify_copies(self) -> None:
        """On this rank alone: every block of every copy. DamagedError, CheckpointError."""
        self._make_ready([(i, number) for i, entry in enumerate(self.entries) for number in range(len(entry.blocks))])

    @staticmethod
    def _all(action: Callable[[], None]) -> str | None:
        """Collective: the first damage that any rank meets. CheckpointError, on all ranks."""

        def one() -> str | None:
            try:
                action()
            except DamagedError as e:
                return str(e)
            return None

        why = dist.agreed(one)
        return next((w for w in dist.gather_objects(why) if w), None) if dist.any_rank(why is not None) else None

    def total_fetched(self) -> tuple[int, float, int]:
        """Collective: bytes over all ranks, the longest of them in seconds, and how many ranks fetched."""
        total, ranks = dist.sum_scalars(self.fetched, self.fetched > 0)
        return int(total), dist.max_scalar(self.seconds), int(ranks)
