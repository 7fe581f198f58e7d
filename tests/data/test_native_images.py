"""Images at native resolution, from shards of odd sizes: which size each gets, and that ranks, workers and resumes
change nothing."""

from __future__ import annotations

import collections
import io
import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from clip_train.batch import BatchSizes
from clip_train.data.config import DataConfig
from clip_train.data.images import for_evaluation
from clip_train.data.loader import TrainLoader
from clip_train.native import from_rows, grids_of, patch_counts, to_rows
from clip_train.resizing import AS_CLIP, Patches
from tests.data.shards import write_shard

N, STEPS = 12, 6
PATCHES = Patches(size=4, most=36)
TOKENS = {6: 1.0, 16: 2.0, 36: 1.0}
SCHEDULE = [{"until_step": 2, "tokens": 4}, {"until_step": 4, "tokens": {4: 1.0, 9: 1.0}}]


def best_grid(height: int, width: int, patch: int, budget: int) -> tuple[int, int]:
    """The grid just before the image would have more than `budget` patches, by exact fractions: a side gets another
    patch where its scaled length passes a multiple of a patch."""
    events = []
    for axis, side in enumerate((height, width)):
        events += [(Fraction(k * patch, side), axis) for k in range(1, budget + 1)]
    grid = [1, 1]
    for _, together in itertools.groupby(sorted(events), key=lambda event: event[0]):
        larger = list(grid)
        for _, axis in together:
            larger[axis] += 1
        if math.prod(larger) > budget:
            break
        grid = larger
    return grid[0], grid[1]


def test_an_image_has_as_many_patches_as_its_budget_allows():
    rng = random.Random(4)
    for _ in range(400):
        height, width = (round(10 ** rng.uniform(1, 3.3)) for _ in range(2))
        patch, budget = rng.choice([8, 14, 16]), rng.randint(4, 600)
        size = Patches(patch, budget).size_within(height, width, budget)
        rows, columns = (side // patch for side in size)
        assert size == (rows * patch, columns * patch) and rows * columns <= budget
        assert (rows, columns) == best_grid(height, width, patch, budget)


@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (1, 1), (7, 9000)])
def test_extreme_shapes_stay_within_the_budget(shape):
    height, width = Patches(16, 256).size_within(*shape, 256)
    assert height % 16 == width % 16 == 0 and 1 <= height * width // 256 <= 256


def test_patches_are_rows_of_the_image():
    image = torch.randint(0, 256, (3, 12, 20), dtype=torch.uint8)
    rows = to_rows(image, patch_size=4, most=20)
    assert rows.shape == (21, 48) and grids_of(rows[None]).tolist() == [[3, 5]]
    for number in range(15):
        top, left = 4 * (number // 5), 4 * (number % 5)
        patch = image[:, top : top + 4, left : left + 4]
        assert torch.equal(rows[1 + number].view(3, 4, 4), patch)
    assert torch.equal(from_rows(rows), image)
    assert not rows[16:].any()
    wide = to_rows(torch.zeros(3, 4, 4 * 300, dtype=torch.uint8), 4, 300)
    assert patch_counts(wide[None]) == [300]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """40 images of all shapes, some of which cannot be used."""
    folder, rng = tmp_path_factory.mktemp("odd"), np.random.default_rng(0)
    for shard in range(2):
        members = []
        for number in range(20):
            size = tuple(int(side) for side in rng.integers(5, 90, 2))
            pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG" if number % 2 else "PNG")
            content = buffer.getvalue()
            if number == 7:
                content = content[: len(content) // 2]
            key = f"s{shard}n{number}"
            extension = "jpg" if number % 2 else "png"
            members += [(f"{key}.{extension}", content), (f"{key}.txt", b"a " * (number + 1))]
        write_shard(folder / f"{shard}.tar", members)
    return f"{folder}/*.tar"


def loader_of(shards: str, **arguments) -> TrainLoader:
    settings = {"workers": 0, "lanes": 6, "shuffle_block": 4, "bad_sample_limit": 1.0}
    settings |= {"resize": "native", "tokens": TOKENS, "aug_flip_prob": 0.5, "scaled_decode": True}
    config = DataConfig(train=shards, **(settings | arguments.pop("settings", {})))
    return TrainLoader(
        config,
        image_size=24,
        context_length=8,
        global_size=BatchSizes((N,)),
        seed=5,
        patches=PATCHES,
        **arguments,
    )


def global_batches(shards: str, steps: int, world_size: int = 1, **arguments):
    loaders = [
        loader_of(shards, rank=r, world_size=world_size, **arguments) for r in range(world_size)
    ]
    out = []
    for _ in range(steps):
        batches = [next(loader) for loader in loaders]
        for batch in batches:
            assert batch.columns["patch_counts"] == patch_counts(batch.images)
        images = b"".join(batch.images.numpy().tobytes() for batch in batches)
        counts = [count for batch in batches for count in batch.columns["patch_counts"]]
        out.append(([key for batch in batches for key in batch.keys], images, counts))
    for loader in loaders:
        loader.close()
    return out


@pytest.fixture(scope="module")
def reference(shards):
    return global_batches(shards, STEPS)


@pytest.mark.parametrize("world_size, workers", [(1, 2), (2, 0), (3, 1), (4, 0), (5, 0)])
def test_ranks_and_workers_change_nothing(shards, reference, world_size, workers):
    assert global_batches(shards, STEPS, world_size, settings={"workers": workers}) == reference


def test_a_resume_changes_nothing(shards, reference):
    settings = {"workers": 2}
    assert global_batches(shards, 2, 2, step=4, settings=settings) == reference[4:]


def test_budgets_are_drawn_by_the_samples_seed(shards):
    """Frequencies of 600 samples, and images of each budget as large as it allows."""
    counts = [n for _, _, counts in global_batches(shards, 50) for n in counts]
    assert max(counts) <= 36
    drawn = collections.Counter(min(b for b in TOKENS if n <= b) for n in counts)
    for budget, share in TOKENS.items():
        assert drawn[budget] / len(counts) == pytest.approx(share / 4, abs=0.06)


@pytest.mark.parametrize("world_size, workers", [(1, 0), (2, 2), (1, 7)])
def test_budgets_follow_the_step(shards, world_size, workers):
    """Also where workers take the steps in turn, and after a resume."""
    settings = {"tokens_schedule": SCHEDULE, "workers": workers, "lanes": 1}
    batches = global_batches(shards, STEPS, world_size, settings=settings)
    largest = [max(counts) for _, _, counts in batches]
    assert max(largest[:2]) <= 4 < max(largest[2:4]) <= 9 < max(largest[4:])
    resumed = global_batches(shards, 3, step=3, settings={**settings, "workers": 0})
    assert resumed == batches[3:]
    # the order of the data does not depend on the budgets
    plain = global_batches(shards, STEPS, settings={"lanes": 1})
    assert [keys for keys, *_ in plain] == [keys for keys, *_ in batches]
    assert plain[4:] == batches[4:]


def test_evaluation_takes_the_whole_image_at_the_largest_budget():
    ramp = torch.arange(60, dtype=torch.uint8).repeat(3, 30, 1) * 4  # brighter to the right
    rows = for_evaluation(ramp, 24, AS_CLIP, PATCHES)
    assert grids_of(rows[None]).tolist() == [list(best_grid(30, 60, 4, 36))]
    first, last = rows[1].view(3, 4, 4), rows[patch_counts(rows[None])[0]].view(3, 4, 4)
    assert first.float().mean() < 20 and last.float().mean() > 215
