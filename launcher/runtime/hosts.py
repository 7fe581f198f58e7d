"""Start the ranks of other hosts over ssh, from one of the hosts.

On each other host, `python -m launcher.runtime.hosts` reads the ranks' command and variables from
its input, so that no secret is in a command line, and then signals. When its input ends, because
the connection or the process that started it is lost, the ranks get HUP: they save and end.
"""

import contextlib
import ipaddress
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
    "AWS_", "AZURE_", "CLIP_TRAIN_", "CUBLAS_", "CUDA_", "DS_", "FI_", "FSSPEC_", "GLOO_", "GOOGLE_", "HF_",
    "KMP_", "LD_LIBRARY_PATH", "MKL_", "NCCL_", "OMP_", "PATH", "PYTHON", "PYTORCH_", "REQUESTS_CA_BUNDLE",
    "SSL_CERT_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRITON_", "UCX_", "WANDB_",
    # libraries read both spellings
    "ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "all_proxy", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
OWN = ("CUDA_VISIBLE_DEVICES",)  # each host's own
# A host that does not answer ends ssh after 30 s, at the start and later.
SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6",
)  # fmt: skip
SSH_FAILED = 255  # ssh's own exit status
NOT_FOUND = 127  # a shell's, and that of `cd` in the line below
# A host name or an IPv4 address; an IPv6 address has two colons. None begins with a dash.
NAME = r"(?:\w[\w.-]*@)?(?:\w[\w.-]*|[\da-fA-F]*:[\da-fA-F]*:[\da-fA-F:.]*(?:%\w+)?)"


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
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not text"
        raise UserError(f"--hostfile ({path}) cannot be read: {why}") from e
    hosts: list[Host] = []
    for number, whole_line in enumerate(text.splitlines(), 1):
        line = whole_line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(rf"({NAME})(?:\s+slots\s*=\s*(\d+))?", line, re.ASCII)
        if match is None:
            raise UserError(f"--hostfile ({path}), line {number}: {line!r} is not `NAME slots=N`")
        slots = int(match[2]) if match[2] else None
        if slots == 0:
            raise UserError(
                f"--hostfile ({path}), line {number}: slots (0) must be at least 1; remove the line "
                "if no rank should run there"
            )
        hosts.append(Host(match[1], slots))
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
    if len(here) > 1:
        raise UserError(
            f"--hostfile ({path}) has this machine under several names: "
            f"{', '.join(host.name for host in here)}; keep the one that the other hosts know"
        )
    if len(hosts) > 1 and is_loopback(here[0].name):
        raise UserError(
            f"--hostfile ({path}) has {here[0].name} for this machine, which each other host takes "
            f"for itself; write a name that they know, such as {socket.gethostname()}"
        )
    return [here[0], *(host for host in hosts if host != here[0])]


def address_of(name: str) -> str:
    """Of `USER@HOST`, the host."""
    return name.rpartition("@")[2]


def is_this_machine(name: str) -> bool:
    """Whether `name` is an address of this machine: only then can a socket be bound to it."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(address_of(name), 0, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def is_loopback(name: str) -> bool:
    """Whether every machine reaches itself by this name."""
    address = address_of(name)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address.lower() in ("localhost", "localhost.localdomain")


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
        try:
            self._ssh = subprocess.Popen(
                [*SSH, name, f"cd {shlex.quote(os.getcwd())} || exit {NOT_FOUND}; exec {start}"],
                stdin=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C reaches only who forwards it
                bufsize=0,  # a signal may come while another one is sent
            )
        except FileNotFoundError as e:
            raise UserError("--hostfile: ssh was not found on this machine; install it") from e
        self.pid = self._ssh.pid
        self._send(json.dumps({"variables": variables | import_path, "arguments": [*arguments]}))

    def _send(self, line: str) -> None:
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._ssh.stdin.write(f"{line}\n".encode())

    def poll(self) -> int | None:
        status = self._ssh.poll()
        if status in (SSH_FAILED, NOT_FOUND):
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
        if status == NOT_FOUND:
            return (
                f"its ranks were not started (its message is above); that host needs {os.getcwd()} "
                f"and {sys.executable} too"
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
