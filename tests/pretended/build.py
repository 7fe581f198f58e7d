"""Builds the guard that makes a CPU-only torch believe in one GPU (cuda_guard.cpp), once per torch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_guard.cpp")


def guard() -> Path:
    """The shared library, built if need be (5 s); CalledProcessError with the compiler's own message."""
    torch = Path(find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
    # its libraries are found by their place: another environment has another
    name = hashlib.sha256(SOURCE.read_bytes() + f"{version('torch')} {torch}".encode()).hexdigest()[
        :16
    ]
    built = Path(tempfile.gettempdir()) / f"clip-train-pretended-gpu-{os.getuid()}" / f"{name}.so"
    if built.exists():
        return built
    built.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = built.with_suffix(f".{os.getpid()}")
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    link = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    flags = ["-O1", "-shared", "-fPIC", "-std=c++20"]
    subprocess.run(
        [compiler, *flags, *include, str(SOURCE), "-o", str(unfinished), *link], check=True
    )
    unfinished.replace(built)
    return built
