"""What a resume takes from the store, and which damage it steps over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.errors import CheckpointError, UserError
from tests.checkpoint.parts import bits, committed, cut, whole
from tests.checkpoint.runs import flip
from tests.ranks import run_ranks
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.runs import Run, assert_is, data_key

pytestmark = pytest.mark.usefixtures("runs")


@pytest.mark.full
def test_a_damaged_local_file_is_fetched_anew(tmp_path: Path, url: str) -> None:
    run = Run(tmp_path, url)
    assert run.save(1)
    (local,) = committed(tmp_path).values()
    flip(local / "rank00000.safetensors")
    resumed = assert_is(Run(tmp_path, url).resume(), 1)
    assert resumed.fetched > 0 and resumed.skipped == {} and set(committed(tmp_path)) == {1}


@pytest.mark.parametrize(
    "damage,reason",
    [
        ("flipped", "sha256 does not match"),
        pytest.param("deleted", "is missing", marks=pytest.mark.full),
        pytest.param("cut", r"bytes instead of", marks=pytest.mark.full),
        pytest.param("marker", "is not readable", marks=pytest.mark.full),
        pytest.param("manifest", "sha256 does not match", marks=pytest.mark.full),
    ],
)
def test_damage_in_the_store_steps_back_and_says_why(
    tmp_path: Path, url: str, view: Bucket, damage: str, reason: str
) -> None:
    run = Run(tmp_path / "a", url)
    assert run.save(1) and run.save(2)
    run.manager.close()
    key = data_key(view, 2)
    marker, manifest = (
        list(view.commits("run"))[-1],
        key.replace("rank00000.safetensors", "_MANIFEST.json"),
    )
    if damage == "flipped":
        view.flip(key)
    elif damage == "deleted":
        view.delete(key)
    elif damage == "cut":
        view.put(key, view.get(key)[:-1])
    else:
        broken = marker if damage == "marker" else manifest
        view.put(broken, view.get(broken).replace(b"2", b"3", 1))
    elsewhere = Run(tmp_path / "b", url)
    resumed = assert_is(elsewhere.resume(), 1)
    assert [ref.step for ref in resumed.skipped] == [2]
    assert re.search(reason, resumed.describe()), resumed.describe()
    assert_is(Run(tmp_path / "a", url).resume(), 2)  # this disk still has it
    assert elsewhere.save(2)
    assert assert_is(Run(tmp_path / "c", url).resume(), 2).skipped == {}


def test_a_bit_that_flips_on_the_way_is_read_again(
    tmp_path: Path, url: str, proxy: FaultyProxy
) -> None:
    run = Run(tmp_path / "a", url)
    assert run.save(1)
    run.manager.close()  # so that it is not its checkpoint writer that meets the fault
    for key in ("safetensors", "MANIFEST", "commit"):
        proxy.faults = [Fault("flip", times=1, key=key)]
        assert assert_is(Run(tmp_path / key, url).resume(), 1).skipped == {}
        assert proxy.fired == 1


def test_what_cannot_be_read_is_not_taken_for_missing(tmp_path: Path, url: str, proxy) -> None:
    assert Run(tmp_path / "a", url).save(1)
    for key in ("", "MANIFEST", "safetensors"):
        proxy.faults = [
            Fault("status", method="GET|HEAD", key=key, code=403, s3code="AccessDenied")
        ]
        with pytest.raises(CheckpointError, match="not taken for a damaged or missing checkpoint"):
            Run(tmp_path / f"b{key}", url).resume()


@pytest.mark.full
def test_resume_from_a_url(tmp_path: Path, url: str, view: Bucket) -> None:
    old = Run(tmp_path / "old", url, keep_last=5)
    assert old.save(1) and old.save(2)
    old.manager.close()
    other = f"{view.url}/other"
    markers = [f"{view.url}/{key}" for key in view.commits("run")]
    attempt = f"{view.url}/{data_key(view, 1).rsplit('/', 1)[0]}"
    for place, step in ((url, 2), (markers[0], 1), (attempt, 1), (f"{url}/", 2)):
        run = Run(tmp_path / f"new{step}{len(place)}", other, resume=place)
        assert_is(run.resume(), step)
    before = view.keys("run/")
    assert run.save(3)
    assert view.keys("run/") == before and [m["step"] for m in view.commits("other").values()] == [
        3
    ]
    with pytest.raises(UserError, match="holds no checkpoints"):
        Run(tmp_path / "x", other, resume=f"{view.url}/nothing").resume()


def on_its_own_disk(root: Path, url: str, step: int) -> dict[str, Any]:
    """A rank whose disk no other rank sees: it resumes what is there, and saves `step`."""
    rank, world_size = dist.rank(), dist.world_size()
    config = CheckpointConfig(remote=url, grace_seconds=120.0)
    manager = CheckpointManager(
        config, root / f"disk{rank}", log=lambda line: None, orphan_seconds=0.0
    )
    resumed = manager.resume()
    same = True
    if resumed is not None:
        for fragment in cut(whole(resumed.step), rank, world_size):
            for slot, want in fragment.tensors.items():
                got = resumed.reader.read(fragment.name, slot, fragment.start, want.numel())
                same &= bits(got) == bits(want)
    own = {"rng": torch.tensor([rank], dtype=torch.uint8)}
    mine = cut(whole(step), rank, world_size)
    saved = manager.save(step, mine, own, {"step": step}, wait=True) is Saved.COMMITTED
    manager.close()
    files = sorted(path.name for path in (root / f"disk{rank}").rglob("*.safetensors"))
    return {
        "resumed": resumed and resumed.step,
        "same": same,
        "saved": saved,
        "files": files,
        "told": resumed and resumed.describe(),
    }


@pytest.mark.full
@pytest.mark.distributed
def test_ranks_that_share_no_disk(tmp_path: Path, url: str, view: Bucket) -> None:
    first = run_ranks(on_its_own_disk, 2, tmp_path / "a", url, 1)
    assert [(seen["resumed"], seen["saved"]) for seen in first] == [(None, True)] * 2
    assert [seen["files"] for seen in first] == [[], []]  # only what the store has counts
    assert view.incomplete("run") == [] and len(view.commits("run")) == 1
    again = run_ranks(on_its_own_disk, 2, tmp_path / "b", url, 2)
    assert [(seen["resumed"], seen["same"], seen["saved"]) for seen in again] == [
        (1, True, True)
    ] * 2
    assert [seen["files"] for seen in again] == [[], []]  # what was fetched has gone again
    (key,) = [
        key for key in view.keys("run/ckpt/s0000000002/") if key.endswith("rank00001.safetensors")
    ]
    view.flip(key)  # one rank finds it: all step back
    more = run_ranks(on_its_own_disk, 3, tmp_path / "c", url, 3)  # with two files for three
    assert [(seen["resumed"], seen["same"], seen["saved"]) for seen in more] == [
        (1, True, True)
    ] * 3
    damage = "rank00001.safetensors is not readable: its sha256 does not match"
    assert [damage in seen["told"] for seen in more] == [True] * 3
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 2, 3]
