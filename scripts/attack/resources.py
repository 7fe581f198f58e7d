"""Less of what a machine has: disk, inodes, shared memory, limits of the shell, time, bandwidth."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.attack import lab
from scripts.attack.case import SAME, Case, said
from scripts.attack.processes import ended, server
from tests.launcher.conftest import (
    ENDLESS,
    ROOT,
    clean_environment,
    finish,
    start,
    wait_for_step,
)
from tests.s3.proxy import Fault, FaultyProxy
from tests.warm import Command

QUICK = (*lab.SMALL, "data.workers=1", "checkpoint.grace_seconds=10", "log.progress=false")


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system at `folder`."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def on(options: str, *words: str, then: str = "") -> Callable[[Path], str]:
    """The run directory is on a file system with too little: the same curve, or an end in words."""

    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        with mounted(folder / "run", options):
            status, out = lab.run(file, *QUICK)
            if status == 0:
                return lab.same(folder / "run")
            word = said(status, out, *words)
            if then:  # with room it continues
                subprocess.run(["mount", "-o", f"remount,{then}", folder / "run"], check=True)
                status, out = lab.run(file, *QUICK)
                assert status == 0, out
                return lab.same(folder / "run")
            return word

    return attack


def under_a_live_run(do: Callable[[Path], object], *words: str) -> Callable[[Path], str]:
    """Something happens to the run directory while it trains."""

    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        (folder / "run").mkdir()
        saves = ("checkpoint.max_failed_saves=2", "checkpoint.every_steps=5")
        process = start(file, *QUICK, *ENDLESS, *saves)
        wait_for_step(folder / "run", 8, process, 50)
        do(folder / "run")
        status, out = ended(process)
        return said(status, out, *words)

    return attack


def removed(run_dir: Path) -> None:
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.rmtree(run_dir, ignore_errors=True)


def renamed(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def a_file_instead(run_dir: Path) -> None:
    renamed(run_dir)
    run_dir.write_text("x")


def checkpoints_removed(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    (run_dir / "checkpoints").write_text("x")


def read_only(folder: Path) -> str:
    """A disk that the kernel has made read-only, as it does after an error of it."""
    file = lab.recipe(folder)
    saves = ("checkpoint.max_failed_saves=2", "checkpoint.every_steps=5")
    with mounted(folder / "run", "size=64m"):
        process = start(file, *QUICK, *ENDLESS, *saves)
        wait_for_step(folder / "run", 8, process, 50)
        again = ["mount", "-o", "remount,ro", folder / "run"]
        while subprocess.run(again, check=False, capture_output=True).returncode:
            time.sleep(0.01)  # a file is open for writing in this moment
            if process.poll() is not None or time.monotonic() > 1e9:
                break
            subprocess.run(["mount", "-o", "remount,size=4k", folder / "run"], check=False)
            break
        status, out = ended(process)
    return said(status, out, "checkpoint")


ANOTHER_USER = (  # who may read what root may; root has no limit of processes
    "setpriv", "--reuid=54321", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override",
)  # fmt: skip


def limited(
    kind: int, amount: int, *words: str, ranks: int = 1, user: tuple[str, ...] = ()
) -> Callable[[Path], str]:
    """A cold start in a shell with this ulimit: the same curve, or an end in words."""

    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        done = subprocess.run(
            [
                *user,
                sys.executable,
                "-m",
                "launcher",
                "train",
                str(file),
                *QUICK,
                f"--ranks={ranks}",
            ],
            env=clean_environment() | {"PYTHONPATH": str(ROOT)},
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=58,
            preexec_fn=lambda: resource.setrlimit(kind, (amount, amount)),
        )
        out = done.stdout + done.stderr
        if done.returncode == 0:
            return lab.same(folder / "run") if ranks == 1 else SAME
        assert done.returncode in (1, 2), (done.returncode, out)
        return said(done.returncode, out, *words)

    return attack


def warm_limited(kind: int, amount: int, *words: str) -> Callable[[Path], str]:
    """The same for a process that has started."""

    def attack(folder: Path) -> str:
        process = start(lab.recipe(folder), *QUICK)
        resource.prlimit(process.pid, kind, (amount, amount))
        status, out = ended(process)
        return lab.same(folder / "run") if status == 0 else said(status, out, *words)

    return attack


def overridden(*before: str) -> Callable[[Path], str]:
    """Overrides that others of the same line override: the last one counts."""

    def attack(folder: Path) -> str:
        status, out = lab.run(lab.recipe(folder), *before, *QUICK)
        assert status == 0, out
        return lab.same(folder / "run")

    return attack


def small_shm(
    size: str, *words: str, workers: int = 2, more: tuple[str, ...] = ()
) -> Callable[[Path], str]:
    """`/dev/shm` of this size, as containers have it."""

    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        line = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", line, "sh", sys.executable, "-m", "launcher", "train", str(file),
             *QUICK, f"data.workers={workers}", *more],
            env=clean_environment() | {"PYTHONPATH": str(ROOT)},
            cwd=folder, check=False, capture_output=True, text=True, timeout=58,
        )  # fmt: skip
        if done.returncode == 0:
            return lab.same(folder / "run") if not more else SAME
        return said(done.returncode, done.stdout + done.stderr, *words)

    return attack


# -- time


def clock_jumps() -> None:
    """`clip-train` with a clock that jumps by an hour, back or ahead, once it has run for 3 s."""
    real, began = time.time, time.monotonic()
    jump = float(os.environ["JUMP"])
    time.time = lambda: real() + jump * (time.monotonic() - began > 3)
    from launcher.cli.main import entry

    entry()


def jumping(seconds: float) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        environ = clean_environment() | {"JUMP": str(seconds), "PYTHONPATH": str(ROOT)}
        store = f"checkpoint.remote={folder / 'store'}"
        line = ["train", str(file), *QUICK, store, "checkpoint.every_steps=1"]
        status, out = finish(Command(line, env=environ, cwd=folder, target=clock_jumps))
        assert status == 0 and "Traceback" not in out, out
        return lab.same(folder / "run")

    return attack


def files_of_tomorrow(folder: Path) -> str:
    """A run whose files are all of next year, as after a wrong clock: it resumes."""
    file = lab.recipe(folder)
    status, out = lab.run(file, *QUICK, "run.steps=20")
    assert status == 0, out
    for path in (folder / "run").rglob("*"):
        os.utime(path, (time.time() + 3e7,) * 2)
    status, out = lab.run(file, *QUICK)
    assert status == 0, out
    return lab.same(folder / "run")


# -- a slow store


def crawling(rate: int, action: str = "crawl") -> Callable[[Path], str]:
    """A store with this link, bytes a second, for shards and checkpoints: words, or the curve."""

    def attack(folder: Path) -> str:
        name = f"slow{rate}{action}"
        server().put(name)
        with FaultyProxy(server().port, server().sign) as proxy:
            proxy.faults = [Fault(action, method="GET|PUT|POST", key=".", rate=rate)]
            environ = server().environment(proxy.url)
            impatient = ("storage.patience_seconds=5", "checkpoint.max_failed_saves=2")
            store = f"checkpoint.remote=s3://{name}/run"
            process = start(lab.recipe(folder), *QUICK, *impatient, store, environ=environ)
            status, out = ended(process, 400)
        return lab.same(folder / "run") if status == 0 else said(status, out, f"s3://{name}")

    return attack


CASES = [
    Case("a disk of 1 MiB", on("size=1m", "not enough space", "make room", then="size=200m")),
    Case("a disk of 4 MiB, then more", on("size=4m", "not enough space", "make room", then="size=200m")),
    Case("a disk of 16 kiB", on("size=16k", "No space left")),
    Case("60 inodes, then more", on("nr_inodes=60", "No space left", then="nr_inodes=9999")),
    Case("12 inodes", on("nr_inodes=12", "No space left")),
    Case("2 inodes", on("nr_inodes=2", "No space left")),
    Case("a read-only run directory", on("ro,size=9m", "Read-only", "choose another run.dir")),
    Case("the run directory removed", under_a_live_run(removed, "run.dir back")),
    Case("the run directory renamed", under_a_live_run(renamed, "run.dir back")),
    Case("a file in place of the run directory", under_a_live_run(a_file_instead, "run.dir back")),
    Case("a file in place of the checkpoints", under_a_live_run(checkpoints_removed, "checkpoints")),
    Case("a disk that turns read-only or full", read_only),
    Case("ulimit -n 64", limited(resource.RLIMIT_NOFILE, 64, "ulimit -n"), cheap=True),
    Case("ulimit -n 128", limited(resource.RLIMIT_NOFILE, 128)),
    Case("ulimit -n 1024, two ranks", limited(resource.RLIMIT_NOFILE, 1024, ranks=2), waits="none: cold starts"),
    Case("ulimit -v of 1 GiB", limited(resource.RLIMIT_AS, 1 << 30)),
    Case("ulimit -v of 3 GiB", limited(resource.RLIMIT_AS, 3 << 30)),
    Case("ulimit -f of 64 kiB", limited(resource.RLIMIT_FSIZE, 64 << 10, "data.workers", "ulimit -f")),
    *(
        Case(
            f"ulimit -u {amount}, {ranks} rank{'s' * (ranks > 1)}",
            limited(resource.RLIMIT_NPROC, amount, "ulimit -u", ranks=ranks, user=ANOTHER_USER),
        )
        for amount, ranks in ((1, 1), (4, 1), (8, 1), (14, 1), (20, 1), (26, 1), (100, 1), (20, 2), (48, 2), (60, 2))
    ),
    Case("ulimit -s of 256 kiB", limited(resource.RLIMIT_STACK, 256 << 10)),
    Case("ulimit -l 0", warm_limited(resource.RLIMIT_MEMLOCK, 0)),
    Case("ulimit -q 0", warm_limited(resource.RLIMIT_MSGQUEUE, 0)),
    Case("data segments of 600 MiB", warm_limited(resource.RLIMIT_DATA, 600 << 20)),
    Case("files of 100 kiB once it runs", warm_limited(resource.RLIMIT_FSIZE, 100 << 10, "data.workers", "ulimit -f")),
    Case("40 open files once it runs", warm_limited(resource.RLIMIT_NOFILE, 40)),
    Case("/dev/shm of 64 MiB", small_shm("64m")),
    Case("/dev/shm of 256 kiB", small_shm("256k", "/dev/shm")),
    Case("/dev/shm of 4 kiB", small_shm("4k", "/dev/shm")),
    Case("/dev/shm of 1 MiB, two ranks", small_shm("1m", "/dev/shm", more=("--ranks=2",))),
    Case("/dev/shm of 64 MiB, two ranks", small_shm("64m", "/dev/shm", more=("--ranks=2",))),
    Case("the same overrides twice", overridden(*QUICK)),
    Case("two values of one override", overridden("run.steps=7")),
    Case("the clock set back by an hour", jumping(-3600.0)),
    Case("the clock set ahead by an hour", jumping(3600.0)),
    Case("the clock set back to 1970", jumping(-1.7e9)),
    Case("all files of a run are of next year", files_of_tomorrow),
    Case("a store at 10 kB/s", crawling(10_000), waits="checkpoint.grace_seconds", prepare=server),
    Case("a store at 1 MB/s", crawling(1_000_000), prepare=server),
    Case("a store that never answers", crawling(1, "hang"), waits="storage.patience_seconds", prepare=server),
]  # fmt: skip
