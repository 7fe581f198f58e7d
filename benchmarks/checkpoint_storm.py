"""Kill a run at random moments, again and again, and see whether anything of it is ever lost.

A small CLIP trains with DeepSpeed and `checkpoint.remote` at a store (`--store`): a folder; a real S3 server through
obstore or s3fs (LocalStack, from scripts/setup_s3.sh; with CLIP_TRAIN_S3_SERVER=ceph Ceph's gateway); Azurite, from
scripts/setup_clouds.sh; tests/clouds/gcs_server.py; or an sshd. Each life resumes where the last one was killed
(`checkpoint.resume: auto`), commits a few checkpoints, and is killed at a moment that the requests to the server tell,
or the files of the folder: while a checkpoint is written, uploaded, committed, removed or fetched. Mostly all processes
get SIGKILL; sometimes a checkpoint writer alone, or rank 1 alone. A third of the kills keep the layout; in the others
ranks and ZeRO stage change every time. Some lives begin on an empty disk.

With `--json FILE`, rows that FILE has of other stores stay.

After every kill the bucket and the disk are read by code that is not the package's; before every life it tells which
checkpoint must be resumed from.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from common import ROOT, finish, parser, rows_of_others

from clip_tools.demo import shapes
from tests.checkpoint.eyes import damaged_in, newest_in, orphans_in
from tests.processes import family, kill_tree
from tests.s3.places import STORES, Place, missing, place

TARGETS = {
    "same layout": "every step's loss is bitwise that of the uninterrupted run, and so are the last checkpoint's files",
    "other layouts": "the same batches, and the last step's loss within 1e-5 relative",
    "resumed": "every life goes on from the newest commit of disk and bucket; nine of ten have one to go on from",
    "commits": "every commit in the bucket and on the disk is whole after every kill",
    "orphans": "nothing in the bucket or on the disk but what a commit names, when the grace has passed",
    "writer alone": "the run goes on and commits again; rank 1 alone: the run ends by itself",
}
LAYOUTS = [
    (2, 3),
    (1, 3),
    (2, 1),
    (1, 0),
    (2, 2),
    (1, 1),
    (2, 3),
    (1, 2),
    (2, 0),
]  # (ranks, ZeRO stage)
ORPHAN_SECONDS = 3.0
# `clip-train`, which removes orphans after seconds instead of an hour
IMPATIENT = f"""
from functools import partial
import launcher.train
from launcher.cli.main import entry
launcher.train.CheckpointManager = partial(
    launcher.train.CheckpointManager, orphan_seconds={ORPHAN_SECONDS}
)
entry()
"""
MOMENTS = {  # what the run asks of the server then: (weight, expression); None: see Storm.is_at
    "writing": (3, None),
    "uploading": (5, r"PUT \S+/run/ckpt/\S+\.safetensors"),
    "manifest": (2, r"PUT \S+/_MANIFEST"),
    "committing": (4, r"PUT \S+/run/commit/"),
    "removing": (4, r"DELETE \S+/run/(commit|ckpt)/|POST \S+comp=batch"),  # the second: Azure's
    "fetching": (2, r"GET \S+\.safetensors"),
    "any": (2, None),
}
VICTIMS = {"all": 7, "writer": 2, "rank 1": 2}
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
RECIPE = """\
run: {{name: storm, steps: {steps}, seed: 3}}
model: {{name: {model}, dropout: 0.1, patch_dropout: 0.25}}
data: {{train: "{train}", workers: 0, lanes: 4, shuffle_block: 64}}
batch: {{global_size: 32, micro_size: 12}}
optim: {{lr: 1e-3}}
schedule: {{warmup_steps: 5}}
checkpoint: {{every_steps: 4, keep_last: 2}}
log: {{batch_digest: true, tensorboard: false}}
"""


class Storm:
    """One run's lives at one store."""

    def __init__(self, folder: Path, at: Place, name: str, steps: int, seed: str) -> None:
        self.folder, self.name, self.steps, self.at = folder, name, steps, at
        self.run_dir, self.rng = folder / name, random.Random(seed)
        self.checkpoints = self.run_dir / "checkpoints"
        self.bucket = at.bucket
        self.wrong: list[str] = []
        self.resumed, self.lives = 0, 0

    # -- a life

    def start(self, ranks: int, stage: int) -> subprocess.Popen:
        program = self.folder / "impatient.py"
        program.write_text(IMPATIENT)
        line = [str(program), "train", str(self.folder / "recipe.yaml"), f"run.dir={self.run_dir}",
                f"run.steps={self.steps}", f"engine.zero_stage={stage}",
                f"checkpoint.remote={self.bucket.url}/run"]  # fmt: skip
        if ranks > 1:
            line = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                *line,
            ]
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.at.requests.clear()
        self.log_begins = (
            (self.run_dir / "log").stat().st_size if (self.run_dir / "log").exists() else 0
        )
        with (self.run_dir / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *line], cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def to_the_end(self, ranks: int, stage: int) -> None:
        expected = self.newest()
        process = self.start(ranks, stage)
        try:
            status = process.wait(900)
            assert status == 0, (self.run_dir / "log").read_text()[-3000:]
        finally:
            kill_tree(process)
        self.check_resumed(expected)

    def kill_once(self, ranks: int, stage: int, moment: str, victim: str) -> None:
        commits, expected = self.rng.choice([0, 1, 1, 2]), self.newest()
        process = self.start(ranks, stage)
        try:
            if moment == "fetching":
                self.wait(process, lambda: self.asked(MOMENTS["fetching"][1]) > 0)
                time.sleep(self.rng.uniform(0, 0.2))
                return
            self.wait(
                process, lambda: self.asked(MOMENTS["committing"][1]) >= commits and self.begun()
            )
            done = {name: self.asked(expression) for name, (_, expression) in MOMENTS.items()}
            if moment == "any":
                time.sleep(self.rng.uniform(0, 3))
            else:
                self.wait(process, lambda: self.is_at(moment, done[moment]))
                time.sleep(
                    0.5 * self.rng.uniform(0, 1) ** 3
                )  # mostly at once, before the server has answered
            self.strike(process, victim)
        finally:
            kill_tree(process)
            time.sleep(0.3)  # a request that is on its way may still be carried out
            self.check_resumed(expected, started=moment != "fetching")
            self.wrong += self.bucket.incomplete("run") + damaged_in(self.checkpoints)

    def strike(self, process: subprocess.Popen, victim: str) -> None:
        """Only a part of it; what is left has to do the right thing."""
        if victim == "all":
            return
        doomed = sorted(pid for pid in family(process) if self.is_a(pid, victim))
        if victim == "writer" and doomed:
            doomed = [self.rng.choice(doomed)]  # each rank has one
        commits = self.asked(MOMENTS["committing"][1])
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        if len(doomed) != 1:
            self.wrong.append(f"{self.name}: {len(doomed)} processes are {victim}")
        elif victim == "writer":
            self.wait(process, lambda: self.asked(MOMENTS["committing"][1]) > commits)
            if self.asked(MOMENTS["committing"][1]) == commits:
                self.wrong.append(f"{self.name}: no commit after a checkpoint writer was killed")
        else:
            self.wait(process, lambda: False)
            if process.poll() in (None, 0):
                self.wrong.append(
                    f"{self.name}: rank 1 was killed, and the run ended with {process.poll()}"
                )

    @staticmethod
    def is_a(pid: int, victim: str) -> bool:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        writer = b"clip_train.checkpoint.writer" in line
        return writer if victim == "writer" else b"RANK=1" in environment and not writer

    def is_at(self, moment: str, done: int) -> bool:
        if moment == "writing":
            return any(self.checkpoints.rglob("*.safetensors.*.part"))
        return self.asked(MOMENTS[moment][1]) > done

    def asked(self, expression: str | None) -> int:
        """How many such requests this life has made."""
        return (
            sum(bool(re.match(expression, unquote(each))) for each in list(self.at.requests))
            if expression
            else 0
        )

    @staticmethod
    def wait(
        process: subprocess.Popen, condition: Callable[[], bool], seconds: float = 180
    ) -> None:
        end = time.monotonic() + seconds
        while not condition() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)

    # -- what is there

    def newest(self) -> int | None:
        """The step to go on from, by the markers of disk and bucket."""
        refs = [
            *newest_in(self.checkpoints),
            *((m["epoch"], m["step"]) for m in self.bucket.commits("run").values()),
        ]
        return max(refs)[1] if refs else None

    def check_resumed(self, expected: int | None, started: bool = True) -> None:
        log = (self.run_dir / "log").read_bytes()[self.log_begins :].decode(errors="replace")
        told = re.findall(r"resuming from step (\d+)", log)
        self.lives += started
        self.resumed += bool(told)
        if told != ([] if expected is None else [str(expected)]) and (told or started):
            self.wrong.append(
                f"{self.name}: resumed from {told} instead of {expected}: {log[-600:]}"
            )
        if re.search(r"passed over +step", log):
            self.wrong.append(f"{self.name}: passed over a checkpoint: {log[-600:]}")

    def begun(self) -> bool:
        """This life's first step is done: it is always logged."""
        log = (self.run_dir / "log").read_bytes()[self.log_begins :]
        return re.search(rb"info: step \d+/\d+ ", log) is not None

    def metrics(self) -> dict[int, tuple]:
        """step -> (loss, digest), from whole lines."""
        try:
            text = (self.run_dir / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return {}
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {line["step"]: (line["loss"], line["batch_digest"]) for line in lines}

    def orphans(self) -> list[str]:
        here = self.checkpoints
        names = [path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()]
        markers = [path.read_bytes() for path in here.glob("commit/e*.json")]
        return self.bucket.orphans("run") + [
            f"{here}/{name}" for name in orphans_in(names, markers)
        ]

    def last_files(self) -> list[str]:
        """sha256 of the data of the newest commit in the bucket."""
        (*_, marker) = self.bucket.commits("run").values()
        manifest = json.loads(self.bucket.get(f"run/{marker['prefix']}/_MANIFEST.json"))
        return [
            f"{marker['step']}",
            *(digest for entry in manifest["files"] for digest in entry["blocks"]),
        ]

    # -- all of it

    def storm(self, kills: int, layouts: list[tuple[int, int]]) -> dict[str, int]:
        counted: dict[str, int] = {}
        for i in range(kills):
            ranks, stage = layouts[i % len(layouts)]
            weights = {name: weight for name, (weight, _) in MOMENTS.items()}
            if not self.at.tells_reads:
                weights["fetching"] = 0
            moment = self.draw(weights)
            if moment == "fetching" and not self.bucket.commits("run"):
                moment = "uploading"
            victim = "all" if moment == "fetching" else self.draw(VICTIMS)
            victim = "all" if victim == "rank 1" and ranks == 1 else victim
            if moment == "fetching" or self.rng.random() < 0.4:  # another machine
                shutil.rmtree(self.checkpoints, ignore_errors=True)
            self.kill_once(ranks, stage, moment, victim)
            for each in (moment, victim):
                counted[each] = counted.get(each, 0) + 1
            told = f"{self.name}: kill {i + 1}/{kills}, {ranks} ranks, ZeRO {stage}, {moment}, {victim}"
            at = max(self.metrics(), default=0)
            print(
                f"{told}; at step {at}, newest commit {self.newest()}; wrong: {self.wrong}",
                flush=True,
            )
            if at >= self.steps - 40:
                self.wrong.append(
                    f"{self.name}: only {i + 1} kills before the run's end: raise --steps"
                )
                break
        time.sleep(ORPHAN_SECONDS + 1)
        self.to_the_end(*layouts[kills % len(layouts)])
        return counted

    def draw(self, weights: dict[str, int]) -> str:
        return self.rng.choices(list(weights), list(weights.values()))[0]


def compare(found: dict[int, tuple], expected: dict[int, tuple]) -> tuple[float, float, bool]:
    """(largest relative difference of a loss, that of the last, same batches)"""
    same = set(found) == set(expected) and all(
        found[step][1] == expected[step][1] for step in expected
    )
    both = sorted(set(found) & set(expected))
    differences = [
        abs(found[step][0] - expected[step][0]) / abs(expected[step][0]) for step in both
    ]
    return max(differences), differences[-1], same


def judge(
    run: Storm, whole: Storm, counted: dict[str, int], name: str
) -> tuple[dict[str, Any], list[str]]:
    """The row, and what it falls short of."""
    worst, last, same = compare(run.metrics(), whole.metrics())
    same_files = run.last_files() == whole.last_files()
    orphans = run.orphans()
    kills = sum(counted[each] for each in VICTIMS if each in counted)
    row = {
        "layouts": name, "kills": kills,
        "of a writer / rank 1": f"{counted.get('writer', 0)} / {counted.get('rank 1', 0)}",
        " / ".join(MOMENTS): " / ".join(str(counted.get(moment, 0)) for moment in MOMENTS),
        "resumed": f"{run.resumed} of {run.lives}", "same batches": str(same), "worst loss": worst, "last loss": last,
        "last files": "the same" if same_files else "others", "wrong": len(run.wrong), "orphans": len(orphans),
    }  # fmt: skip
    missed = [*run.wrong, *(f"{name}: orphan: {each}" for each in orphans)]
    if not same or (worst > 0 or not same_files if name == "same" else last > 1e-5):
        missed.append(
            f"{name} layout: losses differ by {worst:.1e}, the last by {last:.1e}, batches: {same}"
        )
    if run.resumed < 0.9 * (run.lives - 1):
        missed.append(f"{name}: only {run.resumed} of {run.lives} lives had a commit to go on from")
    return row, missed


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--kills", type=int, default=30, help="in all (default: 30)")
    arguments.add_argument(
        "--steps", type=int, help="of each run (default: by the number of kills)"
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--store", nargs="+", choices=STORES, default=["s3"])
    args = arguments.parse_args()
    kills = 3 if args.quick else args.kills
    same_kills = max(1, kills // 3)
    steps = args.steps or 100 + 25 * (kills - same_kills)
    rows: list[dict[str, Any]] = rows_of_others(args.json, "store", args.store)
    missed: list[str] = []
    status = 0
    if absent := [why for store in args.store if (why := missing(store))]:
        print(*absent, sep="\n")
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = shapes(folder / "shapes", 600, per_shard=150)
        (folder / "model.json").write_text(json.dumps(MODEL))
        recipe = RECIPE.format(steps=steps, train=data.train, model=folder / "model.json")
        (folder / "recipe.yaml").write_text(recipe)
        with place("local", folder) as at:
            whole = Storm(folder, at, "uninterrupted", steps, "")
            whole.to_the_end(2, 3)
            for store in args.store:
                for name, count, layouts in (
                    ("same", same_kills, [(2, 3)]),
                    ("other", kills - same_kills, LAYOUTS),
                ):
                    with place(store, folder) as there:
                        seed = f"{args.seed} {name}"
                        run = Storm(folder, there, f"{store}-{name}", steps, seed)
                        row, short = judge(run, whole, run.storm(count, layouts), name)
                    rows.append({"store": store, **row})
                    missed += [f"{store}: {each}" for each in short]
                # after each store, in case that a later one is interrupted
                status = finish("checkpoint_storm", rows, TARGETS, missed, args)
    return status


if __name__ == "__main__":
    sys.exit(main())
