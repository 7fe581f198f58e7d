"""`storage.client` reaches everything that a command opens, in all of its processes: seen by who sends the requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_train.storage.urls import CLIENT
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
    found = {"s3fs" if "otocore" in agent else "obstore" for agent in proxy.agents}
    proxy.agents.clear()
    return found


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
    proxy.agents.clear()
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
        assert status == 2 and "holds no checkpoints" in out, out
        return senders(proxy)

    assert listed(environ={}) == {"obstore"}
    assert listed(environ={CLIENT: "fsspec"}) == {"s3fs"}
    assert listed("storage.client=fsspec", environ={}) == {"s3fs"}
    assert listed("storage.client=obstore", environ={CLIENT: "fsspec"}) == {"obstore"}
