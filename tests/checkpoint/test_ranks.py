"""Several real ranks: they save together, fail together, and resume alike."""

import errno
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint import CheckpointConfig, CheckpointManager, bring, exchange, layout
from clip_train.errors import CheckpointError, RemoteRankError
from clip_train.protocols import Wanted
from clip_train.storage import LocalStorage
from tests.checkpoint.parts import bits, committed, cut, whole
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def own_tensors(rank: int) -> dict[str, torch.Tensor]:
    return {"rng": torch.tensor([rank, 7], dtype=torch.uint8)}


def life(folder: Path) -> dict[str, Any]:
    """On two ranks: saves that succeed, saves that fail on one rank only, a resume past damage."""
    rank, world_size = dist.rank(), dist.world_size()
    said: list[str] = []
    seen: dict[str, Any] = {"said": said}
    manager = CheckpointManager(CheckpointConfig(max_failed_saves=3), folder, log=said.append)

    def save(step: int, fail_on: int | None = None) -> bool:
        def fragments() -> Any:
            yield from cut(whole(step), rank, world_size)
            if rank == fail_on:
                raise MemoryError("no host memory for the snapshot")

        state = {"step": step, "by": rank}
        shared = {"bank": torch.arange(6).reshape(3, 2) + 100 * rank}  # the same on all in earnest: rank 0's is kept
        return manager.save(step, fragments(), own_tensors(rank), state, shared, wait=True)

    seen["first"] = [manager.resume() is None, save(1), save(2)]
    seen["snapshot fails on 1"] = save(3, fail_on=1)

    # rank 1's file cannot be written: a folder is in its way
    layout.new_prefix = lambda epoch, step: f"ckpt/s{step:010d}/e{epoch:06d}-0123abcd"
    (folder / "tmp" / "ckpt+s0000000004+e000000-0123abcd+rank00001.safetensors").mkdir(exist_ok=True)
    dist.barrier()
    seen["write fails on 1"] = save(4)

    # rank 0 cannot commit
    (folder / "commit" / "e000000-s0000000005.json").mkdir(exist_ok=True)
    dist.barrier()
    try:
        save(5)
    except CheckpointError as e:
        seen["third failure"] = str(e)
    manager.close()
    dist.barrier()
    if rank == 0:
        (folder / "commit" / "e000000-s0000000005.json").rmdir()
    manager = CheckpointManager(CheckpointConfig(max_failed_saves=3), folder, log=said.append)
    assert manager.resume() is not None
    seen["last good"] = manager.last_good

    seen["then"] = save(6)
    if rank == 0:  # rank 1's file, which rank 1 verifies
        path = committed(folder)[6] / "rank00001.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    manager.close()
    resumed = CheckpointManager(CheckpointConfig(), folder).resume()
    assert resumed is not None and resumed.rank_tensors is not None
    seen["resumed"] = (resumed.step, resumed.state, [each.ref.step for each in resumed.skipped])
    seen["rng"] = resumed.rank_tensors["rng"].tolist()
    seen["shared"] = {name: t.tolist() for name, t in resumed.reader.shared_tensors().items()}
    return seen


def on_other_ranks(folder: Path) -> tuple[int, bool, bool]:
    resumed = CheckpointManager(CheckpointConfig(resume="must"), folder).resume()
    assert resumed is not None
    same = True
    for fragment in cut(whole(resumed.step), dist.rank(), dist.world_size()):
        for slot, want in fragment.tensors.items():
            got = resumed.reader.read(fragment.name, slot, fragment.start, want.numel())
            same &= bits(got) == bits(want)
    return resumed.step, same, resumed.rank_tensors is None


def test_two_ranks(tmp_path: Path) -> None:
    zero, one = run_ranks(life, 2, tmp_path)
    for seen in (zero, one):
        assert seen["first"] == [True, True, True]
        assert seen["snapshot fails on 1"] is False and seen["write fails on 1"] is False
        assert "step 5 failed (3 in a row): IsADirectoryError" in seen["third failure"]
        assert seen["last good"].step == 2
        assert seen["then"] is True
        assert seen["resumed"] == (2, {"step": 2, "by": 0}, [6])
    assert (zero["rng"], one["rng"]) == ([0, 7], [1, 7])
    assert zero["shared"] == one["shared"] == {"bank": [[0, 1], [2, 3], [4, 5]]}
    assert len(zero["said"]) == 2 and one["said"] == []
    assert "rank 1: MemoryError: no host memory" in zero["said"][0]
    assert re.search(r"step 4 failed .*: rank 1: (IsADirectory|Permission)Error", zero["said"][1])
    # and on three ranks, and on one
    assert run_ranks(on_other_ranks, 3, tmp_path) == [(2, True, True)] * 3
    assert on_other_ranks(tmp_path) == (2, True, True)


def a_disk_that_fails_on_rank_1(folder: Path) -> dict[str, Any]:
    """Its mount is stale for a while: before the first save, and before the second."""
    rank, world_size = dist.rank(), dist.world_size()
    said: list[str] = []
    config = CheckpointConfig(remote=str(folder / "store"))
    manager = CheckpointManager(config, folder / "local", log=said.append)
    real_stat, real_usage = os.stat, shutil.disk_usage

    def stale(path: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 1 and Path(path).is_relative_to(folder):
            raise OSError(errno.ESTALE, "Stale file handle")
        return (real_usage if kwargs.pop("usage", False) else real_stat)(path, *args, **kwargs)

    def save(step: int) -> bool:
        return manager.save(step, cut(whole(step), rank, world_size), own_tensors(rank), {"step": step}, wait=True)

    assert manager.resume() is None
    seen: dict[str, Any] = {"said": said}
    os.stat = stale
    try:
        manager.begin()
    except (CheckpointError, RemoteRankError) as e:
        seen["begin"] = f"{type(e).__name__}: {e}"
    os.stat = real_stat
    seen["left behind"] = [path.name for path in (folder / "local").glob(".seen*")]
    manager.close()
    manager = CheckpointManager(config, folder / "local", log=said.append)
    seen["saves"] = [save(1)]
    shutil.disk_usage = lambda path: stale(path, usage=True)
    seen["saves"].append(save(2))
    shutil.disk_usage = real_usage
    seen["saves"].append(save(3))
    manager.close()
    return seen


def test_a_disk_that_fails_on_one_rank(tmp_path: Path) -> None:
    zero, one = run_ranks(a_disk_that_fails_on_rank_1, 2, tmp_path)
    assert zero["begin"].startswith("RemoteRankError: rank 1 failed: CheckpointError: ")
    assert one["begin"].startswith("CheckpointError: ") and "Stale file handle" in one["begin"]
    assert zero["saves"] == one["saves"] == [True, False, True]
    (told,) = (line for line in zero["said"] if "failed" in line)
    assert "step 2 failed (1 in a row): rank 1: OSError: [Errno 116]" in told
    assert zero["left behind"] == [] and set(committed(tmp_path / "local")) == {1, 3}


def apart(root: Path, *save: int, one_disk: bool = False) -> dict[str, Any]:
    """A rank with a disk of its own, and a store that counts what is read from it, and goes away after the resume."""
    rank, world_size = dist.rank(), dist.world_size()
    exchange.WINDOW_BYTES = 1 << 10  # several rounds
    bring.TELL_SECONDS = 0.0
    said: list[str] = []
    disk = root / f"disk{0 if one_disk else rank}"
    manager = CheckpointManager(CheckpointConfig(remote=str(root / "store")), disk, log=said.append)
    for step in save:
        bank = {"bank": torch.arange(40_000.0)}  # of rank 0's file alone, and needed by all
        mine = cut(whole(step), rank, world_size)
        assert manager.save(step, mine, own_tensors(rank), {"step": step}, bank, wait=True)
    if save:
        manager.close()
        return {}
    remote, read = manager.remote, Counter[str]()
    assert isinstance(remote, LocalStorage)
    whole_range = remote.read_range

    def counted(name: str, start: int, end: int) -> bytes:
        read[name.rsplit("/", 1)[-1]] += end - start
        return whole_range(name, start, end)

    def gone(name: str, start: int, end: int) -> bytes:
        raise AssertionError("it is here already, or on another rank's disk")

    remote.read_range = counted  # type: ignore[method-assign]
    resumed = manager.resume()
    assert resumed is not None
    remote.read_range = gone  # type: ignore[method-assign]
    mine = cut(whole(resumed.step), rank, world_size)
    resumed.reader.prepare(Wanted(f.name, slot, f.start, t.numel()) for f in mine for slot, t in f.tensors.items())
    same = all(
        bits(resumed.reader.read(f.name, slot, f.start, t.numel())) == bits(t)
        for f in mine
        for slot, t in f.tensors.items()
    )
    same &= bits(resumed.reader.shared_tensors()["bank"]) == bits(torch.arange(40_000.0))
    own = resumed.rank_tensors and resumed.rank_tensors["rng"].tolist()
    seen = {"step": resumed.step, "same": same, "own": own, "read": dict(read)}
    return {**seen, "fetched": resumed.fetched, "said": said}


def on_one_disk(root: Path, *save: int) -> dict[str, Any]:
    return apart(root, *save, one_disk=True)


def test_ranks_give_each_other_what_they_have_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(apart, 2, tmp_path, 1)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "store").rglob("*.safetensors")}
    for folder in tmp_path.glob("disk*"):
        shutil.rmtree(folder)

    def check(seen: list[dict[str, Any]]) -> None:
        assert all(each["same"] and each["fetched"] == sum(sizes.values()) for each in seen), seen
        assert sum((Counter(each["read"]) for each in seen), Counter()) == sizes  # every byte once, by somebody
        assert [each["own"] for each in seen] == [[r, 7] if len(seen) == 2 else None for r in range(len(seen))]

    check(run_ranks(apart, 3, tmp_path))
    check(run_ranks(apart, 2, tmp_path))
    warm = run_ranks(apart, 2, tmp_path)
    assert all(each["same"] and each["read"] == {} and each["fetched"] == 0 for each in warm)
    for module, name in ((exchange, "WINDOW_BYTES"), (bring, "TELL_SECONDS")):
        monkeypatch.setattr(module, name, getattr(module, name))  # `apart` sets them, here in this process
    shutil.rmtree(tmp_path / "disk0")
    alone = apart(tmp_path)
    check([alone])
    assert "fetching the checkpoint of step 1: " in alone["said"][0]  # while it has one of two files


def test_the_newest_lies_on_rank_0s_disk_alone(tmp_path: Path) -> None:
    """One node had it there, and no time to upload it; the next start has several nodes."""
    run_ranks(on_one_disk, 2, tmp_path, 1, 2)
    (tmp_path / "store" / "latest.json").unlink()
    (tmp_path / "store" / "commit" / "e000000-s0000000002.json").unlink()
    for world_size in (3, 2):
        for seen in run_ranks(apart, world_size, tmp_path):
            assert (seen["step"], seen["same"], seen["read"], seen["fetched"]) == (2, True, {}, 0)
    data = committed(tmp_path / "disk0")[2] / "rank00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\0")
    for seen in run_ranks(apart, 2, tmp_path):
        assert (seen["step"], seen["same"]) == (1, True)  # which the store has, too
