"""`clip-train train` alone: one rank for each device of this machine, through torchrun's own agent."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from clip_train.stop import SIGNALS, StopRequest
from launcher.config import RunConfig
from launcher.env import detect
from launcher.marks import FOLDER, read_marks
from launcher.verdict import read_verdict

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SAVE_SECONDS = 600  # after a signal the ranks have this long to save


def local_ranks(asked: int | None, environ: Mapping[str, str]) -> int:
    """How many ranks to start here: none of our own (1) where a launcher has started this process as a rank."""
    if detect(environ).world_size > 1 or "RANK" in environ:
        return 1
    return asked if asked is not None else max(1, torch.cuda.device_count())


def launch_local(config: RunConfig, ranks: int, arguments: Sequence[str], stop: StopRequest | None = None) -> int:
    """Run `python -m launcher ARGUMENTS` as `ranks` ranks; returns the exit status of the run, not torchrun's 1."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # by default USR1 ends the agent and leaves its ranks behind; under nohup HUP is nothing to act on
    signals = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": ranks,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "monitor_interval": 0.5,
        "signals_to_handle": ",".join(number.name for number in signals),
        "shutdown_timeout": SAVE_SECONDS,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # an older torch has not all of them
    launch = LaunchConfig(**{name: value for name, value in options.items() if name in known})

    def end(number: int, frame: FrameType | None) -> None:
        raise SignalException(signal.Signals(number).name, sigval=signal.Signals(number))

    with tempfile.TemporaryDirectory(prefix="clip-train-") as folder:
        os.environ.setdefault(FOLDER, folder)  # where ranks say why they ended
        try:
            for number in signals:  # as the agent will; until now they were only noted
                signal.signal(number, end)
            asked = stop.look() if stop is not None else None
            if asked is not None:
                return stopped(f"stopped by {asked} before the first step")
            elastic_launch(launch, sys.executable)("-m", "launcher", *arguments)
            return 0
        except ChildFailedError as e:
            return failed(e)
        except SignalException as e:
            return after_signal(config, e.sigval)
        finally:
            if os.environ[FOLDER] == folder:
                del os.environ[FOLDER]


def failed(error: ChildFailedError) -> int:
    """The exit status of the rank that ended first: the others ended because of it, however they did."""
    _, first = error.get_first_failure()
    return first.exitcode if first.exitcode in (75, 2) else 1


def after_signal(config: RunConfig, number: signal.Signals) -> int:
    """The ranks have ended, by the verdict of the run or by their own word in good order."""
    word = (read_verdict(config.run_dir) or ("",))[0]
    marks = read_marks(Path(os.environ[FOLDER]))
    if word == "DONE":
        return 0
    if word == "PREEMPTED" or (not word and marks and all(mark.kind in ("stopped", "lost") for mark in marks)):
        return 75
    return 128 + number.value


def stopped(message: str) -> int:
    print(f"clip-train: {message}", file=sys.stderr, flush=True)
    return 75
