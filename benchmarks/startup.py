"""From the start of the process to the first step; and what our imports cost beside the packages' own.

Imports are compared in CPU seconds of a fresh Python, in turn; the first step on 1 and 2 ranks.

--before FOLDER: instead, beside another checkout of this project (`git worktree add`), in turn: imports, and the
seconds from the command to the first step on 1 and 8 ranks.
--shards: instead, the seconds from the command to the first step on one rank with 231,349 shards and an index of
650 MB, and with four; with --before FOLDER also of the other checkout.
--memory: instead, the host memory of 8 FSDP ranks on the CPU at a fresh start of a tenth of ViT-bigG-14 and of
open_clip:ViT-SO400M-14-SigLIP (blocks and vocabulary divided by 10, widths as they are), and what that makes of the
whole models; with --before FOLDER also of the other checkout. It needs OpenCLIP (`.venv-peers`).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from common import find_peer, finish, parser

from clip_tools.demo import shapes
from clip_tools.shards.index import index_shard
from clip_train.data.index import INDEX_NAME, to_bytes

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"imports": "at most 1.2 times the CPU seconds of `import torch, deepspeed`"}
MOST_OF_BEFORE = 1.05
SHARDS, BLOCKS = 231_349, 160  # LAION-2B's, and checksums in each shard's line
THEIRS = "import torch, deepspeed"
OURS = "import launcher.cli.main, launcher.train, clip_train.engines.deepspeed.engine"
PARTS = {  # what somebody imports
    "clip_train": "import clip_train",
    "clip_train.library": "import clip_train.library",
    "a rank's": OURS,
}
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def cpu_seconds(code: str, root: Path = ROOT) -> float:
    """root: whose packages are imported."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**ENVIRON, "PYTHONPATH": str(root)}
    subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=root, check=True, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def laion(folder: Path) -> str:
    """`data.train`: links to a few shards under 231,349 names, with an index as large as LAION-2B's, 649 MB."""
    tars = sorted(
        map(str, Path(shapes(folder / "data", 600, per_shard=150).train).parent.glob("*.tar"))
    )
    size = max(Path(tar).stat().st_size for tar in tars)
    known = {tar: index_shard(tar, block_bytes=size // BLOCKS).entry for tar in tars}
    many = folder / "many"
    many.mkdir()
    entries = {f"{i:06d}.tar": known[tars[i % len(tars)]] for i in range(SHARDS)}
    for i, name in enumerate(entries):
        (many / name).symlink_to(tars[i % len(tars)])
    (many / INDEX_NAME).write_bytes(to_bytes(entries))
    return f"{many}/{{000000..{SHARDS - 1:06d}}}.tar"


def first_step(folder: Path, ranks: int, root: Path = ROOT, train: str | None = None) -> float:
    """Seconds from the start of the process to the record of a small run's first step."""
    train = train or shapes(folder / "data", 600, per_shard=150).train
    recipe = root / "recipes" / "demo_shapes.yaml"
    line = [
        f"run.dir={folder / str(ranks)}",
        f"data.train={train}",
        "run.steps=41",
        "batch.global_size=32",
    ]
    line += ["data.workers=0", "data.val=null", "evaluate.zero_shot_classes=null"]
    verb = ["-m", "launcher", "train", str(recipe), *line]
    started = time.time()
    done = subprocess.run(
        [sys.executable, *verb, f"--ranks={ranks}"],
        env={**ENVIRON, "PYTHONPATH": str(root)},
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = (folder / str(ranks) / "metrics.jsonl").read_text().splitlines()[0]
    return json.loads(first)["time"] - started


# A rank: RANK, WORLD_SIZE, the store's file, and the model are in sys.argv. `common` is not imported: it would put
# this checkout first. What the libraries and the group take is there before `base` is read.
RANK = """
import json, sys
from functools import partial
from pathlib import Path
import torch
import tests.peers.torchvision_shim
import open_clip, timm, timm.models.vision_transformer
from clip_train.models.clip import build_model
from clip_train.models.config import ModelConfig
from clip_train.models.openclip import model
from clip_train.models.weights import initial_weights
from clip_train.engines.config import EngineConfig
from clip_train.engines.fsdp import engine

rank, world, store, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
create = timm.create_model
timm.create_model = lambda *a, **k: create(*a, **k, depth=3)
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
torch.distributed.barrier()

def memory(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) / 1024

config = ModelConfig(name=name)
optimizer = lambda named: torch.optim.SGD([p for _, p in named], 0.1)
Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now's
base = memory("VmRSS")
held = EngineConfig(kind="fsdp", zero_stage=2).build(partial(build_model, config.architecture()), optimizer,
    device=torch.device("cpu"),
)
held.load_fragments(initial_weights(config, 0), {})
share = sum(piece.numel for piece in held.pieces) * 4 / 2**20
largest = max(p.numel() for p in held.module.parameters()) * 4 / 2**20
print(json.dumps([base, memory("VmHWM") - base, share, largest]))
"""
TENTHS = ("ViT-bigG-14", "open_clip:ViT-SO400M-14-SigLIP")
SHARDED = 8


def tenth(name: str, folder: Path) -> tuple[str, float]:
    """`model.name` of a tenth of it, and the MiB of all of it in fp32."""
    from clip_train.models.clip import count_parameters
    from clip_train.models.config import load_architecture

    whole = load_architecture(name)
    sizes = whole.model_cfg()
    for tower in ("vision_cfg", "text_cfg"):
        for key in ("layers", "vocab_size"):
            if key in sizes[tower]:
                sizes[tower][key] = round(sizes[tower][key] / 10)
    file = folder / "tenth.json"
    file.write_text(json.dumps(sizes))
    prefix = "open_clip:" if name.startswith("open_clip:") else ""
    return f"{prefix}{file}", count_parameters(whole) * 4 / 2**20


def start_memory(python: str, root: Path, folder: Path, model: str) -> list[list[float]]:
    """Of each rank: MiB before the engine is built, the most beyond, its share, the largest tensor."""
    store = folder / f"store{time.monotonic_ns()}"
    ranks = [
        subprocess.Popen(
            [python, "-c", RANK, str(rank), str(SHARDED), str(store), model],
            env={**ENVIRON, "PYTHONPATH": str(root)},
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SHARDED)
    ]
    said = [rank.communicate() for rank in ranks]
    assert not any(rank.returncode for rank in ranks), said[0][1][-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def memory_rows(python: str, before: Path | None) -> Iterator[dict[str, Any]]:
    for name in TENTHS:
        with tempfile.TemporaryDirectory() as folder:
            model, whole = tenth(name, Path(folder))
            roots = {"before": before, "now": ROOT} if before else {"now": ROOT}
            for when, root in roots.items():
                ranks = start_memory(python, root, Path(folder), model)
                share, largest = max(r[2] for r in ranks), ranks[0][3]
                rank, node = max(r[1] for r in ranks), sum(r[1] for r in ranks)
                yield {
                    "a tenth of": name,
                    "": when,
                    "libraries": round(max(r[0] for r in ranks)),
                    "share": round(share),
                    "largest tensor": round(largest),
                    "a rank": round(rank),
                    "x share": round(rank / share, 2),
                    "beyond the share": round(rank - share),
                    "node": round(node),
                    "all of it: share": round(whole / SHARDED),
                }


def compare_memory(before: Path | None, args: Any) -> int:
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip

    rows = list(memory_rows(find_peer(None, "open_clip") or sys.executable, before))
    return finish("startup", rows, {"memory": "MiB beyond the libraries'"}, [], args)


def compare_shards(before: Path | None, args: Any) -> int:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        many = laion(Path(folder))
        for when, root in (({"before": before} if before else {}) | {"now": ROOT}).items():
            few, all_of_them = (
                first_step(Path(folder, f"{when} {name}"), 1, root, train)
                for name, train in (("few", f"{folder}/data/train/*.tar"), ("many", many))
            )
            rows.append({"": when, "4 shards, s": few, f"{SHARDS:,} shards, s": all_of_them})
    return finish("startup", rows, {"shards": "seconds to the first step"}, [], args)


def compare(before: Path, args: Any) -> int:
    rows, missed = [], []
    for what, code in PARTS.items():
        pairs = [
            (cpu_seconds(code, before), cpu_seconds(code)) for _ in range(3 if args.quick else 5)
        ]
        ratio = median(now / then for then, now in pairs)
        then, now = (round(median(each), 2) for each in zip(*pairs, strict=True))
        rows.append(
            {
                "what": f"imports: {what}, CPU seconds",
                "before, s": then,
                "now, s": now,
                "ratio": round(ratio, 3),
            }
        )
        if ratio > MOST_OF_BEFORE:
            missed.append(f"{what}: {ratio:.2f} times")
    for ranks in (1, 8):
        pairs = []
        for _ in range(1 if args.quick else 3):
            with tempfile.TemporaryDirectory() as old, tempfile.TemporaryDirectory() as new:
                pairs.append((first_step(Path(old), ranks, before), first_step(Path(new), ranks)))
        then, now = (round(median(each), 1) for each in zip(*pairs, strict=True))
        rows.append(
            {
                "what": f"first step, {ranks} rank{'s' * (ranks > 1)}",
                "before, s": then,
                "now, s": now,
                "ratio": round(median(b / a for a, b in pairs), 3),
            }
        )
    return finish(
        "startup",
        rows,
        {"imports": f"at most {MOST_OF_BEFORE} times what they cost before"},
        missed,
        args,
    )


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--before", type=Path, metavar="FOLDER", help="another checkout of this project"
    )
    arguments.add_argument("--memory", action="store_true", help="host memory of a fresh start")
    arguments.add_argument("--shards", action="store_true", help="the start with 231,349 shards")
    args = arguments.parse_args()
    if args.shards:
        return compare_shards(args.before and args.before.resolve(), args)
    if args.memory:
        return compare_memory(args.before and args.before.resolve(), args)
    if args.before is not None:
        return compare(args.before.resolve(), args)
    pairs = [(cpu_seconds(THEIRS), cpu_seconds(OURS)) for _ in range(3 if args.quick else 7)]
    ratio = median(ours / theirs for theirs, ours in pairs)
    table = [
        {"what": THEIRS, "seconds": round(median(theirs for theirs, _ in pairs), 2), "ratio": 1.0},
        {
            "what": OURS,
            "seconds": round(median(ours for _, ours in pairs), 2),
            "ratio": round(ratio, 3),
        },
    ]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            seconds = round(first_step(Path(folder), ranks), 1)
            what = f"{ranks} rank{'s' if ranks > 1 else ''}: first step after"
            table.append({"what": what, "seconds": seconds, "ratio": ""})
    missed = [f"imports: {ratio:.2f} times"] if ratio > 1.2 else []
    return finish("startup", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
