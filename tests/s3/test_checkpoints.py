"""Checkpoints with a remote store: what is lost when what breaks, and what the user is told."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint import CheckpointConfig, CheckpointManager, Resumed, client
from clip_train.errors import CheckpointError, UserError
from tests.checkpoint.parts import bits, committed, cut, rewrite, whole
from tests.ranks import run_ranks
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy

RUNS: list[Run] = []


@pytest.fixture(autouse=True)
def nothing_left_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # one operation's patience, in the saver's process too
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "1")
    yield
    while RUNS:
        RUNS.pop().manager.close()


class Run:
    """One process's life on one machine's disk."""

    def __init__(self, folder: Path, url: str, **config: Any) -> None:
        self.said: list[str] = []
        config = {"grace_seconds": 30.0, "orphan_grace_minutes": 0.0, "remote": url, "max_failed_saves": 9, **config}
        self.manager = CheckpointManager(CheckpointConfig(**config), folder, log=self.said.append)
        self.folder = folder
        RUNS.append(self)

    def save(self, step: int, *, wait: bool = True, padding: int = 0) -> bool:
        own = {"rng": torch.full((4,), step % 256, dtype=torch.uint8), "padding": torch.zeros(padding)}
        return self.manager.save(step, cut(whole(step), 0, 1), own, {"step": step, "cursors": {0: step}}, wait=wait)

    def resume(self) -> Resumed | None:
        return self.manager.resume()

    def hurry(self) -> None:
        """Do not wait for what will not come."""
        self.manager.config = self.manager.config.model_copy(update={"grace_seconds": 0.5})

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.said
            self.manager.poll()
            time.sleep(0.01)


def assert_is(resumed: Resumed | None, step: int) -> Resumed:
    assert resumed is not None and (resumed.step, resumed.state["cursors"]) == (step, {0: step}), resumed
    for (name, slot), tensor in whole(step).items():
        assert bits(resumed.reader.read(name, slot, 0, tensor.numel())) == bits(tensor)
    assert resumed.rank_tensors is not None and resumed.rank_tensors["rng"].tolist() == [step % 256] * 4
    return resumed


def data_key(view: Bucket, step: int) -> str:
    (key,) = [key for key in view.keys(f"run/ckpt/s{step:010d}/") if key.endswith(".safetensors")]
    return key


def test_it_is_in_both_places_and_comes_back_from_either(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path / "a", url)
    run.manager.preflight()
    assert run.resume() is None
    assert run.save(1) and run.save(2)
    assert set(committed(tmp_path / "a")) == {1, 2} and len(view.commits("run")) == 2
    assert view.incomplete("run") == []
    assert run.said == [f"waiting up to 30 s for step {step} to be committed at {url}" for step in (1, 2)]
    assert run.manager.last_good is not None and run.manager.last_good.path.startswith(f"{url}/ckpt/s0000000002/")

    again = assert_is(Run(tmp_path / "b", url).resume(), 2)  # another machine
    assert again.fetched > 0 and f"source         {url}/ckpt/" in again.describe() and "MB fetched" in again.describe()
    assert set(committed(tmp_path / "b")) == {2}  # from now on it is there too

    proxy.requests.clear()
    warm = assert_is(Run(tmp_path / "a", url).resume(), 2)
    assert warm.fetched == 0 and not [each for each in proxy.requests if ".safetensors" in each and "GET" in each]
    assert view.keys("run/preflight") == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_a_damaged_local_file_is_fetched_anew(tmp_path: Path, url: str) -> None:
    run = Run(tmp_path, url)
    assert run.save(1)
    (local,) = committed(tmp_path).values()
    flip(local / "rank00000.safetensors")
    resumed = assert_is(Run(tmp_path, url).resume(), 1)
    assert resumed.fetched > 0 and resumed.skipped == [] and set(committed(tmp_path)) == {1}


@pytest.mark.parametrize(
    "damage,reason",
    [
        ("flipped", "does not have its sha256"),
        ("deleted", "is missing"),
        ("cut", r"bytes instead of"),
        ("marker", "is not readable"),
        ("manifest", "does not have the sha256 in its commit"),
    ],
)
def test_damage_in_the_store_steps_back_and_says_why(
    tmp_path: Path, url: str, view: Bucket, damage: str, reason: str
) -> None:
    run = Run(tmp_path / "a", url)
    assert run.save(1) and run.save(2)
    key = data_key(view, 2)
    marker, manifest = list(view.commits("run"))[-1], key.replace("rank00000.safetensors", "_MANIFEST.json")
    content = view.get(key)
    if damage == "flipped":
        view.put(key, content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "deleted":
        view.delete(key)
    elif damage == "cut":
        view.put(key, content[:-1])
    else:
        broken = marker if damage == "marker" else manifest
        view.put(broken, view.get(broken).replace(b"2", b"3", 1))
    elsewhere = Run(tmp_path / "b", url)
    resumed = assert_is(elsewhere.resume(), 1)
    assert [each.ref.step for each in resumed.skipped] == [2]
    assert re.search(reason, resumed.describe()), resumed.describe()
    assert_is(Run(tmp_path / "a", url).resume(), 2)  # this disk still has it
    assert elsewhere.save(2)
    assert assert_is(Run(tmp_path / "c", url).resume(), 2).skipped == []


def test_a_bit_that_flips_on_the_way_is_read_again(tmp_path: Path, url: str, proxy: FaultyProxy) -> None:
    assert Run(tmp_path / "a", url).save(1)
    for key in ("safetensors", "MANIFEST", "commit"):
        proxy.faults = [Fault("flip", times=1, key=key)]
        assert assert_is(Run(tmp_path / key, url).resume(), 1).skipped == []
        assert proxy.fired == 1


def test_a_marker_that_the_listing_hides_is_found_by_the_hint(tmp_path: Path, url: str, view: Bucket) -> None:
    from clip_train.checkpoint import marks
    from clip_train.storage import Entry, open_storage

    run = Run(tmp_path, url)
    assert run.save(1) and run.save(2)
    storage = open_storage(url)
    listed = storage.list
    storage.list = lambda prefix="": [e for e in listed(prefix) if "s0000000002" not in e.name]  # type: ignore[method-assign]
    assert [ref.step for ref in marks.list_commits(storage)] == [2, 1]
    assert isinstance(listed("commit")[0], Entry)


def test_a_store_that_is_down_does_not_hold_up_training(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path, url)
    run.manager.begin()
    proxy.faults = [Fault("status", method="PUT|POST", key="ckpt/")]
    assert run.save(1, wait=False)
    run.until(lambda: any("trying again" in line for line in run.said))
    assert "SlowDown" in run.said[-1] and set(committed(tmp_path)) == {1} and view.commits("run") == {}
    assert run.manager.last_good is not None and run.manager.last_good.step == 1  # on the disk
    proxy.faults = []
    run.until(lambda: len(view.commits("run")) == 1)
    assert view.incomplete("run") == []


def test_a_newer_save_overtakes_one_that_cannot_be_uploaded(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path, url)
    run.manager.begin()
    proxy.faults = [Fault("status", method="PUT|POST", key="ckpt/s0000000001")]
    assert run.save(1, wait=False)
    run.until(lambda: any("trying again" in line for line in run.said))
    assert run.save(2)
    assert any("step 1 failed (1 in a row)" in line and "overtaken by step 2" in line for line in run.said)
    assert [marker["step"] for marker in view.commits("run").values()] == [2]
    assert_is(Run(tmp_path / "b", url).resume(), 2)


def test_a_bucket_that_goes_away_stops_the_run_after_some_misses(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path, url, max_failed_saves=2)
    assert run.save(1)
    run.hurry()
    proxy.faults = [Fault("status", method="PUT|POST|GET|HEAD", key="", code=404, s3code="NoSuchBucket")]
    for step in (2, 3, 4):
        run.save(step, wait=False)
        time.sleep(0.3)
    stops = r"\(2 in a row\).*create the bucket.*; the last good one is .*s000000000[34]"
    with pytest.raises(CheckpointError, match=stops):
        run.until(lambda: False)
    proxy.faults = []
    assert_is(Run(tmp_path, url).resume(), 4)  # what the disk has


def test_at_the_end_it_waits_no_longer_than_the_grace(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path, url, grace_seconds=4.5)  # enough for the disk, on a busy machine too
    run.manager.begin()
    proxy.faults = [Fault("hang", method="PUT|POST", key="ckpt/")]
    assert run.save(1, wait=False)
    run.until(lambda: run.manager.last_good is not None)  # on the disk, however slow that is
    began = time.monotonic()
    assert run.save(1) is False
    run.manager.close()
    assert time.monotonic() - began < 18
    waiting, abandoned = (line for line in run.said if "trying again" not in line)
    assert re.fullmatch(rf"waiting up to \d s for step 1 to be committed at {url}", waiting)
    assert re.search(r"the save of step 1 was abandoned after \d s; the last good one is", abandoned)
    assert view.commits("run") == {} and set(committed(tmp_path)) == {1}
    proxy.faults = []
    later = Run(tmp_path, url)
    assert_is(later.resume(), 1)
    assert later.save(1)  # it is not in the store yet
    assert len(view.commits("run")) == 1


def test_a_zombie_cannot_commit_over_its_successor(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    zombie = Run(tmp_path / "a", url)
    assert zombie.save(1)
    proxy.faults = [Fault("status", method="PUT|POST", key=r"ckpt/s0000000002/.*safetensors", times=4)]
    assert zombie.save(2, wait=False)  # its upload is delayed
    successor = Run(tmp_path / "b", url)
    assert_is(successor.resume(), 1)
    successor.manager.begin()
    with pytest.raises(CheckpointError, match=r"writes to s3://.* now \(its epoch is 1, this process's is 0\)"):
        zombie.until(lambda: False)
    assert successor.save(2)
    assert [(m["epoch"], m["step"]) for m in view.commits("run").values()] == [(0, 1), (1, 2)]
    assert_is(Run(tmp_path / "c", url).resume(), 2)


def test_what_is_said_to_hold_without_conditional_writes_does(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    deaf = Fault("unconditional", method="PUT", key="")
    proxy.faults = [deaf]
    old, new = Run(tmp_path / "old", url), Run(tmp_path / "new", url)
    assert old.save(1)
    assert_is(new.resume(), 1)
    new.manager.begin()
    with pytest.raises(CheckpointError, match=r"writes to s3://.* now"):
        old.save(2, wait=False)
        old.until(lambda: False)
    assert new.save(2) and view.incomplete("run") == []
    proxy.faults = [Fault("hide", method="GET", key="", hidden="lease/"), deaf]
    twins = [Run(tmp_path / name, url) for name in ("one", "two")]  # neither sees that the other has begun
    for twin in twins:
        assert_is(twin.resume(), 2)
        twin.manager.begin()
    proxy.faults = [deaf]
    with pytest.raises(CheckpointError, match=r"writes to s3://.* now \(its epoch is 2, this process's is 2\)"):
        twins[0].save(3)
    for step in (3, 4):
        assert twins[1].save(step)
        assert view.incomplete("run") == [] and view.newest_step("run") == step


def test_the_answer_to_the_commit_is_lost(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path, url)
    proxy.faults = [Fault("lost", method="PUT", key="run/commit/", times=1)]
    assert run.save(1) and proxy.fired == 1
    assert [line for line in run.said if "waiting" not in line] == [] and view.incomplete("run") == []


def test_retention_and_orphans(tmp_path: Path, url: str, view: Bucket) -> None:
    import s3fs

    view.put("run/ckpt/s0000000008/e000000-0123abcd/rank00000.safetensors", b"half")
    view.put("run/ckpt/s0000000009/e000000-0123abcd/_rank00000.json", b"half")
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.call_s3("create_multipart_upload", Bucket=view.name, Key="run/ckpt/x")
    careful = Run(tmp_path / "a", url, keep_last=1, orphan_grace_minutes=10.0)
    assert careful.save(1) and careful.save(2)
    careful.until(lambda: len(view.commits("run")) == 1)
    time.sleep(0.5)
    assert len(view.orphans("run")) == 3  # their writer may not know yet that it has lost the lease
    time.sleep(1.0)  # the least age of an upload
    assert_is(careful.resume(), 2)
    run = Run(tmp_path / "a", url, keep_last=1)
    assert_is(run.resume(), 2)
    assert run.save(3) and run.save(4)
    run.until(lambda: not view.orphans("run") and len(view.commits("run")) == 2)
    assert sorted(m["step"] for m in view.commits("run").values()) == [2, 4]  # the one resumed from, the newest


def test_preflight_says_what_to_fix(tmp_path: Path, url: str, view: Bucket, proxy, monkeypatch) -> None:
    def says(pattern: str, fault: Fault | None, where: str = url, kind: type = UserError) -> None:
        proxy.faults = [fault] if fault else []
        with pytest.raises(kind, match=pattern):
            Run(tmp_path, where).manager.preflight()
        proxy.faults = []

    any_method = "GET|PUT|HEAD|DELETE"
    says("cannot be listed.*create the bucket", None, "s3://nowhere/run")
    denied = {"code": 403, "s3code": "AccessDenied", "key": "preflight|list"}
    says("cannot be written to: .*AccessDenied", Fault("status", method="PUT", **denied))
    says("cannot be read: .*AccessDenied", Fault("status", method="GET", **denied))
    says(r"cannot have files deleted \(retention does\)", Fault("status", method="DELETE", **denied))
    says("clock", Fault("status", method=any_method, key="", code=403, s3code="RequestTimeTooSkewed"))
    says("have expired: renew", Fault("status", method=any_method, key="", code=400, s3code="ExpiredToken"))
    says("SlowDown", Fault("status", method=any_method, key=""), kind=CheckpointError)
    assert view.keys("run/commit") == []

    proxy.faults = [Fault("unconditional", method="PUT", key="preflight")]
    run = Run(tmp_path, url)
    run.manager.preflight()
    assert "ignores If-None-Match" in run.said[0] and "What still holds" in run.said[0]
    proxy.faults = [Fault("skew", key="", method="GET")]
    run = Run(tmp_path, url)
    run.manager.preflight()
    assert "set this machine's clock" in run.said[0]


def test_what_cannot_be_read_is_not_taken_for_missing(tmp_path: Path, url: str, proxy) -> None:
    assert Run(tmp_path / "a", url).save(1)
    for key in ("", "MANIFEST", "safetensors"):
        proxy.faults = [Fault("status", method="GET|HEAD", key=key, code=403, s3code="AccessDenied")]
        with pytest.raises(CheckpointError, match="not taken for a damaged or missing checkpoint"):
            Run(tmp_path / f"b{key}", url).resume()


def test_resume_from_a_url(tmp_path: Path, url: str, view: Bucket) -> None:
    old = Run(tmp_path / "old", url, keep_last=5)
    assert old.save(1) and old.save(2)
    other = f"{view.url}/other"
    markers = [f"{view.url}/{key}" for key in view.commits("run")]
    attempt = f"{view.url}/{data_key(view, 1).rsplit('/', 1)[0]}"
    for place, step in ((url, 2), (markers[0], 1), (attempt, 1), (f"{url}/", 2)):
        run = Run(tmp_path / f"new{step}{len(place)}", other, resume=place)
        assert_is(run.resume(), step)
    before = view.keys("run/")
    assert run.save(3)
    assert view.keys("run/") == before and [m["step"] for m in view.commits("other").values()] == [3]
    with pytest.raises(UserError, match="holds no checkpoints"):
        Run(tmp_path / "x", other, resume=f"{view.url}/nothing").resume()


def test_no_secret_is_told_or_kept(tmp_path: Path, url: str, view: Bucket, proxy, monkeypatch, capfd) -> None:
    view.server.add_key("AKIASECRETKEY", "TOPSECRETVALUE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRETKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TOPSECRETVALUE")
    run = Run(tmp_path, url)
    assert run.save(1)
    run.hurry()
    proxy.faults = [Fault("status", method="PUT|GET", key="", code=403, s3code="InvalidAccessKeyId")]
    run.save(2, wait=False)
    run.until(lambda: any("step 2: PermissionError" in line and "trying again" in line for line in run.said))
    told = "\n".join(run.said) + "".join(capfd.readouterr())
    kept = b"".join(view.get(key) for key in view.keys("run/")) + b"".join(
        Path(root, name).read_bytes() for root, _, names in os.walk(tmp_path) for name in names
    )
    for secret in ("AKIASECRETKEY", "TOPSECRETVALUE"):
        assert secret not in told and secret.encode() not in kept


def test_a_survey_tells_what_is_there(tmp_path: Path, url: str, view: Bucket) -> None:
    from clip_train.checkpoint.opening import open_to_look, places_of
    from clip_train.checkpoint.retention import Policy
    from clip_train.checkpoint.survey import survey

    run = Run(tmp_path, url, keep_last=3, orphan_grace_minutes=10.0)
    assert run.save(1) and run.save(2) and run.save(3)
    key = data_key(view, 2)
    content = view.get(key)
    view.put(key, content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    view.put("run/ckpt/s0000000009/e000000-0123abcd/rank00000.safetensors", b"half")
    places, _ = places_of(url)
    lines = survey(places, Policy(keep_last=1), verify=False)
    assert [(line.step, line.problem is None) for line in lines] == [(3, True), (2, True), (1, True), (9, False)]
    lines = survey(places, Policy(keep_last=1), verify=True)
    assert [(line.step, line.problem is None) for line in lines] == [(3, True), (2, False), (1, True), (9, False)]
    assert "sha256" in str(lines[1].problem) and "never committed" in str(lines[3].problem)
    assert [line.future[:5] for line in lines] == ["stays", "goes ", "goes ", "goes "]
    shutil.rmtree(tmp_path)
    found = open_to_look(places, 1)
    assert bits(found.reader.full_state()["ln.weight"]) == bits(whole(1)["ln.weight", "param"])
    with pytest.raises(UserError, match=r"--step \(7\).*\[1, 2, 3\]"):
        open_to_look(places, 7)
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 2, 3]


def test_format_1_comes_back_from_the_store(tmp_path: Path, url: str, view: Bucket) -> None:
    run = Run(tmp_path / "a", url)
    assert run.save(1)
    rewrite(tmp_path / "a", 1, 1)
    for path in (tmp_path / "a").rglob("*.json"):
        view.put(f"run/{path.relative_to(tmp_path / 'a').as_posix()}", path.read_bytes())
    assert assert_is(Run(tmp_path / "b", url).resume(), 1).fetched > 0
    for seen in run_ranks(on_its_own_disk, 2, tmp_path / "c", url, 2):  # one file, which cannot be cut, for two
        assert (seen["resumed"], seen["same"], seen["saved"]) == (1, True, True)
    key = data_key(view, 1)
    content = view.get(key)
    view.put(key, content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with pytest.raises(CheckpointError, match="does not have its sha256"):
        Run(tmp_path / "d", url, resume=f"{url}/{next(iter(view.commits('run'))).removeprefix('run/')}").resume()


def on_its_own_disk(root: Path, url: str, step: int) -> dict[str, Any]:
    """A rank whose disk no other rank sees: it resumes what is there, and saves `step`."""
    rank, world_size = dist.rank(), dist.world_size()
    config = CheckpointConfig(remote=url, grace_seconds=60.0, orphan_grace_minutes=0.0)
    manager = CheckpointManager(config, root / f"disk{rank}", log=lambda line: None)
    resumed = manager.resume()
    same = True
    if resumed is not None:
        for fragment in cut(whole(resumed.step), rank, world_size):
            for slot, want in fragment.tensors.items():
                got = resumed.reader.read(fragment.name, slot, fragment.start, want.numel())
                same &= bits(got) == bits(want)
    own = {"rng": torch.tensor([rank], dtype=torch.uint8)}
    saved = manager.save(step, cut(whole(step), rank, world_size), own, {"step": step}, wait=True)
    manager.close()
    files = sorted(path.name for path in (root / f"disk{rank}").rglob("*.safetensors"))
    return {
        "resumed": resumed and resumed.step,
        "same": same,
        "saved": saved,
        "files": files,
        "told": resumed and resumed.describe(),
    }


@pytest.mark.distributed
def test_ranks_that_share_no_disk(tmp_path: Path, url: str, view: Bucket) -> None:
    first = run_ranks(on_its_own_disk, 2, tmp_path / "a", url, 1)
    assert [(seen["resumed"], seen["saved"]) for seen in first] == [(None, True)] * 2
    assert [seen["files"] for seen in first] == [["rank00000.safetensors"], ["rank00001.safetensors"]]
    assert view.incomplete("run") == [] and len(view.commits("run")) == 1
    again = run_ranks(on_its_own_disk, 2, tmp_path / "b", url, 2)  # each fetches its own file
    assert [(seen["resumed"], seen["same"], seen["saved"]) for seen in again] == [(1, True, True)] * 2
    assert [set(seen["files"]) for seen in again] == [{"rank00000.safetensors"}, {"rank00001.safetensors"}]
    (key,) = [key for key in view.keys("run/ckpt/s0000000002/") if key.endswith("rank00001.safetensors")]
    content = view.get(key)
    view.put(key, content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])  # one rank finds it: all step back
    more = run_ranks(on_its_own_disk, 3, tmp_path / "c", url, 3)  # with two files for three
    assert [(seen["resumed"], seen["same"], seen["saved"]) for seen in more] == [(1, True, True)] * 3
    assert ["rank00001.safetensors does not have its sha256" in seen["told"] for seen in more] == [True] * 3
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 2, 3]


def killed_in_the_upload(folder: Path, url: str, victim: int) -> dict[str, Any]:
    """Each rank has a saver of its own; one is killed while it uploads its part of step 2."""
    rank = dist.rank()
    client._node = lambda: (f"node {rank}", "", 0)
    said: list[str] = []
    config = CheckpointConfig(remote=url, grace_seconds=60.0, orphan_grace_minutes=0.0)
    manager = CheckpointManager(config, folder, log=said.append)
    assert manager.resume() is None

    def save(step: int, *, wait: bool) -> bool:
        own = {"rng": torch.tensor([rank], dtype=torch.uint8), "padding": torch.zeros(3_000_000)}
        return manager.save(step, cut(whole(step), rank, 2), own, {"step": step}, wait=wait)

    assert save(1, wait=True)
    said.clear()
    assert save(2, wait=False)
    while not list(folder.glob("commit/*-s0000000002.json")):  # then rank 0 has begun to upload, and rank 1 has long
        manager.poll()
        time.sleep(0.01)
    time.sleep(0.5)
    if rank == victim:
        process = manager._saver._process  # type: ignore[union-attr]
        assert process is not None
        process.kill()
        while manager._saver.connected:  # type: ignore[union-attr]
            manager.poll()
    dist.barrier()
    time.sleep(1.0)  # the least age of an upload that is swept
    saved = save(3, wait=True)
    manager.close()
    return {"saved": saved, "said": [line for line in said if "waiting" not in line and "trying again" not in line]}


@pytest.mark.distributed
@pytest.mark.parametrize("victim", [0, 1])
def test_a_saver_that_is_killed_in_the_upload(tmp_path: Path, url: str, view: Bucket, proxy, victim: int) -> None:
    proxy.faults = [Fault("hang", method="PUT", key=f"s0000000002/.*rank0000{victim}.safetensors")]
    zero, one = run_ranks(killed_in_the_upload, 2, tmp_path, url, victim)
    assert proxy.fired > 0 and zero["saved"] and one["saved"]
    (told,) = zero["said"]
    assert "step 2 failed (1 in a row): " in told and "has ended (signal 9); training goes on, the last good" in told
    assert "s0000000002" in told and one["said"] == []  # it is on the disk
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 3]
    assert view.orphans("run") == [] and view.incomplete("run") == []
    assert set(committed(tmp_path)) == {1, 2, 3}


def test_what_an_evaluation_came_to_survives_an_outage(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path, url, keep_last=1, keep_best="top1")
    assert run.save(1)
    proxy.faults = [Fault("status", method="PUT", key="metric/")]
    run.manager.note_metrics(1, {"top1": 0.9})
    run.until(lambda: any("the saver: " in line for line in run.said))
    assert run.save(2)
    run.until(lambda: any("could not be removed" in line for line in run.said))  # what is best is not known there
    proxy.faults = []
    assert run.save(3)
    run.manager.close()
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 3]
    assert view.keys("run/metric") == ["run/metric/e000000-s0000000001.json"]
