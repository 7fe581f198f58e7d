"""What a whole training command costs: `clip-train train` beside `open_clip_train.main`, CPU seconds for each sample.

Both train the same small model from the same shards (photographs as JPEGs of 256 px, captions of about 20 tokens in
CLIP's context of 77) for the same steps, with the same global batch in 8 micro-batches, fp32, AdamW and gradient clip,
one loader worker and one thread each, and save a checkpoint at the end. Counted are the CPU seconds of all processes
of the command, from the shell and back: imports, loading, steps, saving. They take turns, `--rounds` times; the ratio
is the median of those within a round.

OpenCLIP runs in the environment of `scripts/setup_peers.sh`: `--peer-python .venv-peers/bin/python`.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, find_peer, finish, parser
from data import write_dataset
from step import MODEL

TARGETS = {
    "CPU seconds": "ours with all graphs retained at most 0.5 of OpenCLIP's, whole command on the same shards"
}
GLOBAL, K = 256, 8
SIDE = 256  # pixels of the images in the shards
OPENCLIP = (
    "import sys, tests.peers.torchvision_shim, open_clip; from pathlib import Path; "
    "open_clip.add_model_config(Path(sys.argv.pop(1))); from open_clip_train.main import main; main(sys.argv[1:])"
)


def ours(folder: Path, steps: int, kept: int | str, run: str) -> list[str]:
    return [
        sys.executable, "-m", "launcher", "train", str(ROOT / "recipes/demo_shapes.yaml"),
        f"run.dir={folder / run}", f"run.steps={steps}", f"model.name={folder / 'small.json'}",
        f"data.train={folder}/shards/*.tar", "data.val=null", "data.workers=1", "evaluate.zero_shot_classes=null",
        f"batch.global_size={GLOBAL}", f"batch.micro_size={GLOBAL // K}", f"batch.kept_graphs={kept}",
        "engine.precision=fp32", "optim.lr=1e-4", "optim.grad_clip_norm=1.0", "schedule.warmup_steps=2",
        "checkpoint.resume=never", "log.progress=false",
    ]  # fmt: skip


def openclip(python: str, folder: Path, steps: int, run: str) -> list[str]:
    shards = sorted((folder / "shards").glob("*.tar"))
    return [
        python, "-c", OPENCLIP, str(folder / "small.json"), "--model", "small",
        "--train-data", f"{folder}/shards/{{{shards[0].stem}..{shards[-1].stem}}}.tar",
        "--train-num-samples", str(steps * GLOBAL), "--dataset-type", "webdataset", "--epochs", "1",
        "--batch-size", str(GLOBAL // K), "--accum-freq", str(K), "--workers", "1", "--precision", "fp32",
        "--lr", "1e-4", "--warmup", "2", "--wd", "0.2", "--grad-clip-norm", "1.0", "--local-loss", "--gather-with-grad",
        "--logs", str(folder / "logs"), "--name", run,
    ]  # fmt: skip


def cpu_seconds(command: list[str], source: Path | None = None) -> float:
    """Of it and all that it starts. source: of OpenCLIP's packages; None: those of its Python."""
    paths = [str(ROOT), *([str(source)] if source else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command[:4])} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
        )
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--peer-python", metavar="PYTHON", help="a Python that has open_clip (default: .venv-peers)"
    )
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    steps, rounds = (4, 1) if args.quick else (24, args.rounds)
    peer = find_peer(args.peer_python, "open_clip_train.main")
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "small.json").write_text(
            json.dumps(
                {
                    **MODEL,
                    "text_cfg": {**MODEL["text_cfg"], "vocab_size": 49408, "context_length": 77},
                }
            )
        )
        write_dataset(folder / "shards", SIDE, count=steps * GLOBAL, different=256)
        for i in range(rounds):
            commands = {
                f"ours, m = {m}": ours(folder, steps, m, f"ours-{m}-{i}") for m in (1, "all")
            }
            if peer is not None:
                commands["OpenCLIP"] = openclip(peer, folder, steps, f"theirs-{i}")
            for trainer, command in commands.items():
                seconds.setdefault(trainer, []).append(cpu_seconds(command))
    rows: list[dict[str, Any]] = []
    for trainer, measured in seconds.items():
        row: dict[str, Any] = {
            "command": trainer,
            "ms/sample": 1e3 * statistics.median(measured) / (steps * GLOBAL),
        }
        if peer is not None:
            row["x OpenCLIP"] = statistics.median(
                a / b for a, b in zip(measured, seconds["OpenCLIP"], strict=True)
            )
        rows.append(row)
    missed = (
        []
        if peer is not None
        else ["CPU seconds: open_clip not installed: run scripts/setup_peers.sh"]
    )
    if peer is not None and not args.quick and rows[1]["x OpenCLIP"] > 0.5:
        missed.append(f"CPU seconds: {rows[1]['x OpenCLIP']:.3f} of OpenCLIP's")
    return finish("command", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
