"""Deaths, hangs and mistakes of one rank of several, with no launcher that would end the others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.errors import ClipTrainError
from clip_train.processes import node_name
from launcher.runtime.verdict import RUN_DIR, read_verdict
from launcher.slurm.attempts import explain_verdict
from tests.launcher.conftest import (
    ENDLESS,
    finish,
    free_port,
    metrics,
    start,
    wait_for,
    wait_for_step,
)
from tests.processes import family

pytestmark = pytest.mark.engine

PROMPT = 10.0  # seconds from an error to its verdict; 2 on a machine that is not busy


def seconds_to_verdict(run_dir: Path) -> float:
    """From the record of the last step to the verdict."""
    return (run_dir / "VERDICT").stat().st_mtime - (run_dir / "metrics.jsonl").stat().st_mtime


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_of_one_rank_ends_the_other(recipe, tmp_path, rank):
    process = start(recipe, *ENDLESS, ranks=2)
    wait_for_step(tmp_path / "run", 5, process)
    process.ranks[rank].kill()
    status, out = finish(process)
    assert status != 0
    assert (
        "no progress for" not in out
    )  # it has learnt of the death, and not waited for the watchdog
    assert out.count(f"error: rank {rank} on") == 1 and "has died or is frozen" in out, out
    assert "lost contact" not in out
    word, why = read_verdict(tmp_path / "run")
    assert word == "FAILED" and f"rank {rank} on" in why["reason"]


class BreaksOnRank1(Callback):
    """`log.callbacks`: also remembers the error that each rank's run ends by."""

    def after_step(self, record, keys, invalid):
        if dist.rank() == 1 and record["step"] == 5:
            raise ClipTrainError("the callback is broken on purpose")

    def on_error(self, error):
        Path(f"error{dist.rank()}").write_text(f"{type(error).__name__}: {error}")


def last_line(process, rank: int) -> str:
    out, _ = process.ranks[rank].communicate()
    return out.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    "fault, step, times",
    [
        ("engine:1", 0, 1),
        ("loader:1:0", 0, 2),  # printed with the worker's own traceback
        ("loader:1", 5, 2),
        ("raise:1", 5, 1),
        ("evaluate:1", 5, 1),
        ("snapshot:1", 5, 1),
    ],
)
def test_the_error_of_one_rank_ends_the_other_which_names_it(
    recipe, tmp_path, data, fault, step, times
):
    """While the engine is built, in a loader worker, a step, an evaluation and a save. The rank that failed prints the
    traceback, and rank 0's last line has the error."""
    due = (f"data.val={data.val}", "evaluate.every_steps=5", "checkpoint.every_steps=5")
    process = start(recipe, *ENDLESS, *due, "data.workers=1", ranks=2, fault=fault)
    status, out = finish(process)
    assert status == 1 and [rank.returncode for rank in process.ranks] == [1, 1]
    assert out.count("\nRuntimeError: broken on purpose") == times, out
    error = f"rank 1 on {node_name()}: RuntimeError: broken on purpose"
    assert last_line(process, 0).endswith(f"error: ended by {error}"), out
    word, why = read_verdict(tmp_path / "run")
    assert (word, why["step"], why["reason"]) == ("FAILED", step, error)
    if fault == "evaluate:1":  # the save of its step is not lost
        assert (tmp_path / "run" / "PROGRESS").read_text() == "5\n"
    assert why["where"] == f"rank 1 on {node_name()}" and why["blamed"] == node_name()
    if step > 0:
        assert seconds_to_verdict(tmp_path / "run") < PROMPT


def test_a_callbacks_error_on_rank_1_is_named_by_rank_0(recipe, tmp_path):
    own = (f"log.callbacks=[{__name__}.BreaksOnRank1]",)
    process = start(recipe, *ENDLESS, *own, ranks=2, cwd=tmp_path)
    status, out = finish(process)
    assert status == 1 and "Traceback" not in out, out
    message = "the callback is broken on purpose"
    error = f"rank 1 on {node_name()}: {message}"
    assert last_line(process, 0).endswith(f"error: ended by {error}"), out
    word, why = read_verdict(tmp_path / "run")
    assert (word, why["step"], why["reason"]) == ("FAILED", 5, error)
    seen = [(tmp_path / f"error{rank}").read_text() for rank in range(2)]
    assert seen == [f"RemoteRankError: {error}", f"ClipTrainError: {message}"]


class DoesNotCloseOnRank1(Callback):
    def close(self):
        if dist.rank() == 1:
            raise ClipTrainError("it does not close, on purpose")


def test_an_error_while_rank_1_closes_a_run_is_the_verdict(recipe, tmp_path):
    own = (f"log.callbacks=[{__name__}.DoesNotCloseOnRank1]", "run.steps=6")
    process = start(recipe, *own, ranks=2, cwd=tmp_path)
    _, out = finish(process)
    assert [rank.returncode for rank in process.ranks] == [1, 1], out
    word, why = read_verdict(tmp_path / "run")
    assert word == "FAILED" and why["reason"].endswith("it does not close, on purpose")
    assert "info: done." not in out and last_line(process, 0).endswith(why["reason"])


class EndsSlowlyOnRank1(BreaksOnRank1):
    def close(self):
        if dist.rank() == 1:
            time.sleep(5.0)


def test_a_rank_that_waits_and_writes_a_profile_ends(recipe, tmp_path):
    """A thread closes its run, in which torch cannot end the main thread's profile."""
    own = (f"log.callbacks=[{__name__}.EndsSlowlyOnRank1]", "log.profile_steps=[2, 1000]")
    process = start(recipe, *ENDLESS, *own, ranks=2, cwd=tmp_path)
    _, out = finish(process)
    assert [rank.returncode for rank in process.ranks] == [1, 1], out
    assert (tmp_path / "error0").read_text().startswith("RemoteRankError: rank 1 on")


@pytest.mark.parametrize("fault", ["raise:1:60", "evaluate:1:60", "loader:1:60"])
def test_an_error_is_published_before_pending_saves_finish(recipe, tmp_path, data, fault):
    """An error in a step, an evaluation or the loader, while uploads are pending: the checkpoint
    writers stand still until the verdict names the error, and what was pending is committed all the
    same. If the rank closed first, the watchdog of rank 0 would report a hang."""
    store = f"checkpoint.remote={tmp_path / 'store'}"
    limits = ("launch.hang_seconds=25", "checkpoint.grace_seconds=600", store)
    evaluated = (f"data.val={data.val}", "evaluate.every_steps=30")
    process = start(recipe, *ENDLESS, *evaluated, "data.workers=1", *limits, ranks=2, fault=fault)
    wait_for(lambda: len(writers(process)) == 2, "there are no checkpoint writers", process)
    stopped = writers(process)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: read_verdict(tmp_path / "run"), "there is no verdict", process)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    status, out = finish(process)
    assert status == 1 and "no progress for" not in out, out
    word, why = read_verdict(tmp_path / "run")
    assert word == "FAILED"
    assert why["reason"] == f"rank 1 on {node_name()}: RuntimeError: broken on purpose"
    assert seconds_to_verdict(tmp_path / "run") < PROMPT
    assert list((tmp_path / "run" / "checkpoints" / "commit").glob("*.json")), out


class FailsAndHangsOnRank1(Callback):
    """`log.callbacks`: that rank's process does not end after its error."""

    def after_step(self, record, keys, invalid):
        if dist.rank() == 1 and Path("fail").exists():
            raise ClipTrainError("it fails, and does not end")

    def close(self):
        if dist.rank() == 1:
            time.sleep(1000)


def test_a_rank_that_waits_finishes_its_save_and_ends(recipe, tmp_path):
    """Rank 1 fails, and its process and its connections stay. Rank 0 is in a collective then, and an upload is
    pending, which goes on after the verdict."""
    store = tmp_path / "store"
    own = (f"log.callbacks=[{__name__}.FailsAndHangsOnRank1]",)
    remote = f"checkpoint.remote=tests.checkpoint.held.HeldStore://{store}"
    process = start(recipe, *ENDLESS, *own, remote, ranks=2, cwd=tmp_path)
    try:
        wait_for(lambda: list(store.glob("commit/*.json")), "nothing is committed", process)
        (store / "hold").touch()
        time.sleep(1.0)  # until a commit that was under way has ended
        before = set(store.glob("commit/*.json"))
        step = metrics(tmp_path / "run")[-1]["step"]
        wait_for_step(tmp_path / "run", step + 20, process)  # a save is pending
        (tmp_path / "fail").touch()
        wait_for(lambda: read_verdict(tmp_path / "run"), "there is no verdict", process)
        time.sleep(3.0)  # rank 0 knows it
        (store / "hold").unlink()
        wait_for(lambda: process.ranks[0].poll() is not None, "rank 0 does not end", process)
        assert process.ranks[1].poll() is None
    finally:
        process.ranks[1].kill()
    status, out = finish(process)
    assert process.ranks[0].returncode == 1 and "no progress for" not in out, out
    assert "it fails, and does not end" in last_line(process, 0), out
    assert set(store.glob("commit/*.json")) - before, out


class CannotClose(Callback):
    def close(self):
        raise ClipTrainError("it cannot close")


class Closes(Callback):
    def close(self):
        Path("closed").touch()


def test_a_callback_that_cannot_close_keeps_no_other_open(recipe, tmp_path):
    own = f"log.callbacks=[{__name__}.CannotClose,{__name__}.Closes]"
    line = ("run.steps=2", "schedule.warmup_steps=0", own)
    status, out = finish(start(recipe, *line, cwd=tmp_path))
    assert status == 1 and out.count("it cannot close") == 1, out
    assert (tmp_path / "closed").exists()


def test_a_notice_names_the_rank_and_the_node(recipe, tmp_path):
    """log.notify's REASON, which is all that a message on a phone shows."""
    notice = f"log.notify='echo \"$VERDICT: $REASON\" > {tmp_path}/notice'"
    status, out = finish(start(recipe, *ENDLESS, notice, ranks=2, fault="raise:1"))
    said = (tmp_path / "notice").read_text()
    assert said == f"FAILED: rank 1 on {node_name()}: RuntimeError: broken on purpose\n", out


def test_an_error_in_a_save_is_published_during_uploads(recipe, tmp_path):
    """Uploads hang until the verdict names the error, while local commits go on. What was pending is
    uploaded then."""
    run_dir, store = tmp_path / "run", tmp_path / "store"
    limits = ("launch.hang_seconds=25", "checkpoint.grace_seconds=600")
    remote = f"checkpoint.remote=tests.checkpoint.held.HeldStore://{store}"
    process = start(recipe, *ENDLESS, *limits, remote, ranks=2, fault="snapshot:1:60")
    wait_for(lambda: len(writers(process)) == 2, "there are no checkpoint writers", process)
    (store / "hold").touch()
    time.sleep(1.0)  # until a commit that was under way has ended
    before = len(list(store.glob("commit/*.json")))
    try:
        wait_for(lambda: read_verdict(run_dir), "there is no verdict", process)
        assert process.poll() is None and len(list(store.glob("commit/*.json"))) == before
    finally:
        (store / "hold").unlink()
    status, out = finish(process)
    assert status == 1 and "no progress for" not in out, out
    word, why = read_verdict(run_dir)
    assert word == "FAILED"
    assert why["reason"] == f"rank 1 on {node_name()}: RuntimeError: broken on purpose"
    assert why["step"] >= 60 and seconds_to_verdict(run_dir) < PROMPT
    assert len(list(store.glob("commit/*.json"))) > before, out


def by_hand(recipe, *overrides, **of_rank_1):
    """Two ranks as on two nodes, each with its own environment."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = ("run.steps=3", "schedule.warmup_steps=0", *overrides)
    return (
        start(recipe, *line, environ={**world, "RANK": "0"}),
        {**world, "RANK": "1", **of_rank_1},
        line,
    )


def blamed(run_dir: Path) -> tuple[str, tuple[str, ...]]:
    """What attempts.jsonl would have of an attempt: the reason, and the nodes that are to blame."""
    _, reason, nodes = explain_verdict(read_verdict(run_dir), 1)
    return reason, nodes


def test_an_unresolved_node_name_and_the_missing_rank_are_named(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    first, environ, line = by_hand(
        recipe, "launch.rendezvous_seconds=20", MASTER_ADDR="no-such-node.invalid"
    )
    status, out = finish(start(recipe, *line, environ=environ))
    assert status == 1
    assert "rank 1 on" in out and "cannot resolve MASTER_ADDR (no-such-node.invalid)" in out, out
    assert "correct DNS or /etc/hosts" in out and "lost contact" not in out, out
    status, out = finish(first)
    assert status == 1
    assert "within launch.rendezvous_seconds (20) 1 of 2 ranks have joined" in out, out
    assert "missing: rank 1" in out and "lost contact" not in out, out
    reason, nodes = blamed(tmp_path)
    assert "cannot resolve MASTER_ADDR" in reason and nodes == (node_name(),)


def test_a_failed_process_group_names_ranks_and_nodes(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    status, out = finish(start(recipe, "launch.group_seconds=2", ranks=2, fault="group:1"))
    assert status == 1 and "(launch.group_seconds is 2); missing: rank 0 on" in out, out
    assert "lost contact" not in out and "Traceback" not in out, out
    assert "is GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME needed?" in out, out
    reason, nodes = blamed(tmp_path)
    assert f"missing: rank 0 on {node_name()}, 1 on {node_name()}" in reason and nodes == ()


@pytest.mark.parametrize("line", [(), ("--dry-run",)])
def test_a_gpu_that_torch_cannot_use_is_refused(recipe, tmp_path, line):
    """Nobody looks for it in a run that says that it trains on the CPU."""
    given = {"CUDA_VISIBLE_DEVICES": "7", "SLURM_STEP_GPUS": "7"}
    status, out = finish(start(recipe, *line, environ=given))
    assert status == 2 and "there is a GPU here (SLURM_STEP_GPUS=7)" in out, out
    assert "set CUDA_VISIBLE_DEVICES= (empty)" in out and metrics(tmp_path / "run") == []


def test_a_port_that_is_taken_is_its_own_cause(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        world = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        status, out = finish(start(recipe, environ=world))
    assert status == 1
    assert f"cannot listen at MASTER_PORT ({port})" in out and "lost contact" not in out, out
    reason, nodes = blamed(tmp_path)
    assert f"cannot listen at MASTER_PORT ({port})" in reason and nodes == ()


def test_a_run_directory_not_shared_by_nodes_is_refused_at_start(recipe, tmp_path, monkeypatch):
    """As two nodes with a disk each: the same relative path in two folders. The batch script's controller reads the
    verdict on rank 0's."""
    monkeypatch.setenv(RUN_DIR, "run")
    first, environ, line = by_hand(recipe, "run.dir=run")
    (tmp_path / "disk").mkdir()
    second = start(recipe, *line, environ=environ, cwd=tmp_path / "disk")
    ended = [finish(rank) for rank in (first, second)]
    out = "".join(out for _, out in ended)
    assert [status for status, _ in ended] == [2, 2], out
    assert out.count("is not shared") == 1 and "cannot see what rank 0 writes" in out, out
    assert "set checkpoint.remote" in out and metrics(tmp_path / "run") == [], out
    assert read_verdict(tmp_path / "run")[0] == "FATAL"  # not requeued
    reason, nodes = blamed(tmp_path / "run")
    assert f"is not shared: {node_name()} cannot see" in reason and nodes == ()


def writers(process) -> list[int]:
    """The processes that write checkpoints."""
    found = []
    for pid in {pid for rank in process.ranks for pid in family(rank)}:
        with contextlib.suppress(OSError):
            if b"clip_train.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.full
def test_an_error_of_one_rank_is_printed_there_and_by_rank_0(recipe, tmp_path):
    process = start(recipe, *ENDLESS, ranks=2, fault="alone:1")
    status, out = finish(process)
    assert status == 1
    assert f"[rank 1 on {node_name()}] its own disk is full" in out, out
    assert "its own disk is full" in last_line(process, 0), out
    assert read_verdict(tmp_path / "run")[0] == "FAILED"


def test_a_rank_outside_of_any_collective_learns_of_a_death(recipe, tmp_path):
    """By the heartbeats alone: no launcher, and it waits for no message."""
    process = start(recipe, *ENDLESS, ranks=2, fault="sleep:1")
    wait_for((recipe.parent / "fault").exists, "rank 1 does not come to its fifth step", process)
    process.ranks[0].kill()
    _, out = finish(process)
    assert process.ranks[1].returncode == 1
    assert out.count("error: rank 0 on") == 1, out
    assert read_verdict(tmp_path / "run")[0] == "FAILED"


def test_a_hang_in_a_save_is_found(recipe, tmp_path):
    """Its own watchdog finds it; the other rank stands elsewhere, and has a longer limit."""
    process = start(recipe, *ENDLESS, ranks=2, fault="save:1")
    status, out = finish(process)
    assert status == 1
    assert "in phase save" in out and "in faults/sitecustomize.py" in out, out
    assert read_verdict(tmp_path / "run")[0] == "FAILED"


@pytest.mark.parametrize(
    "lines, message",
    [
        ((["optim.lr=1e-3"], ["optim.lr=2e-3"]), "optim.lr: 0.001 against 0.002"),
        ((["run.steps=10"], ["run.stepz=10"]), "run.stepz (10): no such key"),
        (
            (["run.steps=10"], ["batch.global_size=1"]),
            "batch.global_size (1) must be at least the number of ranks (2)",
        ),
        ((["data.train=/nowhere/*.tar"], ["run.steps=10"]), "matches no shard"),
    ],
)
def test_a_mistake_of_one_rank_ends_all(recipe, tmp_path, lines, message):
    """Two processes of one world, started by hand, that were not given the same line. The rank that is wrong prints
    it, and rank 0's last line has it."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start(recipe, *line, environ={"RANK": str(rank), **world})
        for rank, line in enumerate(lines)
    ]
    ended = [finish(rank) for rank in ranks]
    assert [status for status, _ in ended] == [2, 2], ended
    outs = [out for _, out in ended]
    assert message in outs[0].rstrip().splitlines()[-1], outs
    if "/nowhere" in str(lines[0]):  # rank 0's own, which rank 1 does not repeat
        assert message not in outs[1] and outs[0].count(message) == 1, outs
    else:
        assert outs[1].count(message) == 1 and outs[0].count(message) == 1, outs
    assert not (tmp_path / "run").exists()
