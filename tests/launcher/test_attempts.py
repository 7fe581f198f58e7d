"""What the batch script decides after each attempt, from marks, verdicts and progress."""

from __future__ import annotations

import socket

import pytest

from launcher.runtime.error_reports import (
    FOLDER,
    Mark,
    find_cause,
    leave_mark,
    leave_resumed,
    read_marks,
    read_resumed,
    stopped_early,
)
from launcher.slurm.attempts import History, Limits, Outcome, decide

LIMITS = Limits(failures=3, fruitless=5, node_failures=2)
TWO = ("n1", "n2")


def outcome(verdict: str, before: int = 10, after: int = 10, **more) -> Outcome:
    return Outcome(verdict, before, after, "why", **more)


@pytest.mark.parametrize(
    "ended, failures, action",
    [
        (outcome("DONE"), 2, "done"),
        (outcome("DONE", terminated=True), 0, "done"),
        (outcome("PREEMPTED", after=12), 2, "requeue"),
        (outcome("PREEMPTED", after=12, terminated=True), 0, "leave"),  # scancel
        (outcome("PREEMPTED", after=12, stop_file=True), 0, "leave"),
        (outcome("FATAL", after=12), 0, "stop"),
        (outcome("CRASHED"), 1, "requeue"),
        (outcome("CRASHED"), 2, "give up"),
        (outcome("FAILED"), 2, "give up"),
        (outcome("LOST"), 2, "give up"),
        (outcome("CRASHED", after=11), 2, "requeue"),  # it had come further
        (outcome("CRASHED", terminated=True), 2, "leave"),
    ],
)
def test_decisions(ended, failures, action):
    assert decide(ended, failures, 0, LIMITS).action == action


def test_preemptions_without_progress_end_too_but_later():
    failures = fruitless = 0
    actions = []
    for _ in range(5):
        decision = decide(outcome("PREEMPTED"), failures, fruitless, LIMITS)
        failures, fruitless = decision.failures, decision.fruitless
        actions.append(decision.action)
    assert actions == ["requeue"] * 4 + ["give up"]


def end(attempt: int, decision: str = "requeue", blamed: tuple[str, ...] = (), failures: int = 1) -> dict:
    return {
        "attempt": attempt, "blamed": list(blamed), "decision": decision, "failures": failures, "fruitless": failures,
    }  # fmt: skip


def test_the_history_is_read_again_and_a_torn_line_does_not_matter(tmp_path):
    history = History(tmp_path)
    history.append("begin", attempt=1, nodes=["n1"], step=0)
    history.append("end", **end(1, blamed=("n2",)))
    history.append("begin", attempt=2, nodes=["n1"], step=0)
    with history.path.open("a") as f:
        f.write('{"event": "en')
    again = History(tmp_path)
    assert again.next_number == 3
    assert again.unfinished()["attempt"] == 2
    assert again.counts() == (1, 1)
    assert again.bad_nodes(LIMITS) == []
    again.path.write_text("".join(line + "\n" for line in again.path.read_text().splitlines()[:-1]))
    again.append("end", **end(2, blamed=("n2", "n3")))
    assert History(tmp_path).bad_nodes(LIMITS) == ["n2"]


def test_who_submits_again_after_it_gave_up_starts_counting_anew(tmp_path):
    history = History(tmp_path)
    history.append("end", **end(1, decision="give up", failures=3))
    assert history.counts() == (0, 0)


def mark(rank: int, kind: str, message: str = "m", waiting: bool = False) -> Mark:
    return Mark(rank, f"n{rank + 1}", kind, message, waiting)


KILLED = "srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 1\n"
EXITED = "srun: error: n2: task 1: Exited with exit code 3\nsrun: error: n1: task 0: Killed\n"


@pytest.mark.parametrize(
    "marks, log, nodes, said",
    [
        ([mark(0, "mistake", "batch.global_size")], "", (), "batch.global_size"),
        ([mark(0, "lost"), mark(1, "error", "CUDA error")], "", ("n2",), "rank 1 on n2: CUDA error"),
        ([mark(0, "error"), mark(1, "error")], "", (), "rank 0 on n1"),  # on all nodes: none is to blame
        ([mark(0, "lost")], KILLED, ("n2",), "rank 1 on n2 was ended from outside: Killed"),
        ([], EXITED, ("n2",), "rank 1 on n2 exited with exit code 3"),
        ([mark(0, "hang", "waits", waiting=True)], EXITED, ("n2",), "rank 1 on n2 hangs and does not answer"),
        ([mark(0, "hang", waiting=True), mark(1, "hang", "in decode")], "", ("n2",), "rank 1 on n2 hangs: in decode"),
        ([mark(0, "hang", waiting=True), mark(1, "hang", waiting=True)], "", (), "all ranks hang"),
        ([mark(0, "lost", "Connection reset")], "", ("n2",), "rank 1 on n2 vanished"),
        ([mark(0, "all", "diverged"), mark(1, "lost")], "", (), "diverged"),
        ([mark(0, "stopped")], EXITED, ("n2",), "rank 1 on n2 exited with exit code 3"),
        ([mark(0, "lost")], "srun: error: Node failure on n2\n" + KILLED, ("n2",), "Slurm lost the node n2"),
        ([], "", (), "status 7"),
    ],
)
def test_the_cause(marks, log, nodes, said):
    cause = find_cause(marks, TWO, log, 7)
    assert cause.nodes == nodes
    assert said in cause.reason
    assert cause.fatal == (bool(marks) and marks[0].kind == "mistake")


FOUR = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    "marks, nodes, said",
    [
        ([mark(rank, "error", f"ImportError {rank}") for rank in range(4)], (), "rank 0 on n1: ImportError 0"),
        ([mark(rank, "error", "ImportError") for rank in range(3)], (), "ImportError"),  # n4's were ended before
        (
            [mark(0, "error", "ImportError"), mark(1, "error", "no GPU"), mark(2, "stopped")],
            ("n1", "n2"),
            "ImportError",
        ),
        ([mark(rank, "hang", "in meet", waiting=True) for rank in range(3)], ("n4",), "no rank has come from n4"),
        ([mark(rank, "hang", "in meet", waiting=True) for rank in range(4)], (), "all ranks hang"),
        ([mark(0, "hang", waiting=True), *(mark(rank, "stopped") for rank in (1, 2))], ("n4",), "no rank has come"),
        ([mark(0, "hang", waiting=True), mark(3, "hang", "in import")], ("n4",), "rank 3 on n4 hangs: in import"),
        ([Mark(0, "n1.cluster.local", "hang", "in meet", True)], (), "no rank has come"),  # names that do not agree
    ],
)
def test_the_cause_before_the_ranks_have_met(marks, nodes, said):
    cause = find_cause(marks, [], "", 1, job_nodes=FOUR)
    assert cause.nodes == nodes
    assert said in cause.reason


def test_what_several_nodes_say_in_the_same_words_is_no_nodes_fault():
    errors = [mark(0, "error", "no such module"), mark(1, "error", "no such module"), mark(2, "error", "ECC")]
    assert find_cause(errors, FOUR, "", 1).nodes == ("n3",)


def test_who_is_killed_after_slurm_told_the_job_to_end_is_not_to_blame():
    for log in (KILLED, EXITED):  # srun's ranks; torchrun kills its own, and ends with a status
        assert find_cause([], TWO, log, 1, terminated=True).nodes == ()
    assert find_cause([mark(1, "error", "CUDA error")], TWO, KILLED, 1, terminated=True).nodes == ("n2",)


def test_ranks_that_were_asked_to_stop_during_the_start():
    both = [mark(0, "stopped", "stopped by SIGTERM"), mark(1, "stopped")]
    assert stopped_early(both, "srun: error: n1: task 0: Exited with exit code 75\n") == "stopped by SIGTERM"
    assert stopped_early(both, "") == "stopped by SIGTERM"
    assert stopped_early([both[0], mark(1, "lost")], "srun: error: n2: task 1: Exited with exit code 1\n") is not None
    assert stopped_early(both[:1], EXITED) is None  # rank 1 died, and srun ended rank 0
    assert stopped_early([both[0], mark(1, "error")], "") is None
    assert stopped_early([], "") is None


def test_the_step_that_an_attempt_went_on_from(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    leave_resumed(5)  # without a batch script nobody wants to know
    monkeypatch.setenv(FOLDER, str(tmp_path / "0002"))
    leave_resumed(20)
    assert [read_resumed(tmp_path / name) for name in ("0001", "0002")] == [None, 20]
    assert [file.name for file in tmp_path.iterdir()] == ["0002"]


def test_a_node_goes_by_the_name_that_slurm_knows(tmp_path, monkeypatch):
    """scontrol refuses a hostname that is not its own name for the node, and with it all others of the list."""
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu001")
    for attempt in ("outside a step", "in a step"):
        monkeypatch.setenv(FOLDER, str(tmp_path / attempt))
        leave_mark("error", "CUDA error")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    outside, inside = (read_marks(tmp_path / attempt)[0].node for attempt in ("outside a step", "in a step"))
    assert (outside, inside) == (socket.gethostname(), "gpu001")
