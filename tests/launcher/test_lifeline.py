"""Lines between ranks: who dies is known to all others at once, who leaves in order disturbs nobody."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from pathlib import Path

import pytest

from clip_train import dist
from launcher.runtime import lifeline as lifeline_module
from launcher.runtime.lifeline import Lifeline, Loss
from tests.launcher.conftest import until
from tests.ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.distributed
PATIENCE = 120.0  # seconds


def one_dies(folder: Path, doomed: int) -> None:
    os.environ.update(SLURM_STEP_NUM_TASKS="3", SLURMD_NODENAME=f"n{dist.rank()}")
    lifeline = Lifeline("127.0.0.1")
    assert lifeline.open() is None
    dist.barrier()
    if dist.rank() == doomed:
        assert until(lambda: len(list(Path(folder).glob("* is out"))) == 2)  # of the barrier, which would fail
        os._exit(9)
    Path(folder, f"{dist.rank()} is out").touch()
    loss = lifeline.wait(PATIENCE)
    told = "none" if loss is None else f"{loss.rank} {loss.node} {loss.how} {lifeline.tells(loss)}"
    Path(folder, f"{dist.rank()}").write_text(told)
    os._exit(0)  # no group to leave in order


def both_threads_say() -> list[bool] | None:
    """Of rank 0: whether each of two looks is the one that says it."""
    lifeline = Lifeline("127.0.0.1")
    assert lifeline.open() is None
    dist.barrier()
    losses = [Loss(dist.world_size() - 1, "n", how) for how in ("told", "gone", "gone")]  # type: ignore[arg-type]
    return [lifeline.is_to_say(loss) for loss in losses]


def test_a_death_is_told_once_by_whichever_thread_comes_first():
    assert run_ranks(both_threads_say, 3) == [[False, True, False], [False] * 3, [False] * 3]


@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_a_death_is_known_to_all_and_told_by_one(tmp_path, doomed):
    with pytest.raises(RankFailedError):  # of run_ranks: none of them answers
        run_ranks(one_dies, 3, tmp_path, doomed)
    left = [rank for rank in range(3) if rank != doomed]
    assert [(tmp_path / str(rank)).read_text() for rank in left] == [
        f"{doomed} n{doomed} gone {rank == left[0]}" for rank in left
    ]


def one_leaves(how: str) -> tuple[int, str] | None:
    lifeline = Lifeline("127.0.0.1")
    assert lifeline.open() is None
    dist.barrier()
    if dist.rank() == 1:
        lifeline.leave(how)  # type: ignore[arg-type]
        lifeline.leave("bye")  # again does nothing
        return None
    loss = lifeline.wait(PATIENCE if how == "told" else 2)
    return (loss.rank, loss.how) if loss is not None else None


def test_an_error_that_has_been_told_is_not_told_again():
    assert run_ranks(one_leaves, 3, "told") == [(1, "told"), None, (1, "told")]


def test_who_leaves_in_order_is_not_lost():
    assert run_ranks(one_leaves, 3, "bye") == [None, None, None]


def one_cannot_reach_rank_0() -> str | None:
    if dist.rank() == 0:
        lifeline_module.HELLO_SECONDS = 2.0
    return Lifeline("127.0.0.1" if dist.rank() < 2 else "127.0.0.1.invalid").open()


def test_without_a_way_to_rank_0_there_are_no_lines_and_all_know_why():
    said = run_ranks(one_cannot_reach_rank_0, 3)
    # rank 1 as well where it comes late
    assert re.fullmatch(r"rank 0 on \S+: timed out; rank [12] on \S+: .+", said[0]), said
    assert said == said[:1] * 3


def a_stranger_comes_first() -> str | None:
    if dist.rank() == 1:
        connect = socket.create_connection

        def after_strangers(address: tuple[str, int], **options: float) -> socket.socket:
            strangers.append(connect(address, **options))  # says nothing, and stays
            connect(address, **options).sendall(b"\x16\x03\x01\x02\x00\x01\xff\xfe\n")  # TLS
            return connect(address, **options)

        strangers: list[socket.socket] = []
        socket.create_connection = after_strangers  # type: ignore[assignment]
    return Lifeline("127.0.0.1").open()


def test_strangers_do_not_keep_ranks_from_each_other():
    assert run_ranks(a_stranger_comes_first, 2) == [None, None]


def rank_0_has_no_file_left() -> str | None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = []
    if dist.rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        os.close(files.pop())  # for the socket that listens
    why = Lifeline("127.0.0.1").open()
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return why


def test_too_few_files_are_not_taken_for_a_closed_port():
    assert all("rank 0" in told and "Too many open files" in told for told in run_ranks(rank_0_has_no_file_left, 2))
