"""Which keys of an S3 bucket a pattern matches.

fsspec's own search leaves out, without a word, every folder that it could not list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from clip_train.errors import UserError
from clip_train.storage.answers import describe

MAGIC = re.compile(r"[*?[]")


def matching_keys(fs: Any, path: str) -> list[str]:
    """The objects `bucket/key` that match (`*`, `**`, `?`, `[...]`), sorted.

    Goes down folder by folder, each from where its names may match: no more is listed than is needed.

    fs: of s3fs. path: `bucket/pattern`.
    OSError where a folder cannot be listed; UserError for a pattern in the bucket's name.
    """
    from fsspec.utils import glob_translate

    bucket, _, pattern = path.partition("/")
    if MAGIC.search(bucket):
        raise UserError(f"s3://{path}: name the bucket; patterns match the keys in it")
    folders, parts = [""], pattern.split("/")
    while len(parts) > 1 and "**" not in parts[0]:
        part, *parts = parts
        if MAGIC.search(part) is None:
            folders = [f"{folder}{part}/" for folder in folders]
            continue
        like = re.compile(glob_translate(part))
        below = (each for folder in folders for each in _listed(fs, bucket, folder + _stem(part), "/"))
        folders = [each for each in below if each.endswith("/") and like.match(each.rsplit("/", 2)[-2])]
    delimiter = "" if "**" in "/".join(parts) else "/"
    like = re.compile(glob_translate(pattern))
    found = (key for folder in folders for key in _listed(fs, bucket, folder + _stem(parts[0]), delimiter))
    return sorted(f"{bucket}/{key}" for key in found if not key.endswith("/") and like.match(key))


def _stem(part: str) -> str:
    """What all that it matches begin with."""
    return MAGIC.split(part, maxsplit=1)[0]


def _listed(fs: Any, bucket: str, prefix: str, delimiter: str) -> Iterator[str]:
    """The keys that begin with `prefix`; with a delimiter up to the next one: folders, which end with it, as well."""
    page: dict[str, Any] = {}
    while True:
        try:
            answer = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter=delimiter, **page)
        except Exception as e:  # also what is no OSError: no credentials, no way to the endpoint
            raise OSError(f"s3://{bucket}/{prefix}: {describe(e)}") from e
        yield from (folder["Prefix"] for folder in answer.get("CommonPrefixes", []))
        yield from (each["Key"] for each in answer.get("Contents", []))
        if not answer.get("IsTruncated"):
            return
        page = {"ContinuationToken": answer["NextContinuationToken"]}
