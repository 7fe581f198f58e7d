"""Kill a run at random moments, again and again, and see whether anything of it is ever lost.

A small CLIP trains with DeepSpeed and `checkpoint.remote=s3://...` on a real S3 server (LocalStack, from
scripts/setup_s3.sh; with CLIP_TRAIN_S3_SERVER=ceph Ceph's gateway). All of its processes get SIGKILL at a random
moment, most often while a checkpoint is written or uploaded; then the same line runs again (`checkpoint.resume: auto`),
every other time without the local checkpoints. A third of the kills keep the layout; in the others the number of ranks
and the ZeRO stage change every time. After every kill the bucket is read by code that is not the package's.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, finish, parser

from clip_train.data.synthetic import shapes
from tests.processes import kill_tree
from tests.s3.bucket import Bucket
from tests.s3.server import Server, chosen

TARGETS = {
    "same layout": "every step's loss is bitwise that of the uninterrupted run",
    "other layouts": "the same batches, and the last step's loss within 1e-5 relative",
    "commits": "every commit in the bucket is whole after every kill",
    "orphans": "nothing in the bucket but what a commit names, when the grace has passed",
}
LAYOUTS = [(2, 3), (1, 3), (2, 1), (1, 0), (2, 2), (1, 1), (2, 3), (1, 2), (2, 0)]  # (ranks, ZeRO stage)
GRACE_MINUTES = 0.05
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
checkpoint: {{every_steps: 4, keep_last: 2, orphan_grace_minutes: {grace}}}
log: {{batch_digest: true, tensorboard: false}}
"""


class Storm:
    """One run's life on one server."""

    def __init__(self, folder: Path, server: Server, name: str, steps: int, rng: random.Random) -> None:
        self.run_dir, self.rng, self.name = folder / name, rng, name
        self.folder = folder
        self.bucket = Bucket(server, f"storm-{name}")
        self.steps = steps
        self.incomplete: list[str] = []

    def start(self, ranks: int, stage: int) -> subprocess.Popen:
        line = ["-m", "launcher", "train", str(self.folder / "recipe.yaml"), f"run.dir={self.run_dir}",
                f"run.steps={self.steps}", f"engine.zero_stage={stage}",
                f"checkpoint.remote=s3://{self.bucket.name}/run"]  # fmt: skip
        if ranks > 1:
            line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *line]
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *line], cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def to_the_end(self, ranks: int, stage: int) -> None:
        status = self.start(ranks, stage).wait(600)
        assert status == 0, (self.run_dir / "log").read_text()[-3000:]

    def kill_once(self, ranks: int, stage: int) -> str:
        """Returns what it was doing."""
        begun = self.last_step()
        process = self.start(ranks, stage)
        try:
            self.wait(process, lambda: self.last_step() != begun, 120)
            moment = self.rng.choices(["writing", "uploading", "committing", "any"], [2, 4, 2, 2])[0]
            if moment == "any":
                time.sleep(self.rng.uniform(0, 3))
            else:
                self.wait(process, lambda: self.is_at(moment), 60)
                time.sleep(self.rng.uniform(0, 1) ** 2)  # soon, or in the upload, the commit or the retention after it
        finally:
            kill_tree(process)
        time.sleep(0.3)  # a request that is on its way may still be carried out
        self.incomplete += self.bucket.incomplete("run")
        return moment

    def is_at(self, moment: str) -> bool:
        checkpoints = self.run_dir / "checkpoints"
        if moment == "writing":
            return any((checkpoints / "tmp").glob("*"))
        attempts = set(checkpoints.glob("ckpt/*/*/rank00000.safetensors"))
        if not hasattr(self, "seen") or not attempts >= self.seen:
            self.seen = attempts
        new = attempts - self.seen
        if moment == "uploading" or not new:
            return bool(new)
        return any((path.parent / "_MANIFEST.json").exists() for path in new)

    @staticmethod
    def wait(process: subprocess.Popen, condition: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)

    def last_step(self) -> int:
        lines = self.metrics()
        return max(lines, default=0)

    def metrics(self) -> dict[int, tuple]:
        """step -> (loss, digest), from whole lines."""
        try:
            text = (self.run_dir / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return {}
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {line["step"]: (line["loss"], line["batch_digest"]) for line in lines}

    def storm(self, kills: int, layouts: list[tuple[int, int]]) -> list[str]:
        moments = []
        for i in range(kills):
            if i % 2:  # another machine
                shutil.rmtree(self.run_dir / "checkpoints", ignore_errors=True)
            self.__dict__.pop("seen", None)
            ranks, stage = layouts[i % len(layouts)]
            moments.append(self.kill_once(ranks, stage))
            newest = self.bucket.newest_step("run")
            told = f"{self.name}: kill {i + 1}/{kills}, {ranks} ranks, ZeRO {stage}, {moments[-1]}"
            print(f"{told}, at step {self.last_step()}, newest commit {newest}", flush=True)
            if self.last_step() >= self.steps - 8:
                raise RuntimeError("the run is about to end before all kills: raise --steps")
        time.sleep(60 * GRACE_MINUTES + 1)
        self.to_the_end(*layouts[kills % len(layouts)])
        return moments


def compare(found: dict[int, tuple], expected: dict[int, tuple]) -> tuple[float, float, bool]:
    """(largest relative difference of a loss, that of the last, same batches)"""
    differences = [abs(found[step][0] - expected[step][0]) / abs(expected[step][0]) for step in expected]
    same = set(found) == set(expected) and all(found[step][1] == expected[step][1] for step in expected)
    return max(differences), differences[-1], same


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--kills", type=int, default=30, help="in all (default: 30)")
    arguments.add_argument("--steps", type=int, help="of each run (default: by the number of kills)")
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args()
    if missing := chosen().missing():
        print(missing)
        return 1
    kills = 3 if args.quick else args.kills
    same_kills = max(1, kills // 3)
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    server = chosen()().start()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            os.environ |= server.environment()
            data = shapes(folder / "shapes", 600, per_shard=150)
            (folder / "model.json").write_text(json.dumps(MODEL))
            steps = args.steps or 60 + 12 * (kills - same_kills)
            recipe = RECIPE.format(steps=steps, train=data.train, model=folder / "model.json", grace=GRACE_MINUTES)
            (folder / "recipe.yaml").write_text(recipe)
            whole = Storm(folder, server, "uninterrupted", steps, random.Random(0))
            whole.to_the_end(2, 3)
            expected = whole.metrics()
            for name, count, layouts in (("same", same_kills, [(2, 3)]), ("other", kills - same_kills, LAYOUTS)):
                run = Storm(folder, server, name, steps, random.Random(f"{args.seed} {name}"))
                moments = run.storm(count, layouts)
                worst, last, same = compare(run.metrics(), expected)
                orphans = run.bucket.orphans("run")
                rows.append({
                    "layouts": " ".join(f"{w}x{s}" for w, s in dict.fromkeys(layouts)), "kills": count,
                    "writing / uploading / committing / any":
                        " / ".join(str(moments.count(m)) for m in ("writing", "uploading", "committing", "any")),
                    "steps": steps, "same batches": str(same), "worst loss": worst, "last loss": last,
                    "incomplete commits": len(run.incomplete), "orphans": len(orphans),
                })  # fmt: skip
                if not same or (worst > 0 if name == "same" else last > 1e-5):
                    missed.append(
                        f"{name} layout: losses differ by {worst:.1e}, the last by {last:.1e}, batches: {same}"
                    )
                missed += [f"incomplete: {each}" for each in run.incomplete]
                missed += [f"orphan: {each}" for each in orphans]
            digest = hashlib.sha256(json.dumps(expected).encode()).hexdigest()[:12]
            print(f"uninterrupted: {steps} steps, last loss {expected[steps][0]:.6f}, curve {digest}")
    finally:
        server.stop()
    return finish("checkpoint_storm", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
