"""What tests/s3/test_storage.py asks of S3, asked of Azure and Google Cloud."""

from __future__ import annotations

from pathlib import Path

import pytest

from clip_train.storage.base import Storage
from clip_train.storage.urls import open_storage
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.test_storage import (
    ASK,
    UPLOADS,
    survives_in_an_upload,
    test_a_listing_of_several_pages,
    test_an_upload_that_fails_publishes_nothing,
    test_of_racing_writers_one_wins,
    test_put_read_list_delete,
    test_reads_survive_what_passes,
    test_what_cannot_be_told_is_never_missing,
    test_what_no_operation_can_tell_is_never_missing,
)

__all__ = [
    "test_a_listing_of_several_pages",
    "test_an_upload_that_fails_publishes_nothing",
    "test_of_racing_writers_one_wins",
    "test_put_read_list_delete",
    "test_reads_survive_what_passes",
    "test_what_cannot_be_told_is_never_missing",
    "test_what_no_operation_can_tell_is_never_missing",
]
# obstore sends checksums to S3 alone; and only S3 has errors in the body of a 200.
PASSING = [fault for fault in UPLOADS if fault.action != "upflip" and fault.code != 200]


@pytest.mark.parametrize(
    "fault", PASSING, ids=lambda fault: f"{fault.action}-{fault.method}-{fault.query}"
)
def test_an_upload_survives_what_passes(
    storage: Storage, hasty: Storage, proxy: FaultyProxy, view: Bucket, big: Path, fault: Fault
) -> None:
    survives_in_an_upload(fault, storage, hasty, proxy, view, big)


def test_the_others_are_deleted_if_one_is_missing(storage: Storage, view: Bucket) -> None:
    """Another process, or a try of this call whose answer was lost, has removed it."""
    names = [f"{i:03d}" for i in range(40)]
    for name in names[1:]:
        view.put(f"run/{name}", b"x")
    storage.delete(*names)
    assert view.keys() == []


def test_a_missing_bucket_is_never_an_empty_one(view: Bucket) -> None:
    nowhere = open_storage(f"{view.scheme}://nowhere/run", patience_seconds=1)
    for ask in ASK.values():
        with pytest.raises(OSError, match=rf"{view.scheme}://nowhere.*create the ") as caught:
            ask(nowhere)
        assert not isinstance(caught.value, FileNotFoundError)
