"""`clip-train doctor --hang RUN`: where each rank of a run is, and which collective who has not entered.

It writes a request into the run directory. Two ranks look for it and tell the others through their
store, and the watchdog of each rank answers in the run directory, on any node. Ranks on this machine
that do not answer, because they hold the GIL, are asked by a signal for their stacks.
A second round separates ranks that hang from ranks that work. For a run that has ended, it reads what
the ranks and NCCL wrote when they noticed the hang.
"""

import calendar
import contextlib
import os
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clip_train import stacks
from clip_train.errors import UserError
from clip_train.recipe.recipe import load_config
from clip_train.storage.local import LocalStorage
from launcher.runtime.hang import (
    HANG,
    REQUEST,
    Diagnosis,
    Standing,
    diagnose,
    named,
    read_answers,
    read_nccl_dumps,
)
from launcher.runtime.verdict import VERDICT_FILE, read_verdict
from launcher.runtime.watchdog import REQUEST_SECONDS, Phase, rank_of_run
from launcher.slurm.attempts import History

TIME = "%Y-%m-%dT%H:%M:%S%z"  # in attempts.jsonl
# For all ranks: two look every REQUEST_SECONDS, the others hear of it with their next heartbeat, and
# each may ask its workers.
ANSWER_SECONDS = 20.0
# After the newest answer, or the request to a run that has a verdict: who has not answered will not.
LATE_SECONDS = 8.0
ROUND_SECONDS = 2.0  # between the two rounds; a usual step, if that takes longer
MOST_ROUND_SECONDS = 120.0
LINES_OF_STACK = 24  # shown of a rank
STACKS_SHOWN = 2  # ranks
REMEDIES = {
    "silent": "the rank is frozen, busy outside of Python, or its node is gone. If it is stopped: "
    "kill -CONT PID. Otherwise look at its node (dmesg | tail), kill the process, and start the run "
    "again without that node; it resumes",
    "data": "the rank waits for its next batch: check its disk and its store with `clip-train doctor "
    "{recipe}` on that node, and look at the stack above for the call that does not return",
    "code": "the rank is in code that does not end: its stack above shows where",
    "differ": "the ranks run different code: look for a collective, or a call of `clip_train.dist`, "
    "inside an `if` that is not the same on all ranks, in a callback, loss or model of your own",
    "network": "all have called it, so a link or a GPU does not answer: `dmesg | grep -i -e xid -e "
    "nvrm` on each node, and `clip-train doctor --all-nodes`",
    "none": "nothing: the run makes progress",
}


@dataclass(frozen=True)
class Report:
    """What was found out about a run."""

    run_dir: Path
    world_size: int
    diagnosis: Diagnosis
    state: str  # of the run, as a sentence
    standings: dict[int, Standing]
    stacks: dict[int, str] = field(default_factory=dict)  # by rank
    pids: dict[int, str] = field(default_factory=dict)  # of silent ranks on this machine, and why

    @property
    def hangs(self) -> bool:
        return self.diagnosis.cause != "none"

    @property
    def remedy(self) -> str:
        recipe = shlex.quote(str(self.run_dir / "recipe.yaml"))
        return REMEDIES[self.diagnosis.cause].format(recipe=recipe)

    def page(self) -> str:
        lines = [f"{self.run_dir}: {self.state}"]
        for rank in range(self.world_size):
            if rank in self.standings:
                one = self.standings[rank]
                where = f"{one.node}, pid {one.pid}; {at_step(one)}; {one.does()}"
            else:
                where = self.pids.get(rank, "did not answer")
            lines.append(f"  rank {rank}: {where}")
        pending = [
            f"  rank {rank}: collective {each.number} of {group}, {each.describe()}"
            for rank, one in sorted(self.standings.items())
            for group, collectives in one.collectives.items()
            for each in collectives
            if not each.ended
        ]
        if pending and self.hangs:
            lines += ["collectives that have not ended:", *pending]
        if self.hangs:
            for rank in self.diagnosis.ranks[:STACKS_SHOWN]:
                if self.stacks.get(rank):
                    lines += [f"stack of rank {rank}:", *main_stack(self.stacks[rank])]
            lines.append(f"why: {self.diagnosis.describe()}")
        lines.append(f"what to do: {self.remedy}")
        return "\n".join(lines)

    def values(self) -> dict[str, Any]:
        return {
            "run": str(self.run_dir),
            "state": self.state,
            "hangs": self.hangs,
            "cause": self.diagnosis.cause,
            "why": self.diagnosis.describe(),
            "ranks_that_miss": self.diagnosis.ranks,
            "remedy": self.remedy,
            "silent": self.pids,
            "ranks": {rank: asdict(one) for rank, one in sorted(self.standings.items())},
            "stacks": self.stacks,
        }


def main_stack(text: str) -> list[str]:
    """The part of a rank's stacks that fits on a page: its main thread."""
    if "most recent call first" in text:  # faulthandler's: the main thread is the last
        kept = text.strip().split("\n\n")[-1].splitlines()[:LINES_OF_STACK]
    else:
        kept = text.strip().split("\n\n")[0].splitlines()
        kept = [kept[0], *kept[1:][-LINES_OF_STACK:]]
    return [f"  {line}" for line in kept]


def at_step(one: Standing) -> str:
    step = "before its first step" if one.step is None else f"step {one.step + 1}"
    return f"{step}, phase {one.phase} for {one.seconds:.0f} s"


def explain(run: str, overrides: list[str]) -> Report:
    """run: its folder, or its recipe. UserError if there is nothing to say."""
    try:
        return explain_run(find_run_dir(run, overrides))
    except PermissionError as e:
        raise UserError(
            f"--hang ({run}): {e.filename} is another user's ({e.strerror}); ask as the user who runs it"
        ) from e


def explain_run(run_dir: Path) -> Report:
    folder = run_dir / HANG
    starts = History(run_dir).of("start")
    # as rank 0 has recorded them at the newest start, if it came so far
    world_size = starts[-1].get("ranks", 0) if starts else 0
    here = local_ranks(run_dir)
    stopped = {rank for rank, process in here.items() if process.is_stopped()}
    world_size = max([world_size, *(rank + 1 for rank in here)])
    # The verdict may be of an earlier attempt: a new one, on other nodes, removes it only when it has
    # found its checkpoint, and may hang before that.
    has_ended = not here and (run_dir / VERDICT_FILE).exists()
    first = ask_ended(folder, world_size) if has_ended else ask_all(folder, world_size, stopped)
    if has_ended and not first:
        begin = time.strptime(starts[-1]["time"], TIME) if starts else time.gmtime(0)
        return explain_ended(run_dir, world_size, calendar.timegm(begin) - begin.tm_gmtoff)
    world_size = ranks_in_all(first) or world_size
    if not first and not here:
        raise UserError(
            f"no rank of {run_dir} answers within {ANSWER_SECONDS:.0f} s: is it running, and is this "
            "its run.dir, on a file system that its nodes share?"
        )
    # a GPU may compute for the whole step while its rank waits at one place
    usual = max((answer["standing"].usual for answer in first.values()), default=0.0)
    seconds = max(ROUND_SECONDS, min(usual, MOST_ROUND_SECONDS))
    time.sleep(seconds)
    answers = ask_all(folder, world_size, set(range(world_size)) - first.keys())
    standings = {rank: answer["standing"] for rank, answer in answers.items()}
    texts = {rank: answer["stacks"] for rank, answer in answers.items()}
    pids = {}
    for rank, process in here.items():
        if process.is_stopped():
            pids[rank] = f"pid {process.pid} on this node is stopped: kill -CONT {process.pid}"
        elif rank not in answers:
            pids[rank] = f"pid {process.pid} on this node does not answer"
            texts[rank] = stacks.ask(process)
    world_size = ranks_in_all(answers) or world_size
    moved = [
        rank
        for rank, one in standings.items()
        if rank in first and has_moved(first[rank]["standing"], one, seconds)
    ]
    if moved and len(standings) == world_size:
        steps = {one.step for one in standings.values()}
        state = f"{named(moved)} of {world_size} moved within {seconds:.0f} s"
        if steps - {None}:
            state += f", at step {max(step for step in steps if step is not None)}"
        return Report(run_dir, world_size, Diagnosis("none", state), state, standings)
    state = f"{len(standings)} of {world_size} ranks answered, and none moved"
    if moved:
        state = f"{len(standings)} of {world_size} ranks answered"
    return Report(
        run_dir=run_dir,
        world_size=world_size,
        diagnosis=diagnose(standings, world_size),
        state=state,
        standings=standings,
        stacks=texts,
        pids=pids,
    )


def has_moved(before: Standing, now: Standing, seconds: float) -> bool:
    """Whether a rank has made progress in this time. A loop that does not end moves from line to
    line, so where it is counts only until a step has had its usual time."""
    early, late = before.progress(), now.progress()
    if now.phase == Phase.STEP.value and 0 < now.usual <= seconds:
        late = late._replace(where=early.where)
    return early != late


def find_run_dir(run: str, overrides: list[str]) -> Path:
    place = Path(run)
    if place.suffix in (".yaml", ".yml") and not place.is_dir():
        place = load_config(run, overrides).run_dir
        if not place.is_dir():
            raise UserError(
                f"--hang ({run}): its run.dir ({place}) does not exist: the run has not started, or "
                "not in this folder and on this disk"
            )
    if not place.is_dir():
        raise UserError(f"--hang ({run}) must be the folder of a run, or its recipe")
    return place.resolve()


def local_ranks(run_dir: Path) -> dict[int, stacks.Answering]:
    """The ranks of this run on this machine."""
    found = {}
    for process in stacks.processes():
        match = re.match(r"rank (\d+) ", process.who)
        if match is not None and process.who == rank_of_run(int(match[1]), run_dir):
            found[int(match[1])] = process
    return found


def ranks_in_all(answers: Mapping[int, dict[str, Any]]) -> int:
    """As those that answer know it, unlike an earlier start; 0 if none does."""
    return max((answer["standing"].world_size for answer in answers.values()), default=0)


def write_request(folder: Path, request: str) -> None:
    """If root asks, folder and file belong to the user of the run: the ranks write there too.
    PermissionError."""
    folder.mkdir(exist_ok=True)
    give_to_owner(folder)
    LocalStorage(folder).put_bytes(REQUEST, request.encode())
    give_to_owner(folder / REQUEST)


def give_to_owner(place: Path) -> None:
    """To the owner of the folder that it is in, if this process may do that."""
    owner = place.parent.stat()
    if os.geteuid() != owner.st_uid:
        with contextlib.suppress(OSError):
            os.chown(place, owner.st_uid, owner.st_gid)


def ask_ended(folder: Path, world_size: int) -> dict[int, dict[str, Any]]:
    """The answers, if a run that has a verdict was started again; else none, after a short time."""
    try:
        return ask_all(folder, world_size, set(), first_seconds=LATE_SECONDS)
    except OSError:  # a folder that can only be read: nothing can be asked there
        return {}


def ask_all(
    folder: Path, world_size: int, silent: Set[int], first_seconds: float = ANSWER_SECONDS
) -> dict[int, dict[str, Any]]:
    """The answers of all ranks that answer, by rank.

    silent: ranks that are not waited for. first_seconds: until the first answer.
    """
    request = secrets.token_hex(8)
    write_request(folder, request)
    answers: dict[int, dict[str, Any]] = {}
    newest = time.monotonic()  # when the newest answer came
    end, end_of_first = newest + ANSWER_SECONDS, newest + first_seconds
    try:
        while time.monotonic() < (end if answers else end_of_first):
            found = read_answers(folder).items()
            now = {rank: answer for rank, answer in found if answer["request"] == request}
            if len(now) > len(answers):
                newest = time.monotonic()
            answers = now
            expected = set(range(ranks_in_all(answers) or world_size)) - silent
            # all have answered, or all others have long ago
            if (expected and expected <= answers.keys()) or (
                answers and time.monotonic() - newest > LATE_SECONDS
            ):
                break
            time.sleep(REQUEST_SECONDS / 10)
    finally:
        with contextlib.suppress(OSError):
            (folder / REQUEST).unlink()
    return answers


def explain_ended(run_dir: Path, world_size: int, begin: float) -> Report:
    """Of a run that has ended: what its ranks and NCCL wrote about the hang, since its newest start
    at `begin` (seconds since the epoch). UserError if there is nothing."""
    folder = run_dir / HANG
    answers = {
        rank: answer
        for rank, answer in read_answers(folder).items()
        # not those that were asked for, maybe while it made progress
        if not answer["request"] and answer["time"] >= begin
    }
    standings: dict[int, Standing] = {rank: a["standing"] for rank, a in answers.items()}
    dumps = read_nccl_dumps(folder, begin)
    for rank, collectives in dumps.items():
        before = standings.get(rank)
        if before is None:
            before = Standing(
                rank=rank,
                world_size=world_size,
                node="?",
                pid=0,
                phase="?",
                step=None,
                seconds=0.0,
                where="not described",
                waits=False,
            )
        standings[rank] = Standing(**{**vars(before), "collectives": collectives})
    verdict = read_verdict(run_dir)
    word, details = verdict if verdict is not None else ("no verdict", {})
    if not standings:
        raise UserError(
            f"{run_dir} has ended ({word}: {details.get('reason', '')}), and no rank wrote about a "
            "hang; start it again, and ask while it hangs"
        )
    world_size = max([world_size, *(one.world_size for one in standings.values())])
    return Report(
        run_dir=run_dir,
        world_size=world_size,
        diagnosis=diagnose(standings, world_size),
        state=f"ended, {word}: {details.get('reason', '')}",
        standings=standings,
        stacks={rank: answer["stacks"] for rank, answer in answers.items()},
    )
