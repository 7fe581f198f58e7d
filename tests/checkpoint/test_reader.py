"""Any cut is read back at any other cut, bitwise."""

import hashlib
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from clip_train.checkpoint import FragmentReader
from clip_train.checkpoint.disk import copy_hashed
from clip_train.checkpoint.layout import BLOCK_BYTES
from clip_train.checkpoint.local_file import LocalFile
from clip_train.checkpoint.snapshot import Plan, SharedBuffer, lay_out, plan_file
from clip_train.errors import CheckpointError
from clip_train.protocols import Fragment
from tests.checkpoint.parts import SHAPES, SLOTS, bits, cut, whole


def write_file(path: Path, plan: Plan) -> None:
    """As the saver does: through the shared buffer."""
    buffer = SharedBuffer(plan.num_bytes, pin=False)
    buffer.fill(plan)
    path.parent.mkdir(exist_ok=True)
    sha256, blocks = copy_hashed(buffer.fd, path, plan.num_bytes)
    buffer.close()
    content = path.read_bytes()
    assert sha256 == hashlib.sha256(content).hexdigest()
    cuts = range(0, len(content), BLOCK_BYTES)
    assert blocks == [hashlib.sha256(content[at : at + BLOCK_BYTES]).hexdigest() for at in cuts]


def read(folder: Path, *names: str) -> FragmentReader:
    return FragmentReader({name: LocalFile(folder / name) for name in names})


def write(folder: Path, seed: int, world_size: int) -> FragmentReader:
    for rank in range(world_size):
        own = {"cpu": torch.tensor([rank, 255], dtype=torch.uint8)}
        plan = plan_file(rank, cut(whole(seed), rank, world_size), own)
        write_file(folder / "data" / f"rank{rank:05d}.safetensors", plan)
    return read(folder / "data", *sorted(path.name for path in (folder / "data").iterdir()))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_range_at_any_cut(tmp_path: Path, world_size: int) -> None:
    state, reader = whole(5), write(tmp_path, 5, world_size)
    assert reader.names() == SHAPES
    assert reader.slots() == set(SLOTS)
    for other_world in (1, 2, 3, 4):  # as a run on another number of ranks would ask
        for rank in range(other_world):
            for fragment in cut(state, rank, other_world):
                for slot, want in fragment.tensors.items():
                    got = reader.read(fragment.name, slot, fragment.start, want.numel())
                    assert got.dtype == torch.float32 and bits(got) == bits(want)
    rng = random.Random(0)
    for _ in range(200):
        name, slot = rng.choice(list(state))
        start = rng.randrange(state[name, slot].numel())
        numel = rng.randrange(state[name, slot].numel() - start + 1)
        got = reader.read(name, slot, start, numel)
        assert bits(got) == bits(state[name, slot][start : start + numel])


def test_whole_parameters_for_export(tmp_path: Path) -> None:
    state, full = whole(1), write(tmp_path, 1, 3).full_state()
    assert {name: tuple(t.shape) for name, t in full.items()} == SHAPES
    assert all(bits(full[name]) == bits(state[name, "param"]) for name in SHAPES)


def test_rank_tensors_are_each_ranks_own(tmp_path: Path) -> None:
    reader = write(tmp_path, 1, 2)
    assert [reader.rank_tensors(rank)["cpu"].tolist() for rank in (0, 1)] == [[0, 255], [1, 255]]
    with pytest.raises(CheckpointError, match="rank00002"):
        reader.rank_tensors(2)


def test_a_gap_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1, 3)
    reader = read(tmp_path / "data", "rank00000.safetensors", "rank00002.safetensors")
    with pytest.raises(CheckpointError, match=r"'param' of visual.conv1.weight \[5, 3, 2, 2\] lacks element 33"):
        reader.read("visual.conv1.weight", "param", 0, 60)
    assert reader.read("visual.conv1.weight", "param", 0, 33).numel() == 33
    with pytest.raises(CheckpointError, match="lacks element 33"):
        reader.read("odd|name", "param", 0, 34)  # past its end
    with pytest.raises(CheckpointError, match="momentum"):
        reader.read("logit_scale", "momentum", 0, 1)
    with pytest.raises(CheckpointError, match="no parameter"):
        reader.read("absent", "param", 0, 1)


def test_a_snapshot_is_a_copy(tmp_path: Path) -> None:
    state = whole(1)
    buffer = SharedBuffer(1 << 20, pin=False)
    plan = plan_file(0, cut(state, 0, 1), {})
    buffer.fill(plan)
    state["logit_scale", "param"].fill_(9)
    copy_hashed(buffer.fd, tmp_path / "f", plan.num_bytes)
    buffer.close()
    assert read(tmp_path, "f").read("logit_scale", "param", 0, 1).item() == whole(1)["logit_scale", "param"].item()
    assert plan.num_bytes - len(plan.head) == sum(t.numel() * 4 for t in state.values())


@pytest.mark.parametrize(
    ("start", "tensors", "says"),
    [
        (0, {"param": torch.zeros(2, 2)}, "no range"),
        (3, {"param": torch.zeros(2)}, "no range"),
        (0, {"param": torch.zeros(4), "exp_avg": torch.zeros(3)}, "different lengths"),
        (0, {"a|b": torch.zeros(4)}, "cannot be called"),
    ],
)
def test_a_snapshot_refuses_nonsense(start: int, tensors: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_file(0, [Fragment("w", (2, 2), start, tensors)], {})


def test_the_library_reads_our_files(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(), "f64": torch.randn(2).double(), "i64": torch.tensor(-3),
        "u8": torch.arange(7, dtype=torch.uint8), "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0), "é|\"\\": torch.ones(1),
        "f16": torch.randn(1, 1).half(), "big": torch.randn(5_000_000),
    }  # fmt: skip
    plan = lay_out(tensors, {"key": "value"})
    write_file(tmp_path / "f", plan)
    assert plan.num_bytes == (tmp_path / "f").stat().st_size > BLOCK_BYTES
    back = safetensors.torch.load_file(tmp_path / "f")
    assert set(back) == set(tensors)
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype and torch.equal(back[key], tensor)
    with safetensors.safe_open(tmp_path / "f", framework="pt") as f:
        assert f.metadata() == {"key": "value"}


def test_we_read_the_librarys_files(tmp_path: Path) -> None:
    tensors = {"param|0|w": torch.arange(3.0), "param|3|w": torch.arange(3.0, 6.0)}
    safetensors.torch.save_file(tensors, tmp_path / "f", {"shapes": '{"w": [2, 3]}'})
    assert read(tmp_path, "f").full_state()["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.fixture
def may_open_1024() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("may_open_1024")
def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """As many as there were ranks."""
    for i in range(1050):
        (tmp_path / str(i)).write_bytes(b"%d" % i)
    files = [LocalFile(tmp_path / str(i)) for i in range(1050)]
    for i in range(1050):
        (tmp_path / str(i)).unlink()  # as retention may
    assert [bytes(file.read(0, file.size)) for file in files] == [b"%d" % i for i in range(1050)]


def test_a_local_file_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123")
    path.chmod(0o400)
    data = LocalFile(path).read(1, 3)
    torch.frombuffer(data, dtype=torch.uint8).zero_()
    assert bytes(data) == b"\0\0" and path.read_bytes() == b"0123"
    empty = tmp_path / "empty"
    empty.touch()
    assert LocalFile(empty).size == 0 and bytes(LocalFile(empty).read(0, 0)) == b""
    with pytest.raises(CheckpointError, match=f"{tmp_path}/absent: FileNotFoundError"):
        LocalFile(tmp_path / "absent")
    longer = os.stat_result((0, 0, 0, 0, 0, 0, 5, 0, 0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: longer)  # cut since then
        with pytest.raises(CheckpointError, match="size <4> is smaller"):
            LocalFile(path)
