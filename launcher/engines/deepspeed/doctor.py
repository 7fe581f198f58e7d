"""What `clip-train doctor` looks at for DeepSpeed."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.checks import Finding, check_range, error, ok, warning
from launcher.versions import installed


def check_version() -> Iterator[Finding]:
    if installed("deepspeed") is None:
        yield error(
            "engine", "deepspeed is not installed", "pip install deepspeed, or set engine.kind=fsdp"
        )
    else:
        yield from check_range("engine", "deepspeed")


def check_extensions() -> Iterator[Finding]:
    """DeepSpeed builds extensions; a build that was killed leaves a lock for which later runs wait
    for ever."""
    place = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(place) if place else Path("~/.cache/torch_extensions").expanduser()
    locks = [file for file in folder.glob("**/lock") if time.time() - file.stat().st_mtime > 600]
    if locks:
        message = f"a killed build has left {locks[0]}: later runs wait for it without a word"
        yield error("extensions", message, f"rm {locks[0]}")
    else:
        yield ok("extensions", "no lock of a killed build")


def check_hosts() -> Iterator[Finding]:
    """The deepspeed launcher over ssh: a cut link leaves it waiting for ever without
    keep-alives."""
    hostfile = next(
        (file for file in (Path("hostfile"), Path("/job/hostfile")) if file.exists()), None
    )
    if hostfile is None:
        return
    if "ServerAliveInterval" not in os.environ.get("PDSH_SSH_ARGS_APPEND", ""):
        yield warning(
            "hosts",
            f"{hostfile}: the deepspeed launcher would wait for ever on a dead connection",
            "export PDSH_SSH_ARGS_APPEND='-o ServerAliveInterval=5 -o ServerAliveCountMax=6'",
        )
    else:
        yield ok("hosts", f"{hostfile}, with ssh keep-alives")
    if not any(Path(folder, ".deepspeed_env").expanduser().exists() for folder in (".", "~")):
        message = (
            "no .deepspeed_env: of your environment only NCCL*, PYTHON*, MV2* and UCX* reach the "
            "other hosts"
        )
        yield warning(
            "hosts",
            message,
            "write NAME=value lines (HF_HOME, AWS_PROFILE, ...) to ./.deepspeed_env",
        )


CHECKS = (("engine", check_version), ("extensions", check_extensions), ("hosts", check_hosts))
