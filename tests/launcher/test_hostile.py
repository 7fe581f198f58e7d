"""The hostile shards through the real command: it trains through and tells what it met, or stops on all ranks."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from launcher.runtime.verdict import read_verdict
from tests.data.hostile import Kind, kinds, planted, write_hostile
from tests.launcher.conftest import metrics, run

pytestmark = pytest.mark.engine

RECIPE = """\
run: {{name: hostile, dir: {run_dir}, steps: 3, seed: 3}}
schedule: {{warmup_steps: 1}}
model: {{name: {model}}}
data: {{train: "{train}", workers: 1, lanes: {lanes}, shuffle_block: 10000, bad_sample_limit: {limit}}}
batch: {{global_size: {size}, micro_size: 64}}
checkpoint: {{every_steps: 2}}
log: {{tensorboard: false}}
"""


def places(chosen: list[Kind]) -> int:
    """That an epoch fills in global batches: what is invalid has one too."""
    return sum(len(kind.usable) + sum(kind.bad.values()) for kind in chosen)


KINDS = kinds()
while places(KINDS) % 2:  # so that two ranks can share an epoch
    KINDS.pop()


def write_recipe(folder: Path, model: Path, **settings) -> Path:
    train = write_hostile(folder / "shards", KINDS)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=train, model=model, **settings))
    return recipe


def rows(text: str) -> dict[tuple[str, str], int]:
    """(reason, shard's name) -> count, of a table as it is printed."""
    found = re.findall(r"^ *(\d+)  (\S.*?)  +(?:/\S+/)?([\w-]+\.tar)", text, re.MULTILINE)
    return {(reason, shard): int(count) for count, reason, shard in found}


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_through_and_the_tables_are_exact(tmp_path, model, ranks):
    """One lane and a global batch of a whole epoch: every step ends one."""
    recipe = write_recipe(tmp_path, model, lanes=1, limit=1.0, size=places(KINDS))
    status, out = run(recipe, ranks=ranks)
    assert status == 0, out
    assert all(math.isfinite(line["loss"]) for line in metrics(tmp_path / "run"))
    expected = planted(KINDS)
    first, second = (out[out.index(f"epoch {n} is done (step {n})") :] for n in (1, 2))
    each = expected.total()
    assert first.startswith(f"epoch 1 is done (step 1): {each} invalid samples so far")
    assert second.startswith(f"epoch 2 is done (step 2): {2 * each} invalid samples so far")
    table = rows(first[: first.index("more rows")])
    assert len(table) == 20 and table.items() <= expected.items()
    counts = json.loads((tmp_path / "run" / "invalid.json").read_text())["bad_samples"]
    places_found = {tuple(place.split("\t")): n for place, n in counts.items()}
    assert {(reason, Path(shard).name): n for (reason, shard), n in places_found.items()} == {
        k: 3 * n for k, n in expected.items()
    }


def test_at_the_limit_all_ranks_stop_with_the_table(tmp_path, model):
    recipe = write_recipe(tmp_path, model, lanes=8, limit=0.1, size=64)
    status, out = run(recipe, "run.steps=1000", ranks=2)
    assert status == 1, out
    message = re.search(
        r"(\d+) of the last (\d+) samples were invalid, more than data.bad_sample_limit \(0.1\)",
        out,
    )
    assert message and int(message[1]) >= 20 and int(message[1]) > 0.1 * int(message[2])
    # one rank reports it; the last line of rank 0 may name it again
    reports = re.findall(r"error: (?!ended by).*more than data.bad_sample_limit", out)
    assert len(reports) == 1, out
    table = rows(out[message.end() :])
    assert table and set(table) <= set(planted(KINDS))
    verdict = read_verdict(tmp_path / "run")
    assert verdict is not None and verdict[0] == "FAILED"


def test_at_the_limit_one_process_exits_with_1(tmp_path, model):
    recipe = write_recipe(tmp_path, model, lanes=1, limit=0.2, size=places(KINDS))
    status, out = run(recipe)
    assert status == 1 and "data.bad_sample_limit (0.2)" in out
    assert not metrics(tmp_path / "run")
