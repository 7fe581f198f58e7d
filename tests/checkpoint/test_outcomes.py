"""What is made of the saver's messages."""

from __future__ import annotations

from typing import Any

from clip_train.checkpoint.outcomes import Losses, Outcomes


def outcomes(max_failed: int = 3) -> tuple[Outcomes, list[str]]:
    said: list[str] = []
    return Outcomes(max_failed, said.append), said


def about(kind: str, step: int, prefix: str, **more: Any) -> dict[str, Any]:
    return {"told": kind, "step": step, "prefix": prefix, **more}


def test_one_death_is_one_failure_however_many_saves_it_took_along() -> None:
    ours, said = outcomes()
    for step in (1, 2, 3):
        ours.handed_over(step, f"attempt {step}")
    ours.hear({"told": "gone", "why": "it has ended", "leads": True})
    assert (ours.failures, ours.fatal, ours.pending, ours.writing, ours.tidying) == (1, None, {}, None, set())
    assert len(said) == 1 and said[0].startswith("checkpoint of steps 1, 2, 3 failed (1 in a row): it has ended")
    ours.hear({"told": "gone", "why": "it has ended", "leads": True})
    assert ours.failures == 1 and said[1:] == ["it has ended; the next save starts another"]


def test_another_ranks_losses_are_one_failure_and_told_once() -> None:
    ours, said = outcomes()
    for step in (1, 2, 3):
        ours.handed_over(step, f"attempt {step}")
    lost = Losses({"attempt 1": "it has ended", "attempt 2": "it has ended", "long ago": "it has ended"}, [])
    cancelled = ours.learn_losses([Losses({}, []), lost, lost])
    assert cancelled == dict.fromkeys(("attempt 1", "attempt 2"), "rank 1: it has ended")
    assert ours.pending == {3: "attempt 3"} and (ours.failures, len(said)) == (1, 1)
    ours.hear(about("failed", 1, "attempt 1", why="rank 1: it has ended"))  # as this rank's saver was told to
    assert (ours.failures, len(said)) == (1, 1)


def test_what_became_of_an_older_attempt_is_not_taken_for_the_newer_ones() -> None:
    ours, _ = outcomes()
    ours.handed_over(5, "first")
    ours.hear(about("failed", 5, "first", why="the disk is full"))
    ours.handed_over(5, "second")
    for kind in ("failed", "written", "rest", "overtaken"):
        ours.hear(about(kind, 5, "first", why="late"))
    assert (ours.pending, ours.writing, ours.tidying, ours.failures) == ({5: "second"}, "second", {"second"}, 1)
    ours.hear(about("written", 5, "second"))
    ours.hear(about("done", 5, "second", where="there", seconds=1.0, bytes=1))
    assert (ours.pending, ours.writing, ours.saved, ours.failures) == ({}, None, 5, 0)


def test_an_older_upload_that_ends_late_is_not_the_last_good_one() -> None:
    ours, _ = outcomes()
    ours.hear(about("kept", 7, "b", where="disk/7"))
    ours.hear(about("done", 6, "a", where="bucket/6", seconds=1.0, bytes=1))
    assert ours.last_good == (7, "disk/7") and ours.saved == 6
    ours.hear(about("done", 7, "b", where="bucket/7", seconds=1.0, bytes=1))
    assert ours.last_good == (7, "bucket/7")
    assert ours.take_numbers()["checkpoint_step"] == 7 and ours.take_numbers() == {}
