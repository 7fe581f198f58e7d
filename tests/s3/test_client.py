"""`storage.client` reaches everything that a command opens, in all of its processes: seen by who sends the requests."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import fsspec
import pytest

from clip_train.errors import UserError
from clip_train.storage.urls import CLIENT, client_in_use, open_storage, use_client
from tests.launcher.conftest import MODEL, RECIPE, clean_environment, finish, start
from tests.s3.bucket import Bucket
from tests.s3.epochs import make_shards, upload
from tests.s3.proxy import FaultyProxy
from tests.s3.server import Server
from tests.warm import Command


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment says nothing: the recipe and the command line do."""
    monkeypatch.delenv(CLIENT, raising=False)
    return "auto"


def senders(proxy: FaultyProxy) -> set[str]:
    """The clients that have sent requests since the last call."""
    agents = [re.search(r"(?i)\r\nUser-Agent: *([^\r]*)", head) for head in proxy.heads]
    proxy.heads.clear()
    return {"s3fs" if agent and "botocore" in agent[1].lower() else "obstore" for agent in agents}


@pytest.mark.engine
def test_everything_of_a_recipe_goes_through_the_client_that_it_names(
    tmp_path: Path, server: Server, proxy: FaultyProxy, bucket: str, view: Bucket
) -> None:
    """Shards and index in a loader worker, an evaluation set, checkpoints, weights."""
    make_shards(tmp_path / "set")
    train = upload(server, tmp_path / "set", bucket)
    model = tmp_path / "small.json"
    model.write_text(json.dumps(MODEL))
    recipe = tmp_path / "recipe.yaml"
    text = RECIPE.format(run_dir=tmp_path / "run", train=train, model=model)
    recipe.write_text(text + "storage: {client: fsspec, patience_seconds: 120}\n")
    val = train.replace("{000..005}", "005")
    line = (
        "run.steps=2",
        "schedule.warmup_steps=0",
        "checkpoint.every_steps=1",
        "data.workers=1",
        f"data.val={val}",
        f"checkpoint.remote=s3://{bucket}/run",
    )
    proxy.heads.clear()
    status, out = finish(start(recipe, *line), timeout=900)
    assert status == 0, out
    assert view.newest_step("run") == 2
    asked = " ".join(proxy.requests)
    for what in ("index.json", "000.tar", "005.tar", "run/commit/", "run/ckpt/", "lease/"):
        assert what in asked, what
    assert senders(proxy) == {"s3fs"}
    # another run starts from its weights, through the client of the command line
    other = (*line, f"model.init_from=s3://{bucket}/run", "storage.client=obstore", "run.steps=1")
    other = (*other, f"run.dir={tmp_path / 'other'}", f"checkpoint.remote=s3://{bucket}/other")
    status, out = finish(start(recipe, *other), timeout=900)
    assert status == 0, out
    assert senders(proxy) == {"obstore"}


def test_a_command_without_a_recipe_asks_the_environment(
    tmp_path: Path, proxy: FaultyProxy, view: Bucket
) -> None:
    view.put("run/a.txt", b"x")

    def listed(*arguments: str, environ: dict[str, str]) -> set[str]:
        line = ["checkpoints", f"{view.url}/run", *arguments]
        status, out = finish(
            Command(line, env=clean_environment() | environ, cwd=tmp_path), timeout=900
        )
        assert status == 2 and f"error: {view.url}/run holds no checkpoints" in out, out
        return senders(proxy)

    assert listed(environ={}) == {"obstore"}
    assert listed(environ={CLIENT: "fsspec"}) == {"s3fs"}
    assert listed("storage.client=fsspec", environ={}) == {"s3fs"}
    assert listed("storage.client=obstore", environ={CLIENT: "fsspec"}) == {"obstore"}


def test_settings_of_fsspec_reach_s3fs_and_win(
    proxy: FaultyProxy, view: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FSSPEC_S3 or a file says, which fsspec reads when it is imported."""
    settings = {"endpoint_url": proxy.url, "requester_pays": True}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = open_storage(f"fsspec+s3://{view.name}/run")
    assert store.put_bytes("a", b"1") and store.read_bytes("a") == b"1"
    assert [entry.name for entry in store.list()] == ["a"]
    assert view.get("run/a") == b"1"
    assert len(proxy.heads) >= 3
    assert all("x-amz-request-payer: requester" in head.lower() for head in proxy.heads)


def in_a_child(url: str) -> bool:
    """Whether a process that is forked now reads the file."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if open_storage(url, patience_seconds=5).read_bytes("a") == b"1" else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_process_opens_clients_of_its_own(proxy: FaultyProxy, view: Bucket) -> None:
    """Those of its parent belong to an event loop that it does not have."""
    view.put("run/a", b"1")
    store = open_storage(f"fsspec+s3://{view.name}/run")
    assert store.read_bytes("a") == b"1"
    assert in_a_child(store.url)
    assert store.read_bytes("a") == b"1"


def test_the_choice_lasts_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, "obstore", "fsspec"):
        if given is None:
            monkeypatch.delenv(CLIENT, raising=False)
        else:
            monkeypatch.setenv(CLIENT, given)
        for client in ("fsspec", "obstore", "fsspec"):
            use_client(client)
            assert client_in_use() == client and os.environ[CLIENT] == client
            assert client_in_use("obstore") == "obstore"
        use_client("auto")
        assert os.environ.get(CLIENT) == given and client_in_use() == (given or "obstore")
    monkeypatch.setenv(CLIENT, "boto")
    with pytest.raises(UserError, match=r"CLIENT \(boto\) must be auto, obstore or fsspec"):
        open_storage("s3://bucket/run")
