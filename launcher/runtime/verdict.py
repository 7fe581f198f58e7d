"""How a run ended, for who reads it afterwards: VERDICT in the run directory, and one error report
for each attempt.

A batch script acts on them because exit statuses lie under launchers (torchrun makes 1 of any). No
torch here.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any, Literal, NoReturn

from clip_train.storage.local import LocalStorage

# One word, then a JSON line with `step` and `reason`; `skipped` lists what only looked at the run
# and failed.
#   DONE       all steps are trained and committed
#   PREEMPTED  asked to stop; a checkpoint is committed; run the same line again
#   FAILED     ended by an error that may pass; running again may help
#   FATAL      ended by an error that will come again: a mistake in the recipe, a diverged loss
VERDICT_FILE = "VERDICT"
Word = Literal["DONE", "PREEMPTED", "FAILED", "FATAL"]

STOP_FILE = (
    "STOP"  # in the run directory, made by the user: save, stop, and do not requeue; removed then
)
PROGRESS_FILE = "PROGRESS"  # in it too: the newest committed step
# in the environment, by the batch script's controller: where the report goes
ATTEMPT = "CLIP_TRAIN_ATTEMPT_DIR"
REPORT = "error.json"  # there
NOTIFY_SECONDS = (
    20.0  # below the time for which the other ranks and the launcher wait for the rank that failed
)


@dataclass(frozen=True)
class Failure:
    """Why the ranks ended: the first cause, the same for all of them."""

    rank: int
    node: str
    message: str
    word: Word = "FAILED"
    status: int = 1  # exit status of every rank
    lost: bool = False  # the rank itself is silent: others have noticed
    node_suspect: bool = False  # another node might do: neither the recipe nor the data is to blame

    def __str__(self) -> str:
        return self.message if self.lost else f"rank {self.rank} on {self.node}: {self.message}"


def node_name() -> str:
    """As Slurm calls it inside a step; mpirun would copy the variable of the first node to all
    others."""
    in_step = "SLURM_STEP_NUM_TASKS" in os.environ
    return (os.environ.get("SLURMD_NODENAME") if in_step else None) or socket.gethostname()


def write_verdict(run_dir: Path, word: Word, step: int, reason: str, **more: Any) -> None:
    """Atomically; ranks may write at the same moment. more: further keys; empty values are left
    out."""
    why = {"step": step, "reason": " ".join(reason.split())}
    why |= {key: value for key, value in more.items() if value}
    LocalStorage(run_dir).put_bytes(VERDICT_FILE, f"{word}\n{json.dumps(why)}\n".encode())


def notify(command: str, run_dir: Path, word: str, step: int, reason: str) -> str:
    """Run `log.notify` and wait for it; why it failed, empty if it did not."""
    environ = {
        **os.environ,
        "VERDICT": word,
        "RUN_NAME": run_dir.name,
        "RUN_DIR": str(run_dir),
        "STEP": str(step),
        "REASON": reason,
    }
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            env=environ,
            stdin=subprocess.DEVNULL,
            timeout=NOTIFY_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        return f"log.notify ({command}): {e}"
    return f"log.notify ({command}) ended with status {done.returncode}" if done.returncode else ""


def read_verdict(run_dir: Path) -> tuple[str, dict[str, Any]] | None:
    """The word and the JSON (`step`, `reason`, ...); None if no verdict can be read."""
    try:
        word, _, line = (run_dir / VERDICT_FILE).read_text().partition("\n")
        why = json.loads(line)
        return word.strip(), {**why, "step": int(why["step"]), "reason": str(why["reason"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_report(failure: Failure, trace: str = "") -> None:
    """In torchelastic's format: for torchrun, which prints it, and into the attempt's folder; the
    first one stays.

    A disk that is full or gone is no second error.
    """
    extra = {"timestamp": str(int(time.time())), "py_callstack": trace, **asdict(failure)}
    text = json.dumps({"message": {"message": str(failure), "extraInfo": extra}})
    attempt, torchrun = os.environ.get(ATTEMPT), os.environ.get("TORCHELASTIC_ERROR_FILE")
    for file in (attempt and Path(attempt, REPORT), torchrun and Path(torchrun)):
        if file:
            with contextlib.suppress(OSError):
                LocalStorage(file.parent).put_bytes(file.name, text.encode(), if_absent=True)


def end_process(status: int) -> NoReturn:
    """End at once, without Python's teardown. Removes the folder of the loader's fork server, as
    the teardown would."""
    if multiprocessing.parent_process() is None:  # else the folder is the parent's
        with contextlib.suppress(OSError):
            shutil.rmtree(util.get_temp_dir())
    os._exit(status)


def read_report(attempt: Path) -> Failure | None:
    """None where there is none, or a torn one."""
    try:
        extra = json.loads((attempt / REPORT).read_text())["message"]["extraInfo"]
        return Failure(**{name: extra[name] for name in Failure.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None
