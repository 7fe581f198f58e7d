"""Which samples are in which global batch: the same for ranks x workers, and after kills and resumes elsewhere.

Makes two sources of unequal shards, of weights 2 and 1, both resampled, and runs each layout as real
processes, one for each rank. A digest covers a batch's samples in their order: key, seed, pixels, tokens. Then runs
are killed by SIGKILL at a random step and resumed on another layout, by the number of that step alone. The same with a
`data.keep` and weights that change over steps. Three epochs are counted sample by sample. Then 100,000 positions are
walked one by one, and compared with the closed form: which source, which of its samples, which row of a shard. Last, a
condition is counted over 1e9 rows (8 GB on disk), and a list of uids over 1e7, on one core.
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
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, finish, parser

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.data import reader as reader_module
from clip_train.data.config import DataConfig
from clip_train.data.index import INDEX_NAME, OFFSET_EVERY, ShardEntry, look_up, to_bytes
from clip_train.data.index_columns import ColumnFile
from clip_train.data.keep import UID, Keep, KeptRows
from clip_train.data.loader import TrainLoader
from clip_train.data.order import Order, Source, hash64
from clip_train.data.tar import write_shards
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig

TARGETS = {
    "layouts": "the batch digests of all steps are equal",
    "kill and resume": "equal from there, on another layout",
    "resume": "reads at most the block that each stream was in again",
    "epochs": "every (kept) sample of an indexed set exactly once in each of three epochs of the stream",
    "positions": "brute force and closed form agree at each position: source, number in it, row of a shard",
    "rows counted": "1e9 in at most 30 CPU seconds of one core",
}
LAYOUTS = [(1, 0), (1, 3), (2, 0), (2, 2), (4, 1)]  # ranks, workers of each
GLOBAL, SEED = 48, 11
FIRST = [230, 3, 77, 1, 150, 64, 400]  # samples in the shards of the first source
SECOND = [40, 5, 90]
EPOCHS = 3
KEEP = "score > 0.28 and score != 0.5"
STAGES = [
    {"until_step": 5, "train_weights": [1, 0]},
    {"until_step": 17, "train_weights": [1, 1]},
    {"until_step": 400, "train_weights": [0.2, 5]},
]
COUNT_SECONDS = 30


def score(name: str, shard: int, number: int) -> float:
    """Of a sample that `write_source` writes."""
    return hash64(len(name), shard, number) % 1000 / 1000


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
                "json": {"score": score(name, shard, i)},
            }
            for i, each in enumerate(pixels)
        ]
        write_shards(folder, samples, size, pattern=f"{shard:03d}.tar")
    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    write_indexes(index_shards(shards, columns=["score"]))
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


def epoch_row(train: str, sizes: list[int], lanes: int, keep: str | None = None) -> dict[str, Any]:
    """Counts the first three epochs of the stream, sample by sample."""
    expected = {
        f"first-{shard}-{i}"
        for shard, size in enumerate(sizes)
        for i in range(size)
        if keep is None or kept_by_force("first", shard, i)
    }
    total = len(expected)
    by_stream: dict[int, list[str]] = {stream: [] for stream in range(lanes)}
    config = {"train": train, "lanes": lanes, "workers": 0, "shuffle_block": 32, "keep": keep}
    with loader(config) as batches:
        for start in range(0, EPOCHS * total, GLOBAL):
            positions = sorted(range(start, start + GLOBAL), key=lambda p: (p % lanes, p))
            for p, key in zip(positions, next(batches).keys, strict=True):
                by_stream[p % lanes].append(key)
    stream = [by_stream[p % lanes][p // lanes] for p in range(EPOCHS * total)]
    counts = [Counter(stream[epoch * total : (epoch + 1) * total]) for epoch in range(EPOCHS)]
    wrong = sum(count != dict.fromkeys(expected, 1) for count in counts)
    return {
        "what": "epochs" if keep is None else f"epochs, keep {keep}",
        "layout": f"{len(sizes)} shards of {min(sizes)}-{max(sizes)}, {lanes} streams",
        "equal": "each once" if not wrong else f"{wrong} epochs wrong",
        "digest": f"{EPOCHS} x {total} samples",
    }


# -- brute force


def kept_by_force(name: str, shard: int, number: int) -> bool:
    """KEEP, in plain Python."""
    return score(name, shard, number) > 0.28 and score(name, shard, number) != 0.5


def source_by_force(edges: list[Fraction], position: int) -> int:
    """The source at a position by the definition: a point in [0, 1) for each, and the sources' shares of it."""
    point = (position * 11400714819323198485 + 2 * hash64(SEED, -3)) % 2**64
    return next(number for number, edge in enumerate(edges) if Fraction(point, 2**64) < edge)


def positions_row(train: str, lanes: int, positions: int, block: int = 32) -> dict[str, Any]:
    """Walks the stream of two sources with a keep and changing weights, position by position."""
    config = DataConfig(
        train=train, train_weights=[2, 1], train_weights_schedule=STAGES, keep=KEEP, lanes=lanes,
        shuffle_block=block,
    )  # fmt: skip
    with TrainLoader(
        config, image_size=16, context_length=16, global_size=GLOBAL, seed=SEED
    ) as batches:
        order, index = batches.order, batches.index
    rows = []  # by source: each kept sample as (its shard in the source, its number there)
    for name, sizes in (("first", FIRST), ("second", SECOND)):
        rows.append(
            {(k, i) for k, n in enumerate(sizes) for i in range(n) if kept_by_force(name, k, i)}
        )
    ends = [GLOBAL * stage["until_step"] for stage in STAGES]
    edges = []
    for stage_weights in [*(stage["train_weights"] for stage in STAGES), [2, 1]]:
        total = sum(map(Fraction, stage_weights))
        edges.append([edge / total for edge in itertools.accumulate(map(Fraction, stage_weights))])
    taken = [[0, 0] for _ in range(lanes)]  # by stream, of each source
    first_shards, counts = (0, len(FIRST)), [0, 0]
    wrong = checked = stage = 0
    for position in range(positions):
        while stage < len(ends) and position >= ends[stage]:
            stage += 1
        stream, number = position % lanes, position // lanes
        source = source_by_force(edges[stage], position)
        wrong += order.source(position) != source
        wrong += order.taken(number, lanes, stream) != taken[stream]
        wrong += position % 100 == 0 and order.taken(position, 1, 0) != counts
        taken[stream][source] += 1
        counts[source] += 1
        checked += 1
    # a source's own stream: position q of it is sample q // lanes of stream q % lanes
    for source, of_source in enumerate(order.sources):
        bits = [index.shard(first_shards[source] + k).kept for k in range(len(of_source.counts))]
        kept = [
            KeptRows(each).rows(0, count)
            for each, count in zip(bits, of_source.counts, strict=True)
        ]
        for epoch in range(positions // 2 // len(rows[source])):
            seen: Counter[tuple[int, int]] = Counter()
            begin = epoch * len(rows[source])
            for q in range(begin, begin + len(rows[source])):
                found = of_source.block(q % lanes, q // lanes)
                places = [(s.shard, n) for s in found.segments for n in range(s.start, s.stop)]
                shard, n = places[found.order[q // lanes - found.first]]
                seen[shard, kept[shard][n]] += 1
                checked += 1
            wrong += seen != dict.fromkeys(rows[source], 1)
    return {
        "what": "positions",
        "layout": f"{lanes} streams, {len(STAGES) + 1} weights, keep {KEEP}",
        "equal": "yes" if not wrong else f"NO: {wrong}",
        "digest": f"{checked:,} positions",
    }


def count_rows(folder: Path, number: int, per_shard: int = 10_000) -> list[dict[str, Any]]:
    """CPU seconds to count `number` rows by a condition, and a hundredth of them by a list of uids."""
    table = []
    for what, total in (("score > 0.28", number), ("uids", number // 100)):
        place = folder / what.split()[0]
        place.mkdir()
        column = "score" if what != "uids" else "uid"
        dtype = np.dtype(np.float64) if what != "uids" else UID
        draw = np.random.default_rng(0)
        block = draw.random(1_000_000).round(4)
        file = np.lib.format.open_memmap(place / "column.npy", "w+", dtype, (total,))
        expected = 0
        for begin in range(0, total, len(block)):
            part = block[: total - begin]
            if what == "uids":
                uids = np.zeros(len(part), UID)
                uids["f0"], uids["f1"] = draw.integers(1, 2**63, (2, len(part)))
                file[begin : begin + len(part)] = uids
                expected += len(part[::3])
            else:
                file[begin : begin + len(part)] = part
                expected += int((part > 0.28).sum())
        file.flush()
        keep = what
        if what == "uids":
            keep = str(place / "keep.npy")
            np.save(
                keep,
                np.sort(
                    np.concatenate(
                        [file[i : i + len(block)][::3] for i in range(0, total, len(block))]
                    ),
                    order=["f0", "f1"],
                ),
            )
        del file
        digest = hashlib.sha256()
        with open(place / "column.npy", "rb") as data:
            while chunk := data.read(1 << 24):
                digest.update(chunk)
        names = [f"{shard:06d}.tar" for shard in range(total // per_shard)]
        entry = ShardEntry(per_shard, "0" * 64, Checksums(8, 8, "0" * 16), None, array("Q"))
        name = f"clip_train_column_{digest.hexdigest()[:16]}.npy"
        (place / "column.npy").rename(place / name)
        columns = {column: ColumnFile(name, digest.hexdigest())}
        (place / INDEX_NAME).write_bytes(to_bytes(dict.fromkeys(names, entry), columns))
        shards = [[f"{place}/{shard}" for shard in names]]
        seconds = []
        for wanted in (None, Keep(keep, f"{place}/*.tar")):
            begin_seconds = time.process_time()
            found = look_up(shards, "auto", StorageConfig(), wanted)
            seconds.append(time.process_time() - begin_seconds)
        begin_seconds = time.process_time()
        source = Source(found.places, 256, SEED, 128)
        order = Order([source], [1], SEED)
        last = (
            order.epoch(found.num_samples or 0),
            source.block(255, (found.num_samples or 0) // 256 - 9),
        )
        opened = time.process_time() - begin_seconds
        is_right = found.num_samples == expected and last[0] == 1
        table.append(
            {
                "what": "rows counted",
                "layout": f"{total:.0e} rows in {len(names):,} shards by {what}",
                "equal": "yes" if is_right else f"NO: {found.num_samples}, not {expected}",
                "digest": f"{seconds[1]:.1f} CPU s (index alone {seconds[0]:.1f}), order {opened:.2f}",
                "cpu_seconds": round(seconds[1], 2),
            }
        )
        (place / name).unlink()
    return table


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

    def compare(config: dict[str, Any], what: str, expected: list[str]) -> None:
        """All layouts, then runs that are killed and resumed on another one. expected: of the first
        layout."""
        for layout in LAYOUTS:
            found = expected if layout == LAYOUTS[0] else digests(config, layout, steps)
            where = f"{layout[0]} ranks x {layout[1]} workers"
            row(f"{steps} steps{what}", where, found, expected)
        for _ in range(kills):
            before, after = draw.sample(LAYOUTS, 2)
            stop = draw.randrange(1, steps - 1)
            begun = digests(config, before, steps, kill_after=stop)
            resumed = digests(config, after, steps - stop, stop)
            where = f"{before[0]} x {before[1]} until step {stop}, then {after[0]} x {after[1]}"
            row(f"killed, resumed{what}", where, begun + resumed, expected)

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
        compare(config, "", reference)
        table.append(resume_row(config, draw.randrange(1, steps - 1)))
        changing = {
            "train": f"{first}::{second}", "train_weights": [2, 1], "train_weights_schedule": STAGES, "keep": KEEP,
            "shuffle_block": 32,
        }  # fmt: skip
        compare(changing, "; keep, changing weights", digests(changing, LAYOUTS[0], steps))
        # 64: fewer shards than streams
        for lanes, keep in itertools.product((1, 8, 64), (None, KEEP)):
            table.append(epoch_row(first, FIRST, lanes, keep))
            if table[-1]["equal"] != "each once":
                missed.append(f"{table[-1]['layout']}: {table[-1]['equal']}")
        for lanes in (7, 64):
            table.append(
                positions_row(f"{first}::{second}", lanes, 5_000 if args.quick else 100_000)
            )
        table += count_rows(Path(folder), 10_000_000 if args.quick else 1_000_000_000)
        for line in table:
            if line["equal"].startswith("NO"):
                missed.append(f"{line['what']}, {line['layout']}: {line['equal']}")
            if line.get("cpu_seconds", 0) > COUNT_SECONDS:
                missed.append(f"{line['layout']}: {line['cpu_seconds']} CPU seconds")
    return finish("order", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
