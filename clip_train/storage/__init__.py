"""One I/O interface for local disk and remote stores. The only package that imports fsspec, obstore and botocore.

`open_storage(url)` gives a `Storage` (a checkpoint folder, a bucket); `open_read`, `write_bytes` and
`expand_glob` are for single files, such as shards. S3 and local folders can be written to.
"""
