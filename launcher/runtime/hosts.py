"""Start the ranks of other hosts over ssh, from one of the hosts.

On each other host, `python -m launcher.runtime.hosts` reads the ranks' command and variables from
its input, so that no secret is in a command line, and then signals. When its input ends, because
the connection or the process that started it is lost, the ranks get HUP: they save and end.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clip_train.errors import UserError

# Variables that the other hosts get, by their first letters.
SENT = (
    "AWS_", "AZURE_", "CLIP_TRAIN_", "CUBLAS_", "CUDA_", "DS_", "FSSPEC_", "GLOO_", "GOOGLE_", "HF_",
    "LD_LIBRARY_PATH", "MKL_", "NCCL_", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TORCH_", "UCX_", "WANDB_",
    "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
OWN = ("CUDA_VISIBLE_DEVICES",)  # each host's own
# A lost connection ends ssh after 30 s.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6")
SSH_FAILED = 255  # ssh's own exit status


@dataclass(frozen=True)
class Host:
    """A line of the hostfile."""

    name: str
    slots: int | None  # ranks; None: one for each GPU


def read_hostfile(path: str) -> list[Host]:
    """The hosts, one a line, as MPI writes them: `NAME` or `NAME slots=N`, and comments after #.
    This machine comes first. UserError."""
    try:
        text = Path(path).read_text()
    except OSError as e:
        raise UserError(f"--hostfile ({path}) cannot be read: {e.strerror}") from e
    hosts: list[Host] = []
    for number, whole_line in enumerate(text.splitlines(), 1):
        line = whole_line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"([\w.@:-]+)(?:\s+slots\s*=\s*(\d+))?", line)
        if match is None:
            raise UserError(f"--hostfile ({path}), line {number}: {line!r} is not `NAME slots=N`")
        hosts.append(Host(match[1], int(match[2]) if match[2] else None))
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"--hostfile ({path}) has {', '.join(twice)} twice; remove one line")
    if len({host.slots for host in hosts}) > 1:
        numbers = ", ".join(f"{host.name} {host.slots or 'none'}" for host in hosts)
        raise UserError(
            f"--hostfile ({path}): all hosts must have the same number of slots; found {numbers}"
        )
    here = [host for host in hosts if is_this_machine(host.name)]
    if not here:
        raise UserError(
            f"--hostfile ({path}) has {', '.join(names) or 'no host'}, but not this machine "
            f"({socket.gethostname()}): run the command on one of its hosts"
        )
    return [here[0], *(host for host in hosts if host != here[0])]


def is_this_machine(name: str) -> bool:
    """Whether `name` is an address of this machine: only then can a socket be bound to it."""
    with contextlib.suppress(OSError), socket.create_server((name.rpartition("@")[2], 0)):
        return True
    return False


class RemoteHost:
    """The ranks of one other host, with the methods of `subprocess.Popen` that `launch` uses."""

    def __init__(self, name: str, arguments: Sequence[str], import_path: dict[str, str]) -> None:
        """import_path: the variables with which Python finds this package there."""
        variables = {
            key: value
            for key, value in os.environ.items()
            if key.startswith(SENT) and key not in OWN
        }
        words = [f"{key}={value}" for key, value in import_path.items() if value]
        start = shlex.join(["env", *words, sys.executable, "-m", "launcher.runtime.hosts"])
        self.name = name
        self._ssh = subprocess.Popen(
            [*SSH, name, f"cd {shlex.quote(os.getcwd())} && exec {start}"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches only the process that forwards it
            text=True,
        )
        self.pid = self._ssh.pid
        self._send(json.dumps({"variables": variables | import_path, "arguments": [*arguments]}))

    def _send(self, line: str) -> None:
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._ssh.stdin.write(line + "\n")
            self._ssh.stdin.flush()

    def poll(self) -> int | None:
        status = self._ssh.poll()
        if status == SSH_FAILED:
            return 1
        return status

    def why_it_ended(self) -> str:
        """After `poll` has returned a failure."""
        status = self._ssh.returncode
        if status == SSH_FAILED:
            return (
                f"ssh could not log in, or lost the connection (its message is above); try `ssh "
                f"{self.name} true`, and correct {self.name}'s line in the hostfile or ~/.ssh/config"
            )
        return (
            f"its ranks ended with status {status} before all had joined (the cause is above); all "
            "hosts need the same installation and the same folders"
        )

    def send_signal(self, number: int) -> None:
        self._send(str(number))

    def kill(self) -> None:
        self._ssh.kill()
        self._ssh.wait()
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError):
            self._ssh.stdin.close()


def main() -> int:
    """On another host: run the command that the input names, and send it the signals that follow."""
    start = json.loads(sys.stdin.readline())
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *start["arguments"]],
        env=os.environ | start["variables"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )

    def forward() -> None:
        for line in sys.stdin:
            process.send_signal(int(line))
        process.send_signal(signal.SIGHUP)

    threading.Thread(target=forward, daemon=True).start()
    status = process.wait()
    # a signal's number as a shell writes it
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # the thread may wait for input
