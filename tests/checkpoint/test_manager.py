"""One rank: what exists, what is damaged, what is kept."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clip_train.checkpoint import CheckpointConfig, CheckpointManager, Resumed
from clip_train.checkpoint import manager as manager_module
from clip_train.errors import CheckpointError, UserError
from tests.checkpoint.parts import bits, committed, cut, whole


class Run:
    """One process's life: a manager, and short names."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.said: list[str] = []
        self.manager = CheckpointManager(CheckpointConfig(**config), folder, log=self.said.append)  # type: ignore[arg-type]

    def save(self, *steps: int) -> None:
        for step in steps:
            own = {"rng": torch.full((4,), step % 256, dtype=torch.uint8)}
            assert self.manager.save(step, cut(whole(step), 0, 1), own, {"step": step, "cursors": {0: step}})

    def resume(self) -> Resumed | None:
        return self.manager.resume()


def assert_is(resumed: Resumed | None, step: int) -> Resumed:
    assert resumed is not None
    assert (resumed.step, resumed.state) == (step, {"step": step, "cursors": {0: step}})
    for (name, slot), tensor in whole(step).items():
        assert bits(resumed.reader.read(name, slot, 0, tensor.numel())) == bits(tensor)
    assert resumed.rank_tensors is not None
    assert resumed.rank_tensors["rng"].tolist() == [step % 256] * 4
    return resumed


def data_file(folder: Path, step: int, name: str = "rank00000.safetensors") -> Path:
    (found,) = (folder / "ckpt" / f"s{step:010d}").glob(f"*/{name}")
    return found


def test_save_then_resume(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.resume() is None and run.manager.last_good is None
    run.save(10)
    assert set(committed(tmp_path)) == {10}
    again = Run(tmp_path, resume="must")
    resumed = assert_is(again.resume(), 10)
    assert resumed.skipped == [] and "resuming from step 10" in resumed.describe()
    assert again.manager.last_good == (10, str(committed(tmp_path)[10])) == run.manager.last_good
    again.save(10)  # is there already: nothing to do
    assert (tmp_path / "commit/e000000-s0000000010.json").exists()
    assert len(list((tmp_path / "ckpt").glob("*/*"))) == 1


def test_without_its_commit_it_does_not_exist(tmp_path: Path) -> None:
    Run(tmp_path).save(1, 2)
    (tmp_path / "commit/e000000-s0000000002.json").unlink()
    resumed = assert_is(Run(tmp_path).resume(), 1)
    assert resumed.skipped == []  # never was one
    (tmp_path / "commit/e000000-s0000000001.json").unlink()
    assert Run(tmp_path).resume() is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("rank00000.safetensors", flip, "does not have its sha256"),
        ("rank00000.safetensors", truncate, r"has \d+ bytes instead of \d+"),
        ("rank00000.safetensors", Path.unlink, "rank00000.safetensors is missing"),
        ("_MANIFEST.json", flip, "does not have the sha256 in its commit"),
        ("_MANIFEST.json", truncate, "does not have the sha256 in its commit"),
        ("_MANIFEST.json", Path.unlink, "_MANIFEST.json is missing"),
        ("commit", truncate, "is not readable"),
        ("commit", lambda path: path.write_bytes(b""), "is not readable"),
    ],
)
def test_damage_steps_back_and_says_why(
    tmp_path: Path, name: str, damage: Callable[[Path], object], reason: str
) -> None:
    Run(tmp_path).save(1, 2, 3)
    damage(tmp_path / "commit/e000000-s0000000003.json" if name == "commit" else data_file(tmp_path, 3, name))
    run = Run(tmp_path)
    resumed = assert_is(run.resume(), 2)
    assert [each.ref.step for each in resumed.skipped] == [3]
    assert re.search(reason, resumed.describe())
    # the step that was lost is done again, saved again, and is then the newest
    run.save(3)
    assert assert_is(Run(tmp_path).resume(), 3).skipped == []


def test_all_damaged(tmp_path: Path) -> None:
    Run(tmp_path).save(1, 2)
    for step in (1, 2):
        flip(data_file(tmp_path, step))
    run = Run(tmp_path)
    assert run.resume() is None
    assert "STARTING FRESH" in run.said[0] and "step 1: " in run.said[0] and "step 2: " in run.said[0]
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        Run(tmp_path, resume="must").resume()
    run.save(1)  # the fresh run's own, newer than the damaged step 2
    assert_is(Run(tmp_path).resume(), 1)


def test_modes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Run(tmp_path, resume="must").resume()
    Run(tmp_path).save(1, 5)
    fresh = Run(tmp_path, resume="never")
    assert fresh.resume() is None
    fresh.save(1)  # an abandoned run's step 5 must not win over this
    assert_is(Run(tmp_path).resume(), 1)


def test_resume_from_a_path(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "checkpoints", tmp_path / "new" / "checkpoints"
    Run(old).save(1, 2)
    one = data_file(old, 1).parent
    marker = old / "commit/e000000-s0000000001.json"
    for path, step in ((old, 2), (old.parent, 2), (one, 1), (marker, 1), (f"file://{old}", 2)):
        run = Run(new, resume=str(path))
        assert_is(run.resume(), step)
        shutil.rmtree(new, ignore_errors=True)
        run.save(step)  # the new folder does not have it yet
        assert set(committed(new)) == {step}
    before = set(committed(old))
    Run(new, resume=str(old), keep_last=1).save(7, 8, 9)
    assert set(committed(old)) == before  # another run's checkpoints are not ours to remove
    with pytest.raises(UserError, match="no such path; use auto, must, never"):
        Run(new, resume=str(tmp_path / "absent")).resume()
    with pytest.raises(UserError, match="holds no checkpoints"):
        Run(new, resume=str(tmp_path)).resume()
    with pytest.raises(UserError, match="only a local path"):
        Run(new, resume="s3://bucket/run").resume()


def test_going_back_within_a_run(tmp_path: Path) -> None:
    Run(tmp_path).save(1, 2, 3)
    run = Run(tmp_path, resume=str(data_file(tmp_path, 1).parent))
    assert_is(run.resume(), 1)
    run.save(2)
    assert_is(Run(tmp_path).resume(), 2)  # this one, not the step 3 that was left behind


def test_retention_keeps_the_newest_and_the_one_resumed_from(tmp_path: Path) -> None:
    Run(tmp_path, keep_last=2).save(1, 2, 3, 4)
    assert set(committed(tmp_path)) == {3, 4}
    assert {p.name for p in (tmp_path / "ckpt").iterdir()} == {"s0000000003", "s0000000004"}
    run = Run(tmp_path, keep_last=1)
    assert_is(run.resume(), 4)
    run.save(5, 6, 7)
    assert set(committed(tmp_path)) == {4, 7}


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    Run(tmp_path, keep_last=4).save(1, 2, 3, 4)
    flip(data_file(tmp_path, 3))
    flip(data_file(tmp_path, 4))
    run = Run(tmp_path, keep_last=2)
    assert_is(run.resume(), 2)
    run.save(5)
    left = {p.name for p in (tmp_path / "commit").iterdir()}
    assert left == {"e000001-s0000000005.json", *(f"e000000-s000000000{s}.json" for s in (2, 3, 4))}
    run.save(6)
    left = {p.name for p in (tmp_path / "commit").iterdir()}
    assert left == {"e000001-s0000000005.json", "e000001-s0000000006.json", "e000000-s0000000002.json"}


def test_leftovers_of_killed_saves_go(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2)
    run.save(10)
    for prefix in (
        "s0000000005/e000000-aaaaaaaa",
        "s0000000010/e000000-bbbbbbbb",
        "s0000000099/e000000-cccccccc",
    ):
        (tmp_path / "ckpt" / prefix).mkdir(parents=True, exist_ok=True)
        (tmp_path / "ckpt" / prefix / "rank00000.safetensors").write_bytes(b"half")
    (tmp_path / "tmp" / "ckpt+s0000000005+e000000-aaaaaaaa+rank00000.safetensors").write_bytes(b"half")
    (tmp_path / "tmp" / "somebody's file").write_bytes(b"")
    run.save(20)
    kept = {p.name for p in (tmp_path / "ckpt").iterdir()}
    assert kept == {"s0000000010", "s0000000020", "s0000000099"}  # the last could be in the making
    assert set(committed(tmp_path)) == {10, 20}
    assert len(list((tmp_path / "ckpt/s0000000010").iterdir())) == 1
    assert [p.name for p in (tmp_path / "tmp").iterdir()] == ["somebody's file"]


def test_a_kill_between_marker_and_data_leaves_rubbish_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(1)
    monkeypatch.setattr(run.manager.storage, "delete_tree", lambda prefix: (_ for _ in ()).throw(OSError("killed")))
    run.save(2)
    assert "could not be removed: OSError: killed" in run.said[0]
    assert set(committed(tmp_path)) == {2} and data_file(tmp_path, 1).exists()
    monkeypatch.undo()
    run.save(3)
    assert {p.name for p in (tmp_path / "ckpt").iterdir()} == {"s0000000003"}


def test_failed_saves_are_reported_then_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, max_failed_saves=2)
    run.save(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manager_module, "write_rank", full)
    args = ([], {}, {})
    assert run.manager.save(2, *args) is False
    assert "checkpoint of step 2 failed (1 in a row): rank 0: OSError" in run.said[0]
    assert str(committed(tmp_path)[1]) in run.said[0]
    monkeypatch.undo()
    run.save(3)  # success starts the count anew
    monkeypatch.setattr(manager_module, "write_rank", full)
    assert run.manager.save(4, *args) is False
    with pytest.raises(CheckpointError, match=r"step 5 failed \(2 in a row\).*last good one is .*s0000000003"):
        run.manager.save(5, *args)
    assert run.manager.last_good is not None and run.manager.last_good.step == 3
    assert set(committed(tmp_path)) == {1, 3}


def test_no_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(manager_module, "free_bytes", lambda folder: 1000)
    assert run.manager.save(1, cut(whole(1), 0, 1), {}, {}) is False
    assert f"not enough space for a checkpoint at {tmp_path}" in run.said[0] and "0.000 GB free" in run.said[0]
    assert list(tmp_path.rglob("*")) == []


def test_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.manager.save(1, [], {}, {"a": {"b": torch.zeros(1)}}) is False
    assert "state.a.b: cannot be kept as JSON: Tensor" in run.said[0]


def test_two_writers_of_one_folder_are_noticed(tmp_path: Path) -> None:
    first, second = Run(tmp_path), Run(tmp_path)
    assert first.resume() is None and second.resume() is None
    first.manager._epoch = second.manager._epoch = 0  # both looked before either saved
    first.save(1)
    assert second.manager.save(1, [], {}, {}) is False
    assert "is another run writing to the same folder?" in second.said[0]
    assert_is(Run(tmp_path).resume(), 1)


def test_what_cannot_be_read_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(tmp_path).save(1, 2)
    real = Path.open

    def denied(self: Path, *args: object, **kwargs: object) -> object:
        if self.name == "rank00000.safetensors":
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointError, match="not taken for a damaged or missing checkpoint"):
        Run(tmp_path).resume()


def test_a_newer_format_is_not_stepped_over(tmp_path: Path) -> None:
    Run(tmp_path).save(1, 2)
    (tmp_path / "commit/e000000-s0000000002.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match="reads formats up to 1"):
        Run(tmp_path).resume()


def test_rank_tensors_only_for_the_same_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save(1)
    monkeypatch.setattr(manager_module.dist, "gather_objects", lambda obj: [obj])
    monkeypatch.setattr(manager_module.dist, "broadcast_object", lambda obj: obj)
    monkeypatch.setattr(manager_module.dist, "world_size", lambda: 2)
    resumed = Run(tmp_path).resume()
    assert resumed is not None and resumed.rank_tensors is None and resumed.world_size == 1


def test_due_by_steps(tmp_path: Path) -> None:
    manager = Run(tmp_path, every_steps=3).manager
    assert [step for step in range(10) if manager.due(step)] == [3, 6, 9]
    assert not any(Run(tmp_path, every_steps=None).manager.due(step) for step in range(10))


def test_due_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [1000.0], []
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(manager_module.dist, "broadcast_object", lambda obj: looks.append(now[0]) or obj)
    run = Run(tmp_path, every_steps=None, every_minutes=10.0)
    due = []
    for step in range(1, 2001):
        now[0] += 1.0  # a step per second
        if run.manager.due(step):
            due.append(step)
            run.save(step)
    assert due == [600, 1200, 1800]
    assert len(looks) < 60  # 2000 steps: most ask nobody
