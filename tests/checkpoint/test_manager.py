"""One rank: what exists, what is damaged, what is kept."""

import os
import re
import shutil
import time
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from clip_train.checkpoint.manager import Saved
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.restore import Stores, open_read_only
from clip_train.errors import CheckpointError, UserError
from clip_train.storage.local import LocalStorage
from clip_train.trainer import Trainer
from tests.checkpoint.parts import committed
from tests.checkpoint.runs import Run, assert_holds, assert_is, data_file, flip, kill_writer


def test_save_then_resume(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.resume() is None and run.manager.last_good is None
    run.save(10)
    assert set(committed(tmp_path)) == {10}
    again = Run(tmp_path, resume="must")
    resumed = assert_is(again.resume(), 10)
    assert resumed.skipped == {} and "resuming from step 10" in resumed.describe()
    assert again.manager.last_good == (10, str(committed(tmp_path)[10])) == run.manager.last_good
    again.save(10)  # is there already: nothing to do
    assert (tmp_path / "commit/e000000-s0000000010.json").exists()
    assert len(list((tmp_path / "ckpt").glob("*/*"))) == 1


def test_without_its_commit_it_does_not_exist(tmp_path: Path) -> None:
    Run(tmp_path).save(1, 2)
    (tmp_path / "commit/e000000-s0000000002.json").unlink()
    resumed = assert_is(Run(tmp_path).resume(), 1)
    assert resumed.skipped == {}  # never was one
    (tmp_path / "commit/e000000-s0000000001.json").unlink()
    assert Run(tmp_path).resume() is None


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 1 to 3, to be copied."""
    folder = tmp_path_factory.mktemp("three")
    run = Run(folder)
    run.save(1, 2, 3)
    run.manager.close()
    return folder


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("rank00000.safetensors", flip, "does not match its sha256"),
        ("rank00000.safetensors", truncate, r"has \d+ bytes instead of \d+"),
        ("rank00000.safetensors", Path.unlink, "rank00000.safetensors is missing"),
        ("_MANIFEST.json", flip, "sha256 does not match"),
        ("_MANIFEST.json", truncate, "sha256 does not match"),
        ("_MANIFEST.json", Path.unlink, "_MANIFEST.json is missing"),
        ("commit", truncate, "is not readable"),
        ("commit", lambda path: path.write_bytes(b""), "is not readable"),
    ],
)
def test_damage_steps_back_and_says_why(
    three: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], reason: str
) -> None:
    folder = shutil.copytree(three, tmp_path / "copy")
    damage(
        folder / "commit/e000000-s0000000003.json"
        if name == "commit"
        else data_file(folder, 3, name)
    )
    resumed = assert_is(Run(folder).resume(), 2)
    assert [ref.step for ref in resumed.skipped] == [3]
    assert re.search(reason, resumed.describe())


@pytest.mark.parametrize("name", ["commit", "_MANIFEST.json"])
def test_a_step_whose_checkpoint_is_damaged_is_saved_again(
    three: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(three, tmp_path / "copy")
    truncate(
        folder / "commit/e000000-s0000000003.json"
        if name == "commit"
        else data_file(folder, 3, name)
    )
    run = Run(folder)
    assert_is(run.resume(), 2)
    run.save(3)
    assert assert_is(Run(folder).resume(), 3).skipped == {}


def test_all_damaged(tmp_path: Path) -> None:
    Run(tmp_path).save(1, 2)
    for step in (1, 2):
        flip(data_file(tmp_path, step))
    run = Run(tmp_path)
    assert run.resume() is None
    assert (
        "STARTING FRESH" in run.said[0] and "step 1: " in run.said[0] and "step 2: " in run.said[0]
    )
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        Run(tmp_path, resume="must").resume()
    run.save(1)  # the fresh run's own, newer than the damaged step 2
    assert_is(Run(tmp_path).resume(), 1)


def test_own_damage_is_named_before_a_start_from_another_run(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    Run(old).save(1, 2)
    Run(new, resume=str(old)).save(500)
    flip(data_file(new, 500))
    run = Run(new, resume=str(old))
    assert_is(run.resume(), 2)
    (said,) = run.said
    assert said.startswith(f"none of the checkpoints under {new} is whole:\n  step 500: ")
    assert said.endswith(f"\nSTARTING AGAIN from checkpoint.resume ({old})")
    for step in (1, 2):
        flip(data_file(old, step))
    run = Run(new, resume=str(old))
    with pytest.raises(CheckpointError, match=f"under {old} is whole"):
        run.resume()
    assert "step 500: " in run.said[0]


def test_a_damaged_step_is_called_that(three: Path, tmp_path: Path) -> None:
    """Not a place without checkpoints: the newest one there is whole."""
    folder = shutil.copytree(three, tmp_path / "copy")
    flip(data_file(folder, 1, "_MANIFEST.json"))
    stores = Stores(LocalStorage(folder), None)
    said = (
        rf"the checkpoint of step 1 under {folder} is damaged:\n  step 1: .* sha256 does not match"
    )
    for arguments in ({"step": 1}, {"only": CommitRef(0, 1)}):
        with pytest.raises(UserError, match=said):
            open_read_only(stores, **arguments)
    assert open_read_only(stores).step == 3
    with pytest.raises(UserError, match=r"no whole checkpoint was found .*\ntrain first"):
        open_read_only(Stores(LocalStorage(tmp_path), None))


def test_modes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint was found"):
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
        shutil.rmtree(new)
    before = set(committed(old))
    Run(new, resume=str(old), keep_last=1).save(7, 8, 9)
    assert set(committed(old)) == before  # another run's checkpoints are not ours to remove
    again = Run(new, resume=str(old))  # the same line once more, as a requeued job has it
    assert_is(again.resume(), 9)
    assert any("this run has checkpoints and continues from its own" in line for line in again.said)
    with pytest.raises(UserError, match="no such path; use auto, must, never"):
        Run(new, resume=str(tmp_path / "absent")).resume()
    with pytest.raises(UserError, match="holds no checkpoints"):
        Run(new, resume=str(tmp_path)).resume()


def test_a_run_does_not_go_back_to_its_own_older_checkpoint(tmp_path: Path) -> None:
    """A requeued job has the same line again: it would lose its work each time."""
    (tmp_path / "link").symlink_to(tmp_path)
    remote = f"{tmp_path}/link/store"
    Run(tmp_path / "run", remote=remote).save(1, 2, 3)
    one = data_file(tmp_path / "store", 1).parent
    for line in (
        one,
        tmp_path / "store/commit/e000000-s0000000001.json",
        data_file(tmp_path / "run", 1).parent,
    ):
        with pytest.raises(UserError, match=r"is a checkpoint of this run.* set another run\.name"):
            Run(tmp_path / "run", remote=remote, resume=str(line)).resume()
    branch = Run(tmp_path / "branch", resume=str(one))  # as the message says
    assert_is(branch.resume(), 1)
    for folder in ("run", "store"):
        for step in (2, 3):
            (tmp_path / folder / f"commit/e000000-s{step:010d}.json").unlink()
    assert_is(Run(tmp_path / "run", remote=remote, resume=str(tmp_path / "run")).resume(), 1)


def test_retention_keeps_the_newest_and_the_one_resumed_from(tmp_path: Path) -> None:
    Run(tmp_path, keep_last=2).save(1, 2, 3, 4)
    assert set(committed(tmp_path)) == {3, 4}
    assert {p.name for p in (tmp_path / "ckpt").iterdir()} == {"s0000000003", "s0000000004"}
    run = Run(tmp_path, keep_last=1)
    assert_is(run.resume(), 4)
    run.save(5, 6, 7)
    assert set(committed(tmp_path)) == {4, 7}


def test_leftovers_of_killed_saves_go_after_a_grace(tmp_path: Path) -> None:
    Run(tmp_path).save(10)
    run = Run(tmp_path, keep_last=2, orphan_seconds=600.0)
    assert_is(run.resume(), 10)
    for prefix, minutes in (
        ("s0000000005/e000000-1", 11),
        ("s0000000010/e000000-2", 11),
        ("s0000000099/e000000-1", 11),
        ("s0000000099/e000000-2", 2),  # its writer may not know yet that it has lost the lease
    ):
        (tmp_path / "ckpt" / prefix).mkdir(parents=True, exist_ok=True)
        age(tmp_path / "ckpt" / prefix / "rank00000.safetensors", minutes)
    age(tmp_path / "ckpt/s0000000005/e000000-1/.rank00001.safetensors.0123.part", 11)
    age(tmp_path / "ckpt/s0000000010/e000000-2/._MANIFEST.json.0123.part", 11)
    age(tmp_path / "ckpt" / "somebody's file", 11)
    run.save(20)
    kept = {p.parent.relative_to(tmp_path).as_posix() for p in (tmp_path / "ckpt").glob("*/*/*")}
    whole_ones = {p.relative_to(tmp_path).as_posix() for p in committed(tmp_path).values()}
    assert kept == whole_ones | {"ckpt/s0000000099/e000000-2"}
    assert set(committed(tmp_path)) == {10, 20}
    assert not (tmp_path / "ckpt/s0000000005").exists()
    assert (tmp_path / "ckpt" / "somebody's file").exists()


def age(path: Path, minutes: float) -> None:
    path.write_bytes(b"half")
    then = time.time() - 60 * minutes
    os.utime(path, (then, then))


def test_a_kill_between_marker_and_data_leaves_rubbish_only(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2)
    run.save(1, 2)
    (tmp_path / "commit/e000000-s0000000001.json").unlink()
    assert set(committed(tmp_path)) == {2} and data_file(tmp_path, 1).exists()
    run.save(3)
    assert {p.name for p in (tmp_path / "ckpt").iterdir()} == {"s0000000002", "s0000000003"}


def test_multiples_and_the_best_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1, keep_every=4, keep_best="top1")
    for step in range(1, 11):
        run.save(step)
        run.manager.note_metrics(step, {"top1": 0.9 if step == 6 else 0.1 * step / 10, "top5": 1.0})
    run.manager.note_metrics(10, {"top1": float("nan"), "top5": 1.0})
    run.manager.close()
    assert set(committed(tmp_path)) == {4, 8, 6, 10}
    again = Run(tmp_path, keep_last=1, keep_best="top1")
    resumed = again.resume()
    assert resumed is not None and resumed.step == 10
    again.save(11, 12)
    again.manager.close()
    assert set(committed(tmp_path)) == {6, 10, 12}  # the best of before, resumed from, newest
    run = Run(tmp_path, keep_last=1, keep_best="-loss")
    assert run.resume() is not None
    run.manager.begin()
    run.save(13)
    run.manager.note_metrics(13, {"loss": 2.0})
    run.save(14, 15)
    run.manager.close()
    assert set(committed(tmp_path)) == {12, 13, 15}  # resumed from, best, newest


def test_end_of_run_names_the_disk_if_the_last_upload_failed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run = Run(tmp_path / "local", remote=str(store))
    run.manager.begin()
    (store / "ckpt").touch()  # no folder can be made there
    parts = dict.fromkeys(("objective", "plan", "sizes", "learning_rate", "stop"), MagicMock())
    engine = MagicMock(device=torch.device("cpu"), **{"extra_state.return_value": {}})
    engine.state_fragments.return_value = []
    parts["objective"].state_dict.return_value = {}
    checkpoints = run.manager
    trainer = Trainer(engine, **parts, batches=[], steps=0, checkpoints=checkpoints, callbacks=[])
    with pytest.raises(CheckpointError, match="the last save failed") as caught:
        trainer.run()
    assert f"step 0 is committed ({committed(tmp_path / 'local')[0]})" in str(caught.value)


def test_failed_saves_are_reported_then_fatal(tmp_path: Path) -> None:
    run = Run(tmp_path, max_failed_saves=2)
    run.save(1)

    def save(step: int) -> Saved:
        return run.manager.save(step, [], {}, {}, wait=True)

    for step in (2, 4, 5):
        (tmp_path / "ckpt" / f"s{step:010d}").write_bytes(b"in the way")
    assert save(2) is Saved.FAILED
    assert "checkpoint of step 2 failed (1 in a row): FileExistsError" in run.said[0]
    assert str(committed(tmp_path)[1]) in run.said[0]
    run.save(3)  # success starts the count anew
    assert save(4) is Saved.FAILED
    with pytest.raises(
        CheckpointError, match=r"step 5 failed \(2 in a row\).*last good one is .*s0000000003"
    ):
        save(5)
    assert run.manager.last_good is not None and run.manager.last_good.step == 3
    assert set(committed(tmp_path)) == {1, 3}


def test_a_second_snapshot_of_a_step_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """The first one may be committed after all: its folder is never written with other bytes."""
    run = Run(tmp_path, orphan_seconds=3600.0)
    run.save(1)
    obstacle = tmp_path / "commit/e000000-s0000000002.json"
    obstacle.mkdir()
    assert not run.start(2, wait=True)
    first = data_file(tmp_path, 2)
    content = first.read_bytes()
    obstacle.rmdir()
    assert run.start(2, wait=True, padding=torch.zeros(7))
    assert committed(tmp_path)[2] != first.parent and first.read_bytes() == content


def test_checkpoint_of_another_run_of_the_same_name_is_ignored(
    tmp_path: Path,
) -> None:
    """The bucket and rank 0's folder were emptied, another node's disk was not: numbers begin anew."""
    run = Run(tmp_path, resume="never")
    run.start(1, wait=True)
    left = data_file(tmp_path, 1)
    name, content = left.relative_to(tmp_path), left.read_bytes()
    manifest = {path.name: path.read_bytes() for path in left.parent.iterdir() if path != left}
    run.manager.close()
    shutil.rmtree(tmp_path)
    for each, data in {left.name: content[:-4] + b"old!", **manifest}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name.parent / each).write_bytes(data)
    again = Run(tmp_path, resume="never", orphan_seconds=3600.0)
    again.save(1)
    assert data_file(tmp_path, 1).read_bytes() == content


def test_the_outcome_is_heard_at_a_later_step(tmp_path: Path) -> None:
    run = Run(tmp_path, max_failed_saves=1)
    assert run.start(1)
    run.until(lambda: "checkpoint_step" in run.numbers)
    assert run.numbers["checkpoint_step"] == 1 and set(committed(tmp_path)) == {1}
    (tmp_path / "ckpt/s0000000002").write_bytes(b"in the way")
    assert run.start(2)  # on its way
    with pytest.raises(CheckpointError, match=r"step 2 failed \(1 in a row\)"):
        run.until(lambda: False)


def test_a_snapshot_is_not_overwritten_while_it_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=50)
    padding = torch.zeros(1_000_000)
    for step in range(1, 6):
        run.until(lambda step=step: run.start(step, padding=padding))  # as soon as one may
    run.save(6)
    assert not any("failed" in line for line in run.said), run.said
    steps = committed(tmp_path)
    assert set(steps) == {1, 2, 3, 4, 5, 6}
    for step, folder in steps.items():
        resumed = Run(tmp_path / "other", resume=str(folder)).resume()
        assert resumed is not None
        assert_holds(resumed, step)


def test_a_checkpoint_writer_that_dies_is_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    kill_writer()
    run.save(2)
    (line,) = run.said
    assert line == "the checkpoint writer has ended (signal 9)"
    assert_is(Run(tmp_path).resume(), 2)


def test_no_space_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1000))
    assert run.start(1) is False
    assert (
        f"not enough space for a checkpoint at {tmp_path}" in run.said[0]
        and "0.000 GB free" in run.said[0]
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["lease", "e000000.json"]


def test_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.manager.save(1, [], {}, {"a": {"b": torch.zeros(1)}}) is Saved.FAILED
    assert "Object of type Tensor is not JSON serializable" in run.said[0]


def test_who_began_last_may_commit(tmp_path: Path) -> None:
    zombie, successor = Run(tmp_path), Run(tmp_path)
    assert zombie.resume() is None and successor.resume() is None
    zombie.save(1)
    successor.manager.begin()
    with pytest.raises(
        CheckpointError,
        match=r"process \d+ on .* writes to .* now \(its epoch is 1, this process's is 0",
    ):
        zombie.manager.save(2, [], {}, {}, wait=True)
    assert set(committed(tmp_path)) == {1}
    successor.save(1)  # although the zombie has done the same step
    assert len(list((tmp_path / "commit").iterdir())) == 2
    assert_is(Run(tmp_path).resume(), 1)


def test_what_cannot_be_read_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path).save(1, 2)
    real = Path.open

    def denied(self: Path, *args: object, **kwargs: object) -> object:
        if self.name == "rank00000.safetensors":
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointError, match="not taken for a damaged or missing checkpoint"):
        Run(tmp_path).resume()


def test_due_by_steps(tmp_path: Path) -> None:
    manager = Run(tmp_path, every_steps=3).manager
    assert [step for step in range(10) if manager.due(step)] == [3, 6, 9]
    assert not any(Run(tmp_path, every_steps=None).manager.due(step) for step in range(10))


def test_due_by_minutes(tmp_path: Path) -> None:
    now, looks = 1000.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    run = Run(tmp_path, clock=clock, every_steps=None, every_minutes=10.0)
    due = []
    for step in range(1, 2001):
        now += 1.0  # a step per second
        if run.manager.due(step):
            due.append(step)
            run.save(step)
    assert due == [600, 1200, 1800]
    assert looks < 60  # of 2000 steps: after each look the ranks communicate
