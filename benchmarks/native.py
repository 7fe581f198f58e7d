"""Native resolution at a constant batch, beside OpenCLIP's NaFlex and beside squares.

    .venv/bin/python benchmarks/native.py [--quick]
    .venv-peers/bin/python benchmarks/native.py        # with timm's NaFlexVit, which OpenCLIP trains

Three tables:

- negatives: samples of each step in an epoch of 1,000,000 samples on 8 ranks. OpenCLIP's rule is that of its main
  branch (89fb801, June 2026, `NaFlexBatchScheduler`, its defaults): for each batch a length is drawn from 128, 256,
  576, 784 and 1,024, and a rank's batch is 16,384 / length, rounded down to a multiple of 8.
- padding: of 20,000 images with aspect ratios from 1:3 to 3:1, the share of tokens that are padding.
- seconds: CPU seconds of a forward and a backward of an image tower (width 384, 6 blocks, patches of 16 px), for each
  1,000 patches and for each TFLOP, in turn in one run: squares of 224 px; native images packed and cut by patches;
  NaFlexVit of the same size (timm), whose batches have one length.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from common import finish, parser
from torch import Tensor

from clip_train.batch import token_chunks
from clip_train.models.blocks import VisionTower
from clip_train.models.clip import forward_flops
from clip_train.models.config import Architecture, parse_architecture
from clip_train.native import patch_counts, to_rows
from clip_train.resizing import Patches, budget_at

PATCH = 16
OURS = {128: 1.0, 256: 2.0, 576: 1.0}  # `data.tokens`
# OpenCLIP's defaults
LENGTHS, TOKENS_PER_BATCH, DIVISOR, RANKS = (128, 256, 576, 784, 1024), 4096 * 4, 8, 8
MICRO_TOKENS = 6272  # 32 squares of 224 px
TARGETS = {
    "negatives": "every step has the chosen number of samples",
    "padding": "no token is padding",
    "seconds": "a TFLOP of native images takes at most 1.25 times as long as one of squares",
}


def shapes(count: int) -> list[tuple[int, int]]:
    """Heights and widths, with log-uniform aspect ratios."""
    g = torch.Generator().manual_seed(0)
    ratios = 3 ** (2 * torch.rand(count, generator=g) - 1)
    return [(round(600 * ratio), 600) for ratio in ratios.tolist()]


def grids(count: int, budgets: list[int]) -> list[tuple[int, int]]:
    """Rows and columns of patches of images, each within its budget."""
    patches = Patches(PATCH, max(OURS))
    sizes = zip(shapes(count), budgets, strict=True)
    scaled = [patches.size_within(*shape, budget) for shape, budget in sizes]
    return [(height // PATCH, width // PATCH) for height, width in scaled]


def drawn_budgets(count: int) -> list[int]:
    places = torch.rand(count, generator=torch.Generator().manual_seed(1)).tolist()
    return [budget_at(OURS, place) for place in places]


def openclip_schedule(samples: int) -> list[tuple[int, int]]:
    """(length, samples of a rank) of each batch of an epoch."""
    g, left, schedule = torch.Generator().manual_seed(42), samples // RANKS, []
    while left > 0:
        length = LENGTHS[int(torch.randint(len(LENGTHS), (1,), generator=g))]
        size = min(TOKENS_PER_BATCH // length // DIVISOR * DIVISOR, left)
        schedule.append((length, size))
        left -= size
    return schedule


def negatives() -> list[dict[str, Any]]:
    schedule = openclip_schedule(1_000_000)
    whole = Counter(RANKS * size for _, size in schedule[:-1])
    mean = sum(size * count for size, count in whole.items()) / whole.total()
    rows = [
        {"table": "negatives", "way": "OpenCLIP main", "samples": size, "steps": whole[size]}
        for size in sorted(whole)
    ]
    ours = {"table": "negatives", "way": "ours", "samples": round(mean)}
    return [*rows, {**ours, "steps": 1_000_000 // round(mean)}]


def padding(count: int) -> list[dict[str, Any]]:
    of_length = {length: grids(count, [length] * count) for length in LENGTHS}
    computed = {length: count * length for length in LENGTHS}
    used = {length: sum(h * w for h, w in of_length[length]) for length in LENGTHS}
    share = 1 - sum(used.values()) / sum(computed.values())
    return [
        {"table": "padding", "way": "OpenCLIP main", "share": share},
        {"table": "padding", "way": "ours", "share": 0.0},
    ]


def architecture() -> Architecture:
    vision = {"image_size": 224, "layers": 6, "width": 384, "head_width": 64, "patch_size": PATCH}
    text = {"context_length": 8, "vocab_size": 100, "width": 64, "heads": 1, "layers": 1}
    parsed = parse_architecture(
        {"embed_dim": 384, "vision_cfg": vision, "text_cfg": text}, "native"
    )
    return parsed.model_copy(update={"image_tokens": max(OURS)})


def squares(tower: VisionTower, count: int) -> tuple[Callable[[], None], float]:
    """A step on squares of 224 px, and its patches."""
    images = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8)

    def step() -> None:
        for part in images.split(32):
            tower(part).sum().backward()

    return step, count * 196


def native_rows(count: int) -> list[Tensor]:
    """Images in micro-batches, from small to large: each rows of one tensor."""
    sizes = grids(count, drawn_budgets(count))
    sizes.sort(key=lambda grid: grid[0] * grid[1])
    images = [torch.randint(0, 256, (3, PATCH * h, PATCH * w), dtype=torch.uint8) for h, w in sizes]
    chunks = token_chunks([h * w for h, w in sizes], MICRO_TOKENS)
    parts, start = [], 0
    for size in chunks:
        most = max(h * w for h, w in sizes[start : start + size])
        rows = [to_rows(image, PATCH, most) for image in images[start : start + size]]
        parts.append(torch.stack(rows))
        start += size
    return parts


def native(tower: VisionTower, parts: list[Tensor]) -> Callable[[], None]:
    def step() -> None:
        for part in parts:
            tower(part, num_patches=sum(patch_counts(part))).sum().backward()

    return step


def of_one_length(parts: list[Tensor]) -> list[Tensor]:
    """The same images in batches of one budget each, as OpenCLIP makes them, of at most
    MICRO_TOKENS."""
    batches = []
    for part in parts:
        counts = torch.tensor(patch_counts(part))
        budgets = torch.tensor(sorted(OURS))
        of_image = budgets[torch.searchsorted(budgets, counts)]
        for budget in of_image.unique().tolist():
            rows = part[of_image == budget][:, : 1 + budget]
            batches += rows.split(max(1, MICRO_TOKENS // budget))
    return batches


def naflex(parts: list[Tensor]) -> Callable[[], None]:
    """timm's NaFlexVit on the same images: padded to the longest of a batch, with a mask."""
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    config = NaFlexVitCfg(
        patch_size=PATCH,
        embed_dim=384,
        depth=6,
        num_heads=6,
        class_token=True,
        global_pool="token",
        pos_embed_grid_size=(14, 14),
    )
    model = NaFlexVit(config)
    batches = []
    for part in parts:
        counts = patch_counts(part)
        patches = part[:, 1:].float().div(255)
        batch = {"patches": patches, "patch_coord": [], "patch_valid": []}
        for rows, count in zip(part, counts, strict=True):
            width = int(rows[0, 2]) + 256 * int(rows[0, 3])
            places = torch.arange(patches.shape[1])
            batch["patch_coord"].append(torch.stack([places // width, places % width], 1))
            batch["patch_valid"].append(places < count)
        for name in ("patch_coord", "patch_valid"):
            batch[name] = torch.stack(batch[name])
        batches.append(batch)

    def step() -> None:
        for batch in batches:
            model(batch).sum().backward()

    return step


def seconds(count: int, rounds: int) -> list[dict[str, Any]]:
    config = architecture()
    tower = VisionTower(config, dropout=0.0, patch_dropout=0.0, activation_checkpointing=False)
    flops = forward_flops(config)
    parts = native_rows(count)
    counts = [n for part in parts for n in patch_counts(part)]
    square_step, square_patches = squares(tower, count)
    work = {
        "squares": (square_step, square_patches, count * flops.image_of(196)),
        "ours": (native(tower, parts), sum(counts), sum(map(flops.image_of, counts))),
    }
    if find_spec("timm") is not None:
        import tests.peers.torchvision_shim  # noqa: F401  before timm

        work["NaFlexVit"] = (naflex(of_one_length(parts)), *work["ours"][1:])
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(1 + rounds):  # the first one warms up
        for name, (step, *_) in work.items():
            start = time.process_time()
            step()
            taken[name].append(time.process_time() - start)
    rows = []
    for name, (_, patches, forward) in work.items():
        least = min(taken[name][1:])
        rows.append(
            {
                "table": "seconds",
                "way": name,
                "CPU s per 1,000 patches": least / patches * 1000,
                "CPU s per TFLOP": least / (3 * forward / 1e12),
            }
        )
    return rows


def main() -> int:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(2)
    missed: list[str] = []
    rows = [*negatives(), *padding(500 if args.quick else 20_000)]
    timed = seconds(*((24, 1) if args.quick else (96, 5)))
    of_way = {row["way"]: row["CPU s per TFLOP"] for row in timed}
    if of_way["ours"] > 1.25 * of_way["squares"] and not args.quick:
        missed.append(f"seconds: {of_way}")
    return finish("native", [*rows, *timed], TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
