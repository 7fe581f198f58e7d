"""`clip-train doctor` and `submit` where checkpoints and shards are on S3: each planted fault is named."""

from __future__ import annotations

import functools
import json
import re
import socket
from pathlib import Path

import pytest

from clip_tools.doctor import check_recipe
from clip_train.errors import UserError
from clip_train.recipe.recipe import Recipe, check_config
from launcher.checks import Finding, check_store
from launcher.cli.main import main
from tests.launcher.conftest import MODEL, RECIPE
from tests.launcher.test_doctor import doctor
from tests.s3.bucket import Bucket
from tests.s3.epochs import make_shards, upload
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server

EVERY = "GET|PUT|HEAD|DELETE|POST"
PATIENTLY = ("storage.patience_seconds=120",)
DENIED = {"code": 403, "s3code": "AccessDenied"}
full = functools.partial(pytest.param, marks=pytest.mark.full)


def config(remote: str, train: str = "a.tar", **data: object) -> Recipe:
    raw = {
        "run": {"steps": 5000},
        "data": {"train": train, **data},
        "checkpoint": {"remote": remote},
    }
    raw["storage"] = {"patience_seconds": 120.0}
    return check_config(raw, "recipe.yaml")


def look(config: Recipe) -> list[Finding]:
    return list(check_store(config, patience_seconds=1.0))


def found(findings: list[Finding], level: str) -> list[str]:
    return [
        f"{each.check}: {each.message} -> {each.remedy}" for each in findings if each.level == level
    ]


def test_a_healthy_bucket(view: Bucket) -> None:
    findings = look(config(f"{view.url}/run"))
    assert found(findings, "ok") == [f"{each.check}: {each.message} -> " for each in findings]
    for did in ("listed", "read", "written to", "conditionally", "deleted"):
        assert did in findings[0].message, (did, findings)
    assert view.keys() == [] and view.unfinished_uploads() == []


@pytest.mark.parametrize(
    "fault, level, said",
    [
        (Fault("status", method="GET", key="^/b[0-9a-f]+/?$", **DENIED), "error", "s3:ListBucket"),
        (
            Fault("status", method="PUT", key="", **DENIED),
            "error",
            "cannot be written to: .*s3:PutObject",
        ),
        (
            Fault("status", method="GET", key="preflight", **DENIED),
            "error",
            "cannot be read: .*s3:GetObject",
        ),
        (
            Fault("status", method="PUT", key="once", code=501, s3code="NotImplemented"),
            "error",
            "If-None-Match",
        ),
        (
            Fault("unconditional", method="PUT", key="preflight"),
            "warning",
            "ignores If-None-Match.*Checkpoints are still complete",
        ),
        full(
            Fault("status", method=EVERY, key="", code=403, s3code="RequestTimeTooSkewed"),
            "error",
            "clock",
        ),
        full(
            Fault("status", method=EVERY, key="", code=400, s3code="ExpiredToken"),
            "error",
            "expired: renew them",
        ),
        full(
            Fault("status", method=EVERY, key="", code=403, s3code="InvalidAccessKeyId"),
            "error",
            "InvalidAccessKeyId",
        ),
        full(Fault("status", method=EVERY, key=""), "error", "SlowDown.*try again"),
        full(Fault("reset", method=EVERY, key=""), "error", "check the network"),
        (
            Fault("other", method="GET", key="preflight"),
            "error",
            "cannot be read: .*[Cc]hecksum|returns other bytes",
        ),
    ],
    ids=lambda value: (
        None if not isinstance(value, Fault) else f"{value.action}-{value.method}-{value.s3code}"
    ),
)
def test_planted_faults_are_each_named(
    view: Bucket, proxy: FaultyProxy, fault: Fault, level: str, said: str
) -> None:
    proxy.faults = [fault]
    findings = look(config(f"{view.url}/run"))
    assert fault.fired
    lines = found(findings, level)
    assert any(re.search(said, line) for line in lines), (said, findings)
    assert all(each.remedy for each in findings if each.level != "ok")
    assert view.keys() == []  # nothing is left, whatever failed


def test_what_may_not_be_deleted(view: Bucket, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault("status", method="DELETE", key="", **DENIED)]
    findings = look(config(f"{view.url}/run"))
    (line,) = found(findings, "error")
    assert "cannot delete files" in line and "s3:DeleteObject" in line
    assert len(findings) == 1


def test_no_bucket_and_no_credentials(
    view: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (line,) = found(look(config("s3://nowhere-at-all/run")), "error")
    assert "create the bucket, or correct the URL" in line
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    lines = found(look(config(f"{view.url}/run")), "error")
    assert lines and all(
        "set AWS_PROFILE" in line and "s3:" not in line.split("->")[1] for line in lines
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with socket.socket() as taken:  # and not listened on
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        (line,) = found(look(config(f"{view.url}/run")), "error")
    assert re.search("(?i)connection (is )?refused", line) and "AWS_ENDPOINT_URL" in line


def test_sources_of_shards(
    server: Server, view: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """A denied object, a damaged index."""
    make_shards(tmp_path / "set")
    good = upload(server, tmp_path / "set", view.name)
    proxy.faults = [Fault("status", method="GET|HEAD", **DENIED)]
    denied = r"cannot be opened.*DeniedError.*give these credentials the right"
    with pytest.raises(UserError, match=denied):
        list(check_recipe(config("x", good)))
    proxy.faults = []
    (index,) = view.keys("set/clip_train_index.json")
    view.put(index, view.get(index)[:-3])
    with pytest.raises(UserError, match=r"is damaged.*run `clip-train index` again"):
        list(check_recipe(config("x", good)))


@pytest.fixture
def recipe(tmp_path: Path, view: Bucket, server: Server) -> Path:
    make_shards(tmp_path / "set")
    (tmp_path / "small.json").write_text(json.dumps(MODEL))
    (tmp_path / "site.yaml").write_text("local_paths: [/dev/shm]\n")
    file = tmp_path / "recipe.yaml"
    train = upload(server, tmp_path / "set", view.name)
    file.write_text(
        RECIPE.format(run_dir=tmp_path / "run", train=train, model=tmp_path / "small.json")
    )
    return file


def test_the_command(recipe: Path, tmp_path: Path, view: Bucket) -> None:
    before = view.keys()
    place = f"checkpoint.remote={view.url}/run"
    status, out = doctor(
        tmp_path, "--json", str(recipe), place, *PATIENTLY, PATH="/usr/bin:/bin", limit=4096
    )
    assert status == 0, out
    levels = [
        finding["level"] for finding in json.loads(out)["findings"] if finding["check"] == "store"
    ]
    assert levels == ["ok"], out
    assert view.keys() == before


def test_submit_tries_the_store(
    recipe: Path,
    view: Bucket,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CLIP_TRAIN_SITE", str(recipe.parent / "site.yaml"))
    before = view.keys()

    def submit(*more: str) -> int:
        return main(["submit", str(recipe), "--dry-run", "--gpus-per-node=1", *more])

    assert submit(f"checkpoint.remote={view.url}/run") == 0
    script = capsys.readouterr()
    assert script.out.startswith("#!") and "] error:" not in script.err and view.keys() == before
    assert submit("checkpoint.remote=s3://nowhere-at-all/run") == 2
    assert "create the bucket" in capsys.readouterr().err
    proxy.requests.clear()
    assert submit("checkpoint.remote=s3://nowhere-at-all/run", "--offline") == 0
    assert capsys.readouterr().out == script.out and not proxy.requests
    proxy.faults = [Fault("unconditional", method="PUT", key="preflight")]
    assert submit(f"checkpoint.remote={view.url}/run") == 0
    told = capsys.readouterr()
    assert (
        told.out == script.out
        and "warning: " in told.err
        and "Checkpoints are still complete" in told.err
    )
