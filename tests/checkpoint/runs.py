"""One process's life with a manager, and what is done to its checkpoint writer and to its disk from outside."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import textwrap
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.checkpoint.restore import Resumed
from tests.checkpoint.parts import bits, cut, whole

PATIENCE = 120.0  # seconds for what comes in a moment, on a machine that may hold any process up
RUNS: list[Run] = []  # conftest.py closes them after each test


class Run:
    """One rank's life: a manager, and short names."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        orphan_seconds: float = 0.0,
        **config: Any,
    ) -> None:
        self.said: list[str] = []
        self.numbers: dict[str, float] = {}
        config = {"grace_seconds": PATIENCE, **config}
        self.manager = CheckpointManager(
            CheckpointConfig(**config),
            folder,
            log=self.said.append,
            clock=clock,
            orphan_seconds=orphan_seconds,
        )
        RUNS.append(self)

    def resume(self) -> Resumed | None:
        return self.manager.resume()

    def start(self, step: int, *, wait: bool = False, padding: torch.Tensor | None = None) -> bool:
        """A save of this rank's share of `whole(step)`."""
        rank, world_size = dist.rank(), dist.world_size()
        own = {"rng": torch.tensor([rank, step % 256], dtype=torch.uint8)}
        if padding is not None:
            own["padding"] = padding
        state = {"step": step, "cursors": {"0": step}}
        fragments = cut(whole(step), rank, world_size)
        saved = self.manager.save(step, fragments, own, state, wait=wait)
        return saved in (Saved.COMMITTED, Saved.UNDER_WAY)

    def save(self, *steps: int, padding: torch.Tensor | None = None) -> None:
        for step in steps:
            assert self.start(step, wait=True, padding=padding), self.said

    def until(self, condition: Callable[[], bool]) -> None:
        """Polls as a trainer does at every step."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.said
            self.numbers |= self.manager.poll()
            time.sleep(0.01)


def assert_is(resumed: Resumed | None, step: int) -> Resumed:
    """Bit for bit what a run of one rank has saved as `step`."""
    assert resumed is not None
    assert (resumed.step, resumed.state) == (step, {"step": step, "cursors": {"0": step}})
    assert_holds(resumed, step)
    assert resumed.rank_tensors is not None
    assert resumed.rank_tensors["rng"].tolist() == [0, step % 256]
    return resumed


def assert_holds(resumed: Resumed, step: int) -> None:
    for (name, slot), tensor in whole(step).items():
        assert bits(resumed.reader.read(name, slot, 0, tensor.numel())) == bits(tensor)


def data_file(folder: Path, step: int, name: str = "rank00000.safetensors") -> Path:
    (found,) = (folder / "ckpt" / f"s{step:010d}").glob(f"*/{name}")
    return found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -- the process that writes checkpoints


def writers() -> list[int]:
    """Those of this process: its children, by their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == os.getpid()
                and b"clip_train.checkpoint" in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
    return found


def the_writer() -> int:
    """Once it is that program: a process that has just been forked has no command line yet."""
    end = time.monotonic() + 60
    while not (found := writers()) and time.monotonic() < end:
        time.sleep(0.02)
    (pid,) = found
    return pid


def stop_writer() -> None:
    """As a disk that hangs. Returns when the writer does nothing any more."""
    pid = the_writer()
    util.Finalize(
        None, wake_writers, exitpriority=0
    )  # of a rank that fails meanwhile: it would stay for ever
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def wake_writers() -> None:
    for pid in writers():
        os.kill(pid, signal.SIGCONT)


def kill_writer() -> None:
    """Returns when it has ended, so that what asks how it has ended need not wait."""
    pid = the_writer()
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # this process has seen it already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


# -- the disk


class Gate:
    """A file that a checkpoint writer may write only when it is let through, as at a slow disk or store.

    For writers that start later: it is planted as their `sitecustomize`.
    """

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """folder: for the gate's own files."""
        folder.mkdir()
        self._pipe = folder / "pipe"
        os.mkfifo(self._pipe)
        self._other_end: int | None = None
        code = f"""
            import os, sys
            def hook(event, args):
                own = str(args[0]).startswith({str(path.parent)!r}) and {path.name!r} in str(args[0])
                if event == "open" and own and not waited:
                    waited.append(True)
                    open({str(self._pipe)!r}).read()
            waited = []
            sys.addaudithook(hook)
        """
        (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")

    def reached(self) -> bool:
        """Whether somebody waits."""
        if self._other_end is None:
            try:
                self._other_end = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as e:
                if e.errno != errno.ENXIO:
                    raise
        return self._other_end is not None

    def open(self) -> None:
        """Let through the one who waits."""
        if self._other_end is not None:
            os.close(self._other_end)
