"""What the batch script decides after each attempt, from error reports, verdicts and progress."""

from __future__ import annotations

import socket
from math import inf

import pytest

from clip_train.processes import node_name
from launcher.runtime.outcome import Outcome
from launcher.runtime.verdict import RUN_DIR, Failure, read_verdict, write_verdict
from launcher.slurm.attempts import AttemptResult, History, explain_verdict, next_action


def outcome(verdict: str, before: int = 10, step: int = 10, **more) -> AttemptResult:
    return AttemptResult(verdict, before, step, "why", **more)


@pytest.mark.parametrize(
    "ended, failures, action",
    [
        (outcome("DONE"), 2, "done"),
        (outcome("DONE", terminated=True), 0, "done"),
        (outcome("PREEMPTED", step=12), 2, "requeue"),
        (outcome("PREEMPTED", step=12, terminated=True), 0, "leave"),  # scancel
        (outcome("PREEMPTED", step=12, stop_file=True), 0, "leave"),
        (outcome("FATAL", step=12), 0, "stop"),
        (outcome("CRASHED"), 1, "requeue"),
        (outcome("CRASHED"), 2, "give up"),
        (outcome("FAILED"), 2, "give up"),
        (outcome("LOST"), 2, "give up"),
        (outcome("CRASHED", step=11), 2, "requeue"),  # it had come further
        (outcome("CRASHED", terminated=True), 2, "leave"),
    ],
)
def test_decisions(ended, failures, action):
    assert next_action(ended, failures).decision == action


def test_time_limits_without_progress_end_too():
    failures, actions = 0, []
    for _ in range(3):
        decision = next_action(outcome("PREEMPTED"), failures)
        failures = decision.failures
        actions.append(decision.decision)
    assert actions == ["requeue", "requeue", "give up"]


def end(
    attempt: int, decision: str = "requeue", blamed: tuple[str, ...] = (), failures: int = 1
) -> dict:
    return {
        "attempt": attempt, "blamed": list(blamed), "decision": decision, "failures": failures,
    }  # fmt: skip


def test_a_torn_line_of_the_history_does_not_matter(tmp_path):
    history = History(tmp_path)
    history.append("begin", attempt=1, nodes=["n1"], step=0)
    history.append("end", **end(1, blamed=("n2",)))
    history.append("begin", attempt=2, nodes=["n1"], step=0)
    with history.path.open("a") as f:
        f.write('{"event": "en')
    again = History(tmp_path)
    assert again.next_number() == 3
    assert again.unfinished()["attempt"] == 2
    assert again.failures() == 1 and again.suspects() == []
    again.path.write_text("".join(line + "\n" for line in again.path.read_text().splitlines()[:-1]))
    again.append("end", **end(2, blamed=("n2", "n3")))
    assert History(tmp_path).suspects() == ["n2"]


@pytest.mark.parametrize(
    "message, hardware",
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA out of memory. Tried to allocate 3.00 GiB", False),
        ("NCCL error: unhandled system error, NCCL version 2.27.3", False),  # of whom?
    ],
)
def test_a_node_whose_hardware_fails_is_excluded_at_once(message, hardware, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    assert Outcome().finish(RuntimeError(message)) == 1
    verdict, reason, nodes = explain_verdict(read_verdict(tmp_path), 1)
    assert verdict == "FAILED" and message in reason
    history = History(tmp_path)
    history.append("end", **end(1, blamed=nodes))
    assert history.suspects() == [node_name()] * hardware


def test_half_the_activations_until_the_run_is_submitted_again(tmp_path):
    history = History(tmp_path)
    assert history.room() == inf
    for attempt, (decision, room) in enumerate(
        [("requeue", 800), ("requeue", 400), ("requeue", 0), ("give up", 200)], 1
    ):
        history.append("end", **end(attempt, decision), room=room)
        assert history.room() == {"give up": inf}.get(decision, room or 400)


def test_who_submits_again_after_it_gave_up_starts_counting_anew(tmp_path):
    history = History(tmp_path)
    history.append("end", **end(1, decision="give up", failures=3))
    assert history.failures() == 0


def report(rank: int = 1, message: str = "CUDA error", **more) -> Failure:
    return Failure(rank, f"n{rank + 1}", message, **{"node_suspect": True, **more})


MISTAKE = report(0, "batch.global_size", word="FATAL", node_suspect=False)
DIVERGED = report(0, "diverged", node_suspect=False)
DEAD = report(1, "rank 1 on n2 has died or is frozen", lost=True)
STOPPED = report(
    0, "stopped by SIGTERM before the first step", word="PREEMPTED", status=75, node_suspect=False
)


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """As a rank does under the batch script, in this run directory."""
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    return lambda *failure: Outcome().publish(*failure)


@pytest.mark.parametrize(
    "found, status, verdict, nodes, reason",
    [
        (MISTAKE, 2, "FATAL", (), "rank 0 on n1: batch.global_size"),
        (report(), 1, "FAILED", ("n2",), "rank 1 on n2: CUDA error"),
        (DIVERGED, 137, "FAILED", (), "rank 0 on n1: diverged"),
        (DEAD, 137, "FAILED", ("n2",), "rank 1 on n2 has died or is frozen"),
        (None, 7, "CRASHED", (), "the ranks ended with status 7 and left no verdict"),
        (STOPPED, 75, "PREEMPTED", (), "stopped by SIGTERM before the first step"),
        (STOPPED, 1, "PREEMPTED", (), "stopped by SIGTERM before the first step"),  # torchrun's
        # srun has asked rank 0 to stop, because another rank was killed
        (STOPPED, 137, "CRASHED", (), "a rank was killed before the first step (status 137)"),
    ],
)
def test_the_cause(found, status, verdict, nodes, reason, publish, tmp_path):
    if found is not None:
        publish(found)
    assert explain_verdict(read_verdict(tmp_path), status) == (verdict, reason, nodes)


def test_the_first_failure_of_an_attempt_is_its_verdict(publish, tmp_path):
    publish(report(), "a traceback")
    publish(DIVERGED)
    assert read_verdict(tmp_path)[1]["reason"] == "rank 1 on n2: CUDA error"


def test_no_secret_is_in_what_an_attempt_leaves(tmp_path):
    """Whoever makes a reason or a skipped line need not think of it."""
    url = "https://me:hunter2@host/a.tar"
    write_verdict(tmp_path, "DONE", 1, url, skipped=[f"the evaluation: {url}"])
    History(tmp_path).append("end", reason=url)
    left = [(tmp_path / name).read_text() for name in ("VERDICT", "attempts.jsonl")]
    assert not any("hunter2" in text for text in left) and "".join(left).count("REDACTED") == 3


def test_a_node_goes_by_the_name_that_slurm_knows(monkeypatch):
    """--exclude takes no hostname that is not Slurm's own name for the node."""
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu001")
    outside = node_name()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert (outside, node_name()) == (socket.gethostname(), "gpu001")
