"""A file of a checkpoint on the local disk. Apart from files.py, which the saver needs: it runs without torch."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from clip_train.errors import CheckpointError


class LocalFile:
    """Mapped for as long as it is used, so retention may remove the file under it.

    It holds no file descriptor: a checkpoint has as many files as there were ranks, and 1024 may be all there are.
    """

    def __init__(self, path: Path) -> None:
        """CheckpointError where it cannot be read."""
        self.where = str(path)
        try:
            with path.open("rb") as f:
                self.size = os.fstat(f.fileno()).st_size
                self._map = memoryview(b"")
                if self.size:
                    # not mmap.mmap, which keeps a descriptor; private: torch wants memory that it could write to
                    mapped = torch.from_file(str(path), shared=False, size=self.size, dtype=torch.uint8)
                    self._map = mapped.numpy().data
        except (OSError, RuntimeError) as e:  # torch's own, where it cannot open it or finds it shorter by now
            raise CheckpointError(f"{path}: {type(e).__name__}: {e}") from e

    def read(self, start: int, end: int) -> memoryview:
        return self._map[start:end]
