"""Which samples are in which global batch: the same for ranks x workers, and after kills and resumes elsewhere.

Makes two sources of unequal shards, of weights 2 and 1, both resampled, and runs each layout as real
processes, one for each rank. A digest covers a batch's samples in their order: key, seed, pixels, tokens. Then runs
are killed by SIGKILL at a random step and resumed on another layout, by the number of that step alone. Last, three
epochs are counted sample by sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, finish, parser

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.data import reader as reader_module
from clip_train.data.config import DataConfig
from clip_train.data.index import OFFSET_EVERY
from clip_train.data.loader import TrainLoader
from clip_train.data.tar import write_shards

TARGETS = {
    "layouts": "the batch digests of all steps are equal",
    "kill and resume": "equal from there, on another layout",
    "resume": "reads at most the block that each stream was in again",
    "epochs": "every sample of an indexed set exactly once in each of three epochs of the stream",
}
LAYOUTS = [(1, 0), (1, 3), (2, 0), (2, 2), (4, 1)]  # ranks, workers of each
GLOBAL, SEED = 48, 11
FIRST = [230, 3, 77, 1, 150, 64, 400]  # samples in the shards of the first source
SECOND = [40, 5, 90]
EPOCHS = 3


def write_source(folder: Path, name: str, sizes: list[int]) -> str:
    """Indexed shards; returns what `data.train` would say."""
    import simplejpeg

    draw = np.random.default_rng(len(sizes))
    for shard, size in enumerate(sizes):
        pixels = (
            np.kron(draw.integers(0, 256, (4, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
            for _ in range(size)
        )
        samples = [
            {
                "__key__": f"{name}-{shard}-{i}",
                "jpg": simplejpeg.encode_jpeg(each, 90),
                "txt": f"{name} {shard} {i}",
            }
            for i, each in enumerate(pixels)
        ]
        write_shards(folder, samples, size, pattern=f"{shard:03d}.tar")
    write_indexes(index_shards([str(path) for path in sorted(folder.glob("*.tar"))]))
    return f"{folder}/*.tar"


def loader(
    config: dict[str, Any], rank: int = 0, world_size: int = 1, step: int = 0
) -> TrainLoader:
    return TrainLoader(
        DataConfig(**config), image_size=16, context_length=16, global_size=GLOBAL, seed=SEED, rank=rank,
        world_size=world_size, step=step,
    )  # fmt: skip


# -- in a rank's process


def one_rank(told: dict[str, Any]) -> None:
    """A line for each step: a hash of every sample."""
    with loader(told["config"], told["rank"], told["world_size"], told["begin"]) as batches:
        for _ in range(told["steps"]):
            batch = next(batches)
            seeds = batch.sample_seeds.tolist()
            parts = zip(batch.keys, seeds, batch.images.numpy(), batch.texts.numpy(), strict=True)
            hashes = [
                hashlib.sha256(
                    f"{key} {seed}".encode() + image.tobytes() + text.tobytes()
                ).hexdigest()[:16]
                for key, seed, image, text in parts
            ]
            print(json.dumps(hashes), flush=True)


# -- in the parent


@contextlib.contextmanager
def ranks(
    config: dict[str, Any], world_size: int, steps: int, begin: int
) -> Iterator[tuple[Any, list[subprocess.Popen]]]:
    """(an iterator over the steps: what each rank said of it; the processes)."""
    processes = []
    for rank in range(world_size):
        told = {
            "config": config,
            "rank": rank,
            "world_size": world_size,
            "steps": steps,
            "begin": begin,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, "--rank", json.dumps(told)],
                stdout=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,
            )
        )
    try:
        yield (
            zip(*(map(json.loads, process.stdout or []) for process in processes), strict=False),
            processes,
        )
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()


def digests(
    config: dict[str, Any],
    layout: tuple[int, int],
    steps: int,
    begin: int = 0,
    kill_after: int | None = None,
) -> list[str]:
    """Of each of `steps` steps from `begin` on, or until the ranks are killed."""
    world_size, workers = layout
    out: list[str] = []
    with ranks({**config, "workers": workers}, world_size, steps, begin) as (said, _):
        for step in itertools.islice(said, kill_after):
            out.append(
                hashlib.sha256("".join(h for hashes in step for h in hashes).encode()).hexdigest()[
                    :8
                ]
            )
    return out


def first_difference(a: list[str], b: list[str]) -> int | None:
    if len(a) != len(b):
        return min(len(a), len(b))
    return next((step for step, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def epoch_row(train: str, sizes: list[int], lanes: int) -> dict[str, Any]:
    """Counts the first three epochs of the stream, sample by sample."""
    total = sum(sizes)
    by_stream: dict[int, list[str]] = {stream: [] for stream in range(lanes)}
    with loader({"train": train, "lanes": lanes, "workers": 0, "shuffle_block": 32}) as batches:
        for start in range(0, EPOCHS * total, GLOBAL):
            positions = sorted(range(start, start + GLOBAL), key=lambda p: (p % lanes, p))
            for p, key in zip(positions, next(batches).keys, strict=True):
                by_stream[p % lanes].append(key)
    stream = [by_stream[p % lanes][p // lanes] for p in range(EPOCHS * total)]
    counts = [Counter(stream[epoch * total : (epoch + 1) * total]) for epoch in range(EPOCHS)]
    wrong = sum(len(count) != total or set(count.values()) != {1} for count in counts)
    return {
        "what": "epochs",
        "layout": f"{len(sizes)} shards of {min(sizes)}-{max(sizes)}, {lanes} streams",
        "equal": "each once" if not wrong else f"{wrong} epochs wrong",
        "digest": f"{EPOCHS} x {total} samples",
    }


def resume_row(config: dict[str, Any], step: int) -> dict[str, Any]:
    """How many samples are read before the first batch of a resumed run, by all streams together."""
    counted = 0
    original = reader_module.read_shard

    def counting(*arguments: Any) -> Iterator[Any]:
        nonlocal counted
        for event in original(*arguments):
            counted += 1
            yield event

    reader_module.read_shard = counting
    try:
        with loader({**config, "workers": 0}, step=step) as batches:
            lanes, sources = batches.streams, len(config["train_weights"])
            next(batches)
    finally:
        reader_module.read_shard = original
    # a stream's blocks share shuffle_block; a stream finds its place in an indexed shard from the last mark
    bound = lanes * (config["shuffle_block"] + sources * (OFFSET_EVERY + 1)) + GLOBAL
    return {
        "what": "resume",
        "layout": f"samples read before the first batch, {lanes} streams x {config['shuffle_block']}",
        "equal": "within a block a stream" if counted <= bound else f"NO: more than {bound}",
        "digest": f"{counted} read",
    }


def main() -> int:
    args_parser = parser(__doc__ or "")
    args_parser.add_argument("--steps", type=int, default=200)
    args_parser.add_argument(
        "--kills", type=int, default=4, help="runs that are killed and resumed elsewhere"
    )
    args_parser.add_argument("--rank", help="for the benchmark's own processes")
    args = args_parser.parse_args()
    if args.rank:
        one_rank(json.loads(args.rank))
        return 0
    steps, kills = (40, 1) if args.quick else (args.steps, args.kills)
    table: list[dict[str, Any]] = []
    missed: list[str] = []
    draw = random.Random(SEED)

    def row(what: str, layout: str, found: list[str], expected: list[str]) -> None:
        at = first_difference(found, expected)
        equal = "yes" if at is None else f"NO, from step {at} on"
        digest = hashlib.sha256("".join(found).encode()).hexdigest()[:16]
        table.append({"what": what, "layout": layout, "equal": equal, "digest": digest})
        if at is not None:
            missed.append(f"{what}, {layout}: the batches differ from step {at} on")

    with tempfile.TemporaryDirectory() as folder:
        first = write_source(Path(folder) / "first", "first", FIRST)
        second = write_source(Path(folder) / "second", "second", SECOND)
        config = {
            "train": f"{first}::{second}",
            "train_weights": [2, 1],
            "resampled": True,
            "shuffle_block": 32,
        }
        reference = digests(config, LAYOUTS[0], steps)
        for begin in range(0, steps, 20):
            print(f"step {begin:3d}:", *reference[begin : begin + 20])
        for layout in LAYOUTS:
            found = reference if layout == LAYOUTS[0] else digests(config, layout, steps)
            row(f"{steps} steps", f"{layout[0]} ranks x {layout[1]} workers", found, reference)
        for _ in range(kills):
            before, after = draw.sample(LAYOUTS, 2)
            stop = draw.randrange(1, steps - 1)
            begun = digests(config, before, steps, kill_after=stop)
            resumed = digests(config, after, steps - stop, stop)
            where = f"{before[0]} x {before[1]} until step {stop}, then {after[0]} x {after[1]}"
            row("killed, resumed", where, begun + resumed, reference)
        table.append(resume_row(config, stop))
        if table[-1]["equal"].startswith("NO"):
            missed.append(f"resume: {table[-1]['digest']}, {table[-1]['equal']}")
        for lanes in (1, 8, 64):  # 64: fewer shards than streams
            table.append(epoch_row(first, FIRST, lanes))
            if table[-1]["equal"] != "each once":
                missed.append(f"{table[-1]['layout']}: {table[-1]['equal']}")
    return finish("order", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
