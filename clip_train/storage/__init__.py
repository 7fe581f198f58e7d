"""One I/O interface for local disk and remote stores. The only package that imports fsspec, obstore and botocore.

`open_storage(url)` gives a `Storage` (a checkpoint folder, a bucket); `open_read`, `write_bytes` and
`expand_glob` are for single files, such as shards. S3 and local folders can be written to.
"""

from clip_train.storage.base import Entry, Storage
from clip_train.storage.blocks import BlockFile, Checksums, block_sum
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import ReadError
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import expand_glob, is_remote, local_path, open_read, open_storage, write_bytes

__all__ = [
    "BlockFile",
    "Checksums",
    "Entry",
    "LocalStorage",
    "ReadError",
    "Storage",
    "StorageConfig",
    "block_sum",
    "expand_glob",
    "is_remote",
    "local_path",
    "open_read",
    "open_storage",
    "write_bytes",
]
