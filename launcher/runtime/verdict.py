"""VERDICT, the file in the run directory that records how a run ended.

A batch script acts on it because exit statuses change under launchers (torchrun makes 1 of any). No
torch here.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from clip_train.errors import Word
from clip_train.storage.local import LocalStorage
from clip_train.storage.redact import redact

# One word, then a JSON line with `step` and `reason`. Its other keys:
#   where      the rank that failed, and its node; the reason begins with it
#   blamed     a node that may be the cause; with `hardware` it certainly is
#   room       after out of memory: the bytes that the next attempt's activations may take
#   skipped    parts that only observe the run, and failed
# The words:
#   DONE       all steps are trained and committed
#   PREEMPTED  asked to stop; a checkpoint is committed; run the same command again
#   FAILED     ended by an error that may pass; running again may help
#   FATAL      ended by an error that will come again: a mistake in the recipe, a diverged loss
VERDICT_FILE = "VERDICT"
# In the run directory, made by the user: save, stop, and do not requeue. Removed then.
STOP_FILE = "STOP"
PROGRESS_FILE = "PROGRESS"  # there too: the newest committed step
# In the environment, by the batch script's controller: the run directory, without an old VERDICT.
RUN_DIR = "CLIP_TRAIN_RUN_DIR"
ROOM = "CLIP_TRAIN_ACTIVATION_BYTES"  # there too, after out of memory: `Failure.room`
# With it, a Python process that this one starts does not import from the working directory. OURS: its
# value unless the user has set it, so that `log.notify` does not inherit it.
SAFE_PATH, OURS = "PYTHONSAFEPATH", "clip-train"
# Shorter than the other ranks and the launcher wait for the failed rank.
NOTIFY_SECONDS = 20.0
Verdict = tuple[str, dict[str, Any]]  # the word, and the JSON line


@dataclass(frozen=True)
class Failure:
    """The cause that ended the ranks: the first one, the same for all of them."""

    rank: int
    node: str
    message: str
    word: Word = "FAILED"
    status: int = 1  # exit status of every rank
    lost: bool = False  # the rank itself is silent: others have noticed
    node_suspect: bool = False  # another node may work: recipe and data are not the cause
    hardware: bool = False  # the node's device reported it, so it is certainly the cause
    # after out of memory: bytes of activations with which another attempt may fit; 0 otherwise
    room: int = 0

    def __str__(self) -> str:
        return self.message if self.lost else f"rank {self.rank} on {self.node}: {self.message}"


def write_verdict(run_dir: Path, word: Word, step: int, reason: str, **more: Any) -> None:
    """Atomically; ranks may write at the same moment. more: further keys; empty values are left
    out."""
    why = {"step": step, "reason": " ".join(reason.split())}
    why |= {key: value for key, value in more.items() if value}
    LocalStorage(run_dir).put_bytes(VERDICT_FILE, f"{word}\n{json.dumps(redact(why))}\n".encode())


def notify(
    command: str | None,
    run_dir: Path,
    word: str,
    step: int,
    reason: str,
    warn: Callable[[str], None],
) -> None:
    """Run `log.notify` and wait for it."""
    if command is None:
        return
    environ = {
        **os.environ,
        "VERDICT": word,
        "RUN_NAME": run_dir.name,
        "RUN_DIR": str(run_dir),
        "STEP": str(step),
        "REASON": reason,
    }
    if environ.get(SAFE_PATH) == OURS:
        del environ[SAFE_PATH]
    try:
        subprocess.run(
            ["sh", "-c", command],
            env=environ,
            stdin=subprocess.DEVNULL,
            timeout=NOTIFY_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        warn(f"log.notify: {e}")


def read_verdict(run_dir: Path) -> Verdict | None:
    """The word and the JSON (`step`, `reason`, ...); None if no verdict can be read."""
    try:
        word, _, line = LocalStorage(run_dir).read_bytes(VERDICT_FILE).decode().partition("\n")
        why = json.loads(line)
        return word.strip(), {**why, "step": int(why["step"]), "reason": str(why["reason"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def end_process(status: int) -> NoReturn:
    """End at once, without Python's teardown. Removes the folder of the loader's fork server, as
    the teardown would."""
    if multiprocessing.parent_process() is None:  # else the folder is the parent's
        with contextlib.suppress(OSError):
            shutil.rmtree(util.get_temp_dir())
    os._exit(status)
