"""Processes that start warm: forked from a server that has imported torch, DeepSpeed and what they import late.

A rank or a command then costs 0.3 CPU seconds before it does anything, where one from nothing costs 8. Each is still a
process of its own, with its own environment, session, signals and exit status. The server is `multiprocessing`'s fork
server, one for each process that runs tests. What is about the start itself starts cold: tests/launcher/test_cold.py.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from clip_train.stop import SIGNALS
from tests import devices, jitter, processor

PRELOAD = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.onnx",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "deepspeed",
    "jinja2",
    "clip_train.storage.fsspec_store",
    "clip_train.data.worker",
    "clip_train.evaluate.sets",
    "clip_train.engines.deepspeed.engine",
    "clip_tools.place",
    "clip_tools.plan",
    "launcher.slurm.controller",
    "launcher.train",
    "tests.ranks",
    "tests.frozen",
]
# The number of OpenMP threads is fixed when torch is imported. DeepSpeed asks for its accelerator then.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(processor.THREADS),
    "DS_ACCELERATOR": devices.accelerator(),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # without CUDA itself, which does not survive a fork
    "PYTHONWARNINGS": "ignore",
}

_context = multiprocessing.get_context("forkserver")


def start_server(preload: Sequence[str] = PRELOAD) -> None:
    """Once, before anything else of this process asks for a fork server (a loader's would lack most imports).

    Returns at once; the imports take some seconds, for which the first process waits.
    """
    before = dict(os.environ)
    os.environ.update(SERVER_ENVIRONMENT)
    try:
        _context.set_forkserver_preload(list(preload))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def process(target: Callable[..., Any], *args: Any) -> multiprocessing.process.BaseProcess:
    """A warm process that calls `target(*args)` (of a module) in this process's environment; not started yet."""
    return _context.Process(target=_in_environment, args=(dict(os.environ), target, args))


def _in_environment(
    environ: dict[str, str], target: Callable[..., Any], args: Sequence[Any]
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    _end_with_the_tests()
    processor.answer_no()
    jitter.plant()
    target(*args)


def _end_with_the_tests() -> None:
    """A test process that is killed leaves nothing running. Its child is the fork server, which would not end these."""
    tests = multiprocessing.parent_process()
    assert tests is not None

    def wait() -> None:
        tests.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@functools.cache
def _outputs() -> str:
    """The folder for what commands print; gone with this process."""
    folder = tempfile.mkdtemp(prefix="clip-train-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` of a module returns in a warm process with this process's environment of now (a loader
    there starts its workers anew); what it raises is raised here."""
    receiver, sender = _context.Pipe(duplex=False)
    child = process(_answer, sender, function, args)
    child.start()
    sender.close()
    try:
        kind, value = receiver.recv()
    except EOFError:
        raise RuntimeError("the process ended without an answer") from None
    finally:
        receiver.close()
        child.join()
    if kind == "error":
        raise value
    return value


def _answer(
    sender: connection.Connection, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    own_fork_server()
    try:
        answer = ("value", function(*args))
    except Exception as e:
        answer = ("error", e)
    sender.send(answer)


class Command:
    """`clip-train ARGUMENTS` in a warm process; what tests use of `subprocess.Popen`, output in a file.

    target: another function of a module to call, `launcher.cli.main.entry` by default. sys.argv holds the arguments.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: dict[str, str],
        cwd: Path,
        split: bool = False,
        target: Callable[[], Any] | None = None,
    ):
        self.args, self.returncode = list(arguments), None
        out = Path(_outputs(), uuid.uuid4().hex)
        self._files = [out, out.with_suffix(".err") if split else out]
        self._process = _context.Process(
            target=_run, args=(self.args, env, str(cwd), self._files, target)
        )
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, self._printed()[0])
        return status

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._process.join(timeout)
            self.returncode = self._process.exitcode
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(stdout, stderr); all in the first where they are not split. subprocess.TimeoutExpired after `timeout` s."""
        self.wait(timeout)
        return self._printed()

    def _printed(self) -> tuple[str, str]:
        out, err = (
            file.read_text(errors="replace") if file.exists() else "" for file in self._files
        )
        return out, "" if self._files[0] == self._files[1] else err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class World:
    """Ranks of one world, each a `Command` as a launcher would have started it; nobody but themselves ends them."""

    def __init__(self, ranks: Sequence[Command]):
        self.ranks = ranks

    def poll(self) -> int | None:
        """0 where all have ended with 0, else the status of the first rank that has not; None while one runs."""
        statuses = [rank.poll() for rank in self.ranks]
        return None if None in statuses else next(filter(None, statuses), 0)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        for rank in self.ranks:
            rank.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self.poll()  # type: ignore[return-value]

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The ranks' output, one rank after the other."""
        self.wait(timeout)
        outs, errs = zip(*(rank.communicate() for rank in self.ranks), strict=True)
        return "".join(outs), "".join(errs)

    def send_signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.send_signal(number)


def _run(
    arguments: list[str],
    env: dict[str, str],
    cwd: str,
    files: list[Path],
    target: Callable[[], Any] | None,
) -> None:
    """In the new process: become what a shell would have started."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for number, file in zip((1, 2), files, strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    sys.argv = ["clip-train", *arguments]
    jitter.plant()
    own_fork_server()
    _end_with_the_tests()
    processor.answer_no()
    from tests.launcher.faults import sitecustomize  # noqa: F401  plants what FAULT asks for

    if target is None:
        from launcher.cli.main import entry as target
    target()


def own_fork_server() -> None:
    """The loader's workers come from a child of their trainer, as they always do; this one need not import all anew."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX"))
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(alive_w)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            try:
                forkserver.main(listener.fileno(), alive_r, [])
            finally:
                os._exit(0)
        server._forkserver_address = listener.getsockname()
    os.close(alive_r)
    server._forkserver_alive_fd, server._forkserver_pid = alive_w, pid
