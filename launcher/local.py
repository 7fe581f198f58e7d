"""`clip-train train` alone: one rank for each device of this machine, through torchrun's own agent."""

from __future__ import annotations

import dataclasses
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from launcher.config import RunConfig
from launcher.env import detect
from launcher.verdict import read_verdict

SAVE_SECONDS = 600  # after a signal the ranks have this long to save


def local_ranks(asked: int | None, environ: Mapping[str, str]) -> int:
    """How many ranks to start here: none of our own (1) where a launcher has started this process as a rank."""
    if detect(environ).world_size > 1 or "RANK" in environ:
        return 1
    return asked if asked is not None else max(1, torch.cuda.device_count())


def launch_local(config: RunConfig, ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m launcher ARGUMENTS` as `ranks` ranks; returns the exit status of the run, not torchrun's 1."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
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
        # by default USR1 ends the agent and leaves its ranks behind
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGUSR1",
        "shutdown_timeout": SAVE_SECONDS,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # an older torch has not all of them
    launch = LaunchConfig(**{name: value for name, value in options.items() if name in known})
    try:
        elastic_launch(launch, sys.executable)("-m", "launcher", *arguments)
        return 0
    except ChildFailedError as e:
        statuses = {failure.exitcode for failure in e.failures.values()}
        return next((status for status in (75, 2) if status in statuses), 1)
    except SignalException as e:
        verdict = read_verdict(config.run_dir)
        return 75 if verdict is not None and verdict[0] == "PREEMPTED" else 128 + signal.Signals(e.sigval).value
