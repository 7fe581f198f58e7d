"""The errors a user can meet, and the exit status that each becomes."""

import os
import socket
from collections.abc import Iterable
from typing import Literal

Word = Literal["DONE", "PREEMPTED", "FAILED", "FATAL"]  # of VERDICT: `launcher.runtime.verdict`


class ClipTrainError(Exception):
    """Base of every error that is meant to be read by a user."""

    exit_status = 1  # of the process
    word: Word = "FAILED"  # FATAL: the same line would fail again
    node_suspect = False  # the cause may be this rank's node


class UserError(ClipTrainError, ValueError):
    """A mistake in the recipe, the command or a path to data. The message names the field, the
    value and the remedy."""

    exit_status = 2
    word: Word = "FATAL"
    problems: "tuple[UserError, ...]" = ()  # if this error lists several mistakes


class RankError(UserError):
    """A mistake that may affect only this rank or its node: a wrong environment, a missing GPU."""

    word: Word = "FAILED"
    node_suspect = True


def raise_all(problems: Iterable[str | UserError]) -> None:
    """Raise every mistake as one error that lists and counts them; a single one as it is."""
    found: list[UserError] = []
    for problem in problems:
        error = UserError(problem) if isinstance(problem, str) else problem
        found += error.problems or [error]
    if len(found) == 1:
        raise found[0]
    if found:
        all_of_ranks = all(isinstance(problem, RankError) for problem in found)
        kind = RankError if all_of_ranks else UserError
        error = kind("\n  ".join([f"{len(found)} mistakes", *map(str, found)]))
        error.problems = tuple(found)
        raise error


def unreadable(error: OSError, message: str) -> UserError:
    """The error for a file that cannot be read. A missing or forbidden file is the recipe's
    mistake; other errors may be temporary."""
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return UserError(message)
    return RankError(f"{message} (on {socket.gethostname()})")


def missing(path: str | os.PathLike, what: str, remedy: str) -> UserError:
    """The error for a missing file: the recipe's mistake. If its folder is missing too, this node
    may lack a mount, and another attempt may find the file."""
    folder = os.path.dirname(os.fspath(path))
    if not folder or os.path.isdir(folder):
        return UserError(f"{what}; {remedy}")
    return RankError(
        f"{what}, and its folder {folder} does not exist either. Correct the path, or mount it on "
        f"{socket.gethostname()}"
    )


class DataError(ClipTrainError):
    """Shards that cannot be read, or too many invalid samples."""


class CheckpointError(ClipTrainError):
    """A checkpoint that is incomplete, damaged, or does not fit this run."""


class DivergedError(ClipTrainError):
    """The loss or the gradient is no longer finite."""

    word: Word = "FATAL"


class OutOfMemoryError(ClipTrainError):
    """Out of memory, and the step cannot be computed in a smaller way."""

    word: Word = "FATAL"


class RemoteRankError(ClipTrainError):
    """Another rank has failed and prints why; this rank ends with it."""


class RendezvousError(ClipTrainError):
    """The process group did not form: a port, a host name, a network, or a rank that never
    connected.

    node_suspect: this rank's node may be the cause.
    """

    def __init__(self, message: str, *, node_suspect: bool = False) -> None:
        super().__init__(message)
        self.node_suspect = node_suspect


class EvaluationStopped(ClipTrainError):
    """A rank was asked to stop during an evaluation. All ranks raise it between the same two
    batches."""

    agreed = True  # as if `dist.raise_agreed` had raised it


class Preempted(ClipTrainError):
    """Asked to stop (a signal, a time limit). The checkpoint is committed; run the line again."""

    exit_status = 75
    word: Word = "PREEMPTED"
