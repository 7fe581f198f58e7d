"""What tests/s3 asks of checkpoints on S3, asked of Azure and Google Cloud."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.runs import Run, assert_is
from tests.s3.test_checkpoints import (
    test_it_is_in_both_places_and_comes_back_from_either,
    test_retention_and_orphans,
    test_the_listing_tells_what_is_there,
)
from tests.s3.test_outages import (
    test_a_failed_upload_fails_its_save_and_the_next_one_counts,
    test_a_store_that_is_down_does_not_hold_up_training,
    test_an_upload_outlasts_an_outage_that_ends_other_requests,
    test_at_the_end_it_waits_no_longer_than_the_grace,
)
from tests.s3.test_protocol import (
    test_a_marker_that_a_listing_hides_keeps_its_data,
    test_a_zombie_cannot_commit_over_its_successor,
    test_a_zombie_without_the_store_sees_its_successor_on_disk,
    test_saves_faster_than_uploads_are_not_failures,
    test_the_answer_to_the_commit_is_lost,
    test_two_that_took_the_same_epoch,
    test_what_a_writer_had_in_hand_is_one_failed_save,
    test_what_is_said_to_hold_without_conditional_writes_does,
)
from tests.s3.test_resume import (
    test_a_bit_that_flips_on_the_way_is_read_again,
    test_a_damaged_local_file_is_fetched_anew,
    test_damage_in_the_store_steps_back_and_says_why,
    test_ranks_that_share_no_disk,
    test_resume_from_a_url,
    test_what_cannot_be_read_is_not_taken_for_missing,
)

__all__ = [
    "test_a_bit_that_flips_on_the_way_is_read_again",
    "test_a_damaged_local_file_is_fetched_anew",
    "test_a_failed_upload_fails_its_save_and_the_next_one_counts",
    "test_a_marker_that_a_listing_hides_keeps_its_data",
    "test_a_store_that_is_down_does_not_hold_up_training",
    "test_a_zombie_cannot_commit_over_its_successor",
    "test_a_zombie_without_the_store_sees_its_successor_on_disk",
    "test_an_upload_outlasts_an_outage_that_ends_other_requests",
    "test_at_the_end_it_waits_no_longer_than_the_grace",
    "test_damage_in_the_store_steps_back_and_says_why",
    "test_it_is_in_both_places_and_comes_back_from_either",
    "test_ranks_that_share_no_disk",
    "test_resume_from_a_url",
    "test_retention_and_orphans",
    "test_saves_faster_than_uploads_are_not_failures",
    "test_the_answer_to_the_commit_is_lost",
    "test_the_listing_tells_what_is_there",
    "test_two_that_took_the_same_epoch",
    "test_what_a_writer_had_in_hand_is_one_failed_save",
    "test_what_cannot_be_read_is_not_taken_for_missing",
    "test_what_is_said_to_hold_without_conditional_writes_does",
]
pytestmark = pytest.mark.usefixtures("runs")


def test_a_bit_that_flips_in_an_upload_is_noticed_at_the_resume(
    tmp_path: Path, url: str, view: Bucket, proxy: FaultyProxy
) -> None:
    """These stores get no checksum from obstore: the manifest has one."""
    run = Run(tmp_path / "a", url)
    assert run.save(1)
    proxy.faults = [Fault("upflip", times=1, method="PUT", key=r"s0000000002/.*\.safetensors")]
    assert run.save(2) and proxy.fired == 1
    run.manager.close()
    resumed = assert_is(Run(tmp_path / "b", url).resume(), 1)
    assert [ref.step for ref in resumed.skipped] == [2]
    assert re.search("sha256 does not match", resumed.describe())
    assert view.newest_step("run") == 2
