"""One I/O interface for local disk and remote stores.

`open_storage(url)` gives a `Storage` (a checkpoint folder, a bucket); `open_read`
and `expand_glob` are for single files, such as shards. No other package imports fsspec, obstore or
botocore.
"""
