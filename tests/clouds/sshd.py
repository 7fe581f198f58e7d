"""OpenSSH's server on the loopback, for sftp: it needs no root, and takes one key of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.s3.server import ENDS_WITH_US, free_ports

PROGRAM = "/usr/sbin/sshd"
SFTP_SERVER = "/usr/lib/openssh/sftp-server"  # what sshd has inside as `internal-sftp`


class Sshd:
    """Up within `with`. It serves the files that this user may read and write."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sshd-"))
        self.port = free_ports(1)
        self.subsystem = "internal-sftp"  # the command that serves; it takes effect at a start
        self._process: subprocess.Popen | None = None

    @classmethod
    def missing(cls) -> str | None:
        if not Path(PROGRAM).exists():
            return "sshd is not on this machine: run scripts/setup_hosts.sh install"
        try:
            import paramiko  # noqa: F401
        except ImportError:
            return "paramiko is not installed: pip install 'clip-train[sftp]'"
        return None

    def url(self, path: Path) -> str:
        return f"sftp://127.0.0.1:{self.port}{path}"

    def environment(self) -> dict[str, str]:
        """What a process needs to log in."""
        return {"CLIP_TRAIN_SSH_CONFIG": str(self.folder / "config")}

    def __enter__(self) -> Sshd:
        for name in ("host_key", "key"):
            line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(line, check=True)
        shutil.copy(self.folder / "key.pub", self.folder / "authorized_keys")
        host_key = (self.folder / "host_key.pub").read_text().split()[:2]
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {' '.join(host_key)}\n")
        (self.folder / "config").write_text(
            f"Host alias*\n  HostName 127.0.0.1\nHost *\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/key\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where it gives up its rights
        self.start()
        return self

    def start(self) -> None:
        """Again, after a `stop`."""
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPasswordAuthentication no\n"
            f"UsePAM no\nStrictModes no\nPermitRootLogin yes\nPidFile none\nMaxStartups 100\n"
            f"Subsystem sftp {self.subsystem}\n"
        )
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", ENDS_WITH_US, "sh", PROGRAM, "-D", "-e", "-f", f"{self.folder}/sshd_config"],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + 60
        while b"Server listening" not in (self.folder / "log").read_bytes():
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.02)

    def serve(self, subsystem: str) -> None:
        """From now on by another command. All connections end."""
        self.stop()
        self.subsystem = subsystem
        self.start()

    def stop(self) -> None:
        """All connections end with it."""
        if self._process is not None:
            from tests.processes import kill_tree

            kill_tree(self._process)
            self._process.communicate()
            self._process = None
        (self.folder / "log").unlink(missing_ok=True)

    def __exit__(self, *error: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
