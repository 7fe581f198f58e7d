"""Any cut is read back at any other cut, bitwise."""

import hashlib
import random
import resource
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from clip_train.checkpoint.commit import CommittedCheckpoint
from clip_train.checkpoint.manifest import (
    BLOCK_BYTES,
    Commit,
    CommitRef,
    FileEntry,
    Manifest,
    build_layout,
)
from clip_train.checkpoint.reader import FragmentReader
from clip_train.checkpoint.snapshot import SharedMemory, plan_file
from clip_train.checkpoint.writer import copy_hashed
from clip_train.errors import CheckpointError
from clip_train.storage.tensors import FilePlan, lay_out
from clip_train.task import Fragment
from tests.checkpoint.parts import SHAPES, SLOTS, bits, cut, whole

PREFIX = "ckpt/s0000000001/e000000-1"


def write_file(path: Path, plan: FilePlan) -> list[str]:
    """As the checkpoint writer does: through the shared memory."""
    memory = SharedMemory()
    memory.reserve(plan.num_bytes).result()
    memory.fill(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = copy_hashed(memory.fd, path, plan.num_bytes)
    memory.close()
    content = path.read_bytes()
    cuts = range(0, len(content), BLOCK_BYTES)
    assert blocks == [hashlib.sha256(content[at : at + BLOCK_BYTES]).hexdigest() for at in cuts]
    return blocks


def reader_of(folder: Path, plans: dict[str, FilePlan]) -> FragmentReader:
    entries = []
    for name, plan in plans.items():
        blocks = write_file(folder / PREFIX / name, plan)
        entries.append(FileEntry(name, plan.num_bytes, blocks))
    layout = build_layout([plan.fragments for plan in plans.values()])
    return FragmentReader(found(entries, layout), folder / PREFIX, None)


def found(entries: list[FileEntry], layout: bytes) -> CommittedCheckpoint:
    whole = Manifest(1, 0, len(entries), entries, "", {})
    return CommittedCheckpoint(CommitRef(0, 1), Commit(0, 1, PREFIX, ""), whole, layout)


def plans(seed: int, ranks: Iterable[int], world_size: int) -> dict[str, FilePlan]:
    return {
        f"rank{rank:05d}.safetensors": plan_file(
            rank,
            cut(whole(seed), rank, world_size),
            {"cpu": torch.tensor([rank, 255], dtype=torch.uint8)},
        )
        for rank in ranks
    }


def write(folder: Path, seed: int, world_size: int) -> FragmentReader:
    return reader_of(folder, plans(seed, range(world_size), world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_range_at_any_cut(tmp_path: Path, world_size: int) -> None:
    state, reader = whole(5), write(tmp_path, 5, world_size)
    assert reader.shapes == SHAPES
    assert (
        all(reader.slots(name) == set(SLOTS) for name in SHAPES) and reader.slots("other") == set()
    )
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
    like, read = write(tmp_path, 1, 3).open_weights()
    state, full = whole(1), {name: read(name) for name in like}
    assert {name: tuple(t.shape) for name, t in full.items()} == SHAPES
    assert all(bits(full[name]) == bits(state[name, "param"]) for name in SHAPES)


def test_rank_tensors_are_each_ranks_own(tmp_path: Path) -> None:
    reader = write(tmp_path, 1, 2)
    assert [reader.tensors(rank)["cpu"].tolist() for rank in (0, 1)] == [[0, 255], [1, 255]]


def test_a_gap_is_an_error(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, plans(1, (0, 2), 3))
    with pytest.raises(
        CheckpointError, match=r"'param' of visual.conv1.weight \[5, 3, 2, 2\] lacks element 33"
    ):
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
    memory = SharedMemory()
    plan = plan_file(0, cut(state, 0, 1), {})
    memory.reserve(plan.num_bytes).result()
    memory.fill(plan)
    state["logit_scale", "param"].fill_(9)
    copy_hashed(memory.fd, tmp_path / "f", plan.num_bytes)
    memory.close()
    with safetensors.safe_open(tmp_path / "f", framework="pt") as f:
        assert f.get_tensor("param|0|logit_scale").item() == whole(1)["logit_scale", "param"].item()
    assert plan.num_bytes - len(plan.head) == sum(t.numel() * 4 for t in state.values())


@pytest.mark.parametrize(
    ("start", "tensors", "says"),
    [
        (0, {"param": torch.zeros(2, 2)}, "not a range"),
        (3, {"param": torch.zeros(2)}, "not a range"),
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


def test_the_layout_says_where_the_library_finds_it(tmp_path: Path) -> None:
    """A byte offset of the layout against the library's slice of the same file."""
    reader = write(tmp_path, 3, 2)
    for rank in range(2):
        with safetensors.safe_open(
            tmp_path / PREFIX / f"rank{rank:05d}.safetensors", framework="pt"
        ) as f:
            for key in f.keys():  # noqa: SIM118
                if not key.startswith("@"):
                    slot, start, name = key.split("|", 2)
                    tensor = f.get_slice(key)[:]
                    assert bits(reader.read(name, slot, int(start), len(tensor))) == bits(tensor)


@pytest.fixture
def may_open_1024() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("may_open_1024")
def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """As many as there were ranks. Retention may remove those that are open."""
    piece = torch.arange(3.0)
    many = {
        f"rank{rank:05d}.safetensors": plan_file(
            rank, [Fragment("w", (3 * 1050,), 3 * rank, {"param": piece + rank})], {}
        )
        for rank in range(1050)
    }
    reader = reader_of(tmp_path, many)
    expected = torch.cat([piece + rank for rank in range(1050)])
    assert torch.equal(reader.read("w", "param", 0, 3 * 1050), expected)
    for path in (tmp_path / PREFIX).iterdir():
        path.unlink()
    assert torch.equal(reader.read("w", "param", 0, 3 * 1050), expected)


def test_only_the_files_with_something_to_read_are_opened(tmp_path: Path) -> None:
    reader = write(tmp_path, 1, 3)
    for rank in (1, 2):
        (tmp_path / PREFIX / f"rank{rank:05d}.safetensors").unlink()
    assert reader.read("visual.conv1.weight", "param", 0, 33).numel() == 33
    with pytest.raises(CheckpointError, match=r"rank00001\.safetensors"):
        reader.read("visual.conv1.weight", "param", 0, 34)


def test_a_byte_that_has_changed_is_not_given_out(tmp_path: Path) -> None:
    reader = write(tmp_path, 1, 1)
    path = tmp_path / PREFIX / "rank00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its sha256"):
        reader.read("logit_scale", "param", 0, 1)


def test_what_is_read_can_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    reader = write(tmp_path, 1, 1)
    path = tmp_path / PREFIX / "rank00000.safetensors"
    path.chmod(0o400)
    before = path.read_bytes()
    reader.read("ln.weight", "param", 0, 7).zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "data", [b"", b"no zlib", zlib.compress(b""), zlib.compress(bytes([255] * 8) + b"{}")]
)
def test_a_layout_that_makes_no_sense_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CheckpointError, match="its layout is not readable"):
        FragmentReader(found([], data), tmp_path, None)
