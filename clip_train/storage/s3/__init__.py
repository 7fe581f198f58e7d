"""An S3 bucket: `S3Storage` for checkpoints (store, upload, requests), `Session` for whoever reads from one."""

from clip_train.storage.s3.store import S3Storage

__all__ = ["S3Storage"]
