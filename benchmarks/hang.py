"""Seconds from a planted hang to the message that names it, and the message, in runs of two ranks on the CPU.

Each row plants one cause in rank 1: a collective that it skips, code that does not return, a loader worker that gives
no sample, a process that is frozen; and a store that keeps its connections open and answers no more (skipped without
the S3 server of the tests, scripts/setup_s3.sh). The seconds begin with the last step that was recorded, for a frozen
process with the signal. A hang is noticed after `launch.hang_seconds`, here 20; a frozen process by its heartbeat.

--case WORD: only the causes that contain this word.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, finish, parser

from clip_tools.demo import shapes
from launcher.runtime.verdict import VERDICT_FILE, read_verdict
from tests import warm
from tests.launcher import hangs
from tests.launcher.conftest import ENDLESS, MODEL, RECIPE, start, wait_for, wait_for_step
from tests.launcher.conftest import finish as finish_process
from tests.processes import Process

LIMIT = 20.0  # launch.hang_seconds
TARGETS = {
    "after s": f"at most {LIMIT:.0f} + 10 for what the watchdog finds, 25 for a frozen process",
    "message": "names rank 1, the collective that it has not entered, and what it does instead",
}
MOST, MOST_FROZEN = LIMIT + 10, 25.0
QUICK = ("does not return",)
CODE = "tests.launcher.hangs"


@dataclass
class Case:
    cause: str
    overrides: list[str]
    plant: Callable[[Path, Process], None] = lambda folder, process: None
    expected: tuple[str, ...] = ()
    most: float = MOST
    is_signal: bool = False  # the seconds begin with `plant`
    needs_store: bool = False


def stay_away(folder: Path, process: Process) -> None:
    (folder / hangs.AWAY).touch()


def freeze(folder: Path, process: Process) -> None:
    os.kill(process.ranks[1].pid, signal.SIGSTOP)


CASES = [
    Case(
        "a rank skips a collective",
        [f"log.callbacks=[{CODE}.SkipsACollective]"],
        expected=("rank 0 is in collective 1 of gloo group", "rank 1 has not entered it"),
    ),
    Case(
        "a rank's own code does not return",
        [f"log.callbacks=[{CODE}.StaysAway]"],
        stay_away,
        ("in launcher/hangs.py", "rank 0 is in collective", "rank 1 has not entered it"),
    ),
    Case(
        "a rank waits for data: a worker's own code",
        [f"data.stages=[{CODE}.stalling]", "data.workers=1"],
        expected=("waiting for data: loader worker", "stalling", "rank 1 has not entered it"),
    ),
    Case(
        "a frozen process",
        [],
        freeze,
        ("rank 1 on", "has died or is frozen"),
        most=MOST_FROZEN,
        is_signal=True,
    ),
    Case(
        "a store that answers no more",
        ["data.workers=1", "storage.patience_seconds=100"],
        expected=("waiting for data: loader worker", "in storage/"),
        needs_store=True,
    ),
]


@contextmanager
def store(folder: Path) -> Iterator[tuple[str, dict[str, str], Callable[[], None]]]:
    """Shards at a URL, the environment with which they are read, and what stops the store."""
    from tests.s3.epochs import make_shards, upload
    from tests.s3.proxy import Fault, FaultyProxy
    from tests.s3.server import chosen

    with ExitStack() as stack:
        server = chosen()().start()
        stack.callback(server.stop)
        proxy = stack.enter_context(FaultyProxy(server.port, server.sign))
        make_shards(folder / "set")
        server.put("hang")
        train = upload(server, folder / "set", "hang")

        def stop() -> None:
            proxy.faults = [Fault("hang", key="", method="GET|HEAD")]

        yield train, server.environment(proxy.url), stop


def measure(case: Case, folder: Path, train: str) -> tuple[dict[str, Any], list[str]]:
    """The row, and what fell short."""
    folder.mkdir()
    recipe, run_dir = folder / "recipe.yaml", folder / "run"
    (folder / "small.json").write_text(json.dumps(MODEL))
    with ExitStack() as stack:
        environ: dict[str, str] = {}
        plant = case.plant
        if case.needs_store:
            train, environ, stop = stack.enter_context(store(folder))
            plant = lambda *_: stop()  # noqa: E731
        model = folder / "small.json"
        recipe.write_text(RECIPE.format(run_dir=run_dir, train=train, model=model))
        limit = f"launch.hang_seconds={LIMIT}"
        process = start(recipe, *ENDLESS, limit, *case.overrides, ranks=2, environ=environ)
        wait_for_step(run_dir, hangs.STEP - 1, process)
        begin = time.time()
        plant(folder, process)
        wait_for((run_dir / VERDICT_FILE).exists, "it is not named", process.ranks[0], timeout=300)
        if case.is_signal:
            process.ranks[1].kill()  # a launcher would, and the other rank has named it
        status, out = finish_process(process, timeout=300)
    if not case.is_signal:
        begin = (run_dir / "metrics.jsonl").stat().st_mtime
    after = (run_dir / VERDICT_FILE).stat().st_mtime - begin
    verdict = read_verdict(run_dir)
    reason = verdict[1]["reason"] if verdict is not None else out[-2000:]
    missed = [
        f"{case.cause}: {word!r} is not in {reason}" for word in case.expected if word not in reason
    ]
    if after > case.most:
        missed.append(f"{case.cause}: {after:.1f} s")
    return {
        "cause": case.cause,
        "after s": round(after, 1),
        "status": str(status),
        # processes and hosts differ from run to run
        "message": re.sub(
            r"(rank \d) on [\w.-]+", r"\1 on …", re.sub(r"worker \d+", "worker …", reason)
        ),
    }, missed


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--case", metavar="WORD", default="", help="only these causes")
    args = arguments.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    warm.start_server()
    cases = [case for case in CASES if args.case in case.cause]
    if args.quick:
        cases = [case for case in cases if any(word in case.cause for word in QUICK)]
    rows, missed = [], []
    with tempfile.TemporaryDirectory(prefix="hang-") as folder:
        data = shapes(Path(folder) / "data", 600, per_shard=150)
        for number, case in enumerate(cases):
            if case.needs_store and not (ROOT / ".venv-s3").exists():
                print(f"skipped, without an S3 server: {case.cause}", file=sys.stderr)
                continue
            row, short = measure(case, Path(folder) / str(number), data.train)
            print(*row.values(), sep=" | ", file=sys.stderr, flush=True)
            rows.append(row)
            missed += short
    return finish("hang", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
