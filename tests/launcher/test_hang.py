"""A run that hangs: which collective which ranks have not entered, in the watchdog's message and in `doctor --hang`."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from clip_tools.hang import explain, local_ranks
from clip_train import dist, stacks
from clip_train.errors import UserError
from clip_train.storage.local import LocalStorage
from clip_train.torch_internals import dump_collectives, group_members
from launcher.cli.main import main
from launcher.runtime import environment
from launcher.runtime.environment import NCCL_DUMP
from launcher.runtime.hang import (
    ANSWER,
    HANG,
    REQUEST,
    Collective,
    Standing,
    diagnose,
    read_dump,
    read_nccl_dumps,
)
from launcher.runtime.verdict import VERDICT_FILE, read_verdict
from launcher.runtime.watchdog import rank_of_run
from launcher.slurm.attempts import History
from tests.launcher import hangs
from tests.launcher.conftest import ENDLESS, finish, kill, start, until, wait_for_step
from tests.ranks import run_ranks

HANGS = "tests.launcher.hangs"
LIMIT = "launch.hang_seconds=15"  # above a stall's


def reason(recipe: Path, *overrides: str) -> str:
    """Why a run of two ranks ended, which the watchdog found to hang."""
    status, out = finish(start(recipe, *ENDLESS, LIMIT, *overrides, ranks=2))
    word, why = read_verdict(recipe.parent / "run")
    assert status == 1 and word == "FAILED", out
    assert "no progress for" in why["reason"], out
    return why["reason"]


@pytest.mark.engine
def test_a_skipped_collective_is_named_on_both_sides(recipe):
    said = reason(recipe, f"log.callbacks=[{HANGS}.SkipsACollective]")
    assert "rank 0 is in collective 1 of gloo group" in said
    assert "(all_reduce [3] Float, called from launcher/hangs.py" in said
    assert "rank 1 has not entered it: rank 1 is waiting in gather_rows, called from" in said


@pytest.mark.engine
@pytest.mark.parametrize(
    "workers, reader",
    [(1, "loader worker "), pytest.param(0, "in launcher/hangs.py:", marks=pytest.mark.full)],
)
def test_a_rank_that_waits_for_data_is_named(recipe, workers, reader):
    """With the line of the user's own code that gives no sample, in a loader worker too."""
    said = reason(recipe, f"data.stages=[{HANGS}.stalling]", f"data.workers={workers}")
    assert said.startswith("rank 1 on ")
    assert f"waiting for data: {reader}" in said and " stalling; rank 0 is in collective " in said
    assert said.endswith("rank 1 has not entered it")


@contextmanager
def running(recipe: Path, *overrides: str, ranks: int = 2):
    process = start(recipe, *ENDLESS, *overrides, ranks=ranks)
    try:
        yield process
    finally:
        kill(process)


@pytest.mark.engine
def test_the_doctor_asks_a_live_run(recipe, tmp_path, capsys):
    """A run that makes steps, then one whose rank 1 stays away, and then is frozen too. Rank 2 does
    not look for requests: it hears of them."""
    run_dir = tmp_path / "run"
    with running(recipe, f"log.callbacks=[{HANGS}.StaysAway]", ranks=3) as process:
        wait_for_step(run_dir, 5, process)
        assert main(["doctor", "--hang", str(recipe)]) == 0
        assert "what to do: nothing: the run makes progress" in capsys.readouterr().out
        (tmp_path / hangs.AWAY).touch()
        assert until(lambda: explain(str(run_dir), []).hangs)
        assert main(["doctor", "--hang", str(run_dir)]) == 1
        page = capsys.readouterr().out
        assert "3 of 3 ranks answered, and none moved" in page
        assert "in launcher/hangs.py" in page and "time.sleep(1000)" in page  # its stack
        assert "rank 1 has not entered it: rank 1 is in launcher/hangs.py" in page
        assert page.splitlines()[-1].startswith("what to do: the rank is in code that does not end")
        os.kill(process.ranks[1].pid, signal.SIGSTOP)
        pid = process.ranks[1].pid
        assert main(["doctor", "--json", "--hang", str(run_dir)]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["cause"] == "silent" and found["ranks_that_miss"] == [1]
        assert found["silent"] == {"1": f"pid {pid} on this node is stopped: kill -CONT {pid}"}


@pytest.mark.full
@pytest.mark.engine
def test_the_stack_of_a_rank_that_holds_the_gil(recipe, tmp_path):
    with running(recipe, f"log.callbacks=[{HANGS}.HoldsTheGil]") as process:
        wait_for_step(tmp_path / "run", 5, process)
        report = explain(str(tmp_path / "run"), [])
    assert report.diagnosis.ranks == (1,)
    assert "hangs.py" in report.stacks[1] and " in after_step" in report.stacks[1]


def test_nothing_answers(tmp_path):
    with pytest.raises(UserError, match="must be the folder of a run, or its recipe"):
        explain(str(tmp_path / "nowhere"), [])
    (tmp_path / VERDICT_FILE).write_text('DONE\n{"step": 3, "reason": "trained"}\n')
    with pytest.raises(UserError, match=r"has ended \(DONE: trained\), and no rank wrote about"):
        explain(str(tmp_path), [])


def test_a_run_that_has_not_started(recipe):
    with pytest.raises(UserError, match=r"its run\.dir \(.*run\) does not exist: the run has not"):
        explain(str(recipe), [])


@contextmanager
def answering(run_dir: Path, *now: Callable[[], Standing]) -> Iterator[None]:
    """Ranks as the doctor knows them: each answers its requests with where it is then."""
    folder, over = run_dir / HANG, threading.Event()

    def answer() -> None:
        done = ""
        while not over.wait(0.02):
            with suppress(OSError):
                request = (folder / REQUEST).read_text()
                if request == done:
                    continue
                for each in now:
                    content = {
                        "standing": asdict(each()),
                        "stacks": "thread Main:\n",
                        "time": time.time(),
                    }
                    name = ANSWER.format(rank=content["standing"]["rank"])
                    text = json.dumps(content | {"request": request})
                    LocalStorage(folder).put_bytes(name, text.encode())
                done = request

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_an_earlier_start_with_more_ranks_does_not_count(tmp_path):
    History(tmp_path).append("start", ranks=4)
    steps = count()
    ranks = [lambda rank=rank: standing(rank, step=next(steps)) for rank in range(2)]
    with answering(tmp_path, *ranks):
        report = explain(str(tmp_path), [])
    assert not report.hangs and report.world_size == 2 and "did not answer" not in report.page()


def test_a_run_that_was_started_again_elsewhere(tmp_path):
    """And has not come so far that it removes the verdict of its earlier attempt."""
    (tmp_path / VERDICT_FILE).write_text('FAILED\n{"step": 3, "reason": "timed out"}\n')
    History(tmp_path).append("start", ranks=2)
    ranks = [lambda rank=rank: standing(rank, phase="start", step=None) for rank in range(2)]
    with answering(tmp_path, *ranks):
        report = explain(str(tmp_path), [])
    assert report.hangs and report.state == "2 of 2 ranks answered, and none moved"


def test_a_rank_that_waits_for_a_long_step_makes_progress(tmp_path):
    """Its main thread is at one place for the whole step, as with a GPU."""
    begin, usual = time.monotonic(), 5.0

    def now() -> Standing:
        step = int((time.monotonic() - begin) / usual)
        return standing(0, world_size=1, step=step, usual=usual, waits=True)

    with answering(tmp_path, now):
        report = explain(str(tmp_path), [])
    assert not report.hangs and "moved within 5 s" in report.state


def test_a_loop_that_does_not_end_is_no_progress(tmp_path):
    places = count()
    looping = lambda: standing(0, world_size=1, usual=0.1, where=f"in a.py:{next(places)} f")  # noqa: E731
    with answering(tmp_path, looping):
        report = explain(str(tmp_path), [])
    assert report.diagnosis.cause == "code"


def test_the_run_of_another_user(tmp_path):
    """Root's request belongs to the user of the run, whose ranks answer beside it. Another user is told."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    os.chown(tmp_path, 12345, 12345)
    seen = []

    def now() -> Standing:
        request = tmp_path / HANG / REQUEST
        seen[:] = [(tmp_path / HANG).stat().st_uid, until(lambda: request.stat().st_uid == 12345)]
        return standing(0, world_size=1)

    with answering(tmp_path, now):
        explain(str(tmp_path), [])
    assert seen == [12345, True]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(54321)
            with pytest.raises(
                UserError, match=r"is another user's .* ask as the user who runs it"
            ):
                explain(str(tmp_path), [])
            os.write(write, b"told")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        assert told.read() == b"told"


# -- the flight recorder


def pending_collectives() -> list[Collective]:
    (dump,) = dump_collectives()
    return [each for group in read_dump(dump).values() for each in group if not each.ended]


def half_entered() -> tuple[bytes, dict[str, list[int]]]:
    """Rank 0 is in the third collective of a group, which rank 1 never enters."""
    group = torch_dist.new_group([0, 1])
    for _ in range(2):
        torch_dist.all_reduce(torch.zeros(4), group=group)
    if dist.rank() == 0:
        torch_dist.all_gather(
            [torch.zeros(5, dtype=torch.long) for _ in range(2)],
            torch.zeros(5, dtype=torch.long),
            group=group,
            async_op=True,
        )
    dist.barrier()
    # the recorder hears a moment later than the main thread that the barrier has ended
    assert until(lambda: len(pending_collectives()) == (1 if dist.rank() == 0 else 0))
    (dump,) = dump_collectives()
    members = group_members()
    dist.barrier()
    if dist.rank() == 1:  # so that both can end
        torch_dist.all_gather(
            [torch.zeros(5, dtype=torch.long) for _ in range(2)],
            torch.zeros(5, dtype=torch.long),
            group=group,
        )
    return dump, members


def standing(rank: int, **more) -> Standing:
    known = {"phase": "step", "step": 3, "seconds": 9.0, "where": "in a.py:1 f", "waits": False}
    return Standing(**{"rank": rank, "world_size": 2, "node": "n", "pid": 1, **known, **more})


def test_dumps_of_two_ranks_say_who_misses_what(tmp_path):
    """Real dumps, as NCCL writes its own: the same recorder, in files of the same form."""
    dumps = run_ranks(half_entered, 2)
    standings = {
        rank: standing(rank, collectives=read_dump(dump), members=members)
        for rank, (dump, members) in enumerate(dumps)
    }
    assert Standing.load(json.loads(standings[0].dump())) == standings[0]
    found = diagnose(standings, 2)
    assert found.cause == "code" and found.ranks == (1,)
    assert "rank 0 is in collective 3 of gloo group" in found.said
    assert "(all_gather [5] Long, called from launcher/test_hang.py:" in found.said
    assert (
        found.said.endswith("rank 1 has not entered it") and found.where == "rank 1 is in a.py:1 f"
    )
    # what a run that has ended leaves
    (tmp_path / HANG).mkdir()
    for rank, (dump, _) in enumerate(dumps):
        (tmp_path / HANG / f"{NCCL_DUMP}{rank}").write_bytes(dump)
    (tmp_path / HANG / f"{NCCL_DUMP}x").write_bytes(b"")
    assert {*read_nccl_dumps(tmp_path / HANG)} == {0, 1}
    (tmp_path / VERDICT_FILE).write_text('FAILED\n{"step": 3, "reason": "timed out"}\n')
    report = explain(str(tmp_path), [])
    assert report.diagnosis.ranks == (1,) and "ended, FAILED: timed out" in report.page()


class Harmful:
    def __reduce__(self):
        return (os.system, ("true",))


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps({"entries": [Harmful()]}), "may not contain"),
        (pickle.dumps([1]), "not a dump"),
        (b"", "not a dump"),
        (b"\x80", "not a dump|truncated|ran out"),
    ],
    ids=["a class", "a list", "empty", "cut"],
)
def test_a_dump_cannot_run_code(content, message):
    with pytest.raises(ValueError, match=message):
        read_dump(content)


def collective(
    number: int, name: str = "all_reduce", ended: bool = False, caller: str = "x.py:2 g"
):
    return Collective(number, name, "[3] Float", caller, ended)


def test_causes_are_told_apart():
    """By hand: who is pending, absent, silent or elsewhere."""

    def of(*calls: list[Collective], world_size: int = 3, **more):
        members = {"0": [*range(world_size)]}
        ranks = {
            rank: standing(rank, collectives={"nccl group 0": those}, members=members, **more)
            for rank, those in enumerate(calls)
        }
        return diagnose(ranks, world_size)

    here, before = [collective(7)], [collective(6, ended=True)]
    assert (of(here, here, before).cause, of(here, here, before).ranks) == ("code", (2,))
    assert of(here, here, before).said.startswith("ranks 0, 1 are in collective 7 of nccl group 0")
    assert of(here, here, before, data="in b.py:3 read").cause == "data"
    assert (of(here, here).cause, of(here, here).ranks) == ("silent", (2,))
    other = of(here, here, [collective(7, "all_gather")])
    assert (other.cause, other.ranks) == ("differ", (2,)) and "all_gather [3] Float" in other.said
    assert of(here, here, here).cause == "network"
    assert "does not end" in of(here, here, here).said
    # NCCL enqueues ahead: the oldest one that is pending decides
    ahead = [collective(7), collective(8), collective(9)]
    assert "collective 7 of" in of(ahead, here, before).said
    assert diagnose({}, 2).cause == "silent"
    starved = diagnose({rank: standing(rank, data="in b.py:3 read") for rank in range(2)}, 2)
    assert (starved.cause, starved.ranks) == ("data", (0, 1))  # a store, and no rank's fault
    # what has ended a moment ago may still look pending, on all ranks
    late = {"gloo group 1": [collective(3)]}
    two = {0: {**late, "gloo group 0": here}, 1: {**late, "gloo group 0": before}}
    late_too = diagnose({rank: standing(rank, collectives=those) for rank, those in two.items()}, 2)
    assert (late_too.cause, late_too.ranks) == ("code", (1,))
    alone = diagnose({0: standing(0)}, 1)
    assert alone.cause == "code" and alone.said == "rank 0 is in a.py:1 f"


def test_the_recorder_is_on_unless_the_user_says_otherwise(tmp_path):
    environ: dict[str, str] = {}
    environment.prepare(environ, hang_dir=tmp_path / HANG)
    assert (
        environ["TORCH_FR_BUFFER_SIZE"] == "2000" and environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    )
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/hang/nccl_rank_"
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x"}
    environment.prepare(environ := dict(own), hang_dir=tmp_path)
    assert not environ.keys() & {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"}
    assert own.items() <= environ.items()
    # nothing of one call is left in the next, with the user's own allocator too
    environment.prepare({"PYTORCH_ALLOC_CONF": ""}, hang_dir=tmp_path)
    environment.prepare(environ := own | {"PYTORCH_ALLOC_CONF": ""}, hang_dir=tmp_path)
    assert not environ.keys() & {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"}


def test_an_answer_that_cannot_be_read_is_left_out(tmp_path):
    from launcher.runtime.hang import read_answers

    (tmp_path / ANSWER.format(rank=0)).write_text("{")
    (tmp_path / ANSWER.format(rank=1)).write_text('{"standing": {"rank": 1}}')
    assert read_answers(tmp_path) == {}


# -- stacks by a signal


@contextmanager
def asked_by_signal(who: str) -> Iterator[int]:
    """The pid of a process that has called `stacks.answer`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            stacks.answer(who)
            os.write(write, b"x")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    try:
        os.read(read, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_a_rank_is_found_by_the_folder_of_its_run(tmp_path):
    """Its path may be longer than a name in memory, and lead over a link."""
    run_dir = tmp_path / ("long" * 50) / ("name" * 50)
    run_dir.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run_dir)
    with asked_by_signal(rank_of_run(3, tmp_path / "link")) as pid:
        (found,) = local_ranks(run_dir).items()
    assert (found[0], found[1].pid) == (3, pid) and local_ranks(tmp_path) == {}


def test_a_process_answers_a_signal_with_its_stacks():
    assert stacks.SIGNAL not in (signal.SIGUSR1, signal.SIGUSR2)
    with asked_by_signal("this test") as pid:
        (found,) = [each for each in stacks.processes() if each.pid == pid]
        assert found.who == "this test" and not found.is_stopped()
        first, second = stacks.ask(found), stacks.ask(found)
        assert first == second and "in test_a_process_answers_a_signal_with_its_stacks" in first
        os.kill(pid, signal.SIGSTOP)
        assert until(found.is_stopped)
        assert stacks.ask(found, seconds=0.3) == ""
    assert stacks.ask(found, seconds=0.3) == ""
