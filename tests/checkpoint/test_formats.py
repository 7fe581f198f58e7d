"""Checkpoints of other versions of this program; the list of what a folder holds."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from clip_train.checkpoint.restore import Stores, open_read_only
from clip_train.errors import CheckpointError
from clip_train.storage.local import LocalStorage
from launcher.cli.main import main
from tests.checkpoint.parts import bits, rewrite, whole
from tests.checkpoint.runs import Run, assert_is, data_file, flip


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_format_is_no_fresh_start(tmp_path: Path, version: int) -> None:
    """clip-train 0.1's checkpoints are not read any more; nor are they taken for damage."""
    Run(tmp_path).save(1, 2)
    rewrite(tmp_path, 2, version)
    with pytest.raises(
        CheckpointError, match=f"format {version}, .* reads format 3: .*model.init_from"
    ):
        Run(tmp_path).resume()
    assert_is(
        Run(
            tmp_path / "new", resume=str(next((tmp_path / "commit").glob("*-s0000000001.json")))
        ).resume(),
        1,
    )


@pytest.mark.parametrize("where", ["marker", "manifest"])
def test_a_newer_format_names_version_and_remedy(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture
) -> None:
    Run(tmp_path).save(1, 2)
    rewrite(tmp_path, 2, 4)
    if where == "manifest":  # the marker could be the same as ever
        (marker,) = (tmp_path / "commit").glob("*-s0000000002.json")
        commit = {**json.loads(marker.read_text()), "format": 3}
        del commit["sha256"]
        body = json.dumps(commit, sort_keys=True, separators=(",", ":")).encode()
        marker.write_text(json.dumps({**commit, "sha256": hashlib.sha256(body).hexdigest()}))
    says = (
        "format 4, and this clip-train reads format 3: update clip-train, or name an older "
        "checkpoint"
    )
    with pytest.raises(CheckpointError, match=says):
        Run(tmp_path).resume()
    older = Run(
        tmp_path / "new", resume=str(next((tmp_path / "commit").glob("*-s0000000001.json")))
    )
    assert_is(older.resume(), 1)  # as the remedy says
    # the listing is not stopped by it, and an older program's retention leaves it alone
    assert main(["checkpoints", str(tmp_path), "--json"]) == 1
    newest, oldest = json.loads(capsys.readouterr().out)["checkpoints"]
    assert "format 4" in newest["problem"] and oldest["problem"] is None
    fresh = Run(tmp_path, resume="never", keep_last=1)
    fresh.save(3)
    fresh.manager.close()
    assert len(list((tmp_path / "commit").glob("*.json"))) >= 1


def test_the_listing_tells_everything_apart(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def listed(*, verify: bool) -> tuple[int, dict[int, dict]]:
        status = main(["checkpoints", str(tmp_path), "--json", *["--verify"] * verify])
        told = json.loads(capsys.readouterr().out)["checkpoints"]
        return status, {line["step"]: line for line in told}

    (tmp_path / "commit").mkdir()
    assert listed(verify=False) == (0, {})
    run = Run(tmp_path, keep_last=9)
    run.save(1, 2, 3, 4, 5, 6)
    run.manager.close()
    assert listed(verify=True)[0] == 0
    # what is not ours is nobody's business
    for name in (
        "README.md",
        "commit/notes.txt",
        "ckpt/mine/x.bin",
        "ckpt/s0000000001/mine/y",
        "latest.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("foreign")
    status, lines = listed(verify=True)
    assert (
        status == 0
        and set(lines) == {1, 2, 3, 4, 5, 6}
        and all(line["problem"] is None for line in lines.values())
    )

    flip(data_file(tmp_path, 1))
    data_file(tmp_path, 2).unlink()
    with data_file(tmp_path, 3).open("ab") as f:
        f.write(b"x")
    data_file(tmp_path, 4, "_MANIFEST.json").unlink()
    next((tmp_path / "commit").glob("*-s0000000005.json")).write_text("{")
    shutil.copytree(data_file(tmp_path, 6).parent, tmp_path / "ckpt/s0000000007/e000000-0123abcd")
    status, lines = listed(verify=False)
    assert status == 1 and set(lines) == {1, 2, 3, 4, 5, 6}, "7 was never committed"
    reasons = {
        2: "is missing",
        3: "bytes instead of",
        4: "_MANIFEST.json is missing",
        5: "is not readable",
    }
    for step, reason in reasons.items():
        assert reason in lines[step]["problem"], lines[step]
    assert lines[6]["problem"] is lines[1]["problem"] is None
    status, lines = listed(verify=True)
    assert status == 1 and "sha256 does not match" in lines[1]["problem"]
    # as a table, too
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "complete, every byte verified" in out and "is not readable" in out

    # an attempt without a commit is no fault
    for step in range(1, 6):
        next((tmp_path / "commit").glob(f"*-s{step:010d}.json")).unlink()
    status, lines = listed(verify=True)
    assert status == 0 and set(lines) == {6} and lines[6]["problem"] is None


def test_read_only_open_writes_nothing_and_reads_a_complete_copy(tmp_path: Path) -> None:
    here, store = tmp_path / "run", tmp_path / "store"
    run = Run(here, remote=str(store))
    run.save(1, 2)
    run.manager.close()

    def look() -> int:
        """How many bytes of the data come from the store."""
        before = sorted((path, path.stat().st_mtime_ns) for path in here.rglob("*"))
        remote = Counting(store)
        found = open_read_only(Stores(LocalStorage(here), remote))
        assert found.step == 2
        like, read = found.reader.open_weights()
        for key, tensor in ((name, read(name)) for name in like):
            assert bits(tensor) == bits(whole(2)[key, "param"])
        assert sorted((path, path.stat().st_mtime_ns) for path in here.rglob("*")) == before
        return remote.num_bytes

    assert look() == 0
    data_file(here, 2).unlink()
    assert look() > 0


class Counting(LocalStorage):
    """A folder that stands for a remote store."""

    num_bytes = 0

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None:
            self.num_bytes += end - start
        return super().read_bytes(name, start, end)
