"""Several real ranks: they save together, fail together, and resume alike."""

import errno
import itertools
import os
import re
import resource
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.errors import CheckpointError, RemoteRankError
from clip_train.storage.local import LocalStorage
from clip_train.task import StateRange
from tests.checkpoint.parts import bits, committed, cut, whole
from tests.checkpoint.runs import flip, writers
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def own_tensors(rank: int) -> dict[str, torch.Tensor]:
    return {"rng": torch.tensor([rank, 7], dtype=torch.uint8)}


def let_writer_write(most: int) -> None:
    """No file with more bytes, as on a disk that is full."""
    (pid,) = writers()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


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
        shared = {
            "bank": torch.arange(6).reshape(3, 2) + 100 * rank
        }  # the same on all in earnest: rank 0's is kept
        saved = manager.save(step, fragments(), own_tensors(rank), state, shared, wait=True)
        return saved is Saved.COMMITTED

    seen["first"] = [manager.resume() is None, save(1), save(2)]
    seen["snapshot fails on 1"] = save(3, fail_on=1)

    if rank == 1:
        let_writer_write(512)
    seen["write fails on 1"] = save(4)
    if rank == 1:
        let_writer_write(resource.RLIM_INFINITY)

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
    seen["resumed"] = (resumed.step, resumed.state, [ref.step for ref in resumed.skipped])
    seen["rng"] = resumed.rank_tensors["rng"].tolist()
    seen["shared"] = {name: t.tolist() for name, t in resumed.reader.tensors().items()}
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
    assert "rank 1 failed: MemoryError: no host memory" in zero["said"][0]
    assert re.search(r"step 4 failed .*: rank 1: OSError: .*File too large", zero["said"][1])
    # and on three ranks, and on one
    assert run_ranks(on_other_ranks, 3, tmp_path) == [(2, True, True)] * 3
    assert on_other_ranks(tmp_path) == (2, True, True)


def a_disk_that_fails_on_rank_1(folder: Path) -> dict[str, Any]:
    """Its mount is stale for a while: before the first save, and before the second."""
    rank, world_size = dist.rank(), dist.world_size()
    said: list[str] = []
    config = CheckpointConfig(remote=str(folder / "store"))
    real_stat, real_usage = os.stat, shutil.disk_usage

    def stale(path: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 1 and Path(path).is_relative_to(folder):
            raise OSError(errno.ESTALE, "Stale file handle")
        return (real_usage if kwargs.pop("usage", False) else real_stat)(path, *args, **kwargs)

    def save(step: int) -> bool:
        mine = cut(whole(step), rank, world_size)
        saved = manager.save(step, mine, own_tensors(rank), {"step": step}, wait=True)
        return saved is Saved.COMMITTED

    seen: dict[str, Any] = {"said": said}
    os.stat = stale
    try:
        CheckpointManager(config, folder / "local")
    except (CheckpointError, RemoteRankError) as e:
        seen["begin"] = f"{type(e).__name__}: {e}"
    os.stat = real_stat
    seen["left behind"] = [path.name for path in (folder / "local").glob(".seen*")]
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
    assert "step 2 failed (1 in a row): rank 1 failed: OSError: [Errno 116]" in told
    assert zero["left behind"] == [] and set(committed(tmp_path / "local")) == {1, 3}


BANK = 40_000  # floats, of rank 0's file alone, and needed by all


def saved_apart(root: Path, disks: list[int], bank: int, *steps: int) -> None:
    """disks: by rank, the disk that it sees."""
    rank, world_size = dist.rank(), dist.world_size()
    disk = root / f"disk{disks[rank]}"
    said: list[str] = []
    manager = CheckpointManager(CheckpointConfig(remote=str(root / "store")), disk, log=said.append)
    for step in steps:
        mine = cut(whole(step), rank, world_size)
        shared = {"bank": torch.arange(float(bank))}
        saved = manager.save(step, mine, own_tensors(rank), {"step": step}, shared, wait=True)
        assert saved is Saved.COMMITTED
    manager.close()
    dist.barrier()


def resumed_apart(root: Path, disks: list[int], bank: int) -> dict[str, Any]:
    """A store that counts what is read from it, and goes away when what this rank needs is here."""
    rank, world_size = dist.rank(), dist.world_size()
    disk, said = root / f"disk{disks[rank]}", []
    manager = CheckpointManager(CheckpointConfig(remote=str(root / "store")), disk, log=said.append)
    remote, read = manager.remote, Counter[tuple[str, int]]()
    assert isinstance(remote, LocalStorage)
    read_bytes = remote.read_bytes

    def counted(name: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None:
            read[name.rsplit("/", 1)[-1], start] += end - start
        return read_bytes(name, start, end)

    def gone(name: str, start: int = 0, end: int | None = None) -> bytes:
        assert end is None, "it is on this rank's disk already"
        return read_bytes(name)

    remote.read_bytes = counted  # type: ignore[method-assign]
    resumed = manager.resume()
    assert resumed is not None
    mine = cut(whole(resumed.step), rank, world_size)
    resumed.reader.prepare(
        StateRange(f.name, slot, f.start, t.numel()) for f in mine for slot, t in f.tensors.items()
    )
    remote.read_bytes = gone  # type: ignore[method-assign]
    same = all(
        bits(resumed.reader.read(f.name, slot, f.start, t.numel())) == bits(t)
        for f in mine
        for slot, t in f.tensors.items()
    )
    same &= bits(resumed.reader.tensors()["bank"]) == bits(torch.arange(float(bank)))
    own = resumed.rank_tensors and resumed.rank_tensors["rng"].tolist()
    return {
        "step": resumed.step,
        "same": same,
        "own": own,
        "read": read,
        "fetched": resumed.fetched,
        "said": said,
    }


def fetched_twice(root: Path, disks: list[int], bank: int) -> list[dict[str, Any]]:
    """Onto empty disks, and then onto those on which the ranks have saved."""
    saved_apart(root, disks, bank, 1)
    kept = root / f"kept{disks[dist.rank()]}"
    if disks.index(disks[dist.rank()]) == dist.rank():
        (root / f"disk{disks[dist.rank()]}").rename(kept)
    dist.barrier()
    empty = resumed_apart(root, disks, bank)
    dist.barrier()
    if disks.index(disks[dist.rank()]) == dist.rank():
        shutil.rmtree(root / f"disk{disks[dist.rank()]}")
        kept.rename(root / f"disk{disks[dist.rank()]}")
    dist.barrier()
    return [empty, resumed_apart(root, disks, bank)]


@pytest.mark.parametrize(
    ("disks", "bank"),
    [
        ([0, 0], BANK),
        ([0, 1], BANK),
        pytest.param([0, 0, 1], 20_000_000, id="several blocks", marks=pytest.mark.full),
    ],
)
def test_a_block_is_fetched_once_for_each_disk(tmp_path: Path, disks: list[int], bank: int) -> None:
    world_size = len(disks)
    empty, again = zip(*run_ranks(fetched_twice, world_size, tmp_path, disks, bank), strict=True)
    store = tmp_path / "store"
    sizes = {path.name: path.stat().st_size for path in store.rglob("*.safetensors")}
    for each in empty:
        assert each["same"] and each["own"] == [empty.index(each), 7], each
    everything: Counter[tuple[str, int]] = Counter()
    shared = len(set(disks)) == 1
    for on_it in (
        [sum((seen["read"] for seen in empty), Counter())]
        if shared
        else [seen["read"] for seen in empty]
    ):
        assert all(
            count <= min(sizes[name] - start, 16 << 20) for (name, start), count in on_it.items()
        ), on_it
        everything |= on_it
    assert everything.total() == sum(sizes.values())  # every block has been verified by somebody
    assert all(each["same"] for each in again)
    if shared:
        assert all(each["fetched"] == sum(sizes.values()) for each in empty)
        assert not any(each["read"] for each in again)
    else:  # only what the store has counts
        assert not list(tmp_path.glob("disk*/commit/*")) and not list(tmp_path.glob("disk*/ckpt/*"))


def changed_since(root: Path) -> str:
    """The store changes after every block was verified, before ranks fetch the others' blocks."""
    saved_apart(root, [0, 1], BANK, 1)
    disk = root / f"empty{dist.rank()}"
    resumed = CheckpointManager(CheckpointConfig(remote=str(root / "store")), disk).resume()
    assert resumed is not None
    dist.barrier()
    if dist.is_main():
        for path in (root / "store").rglob("*.safetensors"):
            flip(path)
    dist.barrier()
    try:
        resumed.reader.prepare(
            StateRange(name, slot, 0, t.numel()) for (name, slot), t in whole(1).items()
        )
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def test_what_has_changed_since_ends_all_ranks(tmp_path: Path) -> None:
    zero, one = run_ranks(changed_since, 2, tmp_path)
    assert zero.startswith("DamagedError: ")
    assert "rank00001.safetensors is not readable: its sha256 does not match" in zero
    assert one.startswith("RemoteRankError: rank 0 failed: DamagedError: ")


def test_a_long_fetch_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_apart(tmp_path, [0], 5_000_000, 1)
    shutil.rmtree(tmp_path / "disk0")
    minutes = itertools.count(0.0, 60.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(minutes))  # each block takes that long
    alone = resumed_apart(tmp_path, [0], 5_000_000)
    monkeypatch.undo()
    assert alone["same"] and alone["fetched"] > 20_000_000
    assert "reading the checkpoint of step 1: " in alone["said"][0]  # while it has not all of it
