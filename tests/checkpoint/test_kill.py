"""SIGKILL at any moment of a save leaves the previous checkpoint whole and found."""

import json
import subprocess
import sys
from pathlib import Path

from clip_train.checkpoint import CheckpointConfig, CheckpointManager
from tests.checkpoint.parts import committed

TRIALS = 25


def test_kills_in_the_middle_of_saving(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.killed_saver", str(tmp_path), str(TRIALS), "0"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["mid_save"] >= TRIALS // 4, "too few kills hit a save: the test has lost its point"
    manager = CheckpointManager(CheckpointConfig(keep_last=2, orphan_grace_minutes=0.0), tmp_path)
    resumed = manager.resume()
    assert resumed is not None and resumed.step == answer["newest"] > 5
    # the next save clears up after all the kills
    assert manager.save(resumed.step + 1, [], {}, {}, wait=True)
    manager.close()
    with_files = {path.parent for path in (tmp_path / "ckpt").glob("*/*/*")}
    assert with_files == set(committed(tmp_path).values()) and len(with_files) <= 3
    assert not list((tmp_path / "tmp").iterdir())
