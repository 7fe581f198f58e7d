"""What is said of one of eight ranks that is not well, and after how many seconds.

    python benchmarks/view.py [CASE ...]    of: busy store disk clock start; default: all, about 30 minutes

Eight ranks of the tiny model train over gloo with ZeRO 1 on this machine, each in a session of its own, so that Linux
shares the cores fairly between them (`sched_autogroup_enabled` must be 1). Rank 5 is not well:

busy   first it is as the others, for five minutes; then three processes in its session are busy; then they end
store  its shards come from S3 (LocalStack: scripts/setup_s3.sh) at 8 KiB a second
disk   its node's disk, on which checkpoints are written before they go to S3, gets full (root is needed, for a mount)
clock  it is two hours behind, and rank 0 two hours ahead: a preloaded library (below, in C) changes what libc answers
start  it is not started; it has a GPU, as it seems, that torch cannot use; it joins, and does not form the group
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, finish, parser

from clip_tools.demo import SyntheticData, shapes
from clip_tools.shards.index import index_shards, write_indexes
from tests.launcher.conftest import RECIPE, free_port, metrics
from tests.processes import kill_tree
from tests.s3.bucket import Bucket
from tests.s3.localstack import LocalStack
from tests.s3.proxy import Fault, FaultyProxy

RANKS, SICK = 8, 5
EVEN_SECONDS, PATIENCE = 300.0, 240.0
NAMED_WITHIN = 120.0
WARM_STEP = 10
BLOCK_BYTES = 16 << 10  # of an index: four samples, a step
RATE = 32 << 10  # bytes a second of a slow store, whose requests count as 64 KiB at least
COMMON = ("engine.zero_stage=1", "batch.micro_size=4", "data.lanes=8", "run.steps=100000", "log.progress=false",
          "log.batch_digest=false")  # fmt: skip
TARGETS = {
    "even": f"nobody is named in {EVEN_SECONDS:.0f} s",
    "busy, store": f"rank {SICK} is named within {NAMED_WITHIN:.0f} s, with the cause",
    "disk": f"the failed save names rank {SICK}; training continues, and saves again once there is room",
    "start": f"rank {SICK} or its node is named, and all ranks end with an error",
    "clock": "nothing is misled: the run ends with all of its steps and checkpoints, and resumes",
}
BUSY = "while [ ! -e busy ]; do sleep 0.2; done; for i in 1 2 3; do while [ -e busy ]; do :; done & done"
WRONG_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long off(void) { return atol(getenv("CLOCK_OFF")); }

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = ((int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime"))(clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += off();
  return status;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int status = ((int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday"))(now, zone);
  now->tv_sec += off();
  return status;
}
"""

Row = dict[str, Any]
Wrap = Callable[[list[str]], list[str]]  # a rank's command line, within another one


class Ranks:
    """Eight ranks that train, until `close`."""

    def __init__(
        self,
        folder: Path,
        train: str,
        *overrides: str,
        environ: Mapping[int, Mapping[str, str]] | None = None,
        wrap: Wrap = lambda line: line,
        absent: int = -1,
    ) -> None:
        """environ: more of single ranks; -1: of all. wrap: of rank 5 alone. absent: a rank that is not started."""
        self.folder, self.run_dir = folder, folder / "run"
        folder.mkdir(exist_ok=True)
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(run_dir=self.run_dir, train=train, model="tiny"))
        line = [sys.executable, "-m", "launcher", "train", str(recipe), *COMMON, *overrides]
        world = {
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
        }
        world |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        more = environ or {}
        self.processes = []
        for rank in {*range(RANKS)} - {absent}:
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **more.get(-1, {}),
                **more.get(rank, {}),
            }
            with (folder / f"log{rank}").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        wrap(line) if rank == SICK else line,
                        env=os.environ | world | own,
                        cwd=folder,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            kill_tree(process)

    def log(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("log*")))

    def seconds_until(
        self, condition: Callable[[], object], patience: float = PATIENCE
    ) -> float | None:
        """None: it does not come true within `patience`, or before a rank ends."""
        began = time.monotonic()
        came = self.come(lambda: condition() or not self.live(), patience) and condition()
        return time.monotonic() - began if came else None

    def come(self, condition: Callable[[], object], patience: float = PATIENCE) -> bool:
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.5)
        return False

    def live(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def reach(self, step: int) -> None:
        if self.seconds_until(lambda: self.step() >= step, 600) is None:
            raise RuntimeError(f"step {step} was not reached: {self.log()[-3000:]}")

    def step(self) -> int:
        return max((record["step"] for record in metrics(self.run_dir)), default=0)

    def find(self, pattern: str) -> str:
        """The newest line of a log that has it, without its beginning."""
        found = re.findall(rf"(?m)^.*?({pattern}.*)$", self.log())
        return found[-1] if found else ""

    def named(self) -> list[str]:
        return [record["slow_rank"] for record in metrics(self.run_dir) if "slow_rank" in record]


def row(what: str, said: str, seconds: float | None, ok: bool) -> Row:
    taken = "" if seconds is None else f"{seconds:.0f}"
    return {"rank 5": what, "what was said": said or "nothing", "after s": taken, "ok": ok}


def busy(folder: Path, data: SyntheticData) -> Iterator[Row]:
    flag = folder / "busy"
    with Ranks(
        folder, data.train, wrap=lambda line: ["sh", "-c", f'({BUSY}) & exec "$@"', "sh", *line]
    ) as ranks:
        ranks.reach(WARM_STEP)
        seconds = ranks.seconds_until(ranks.named, EVEN_SECONDS)
        yield row(
            "as the others",
            " ".join(ranks.named()[:1]),
            seconds or EVEN_SECONDS,
            seconds is None and ranks.live(),
        )
        flag.touch()
        seconds = ranks.seconds_until(ranks.named)
        said = " ".join(ranks.named()[:1])
        right = said.startswith(f"rank {SICK} on ") and " computes " in said
        yield row(
            "busy processes on its core", said, seconds, right and (seconds or 1e9) <= NAMED_WITHIN
        )
        flag.unlink()
        seconds = ranks.seconds_until(lambda: ranks.find(f"rank {SICK} is not slow any more"))
        yield row(
            "they have ended", ranks.find(f"rank {SICK} is not slow"), seconds, seconds is not None
        )


def store(folder: Path, data: SyntheticData) -> Iterator[Row]:
    line = (
        "storage.min_rate=0",
        "storage.patience_seconds=300",
        "data.shuffle_block=16",
    )
    with contextlib.ExitStack() as stack:
        server, bucket = stack.enter_context(on_s3(folder, data))
        proxy = stack.enter_context(FaultyProxy(server.port, server.sign))
        environ = {-1: server.environment(), SICK: server.environment(proxy.url)}
        ranks = stack.enter_context(Ranks(folder, f"{bucket.url}/*.tar", *line, environ=environ))
        ranks.reach(WARM_STEP)
        proxy.faults = [Fault("crawl", rate=RATE)]
        seconds = ranks.seconds_until(ranks.named)
        said = " ".join(ranks.named()[:1])
        right = said.startswith(f"rank {SICK} on ") and " waits for data " in said
        yield row("a slow store", said, seconds, right and (seconds or 1e9) <= NAMED_WITHIN)


@contextlib.contextmanager
def on_s3(folder: Path, data: SyntheticData) -> Iterator[tuple[LocalStack, Bucket]]:
    """The shards and their indexes, in a bucket."""
    server = LocalStack()
    server.start()
    try:
        bucket = Bucket(server, "view")
        for file in sorted(Path(data.train).parent.iterdir()):
            bucket.put(file.name, file.read_bytes())
        yield server, bucket
    finally:
        server.stop()


def disk(folder: Path, data: SyntheticData) -> Iterator[Row]:
    checkpoints = folder / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mount = f'mount -t tmpfs -o size=400m none {checkpoints} && exec "$@"'
    with contextlib.ExitStack() as stack:
        server, bucket = stack.enter_context(on_s3(folder, data))
        line = (f"checkpoint.remote={bucket.url}/run", "checkpoint.every_steps=10")
        mounted = lambda line: ["unshare", "-m", "sh", "-c", mount, "sh", *line]  # noqa: E731
        ranks = stack.enter_context(
            Ranks(folder, data.train, *line, environ={-1: server.environment()}, wrap=mounted)
        )
        ranks.reach(25)
        filler = Path(f"/proc/{ranks.processes[SICK].pid}/root{checkpoints}/filler")
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        seconds = ranks.seconds_until(lambda: ranks.find("checkpoint of step .* failed"))
        said = ranks.find("checkpoint of step .* failed")
        yield row("its disk is full", said, seconds, f"rank {SICK}" in said)
        filler.unlink()
        before = ranks.log().count(" committed after ")
        seconds = ranks.seconds_until(lambda: ranks.log().count(" committed after ") > before)
        yield row(
            "there is room again", ranks.find("checkpoint of step"), seconds, seconds is not None
        )


def clock(folder: Path, data: SyntheticData) -> Iterator[Row]:
    folder.mkdir()
    library = folder / "clock.so"
    line = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(line, input=WRONG_CLOCK, text=True, check=True)
    wrong = {0: 7200, SICK: -7200}
    environ = {
        rank: {"LD_PRELOAD": str(library), "CLOCK_OFF": str(off)} for rank, off in wrong.items()
    }
    died = "rank 7 on .* has died or is frozen"
    with Ranks(
        folder, data.train, "run.steps=90", "checkpoint.every_steps=10", environ=environ
    ) as ranks:
        ranks.reach(WARM_STEP)
        away = metrics(ranks.run_dir)[-1]["time"] - time.time()
        ranks.reach(65)
        before = ranks.find(died)
        kill_tree(ranks.processes.pop(7))
        seconds = ranks.seconds_until(lambda: ranks.find(died))
        ok = not before and seconds is not None and abs(away - wrong[0]) < 60
        yield row(
            "2 h behind, and rank 0 2 h ahead; rank 7 is killed", ranks.find(died), seconds, ok
        )
    with Ranks(folder, data.train, "run.steps=90", "checkpoint.every_steps=10") as ranks:
        ranks.reach(90)
        ended = ranks.come(ranks.ended)
        good = {process.poll() for process in ranks.processes} == {0}
        said, steps = (
            ranks.find("resuming from step"),
            [each["step"] for each in metrics(ranks.run_dir)],
        )
        yield row(
            "all clocks are right again",
            said,
            None,
            "60" in said and steps == [*range(1, 91)] and ended and good,
        )


def start(folder: Path, data: SyntheticData) -> Iterator[Row]:
    fault = {
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests/launcher/faults",
        "FAULT": f"group:{SICK}",
        "FAULT_FILE": "fault",
    }
    gpu = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "0"}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("it is not started", r"\d of \d ranks have joined", {"absent": SICK}),
        ("its GPU cannot be used", "there is a GPU here", {"environ": {SICK: gpu}}),
        ("it joins, and does not form the group", "their process group did not", {"environ": {SICK: fault}}),
    ]  # fmt: skip
    for what, pattern, options in cases:
        line = ("launch.rendezvous_seconds=90",)
        with Ranks(folder, data.train, *line, **options) as ranks:
            began = time.monotonic()
            for name, condition in (("first words", partial(ranks.find, pattern)), ("end", ranks.ended)):  # fmt: skip
                came = ranks.come(condition)
                failed = 0 not in {process.poll() for process in ranks.processes}
                seconds = time.monotonic() - began
                yield row(f"{what}: {name}", ranks.find(pattern), seconds, came and failed)


CASES: dict[str, Callable[[Path, SyntheticData], Iterator[Row]]] = {
    case.__name__: case for case in (busy, store, disk, clock, start)
}


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{' '.join(CASES)}; default: all"
    )
    args = arguments.parse_args()
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="view-"))
    data = shapes(folder / "data", 4000, per_shard=500)
    paths = sorted(map(str, (folder / "data" / "train").glob("*.tar")))
    write_indexes(index_shards(paths, block_bytes=BLOCK_BYTES, workers=1))
    for name in args.cases or CASES:
        for each in CASES[name](folder / name, data):
            print(each, flush=True)
            rows.append(each)
    missed = [f"{each['rank 5']}: {each['what was said']}" for each in rows if not each.pop("ok")]
    return finish("view", rows, TARGETS, missed, args)


if __name__ == "__main__":
    os.environ.pop("RANK", None)
    sys.exit(main())
