"""A remote file that reads like a local one: ranges fetched ahead, retried and verified."""

from concurrent.futures import Future
from functools import partial

from clip_train.storage.blocks import BlockCache, BlockFile, Checksums, block_sum
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import StorageError, TransferError
from clip_train.storage.remote import Pace, RemoteStorage

_DAMAGED = (
    "the content has changed since the index was made: restore the file, or run `clip-train "
    "index` again if the new content is right"
)


_ahead_bytes: dict[int, int] = {}  # fetched ahead, by each open file of this process


class RangedFile(BlockFile):
    """A seekable stream over the remote file that is a storage's root.

    Blocks are fetched as needed. Once the reader moves from one block to the next, up to
    `config.read_ahead` more are fetched ahead, as far as the process's budget allows. With
    checksums, a block is verified before any of its bytes is returned. With a cache, blocks are
    read from it and added to it.

    Raises (after the last attempt, with the file, the bytes and the attempt):
        MissingError: the object does not exist.
        DeniedError: refused twice, the second time with fresh credentials.
        StorageError: the object has changed since it was opened, or every attempt failed.
    """

    def __init__(
        self,
        remote: RemoteStorage,
        config: StorageConfig,
        checksums: Checksums | None,
        cache: BlockCache | None = None,
    ) -> None:
        self._remote = remote
        self._config = config
        self._checksums = checksums
        self._cache = cache
        self._ahead: dict[int, Future[bytes]] = {}  # by number of the block
        self._depth = 0  # how many blocks to fetch ahead
        self._previous = -2  # the number of the block that was loaded last
        self._pace = Pace(
            config.patience_seconds,
            config.min_rate,
            config.attempts,
            backoff_seconds=config.backoff_seconds,
            keys=" (storage.patience_seconds, storage.min_rate)",
            limit="storage.attempts",
        )
        head = remote.wait("its size", partial(remote.head, remote.root), self._pace)
        self._tag = head.tag
        if checksums is not None and head.size != checksums.size:
            raise StorageError(
                f"{remote.url} has {head.size} bytes, and its index says {checksums.size}: it was "
                "truncated or replaced; restore it, or run `clip-train index` again if the new "
                "content is right"
            )
        block_bytes = checksums.block_bytes if checksums else config.range_bytes
        super().__init__(remote.url, head.size, block_bytes)

    def _load(self, block: int) -> bytes:
        if self._cache is not None:
            end = min(block + 1 + self._config.read_ahead, -(-self.size // self.block_bytes))
            name = f"{self.url} {self._tag} {self.size} {self.block_bytes}"
            return self._cache.load(name, block, end, self._start)
        in_order = block == self._previous + 1
        self._previous = block
        self._depth = min(max(2, 2 * self._depth), self._config.read_ahead) if in_order else 0
        others = sum(size for file, size in list(_ahead_bytes.items()) if file != id(self))
        room = max(0, self._config.read_ahead_bytes - others) // self.block_bytes  # blocks
        end = min(block + 1 + min(self._depth, room), -(-self.size // self.block_bytes))
        next_blocks = range(block + 1, end)
        for number in set(self._ahead) - {block, *next_blocks}:
            self._ahead.pop(number).cancel()
        future = self._ahead.pop(block, None) or self._start(block)
        for number in next_blocks:
            if number not in self._ahead:
                self._ahead[number] = self._start(number)
        _ahead_bytes[id(self)] = len(self._ahead) * self.block_bytes
        return future.result()

    def close(self) -> None:
        _ahead_bytes.pop(id(self), None)
        for future in self._ahead.values():
            future.cancel()
        super().close()

    def _start(self, block: int) -> Future[bytes]:
        begin, end = self.bounds(block)

        async def fetch(pace: Pace) -> bytes:
            data = await self._remote.get(self._remote.root, begin, end, self._tag, pace)
            if self._checksums is not None and block_sum(data) != self._checksums.of(block):
                await self._remote.distrust(self._remote.root, self._tag)
                raise TransferError(_DAMAGED)
            return data

        return self._remote.start(f"bytes {begin}-{end - 1}", fetch, self._pace)
