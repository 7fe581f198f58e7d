"""What each rank of an attempt leaves behind for its batch script: one small file, why it ended.

Exit codes lie (torchrun makes 1 of any, srun reports the ranks that it killed itself), so a rank that fails
says so in `<attempt folder>/rank00003.json`. Without a supervisor there is no folder and nothing is written.
No torch here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FOLDER = "CLIP_TRAIN_ATTEMPT_DIR"  # in the environment, set by launcher.slurm.controller
RANKS = "ranks.json"  # in it: the node of each rank
RESUMED = "resumed"  # in it: the step that the ranks went on from
TERMINATED = "terminated"  # in it: Slurm has told the batch script to end (TERM)
END_TIME = "SLURM_JOB_END_TIME"  # Unix time; newer Slurms set it, launcher.slurm.controller for older ones

# In the run directory.
STOP_FILE = "STOP"  # made by the user: save, stop, and do not requeue
PROGRESS_FILE = "PROGRESS"  # the newest committed step, for the batch script

# error: this rank's own. mistake: the user's, will come again. all: of the run, not of a node (data, checkpoints).
# lost: another rank went away. hang: the watchdog fired here. stopped: asked to; committed, or before the first step.
Kind = Literal["error", "mistake", "all", "lost", "hang", "stopped"]


@dataclass(frozen=True)
class Mark:
    """Why one rank ended."""

    rank: int
    node: str
    kind: Kind
    message: str
    waiting: bool = False  # hang: it stood in a collective, so another rank is to blame


def attempt_folder() -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder) if folder else None


# (rank, world) as each launcher says it, in the order in which `launcher.runtime.environment` believes them
SAID = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def said_rank() -> int | None:
    """This rank by its launcher's word; None in a world of one. Before a process group there is no other way."""
    for rank, world in SAID:
        numbers = os.environ.get(rank, ""), os.environ.get(world, "")
        if all(number.isdigit() for number in numbers) and int(numbers[1]) > 1:
            return int(numbers[0])
    return None


def this_rank() -> int:
    return said_rank() or 0


_why_lost: list[tuple[float, str]] = []  # until when (monotonic), and what this rank knows of it


def explain_loss_by(message: str, seconds: float = 60.0) -> None:
    """If this rank loses the others within `seconds`, it was not they that went away."""
    _why_lost.append((time.monotonic() + seconds, message))


def node_name() -> str:
    """As srun says it and scontrol wants it; the hostname may be a longer one. Only in a step of srun: mpirun hands on
    to all nodes the name of the one that it was started on."""
    in_step = "SLURM_STEP_NUM_TASKS" in os.environ
    return (os.environ.get("SLURMD_NODENAME") if in_step else None) or socket.gethostname()


def leave_mark(kind: Kind, message: str, *, waiting: bool = False) -> None:
    """The first mark of a rank stays: what follows is a consequence. A disk that is gone is no second error."""
    folder = attempt_folder()
    if folder is None:
        return
    if kind == "lost" and _why_lost and time.monotonic() < _why_lost[-1][0]:
        kind, message = "hang", f"{_why_lost[-1][1]}; then: {message}"
    mark = Mark(this_rank(), node_name(), kind, message, waiting)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank{mark.rank:05d}.json").open("x") as f:
            json.dump(asdict(mark), f)


def leave_ranks(nodes: Sequence[str]) -> None:
    """Rank 0: the node of each rank, so that a rank that leaves no mark can be found."""
    folder = attempt_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RANKS).write_text(json.dumps(list(nodes)))


def read_marks(folder: Path) -> list[Mark]:
    """In the order of the ranks; a torn file counts as none."""
    marks = []
    for file in sorted(folder.glob("rank[0-9]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            marks.append(Mark(**json.loads(file.read_text())))
    return marks


def read_ranks(folder: Path) -> list[str]:
    try:
        return json.loads((folder / RANKS).read_text())
    except (OSError, ValueError):
        return []


def leave_resumed(step: int) -> None:
    """Rank 0: the step that the attempt goes on from, 0 for a fresh start. It may be an older one than the batch script
    knows of: what was committed on the disk of a node that is lost, or has been damaged since."""
    folder = attempt_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESUMED).write_text(f"{step}\n")


def read_resumed(folder: Path) -> int | None:
    """None: the ranks did not come so far."""
    try:
        return int((folder / RESUMED).read_text())
    except (OSError, ValueError):
        return None


def leave_terminated(folder: Path) -> None:
    """The batch script, at once: KILL may follow before the ranks have ended, and then it writes nothing any more."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TERMINATED).touch()


def was_terminated(folder: Path) -> bool:
    return (folder / TERMINATED).exists()


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed."""

    reason: str
    nodes: tuple[str, ...] = ()  # to blame; none where it is not a node's fault
    fatal: bool = False  # it will come again


# The first rank that ended badly, as srun tells it: "srun: error: n2: task 1: Killed". The later ones it killed itself.
SRUN_ERROR = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (\w[\w ]*)")


def find_cause(
    marks: Sequence[Mark],
    nodes: Sequence[str],
    log: str,
    status: int,
    *,
    job_nodes: Sequence[str] = (),
    terminated: bool = False,
) -> Cause:
    """The first of: an error of its own, a rank that hangs, one killed first, one that vanished.

    nodes: by rank, empty if the ranks never met. log: the attempt's, in which srun tells who was killed.
    job_nodes: all of the job. terminated: Slurm had told the job to end; who is killed while it saves is not to blame.
    """
    silent = [rank for rank in range(len(nodes)) if rank not in {mark.rank for mark in marks}]
    absent = set() if nodes else set(job_nodes) - {mark.node for mark in marks}
    return (
        _own_error(marks, nodes or job_nodes)
        or lost_node(log)
        or _hang(marks, nodes or job_nodes, silent, absent)
        or _death(marks, log, terminated)
        or _vanished(marks, nodes, silent)
        or Cause(f"the ranks ended with status {status} and without a word")
    )


def stopped_early(marks: Sequence[Mark], log: str) -> str | None:
    """Why the ranks ended before their first step, if they were asked to.

    srun asks the same of the ranks that are left when one has died; then that one is the first that it tells of,
    and has no such mark.
    """
    asked = [mark for mark in marks if mark.kind == "stopped"]
    first = SRUN_ERROR.search(log)
    begun_by = int(re.match(r"\d+", first[2])[0]) if first else None  # type: ignore[index]
    if not asked or any(mark.kind not in ("stopped", "lost") for mark in marks):
        return None
    return asked[0].message if begun_by is None or begun_by in {mark.rank for mark in marks} else None


NODE_FAILURE = re.compile(r"srun: error: Node failure on ([\w.-]+)")


def lost_node(log: str) -> Cause | None:
    """A node that Slurm has given up, as srun tells it."""
    found = NODE_FAILURE.search(log)
    return Cause(f"Slurm lost the node {found[1]}", (found[1],)) if found else None


def _own_error(marks: Sequence[Mark], nodes: Sequence[str]) -> Cause | None:
    for kind in ("mistake", "all", "error"):
        of_kind = [mark for mark in marks if mark.kind == kind]
        if of_kind:
            first = of_kind[0]
            own = _alone_with_it(of_kind) if kind == "error" else set()
            return Cause(f"rank {first.rank} on {first.node}: {first.message}", _some(own, nodes), kind == "mistake")
    return None


def _alone_with_it(errors: Sequence[Mark]) -> set[str]:
    """Nodes whose error no other node has in the same words: what several have, a broken environment say, is of the
    run. The rest of its nodes may have been ended before they came so far."""
    having: dict[str, set[str]] = {}
    for mark in errors:
        having.setdefault(mark.message, set()).add(mark.node)
    return set().union(*(nodes for nodes in having.values() if len(nodes) == 1))


def _hang(marks: Sequence[Mark], nodes: Sequence[str], silent: Sequence[int], absent: set[str]) -> Cause | None:
    """absent: where the ranks have not met, the nodes from which none has left a word: the others wait for them."""
    hangs = [mark for mark in marks if mark.kind == "hang"]
    if not hangs:
        return None
    busy = [mark for mark in hangs if not mark.waiting]
    if busy:
        told = f"rank {busy[0].rank} on {busy[0].node} hangs: {busy[0].message}"
        return Cause(told, _some({mark.node for mark in busy}, nodes))
    if silent:
        told = f"rank {silent[0]} on {nodes[silent[0]]} hangs and does not answer; {hangs[0].message}"
        return Cause(told, _some({nodes[rank] for rank in silent}, nodes))
    if absent:
        told = f"no rank has come from {', '.join(sorted(absent))}; {hangs[0].message}"
        return Cause(told, _some(absent, nodes))
    return Cause(f"all ranks hang in a collective: {hangs[0].message}")


def _death(marks: Sequence[Mark], log: str, terminated: bool) -> Cause | None:
    first = SRUN_ERROR.search(log)
    if first is None:
        return None
    node, tasks, how = first.groups()
    blamed = () if terminated else (node,)
    if not how.startswith("Exited"):
        return Cause(f"rank {tasks} on {node} was ended from outside: {how.strip()}", blamed)
    if any(mark.kind != "stopped" for mark in marks):
        return None
    return Cause(f"rank {tasks} on {node} {how.lower().strip()}, without a word", blamed)


def _vanished(marks: Sequence[Mark], nodes: Sequence[str], silent: Sequence[int]) -> Cause | None:
    if not marks:
        return None
    if not silent:
        return Cause(f"rank {marks[0].rank} on {marks[0].node}: {marks[0].message}")
    told = f"rank {silent[0]} on {nodes[silent[0]]} vanished; {marks[0].message}"
    return Cause(told, _some({nodes[rank] for rank in silent}, nodes))


def _some(blamed: set[str], nodes: Sequence[str]) -> tuple[str, ...]:
    """What happens on every node of several is no node's fault."""
    everywhere = set(nodes)
    return () if len(everywhere) > 1 and blamed >= everywhere else tuple(sorted(blamed))


def mark_error(error: BaseException) -> None:
    """A mark for what ended this rank."""
    from clip_train.errors import ClipTrainError, Preempted, RankError, RemoteRankError, UserError

    message = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, Preempted):
        return leave_mark("stopped", message)
    if isinstance(error, RemoteRankError):
        leave_mark("lost", message)
    elif isinstance(error, UserError) and not isinstance(error, RankError):
        leave_mark("mistake", message)
    elif isinstance(error, ClipTrainError) and not isinstance(error, RankError):
        leave_mark("all", message)  # data, checkpoints, a diverged loss: no node's fault
    elif is_lost_contact(error):
        leave_mark("lost", f"lost contact with another rank: {message}")
    else:
        leave_mark("error", f"{type(error).__name__}: {message}")


LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Timed out (waiting|after)|Broken pipe"
    r"|NCCL (error|communicator)|Application timeout|wait timeout|Socket (closed|Timeout)|unhandled system error",
    re.IGNORECASE,
)


# This rank's own mistakes, which NCCL reports as errors of communication too.
OWN = re.compile(r"Duplicate GPU detected|no socket interface found|invalid usage", re.IGNORECASE)


def is_lost_contact(error: BaseException) -> bool:
    """A collective that failed because another rank has gone: gloo's and NCCL's words for it."""
    if OWN.search(str(error)):
        return False
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None
