"""Seconds from a signal to the end of a run, in each phase of a run of the model `tiny` on the CPU.

Each row starts a run, waits until it is in the phase, sends the signal to one rank or to all, and waits until all of
the run's processes have ended. What hangs sleeps for 1,000 s, so a run that waits for it ends far too late. Imports
are measured from a fresh Python; all other runs start warm (tests/warm.py), which changes nothing about their end.

--phase WORD: only the phases whose name contains this word.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, finish, parser

from clip_tools.demo import shapes
from launcher.runtime.verdict import PROGRESS_FILE, VERDICT_FILE, read_verdict
from tests import warm
from tests.launcher.conftest import (
    RECIPE,
    free_port,
    kill,
    metrics,
    start,
    start_cold,
    wait_for,
    wait_for_step,
)
from tests.launcher.conftest import finish as finish_process
from tests.launcher.slow import SLEEPS
from tests.launcher.test_cold import listens, ranks_of
from tests.launcher.test_rendezvous import listeners
from tests.launcher.test_stop import still
from tests.processes import Process

MOST = 10.0  # seconds from the signal to the end
GRACE = 3  # checkpoint.grace_seconds where a store hangs: the run may wait that long for the upload
TARGETS = {
    "seconds": f"at most {MOST:.0f} from the signal to the end of all processes, in each phase",
    "status": "75, except 0 for a signal after which no step, save or evaluation is left",
    "step": "the last step that the run has taken is committed",
}
OURS = "tests.launcher.test_stop"
SLOW = "tests.launcher.slow"
NO_SAVES = "checkpoint.every_steps=100000"
QUICK = ("a step", "no data", "an evaluation by own code")
LEFT_AFTER = 60.0  # seconds; a run that has not ended then is killed
SLOW_DISK = 3  # seconds for a rank's file of a checkpoint


@dataclass
class Run:
    """A run in a folder of its own."""

    folder: Path
    train: str
    val: str

    @property
    def dir(self) -> Path:
        return self.folder / "run"

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    def write(self) -> None:
        text = RECIPE.format(run_dir=self.dir, train=self.train, model="tiny")
        self.recipe.write_text(text)

    def start(self, *overrides: str, ranks: int = 1, fault: str = "", **environ: str) -> Process:
        return start(
            self.recipe,
            *ENDLESS,
            *overrides,
            ranks=ranks,
            fault=fault,
            environ={SLEEPS: str(self.folder / "sleeps"), **environ},
        )

    def wait(self, condition: Callable[[], object], process: Process) -> Process:
        wait_for(condition, "the phase is not reached", process)
        return process

    def asleep(self, process: Process) -> Process:
        return self.wait((self.folder / "sleeps").exists, process)

    def after_step(self, step: int, process: Process) -> Process:
        wait_for_step(self.dir, step, process)
        return process

    def steps(self) -> int:
        lines = metrics(self.dir)
        return lines[-1]["step"] if lines else 0


ENDLESS = ("run.steps=100000", "log.progress=false", "schedule.name=constant")


# -- before the first step


def imports(run: Run) -> Process:
    process = start_cold(run.recipe, *ENDLESS)
    return run.wait(lambda: listens(process.pid, signal.SIGTERM), process)


def imports_of_ranks(run: Run) -> Process:
    process = start_cold(run.recipe, *ENDLESS, "--ranks=2")
    return run.wait(lambda: len(ranks_of(run.recipe)) == 2, process)


def rendezvous(run: Run) -> Process:
    """Rank 0 of two; rank 1 never starts."""
    port = free_port()
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    process = run.start(**world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run.wait(lambda: listeners(port), process)
    time.sleep(1.0)  # from its store to its wait for rank 1
    return process


def group(run: Run) -> Process:
    """Both ranks have joined, and one never begins to form the process group."""
    process = run.start(ranks=2, fault="group:1")
    return run.wait((run.folder / "fault").exists, process)


def slow_shards(run: Run) -> str:
    return f"data.train={OURS}.SlowStore://{run.folder}/store/{{0..3}}.tar"


def counting(run: Run) -> Process:
    return run.asleep(run.start(slow_shards(run), "run.steps=null", "run.epochs=2"))


def listing(run: Run) -> Process:
    return run.asleep(run.start(slow_shards(run)))


def store(run: Run) -> Process:
    return run.asleep(run.start(f"checkpoint.remote={OURS}.SlowStore://{run.folder}/store"))


def download(run: Run) -> Process:
    """The run resumes on a new node."""
    folder = run.folder / "store"
    same = "checkpoint.every_steps=2"
    first = run.start(same, f"checkpoint.remote={folder}", "run.steps=6")
    status, out = finish_process(first)
    assert status == 0, out
    shutil.rmtree(run.dir)
    return run.asleep(run.start(same, f"checkpoint.remote={SLOW}.SlowReads://{folder}"))


def build(run: Run) -> Process:
    own = (f"model.name={SLOW}.SlowTowers", "model.dropout=0", "model.patch_dropout=null")
    return run.asleep(run.start(*own))


def first_step(run: Run) -> Process:
    return run.asleep(run.start(f"loss.kind={OURS}.slow_loss"))


# -- steps


def step(run: Run) -> Process:
    return run.after_step(5, run.start(NO_SAVES))


def step_of_two(run: Run) -> Process:
    return run.after_step(5, run.start(NO_SAVES, ranks=2))


def slow_step(run: Run) -> Process:
    """Each step takes two seconds."""
    return run.asleep(run.start(NO_SAVES, f"log.callbacks=[{SLOW}.SlowStep]"))


def no_data(run: Run, workers: int = 0, ranks: int = 1) -> Process:
    stage = f"data.stages=[{OURS}.slow_stage]"
    process = run.after_step(3, run.start(NO_SAVES, stage, f"data.workers={workers}", ranks=ranks))
    (run.folder / "hold").touch()
    run.asleep(process)
    still(run.dir)
    return process


def no_data_of_workers(run: Run) -> Process:
    return no_data(run, workers=2, ranks=2)


# -- evaluations


def evaluates(run: Run, *overrides: str) -> tuple[str, ...]:
    return (f"data.val={run.val}", "evaluate.every_steps=5", NO_SAVES, *overrides)


def one_by_one(run: Run) -> tuple[str, ...]:
    """An evaluation of far more than a minute: many links to one shard, in batches of one sample."""
    folder = run.folder / "many"
    folder.mkdir()
    shard = next(Path(run.val).parent.glob("*.tar"))
    for number in range(100):
        (folder / f"{number:03d}.tar").symlink_to(shard)
    return evaluates(run, f"data.val={folder}/{{000..099}}.tar", "evaluate.batch_size=1")


def long_evaluation(run: Run) -> Process:
    """The save before it is committed."""
    process = run.after_step(5, run.start(*one_by_one(run)))
    commits = run.dir / "checkpoints" / "commit"
    return run.wait(lambda: list(commits.glob("*s0000000005.json")), process)


def own_evaluation(run: Run, ranks: int = 1) -> Process:
    return run.asleep(
        run.start(*evaluates(run, f"evaluate.functions=[{OURS}.slow_numbers]"), ranks=ranks)
    )


def own_evaluation_of_two(run: Run) -> Process:
    return own_evaluation(run, ranks=2)


# -- saves


def slow_disk(run: Run) -> dict[str, str]:
    """The environment of checkpoint writers that need SLOW_DISK seconds more for each rank's file of a checkpoint."""
    folder = run.folder / "disk"
    folder.mkdir()
    code = f"""
        import sys, time
        def hook(event, args):
            if event == "open" and ".safetensors" in str(args[0]) and str(args[1])[:1] in "wax":
                open({str(run.folder / "sleeps")!r}, "w").close()
                time.sleep({SLOW_DISK})
        sys.addaudithook(hook)
    """
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def save(run: Run) -> Process:
    return run.asleep(run.start("checkpoint.every_steps=5", **slow_disk(run)))


def save_of_two(run: Run) -> Process:
    return run.asleep(run.start("checkpoint.every_steps=5", ranks=2, **slow_disk(run)))


def save_and_evaluation(run: Run) -> Process:
    """The evaluation has begun, and the save before it is still being written."""
    process = run.asleep(run.start(*one_by_one(run), **slow_disk(run)))
    return run.after_step(5, process)


def upload(run: Run) -> Process:
    """The store takes no more uploads, and one is pending."""
    folder = run.folder / "store"
    line = ("checkpoint.every_steps=5", f"checkpoint.grace_seconds={GRACE}")
    remote = f"checkpoint.remote=tests.checkpoint.held.HeldStore://{folder}"
    process = run.after_step(10, run.start(*line, remote))
    run.wait(lambda: list(folder.glob("commit/*.json")), process)
    (folder / "hold").touch()
    return run.after_step(run.steps() + 10, process)


# -- the end


def last_evaluation(run: Run) -> Process:
    function = f"evaluate.functions=[{OURS}.slow_numbers]"
    return run.asleep(run.start("run.steps=6", f"data.val={run.val}", NO_SAVES, function))


def last_save(run: Run) -> Process:
    return run.asleep(run.start("run.steps=6", NO_SAVES, **slow_disk(run)))


def close(run: Run) -> Process:
    """All is committed, and a callback's `close` hangs."""
    return run.asleep(run.start("run.steps=6", NO_SAVES, f"log.callbacks=[{SLOW}.SlowClose]"))


def close_after_stop(run: Run) -> Process:
    """A step is stopped, and a callback's `close` hangs then."""
    return run.after_step(5, run.start(NO_SAVES, f"log.callbacks=[{SLOW}.SlowClose]"))


@dataclass
class Phase:
    name: str
    reach: Callable[[Run], Process]
    signal: signal.Signals = signal.SIGTERM
    to: str = "all ranks"  # or "rank 1"
    more: float = 0.0  # seconds that the documents allow beside MOST
    statuses: tuple[int, ...] = (75,)


PHASES = [
    Phase("imports", imports),
    Phase("imports of 2 ranks", imports_of_ranks),
    Phase("rendezvous: the other rank does not come", rendezvous),
    Phase("rendezvous: the group does not form", group),
    Phase("counting shards: the store hangs", counting),
    Phase("listing shards: the store hangs", listing),
    Phase("listing checkpoints: the store hangs", store),
    Phase("a download of a checkpoint: the store hangs", download),
    Phase("building the model", build),
    Phase("the first step does not end", first_step),
    Phase("a step", step),
    Phase("a step", step, signal.SIGUSR1),
    Phase("a step", step, signal.SIGUSR2),
    Phase("a step", step, signal.SIGXCPU),
    Phase("a step", step, signal.SIGINT),
    Phase("a step, 2 ranks", step_of_two, to="rank 1"),
    Phase("a step of 2 s", slow_step),
    Phase("no data", no_data),
    Phase("no data, 2 ranks, 2 workers each", no_data_of_workers),
    Phase("a long evaluation", long_evaluation),
    Phase("an evaluation by own code", own_evaluation),
    Phase("an evaluation by own code, 2 ranks", own_evaluation_of_two, to="rank 1"),
    Phase(f"a save of {SLOW_DISK} s", save),
    Phase(f"a save of {SLOW_DISK} s, 2 ranks", save_of_two),
    Phase(f"an evaluation, whose save takes {SLOW_DISK} s", save_and_evaluation),
    Phase(f"an upload: the store hangs, grace_seconds={GRACE}", upload, more=GRACE),
    Phase("the last evaluation, by own code", last_evaluation),
    Phase(f"the last save, of {SLOW_DISK} s", last_save, statuses=(0, 75)),
    Phase("the end: a callback does not close", close, statuses=(0, 75)),
    Phase("a step; then a callback does not close", close_after_stop),
]


def measure(phase: Phase, run: Run) -> tuple[dict[str, Any], list[str]]:
    """The row, and what fell short."""
    run.write()
    process = phase.reach(run)
    begin = time.monotonic()
    to = process.ranks[1] if phase.to == "rank 1" else process
    to.send_signal(phase.signal)
    out, status, seconds = "", None, LEFT_AFTER
    try:
        out, _ = process.communicate(timeout=LEFT_AFTER)
        seconds, status = time.monotonic() - begin, process.wait(0)
    except subprocess.TimeoutExpired:
        out = "still running"
    finally:
        kill(process)
    steps = run.steps()
    committed = 0
    if (run.dir / PROGRESS_FILE).exists():
        committed = int((run.dir / PROGRESS_FILE).read_text())
    verdict = read_verdict(run.dir) if (run.dir / VERDICT_FILE).exists() else None
    word = verdict[0] if verdict else ""
    what = f"{phase.name}, {phase.signal.name}"
    missed = []
    if seconds > MOST + phase.more:
        missed.append(f"{what}: {seconds:.1f} s")
    if status not in phase.statuses:
        missed.append(f"{what}: status {status}: {out[-2000:]}")
    if committed != steps:
        missed.append(f"{what}: {steps} steps, and {committed} is committed")
    return {
        "during": phase.name,
        "signal": phase.signal.name.removeprefix("SIG"),
        "to": phase.to,
        "s": round(seconds, 1),
        "status": "none" if status is None else str(status),
        "verdict": word,
        "steps": steps,
        "committed": committed,
    }, missed


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--phase", metavar="WORD", default="", help="only these phases")
    args = arguments.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    warm.start_server()
    phases = [phase for phase in PHASES if args.phase in phase.name]
    if args.quick:
        phases = [phase for phase in phases if phase.name in QUICK]
    rows, missed = [], []
    print(f"load average at the start: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="stop-") as folder:
        data = shapes(Path(folder) / "data", 600, per_shard=150)
        for number, phase in enumerate(phases):
            place = Path(folder) / str(number)
            place.mkdir()
            row, short = measure(phase, Run(place, data.train, data.val))
            print(*row.values(), sep=" | ", file=sys.stderr, flush=True)
            rows.append(row)
            missed += short
    print(f"load average at the end: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return finish("stop", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
