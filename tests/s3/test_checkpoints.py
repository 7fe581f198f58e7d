"""Checkpoints with a remote store: both places, what is kept there, and what the user is told."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from clip_train.errors import CheckpointError, UserError
from tests.checkpoint.parts import bits, committed, whole
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault
from tests.s3.runs import Run, assert_is, data_key

pytestmark = pytest.mark.usefixtures("runs")


def test_it_is_in_both_places_and_comes_back_from_either(
    tmp_path: Path, url: str, view: Bucket, proxy
) -> None:
    run = Run(tmp_path / "a", url)
    run.manager.preflight()
    assert run.resume() is None
    assert run.save(1) and run.save(2)
    assert set(committed(tmp_path / "a")) == {1, 2} and len(view.commits("run")) == 2
    assert view.incomplete("run") == []
    for line, step in zip(run.said, (1, 2), strict=True):
        assert re.fullmatch(rf"waiting up to \d+ s for step {step} to be committed at {url}", line)
    assert run.manager.last_good is not None and run.manager.last_good.path.startswith(
        f"{url}/ckpt/s0000000002/"
    )

    again = assert_is(Run(tmp_path / "b", url).resume(), 2)  # another machine
    assert (
        again.fetched > 0
        and f"source         {url}/ckpt/" in again.describe()
        and "MB fetched" in again.describe()
    )

    proxy.requests.clear()
    warm = assert_is(Run(tmp_path / "a", url).resume(), 2)
    assert warm.fetched == 0 and not [
        each for each in proxy.requests if ".safetensors" in each and "GET" in each
    ]
    assert view.keys("run/preflight") == []


@pytest.mark.full
def test_retention_and_orphans(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    view.put("run/ckpt/s0000000008/e000000-0123abcd/rank00000.safetensors", b"half")
    view.put("run/ckpt/s0000000009/e000000-0123abcd/_rank00000.json", b"half")
    careful = Run(tmp_path / "a", url, keep_last=1, orphan_seconds=600.0)
    assert careful.save(1) and careful.save(2)
    careful.manager.close()
    assert len(view.commits("run")) == 1
    assert len(view.orphans("run")) == 2  # their writer may not know yet that it has lost the lease
    run = Run(tmp_path / "a", url, keep_last=1)
    assert_is(run.resume(), 2)
    assert run.save(3) and run.save(4)
    run.manager.close()
    assert not view.orphans("run")
    assert sorted(m["step"] for m in view.commits("run").values()) == [
        2,
        4,
    ]  # the one resumed from, the newest


@pytest.mark.full
def test_preflight_says_what_to_fix(
    tmp_path: Path, url: str, view: Bucket, proxy, monkeypatch
) -> None:
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
    says(
        r"cannot delete files \(needed for retention\)", Fault("status", method="DELETE", **denied)
    )
    says(
        "clock", Fault("status", method=any_method, key="", code=403, s3code="RequestTimeTooSkewed")
    )
    says(
        "have expired: renew",
        Fault("status", method=any_method, key="", code=400, s3code="ExpiredToken"),
    )
    says("SlowDown", Fault("status", method=any_method, key=""), kind=CheckpointError)
    assert view.keys("run/commit") == []

    proxy.faults = [Fault("unconditional", method="PUT", key="preflight")]
    run = Run(tmp_path, url)
    run.manager.preflight()
    assert (
        "ignores If-None-Match" in run.said[0] and "Checkpoints are still complete" in run.said[0]
    )


def test_no_secret_is_told_or_kept(
    tmp_path: Path, url: str, view: Bucket, proxy, monkeypatch, capfd
) -> None:
    view.server.add_key("AKIASECRETKEY", "TOPSECRETVALUE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRETKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TOPSECRETVALUE")
    run = Run(tmp_path, url)
    assert run.save(1)
    run.hurry()
    proxy.faults = [
        Fault("status", method="PUT|GET", key="", code=403, s3code="InvalidAccessKeyId")
    ]
    run.save(2, wait=False)
    run.until(lambda: any("step 2 failed" in line and "DeniedError" in line for line in run.said))
    told = "\n".join(run.said) + "".join(capfd.readouterr())
    kept = b"".join(view.get(key) for key in view.keys("run/")) + b"".join(
        Path(root, name).read_bytes() for root, _, names in os.walk(tmp_path) for name in names
    )
    for secret in ("AKIASECRETKEY", "TOPSECRETVALUE"):
        assert secret not in told and secret.encode() not in kept


@pytest.mark.full
def test_the_listing_tells_what_is_there(tmp_path: Path, url: str, view: Bucket) -> None:
    from clip_train.checkpoint.restore import list_checkpoints, open_read_only, stores_at

    run = Run(tmp_path, url, keep_last=3, orphan_seconds=600.0)
    assert run.save(1) and run.save(2) and run.save(3)
    run.manager.close()
    key = data_key(view, 2)
    view.flip(key)
    view.put("run/ckpt/s0000000009/e000000-0123abcd/rank00000.safetensors", b"half")
    places = stores_at(url)
    lines = list_checkpoints(places, verify=False)
    assert [(line["step"], line["problem"] is None) for line in lines] == [
        (3, True),
        (2, True),
        (1, True),
    ]
    lines = list_checkpoints(places, verify=True)
    assert [(line["step"], line["problem"] is None) for line in lines] == [
        (3, True),
        (2, False),
        (1, True),
    ]
    assert "sha256" in str(lines[1]["problem"])
    shutil.rmtree(tmp_path)
    found = open_read_only(places, 1)
    assert bits(found.reader.open_weights()[1]("ln.weight")) == bits(whole(1)["ln.weight", "param"])
    with pytest.raises(UserError, match=r"has no checkpoint of step 7; it has \[1, 2, 3\]"):
        open_read_only(places, 7)
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 2, 3]
