"""`clip-train train` alone: one rank for each device of this machine, through torchrun's own agent."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from clip_train.stop import SIGNALS, StopRequest
from launcher.config.recipe import RunConfig
from launcher.runtime.environment import detect
from launcher.runtime.error_reports import FOLDER, leave_mark, read_marks, read_ranks
from launcher.runtime.limits import raise_open_files
from launcher.runtime.verdict import read_verdict

SAVE_SECONDS = 600  # after a signal the ranks have this long to save
# What the agent itself is to handle. Each signal that it handles breaks off its wait for the ranks, and the third ends
# it: Slurm's USR1 comes every 5 s. So `run_agent` takes the rest.
AGENTS_SIGNALS = "SIGQUIT"


def local_ranks(asked: int | None, environ: Mapping[str, str]) -> int:
    """How many ranks to start here: none of our own (1) where a launcher has started this process as a rank."""
    if detect(environ).world_size > 1 or "RANK" in environ:
        return 1
    return asked if asked is not None else max(1, torch.cuda.device_count())


def launch_local(config: RunConfig, ranks: int, arguments: Sequence[str], stop: StopRequest) -> int:
    """Run `python -m launcher ARGUMENTS` as `ranks` ranks; returns the exit status of the run, not torchrun's 1."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": ranks,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "monitor_interval": 0.5,
        "signals_to_handle": AGENTS_SIGNALS,
        "shutdown_timeout": SAVE_SECONDS,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # an older torch has not all of them
    launch = LaunchConfig(**{name: value for name, value in options.items() if name in known})
    status = run_agent(lambda: elastic_launch(launch, sys.executable)("-m", "launcher", *arguments), stop)
    verdict = read_verdict(config.run_dir) if status > 128 else None
    return 0 if verdict is not None and verdict[0] == "DONE" else status  # a signal that came too late


def to_handle() -> list[signal.Signals]:
    """By default USR1 would end the agent and leave its ranks behind; under nohup HUP is nothing to act on."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def run_agent(launch: Callable[[], object], stop: StopRequest) -> int:
    """Run torchrun's agent to its end -> 0, 75 or 2 as its ranks ended, 128 + a signal, else 1.

    stop: has listened since the process began. From now on the first signal ends the agent, which passes it on to its
    ranks and waits for them; later ones change nothing, but for INT: Ctrl-C three times leaves the ranks to themselves.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    raise_open_files()
    ending = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        if ending and number != signal.SIGINT:
            return
        ending = True
        raise SignalException(signal.Signals(number).name, sigval=signal.Signals(number))

    with tempfile.TemporaryDirectory(prefix="clip-train-") as folder:
        os.environ.setdefault(FOLDER, folder)  # where ranks say why they ended
        try:
            for number in to_handle():  # until now they were only noted
                signal.signal(number, end)
            asked = stop.look()
            if asked is not None:
                return stopped_early(asked)
            launch()
            return 0
        except ChildFailedError as e:
            _, first = e.get_first_failure()  # the others ended because of it, however they did
            return first.exitcode if first.exitcode in (75, 2) else 1
        except SignalException as e:
            return after_signal(Path(os.environ[FOLDER]), e.sigval)
        finally:
            # as the interpreter ends it gives handlers up, and what Slurm sends every 5 s would kill it with its status
            stop.ignore()
            if os.environ[FOLDER] == folder:
                del os.environ[FOLDER]


def after_signal(folder: Path, number: signal.Signals) -> int:
    """75 where the ranks have ended in good order by their own word, or had not met yet and so have nothing to save."""
    kinds = {mark.kind for mark in read_marks(folder)}
    if not kinds and not read_ranks(folder):
        return stopped_early(number.name)
    return 75 if "stopped" in kinds and kinds <= {"stopped", "lost"} else 128 + number.value


def stopped_early(by: str) -> int:
    """There were no ranks yet to say so."""
    told = f"stopped by {by} before the first step"
    print(f"clip-train: {told}", file=sys.stderr, flush=True)
    leave_mark("stopped", told)
    return 75
