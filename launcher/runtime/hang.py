"""Where each rank is while a run makes no progress, and which collective which ranks have not
entered.

torch's flight recorder numbers the collectives of each process group, on every backend and whoever
calls them. The ranks of a hang differ in these numbers. Each rank describes itself by a `Standing`
(`launcher.runtime.watchdog` asks for it), and `diagnose` compares those of all ranks.
"""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from launcher.runtime.environment import NCCL_DUMP

# In the run directory: what each rank has said of a hang. Written only then, or if it is asked for.
HANG = "hang"
REQUEST = "request"  # `clip-train doctor --hang` writes a new text, and each rank answers it
ANSWER = "rank_{rank}.json"
RECORDER_SECONDS = 10.0  # for the flight recorder, which asks CUDA, and CUDA may hang
MOST_PENDING, NEWEST = 16, 4  # collectives of each group that a rank describes
# In the frames of a call, these files are below the code that wanted the collective.
BELOW = ("/torch/", "/clip_train/dist.py", "/comm/")  # the last: of engines


# -- the flight recorder


@dataclass(frozen=True)
class Collective:
    """One that this rank has entered."""

    number: int  # in its group, from 1
    name: str  # such as all_reduce
    sizes: str  # of its input, with the type
    caller: str  # file, line and function of the code that called it
    ended: bool

    def describe(self) -> str:
        call = f"{self.name} {self.sizes}"
        return f"{call}, called from {self.caller}" if self.caller else call


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers. A dump has nothing else, so no class is looked up, and a
    file that somebody else has put there cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump of collectives may not contain {module}.{name}")


def read_dump(dump: bytes) -> dict[str, list[Collective]]:
    """The collectives in a dump of the flight recorder, by backend and group, as `gloo group 0`:
    those that have not ended, and the newest. ValueError if it is not such a dump."""
    try:
        content = PlainUnpickler(io.BytesIO(dump)).load()
        groups: dict[str, list[Collective]] = {}
        for entry in content["entries"]:
            if entry["is_p2p"]:
                continue  # numbered by pairs of ranks
            backend, _, name = entry["profiling_name"].rpartition(":")
            group = f"{backend or 'nccl'} group {entry['process_group'][0]}"
            sizes = " ".join(map(str, entry["input_sizes"]))
            types = " ".join(dict.fromkeys(entry["input_dtypes"]))
            groups.setdefault(group, []).append(
                Collective(
                    number=entry["collective_seq_id"],
                    name=name,
                    sizes=f"{sizes} {types}".strip(),
                    caller=caller_of(entry["frames"]),
                    ended=bool(entry["retired"]) or entry["state"] == "completed",
                )
            )
    except (KeyError, TypeError, IndexError, AttributeError, EOFError) as e:
        raise ValueError(f"not a dump of the flight recorder: {type(e).__name__}: {e}") from e
    except pickle.UnpicklingError as e:
        raise ValueError(str(e)) from e
    for group, collectives in groups.items():
        pending = [each for each in collectives if not each.ended][:MOST_PENDING]
        kept = {each.number: each for each in [*pending, *collectives[-NEWEST:]]}
        groups[group] = [kept[number] for number in sorted(kept)]
    return groups


def caller_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame that is not below the code that wanted the collective."""
    for frame in frames:
        if not any(part in frame["filename"] for part in BELOW):
            return place(frame["filename"], frame["line"], frame["name"])
    return ""


def place(file: str, line: int | None, function: str) -> str:
    return f"{'/'.join(file.split('/')[-2:])}:{line} {function}"


def recorded() -> dict[str, list[Collective]]:
    """This rank's collectives, as `read_dump`. Empty if the recorder is off, or does not answer."""
    from clip_train.torch_internals import dump_collectives

    found: dict[str, list[Collective]] = {}

    def read() -> None:
        for dump in dump_collectives():
            found.update(read_dump(dump))

    reading = threading.Thread(target=read, name="flight recorder", daemon=True)
    reading.start()
    reading.join(RECORDER_SECONDS)
    return dict(found)


# -- a rank


class Progress(NamedTuple):
    """What differs between two standings of a rank that makes progress."""

    pid: int
    step: int | None
    phase: str
    where: str
    newest: dict[str, int]  # collective that it has entered, by group


@dataclass(frozen=True)
class Standing:
    """Where a rank is. It travels as JSON."""

    rank: int
    world_size: int
    node: str
    pid: int
    phase: str
    step: int | None  # steps taken; None before there is a trainer
    seconds: float  # since the phase, or the step, began
    where: str  # of the main thread
    waits: bool  # for other ranks
    usual: float = 0.0  # seconds of a step, the median of the latest; 0: none yet
    data: str = ""  # if it waits for a batch: what the code that reads it does
    collectives: dict[str, list[Collective]] = field(default_factory=dict)  # by group
    members: dict[str, list[int]] = field(default_factory=dict)  # by group: its ranks

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Standing:
        collectives = {
            group: [Collective(**each) for each in those]
            for group, those in values["collectives"].items()
        }
        return cls(**{**values, "collectives": collectives})

    def newest(self, group: str) -> int:
        """The number of the newest collective that it has entered."""
        return max((each.number for each in self.collectives.get(group, ())), default=0)

    def entered(self, group: str, number: int) -> Collective | None:
        return next((e for e in self.collectives.get(group, ()) if e.number == number), None)

    def does(self) -> str:
        return f"{self.where}, waiting for data: {self.data}" if self.data else self.where

    def progress(self) -> Progress:
        newest = {group: self.newest(group) for group in self.collectives}
        return Progress(
            pid=self.pid, step=self.step, phase=self.phase, where=self.where, newest=newest
        )


# -- all ranks

Cause = Literal["silent", "data", "code", "differ", "network", "none"]


@dataclass(frozen=True)
class Diagnosis:
    """Why a run makes no progress."""

    cause: Cause
    said: str  # the collective, the ranks that have entered it and those that have not
    ranks: tuple[int, ...] = ()  # those that the others wait for
    where: str = ""  # what these do
    entered: tuple[int, ...] = ()  # those that wait in the collective

    def describe(self) -> str:
        return f"{self.said}: {self.where}" if self.where else self.said


def diagnose(standings: Mapping[int, Standing], world_size: int) -> Diagnosis:
    """Compare the ranks. standings: of those that have answered, by rank."""
    silent = tuple(rank for rank in range(world_size) if rank not in standings)
    found = [
        each
        for group in sorted({group for one in standings.values() for group in one.collectives})
        if (each := compare(standings, group, silent)) is not None
    ]
    order: list[Cause] = ["data", "code", "silent", "differ", "network"]
    found.sort(key=lambda each: order.index(each.cause))
    # The others wait for a rank that waits for nobody.
    missed = [each for each in found if each.ranks]
    waiting = {rank for each in missed for rank in each.entered}
    idle = [each for each in missed if not waiting & {*each.ranks}]
    if idle:
        return idle[0]
    if len(missed) > 1:
        # Each waits for another, in different groups: one of them has left out a call.
        ranks = tuple(sorted({rank for each in missed for rank in each.ranks}))
        return Diagnosis("differ", "; ".join(each.describe() for each in missed), ranks)
    if found:
        return found[0]
    if silent:
        return Diagnosis("silent", f"{named(silent)} did not answer", silent)
    busy = tuple(rank for rank, one in sorted(standings.items()) if not one.waits)
    said = "; ".join(f"rank {rank} is {standings[rank].does()}" for rank in busy[:4])
    if not busy:
        return Diagnosis("network", "all ranks wait for each other")
    cause: Cause = "code"
    if any(standings[rank].data for rank in busy):
        cause = "data"
    return Diagnosis(cause, said, busy)


def compare(
    standings: Mapping[int, Standing], group: str, silent: Sequence[int]
) -> Diagnosis | None:
    """What holds up the oldest pending collective of a group; None if nothing is pending."""
    pending = [
        each.number
        for one in standings.values()
        for each in one.collectives.get(group, ())
        if not each.ended
    ]
    if not pending:
        return None
    number = min(pending)
    members = members_of(standings, group)
    entered = {r: one for r, one in standings.items() if one.newest(group) >= number}
    entered = {r: one for r, one in entered.items() if r in members}
    absent = tuple(r for r in standings if r in members and r not in entered)
    silent = tuple(r for r in silent if r in members)
    calls = {r: call for r, one in entered.items() if (call := one.entered(group, number))}
    what = f"collective {number} of {group}"
    by_call: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_call.setdefault(f"{call.name} {call.sizes}", []).append(rank)
    in_it = f"{named(tuple(entered))} {is_or_are(entered)} in {what}"
    if len(by_call) == 1 and calls:
        in_it += f" ({next(iter(calls.values())).describe()})"
    if absent:
        missing = "; ".join(f"rank {r} is {standings[r].does()}" for r in absent[:4])
        data = any(standings[r].data for r in absent)
        said = f"{in_it}, {named(absent)} {has_or_have(absent)} not entered it"
        return Diagnosis("data" if data else "code", said, absent, missing, (*entered,))
    if silent:
        said = f"{in_it}, {named(silent)} did not answer"
        return Diagnosis("silent", said, silent, entered=(*entered,))
    if len(by_call) > 1:
        said = "; ".join(
            f"{named(tuple(ranks))} in {calls[ranks[0]].describe()}" for ranks in by_call.values()
        )
        fewest = min(by_call.values(), key=len)
        said = f"{what} is not the same on all ranks: {said}"
        return Diagnosis("differ", said, tuple(fewest))
    return Diagnosis("network", f"{in_it}: all of the group have entered it, and it does not end")


def members_of(standings: Mapping[int, Standing], group: str) -> set[int]:
    """The ranks of a group, as any of them knows them."""
    name = group.rpartition(" ")[2]
    known = {r for one in standings.values() for r in one.members.get(name, ())}
    return known or {r for r, one in standings.items() if group in one.collectives}


def named(ranks: Sequence[int]) -> str:
    from launcher.runtime.rendezvous import first_ranks

    return f"rank{'s' * (len(ranks) != 1)} {first_ranks(sorted(ranks))}"


def is_or_are(ranks: Iterable[int]) -> str:
    return "is" if len([*ranks]) == 1 else "are"


def has_or_have(ranks: Iterable[int]) -> str:
    return "has" if len([*ranks]) == 1 else "have"


# -- the run directory


def read_answers(folder: Path) -> dict[int, dict[str, Any]]:
    """By rank: `standing` (a `Standing`), `stacks` (a text) and `request`, from `RUN/hang`. A file
    that is no answer is left out."""
    answers: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob(ANSWER.format(rank="*"))):
        try:
            content = json.loads(file.read_text())
            content["standing"] = standing = Standing.load(content["standing"])
            if content.keys() >= {"request", "stacks", "time"}:
                answers[standing.rank] = content
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return answers


def read_nccl_dumps(folder: Path, begin: float = 0.0) -> dict[int, dict[str, list[Collective]]]:
    """By rank: the collectives that NCCL has dumped there since `begin`. The files are this run's own,
    and are read as `read_dump` reads them: nothing in them is run."""
    dumps = {}
    for file in folder.glob(f"{NCCL_DUMP}*"):
        rank = file.name.removeprefix(NCCL_DUMP)
        if rank.isdigit() and file.stat().st_mtime >= begin:
            try:
                dumps[int(rank)] = read_dump(file.read_bytes())
            except (OSError, ValueError):
                continue
    return dumps
