"""What tests/s3/test_storage.py asks of S3, asked of Azure and Google Cloud."""

from __future__ import annotations

from tests.s3.test_storage import (
    test_a_listing_of_several_pages,
    test_an_upload_survives_what_passes,
    test_an_upload_that_fails_publishes_nothing,
    test_of_racing_writers_one_wins,
    test_put_read_list_delete,
    test_reads_survive_what_passes,
    test_what_cannot_be_told_is_never_missing,
    test_what_no_operation_can_tell_is_never_missing,
)

__all__ = [
    "test_a_listing_of_several_pages",
    "test_an_upload_survives_what_passes",
    "test_an_upload_that_fails_publishes_nothing",
    "test_of_racing_writers_one_wins",
    "test_put_read_list_delete",
    "test_reads_survive_what_passes",
    "test_what_cannot_be_told_is_never_missing",
    "test_what_no_operation_can_tell_is_never_missing",
]
