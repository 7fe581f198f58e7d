"""`~`, variables and links in every path of a recipe and a command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clip_train.errors import UserError
from clip_train.recipe.recipe import load_config
from launcher.cli.main import main, parse
from tests.launcher.conftest import finish, start

KEYS = [
    "run.dir",
    "data.train",
    "data.val",
    "model.name",
    "model.init_from",
    "model.init_image_from",
    "model.init_text_from",
    "model.teacher",
    "engine.ds_config",
    "checkpoint.remote",
    "checkpoint.resume",
    "evaluate.zero_shot_classes",
    "evaluate.zero_shot_data",
]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SCRATCH", str(folder))
    monkeypatch.delenv("NOWHERE", raising=False)
    return folder


def value(recipe: Path, key: str, place: str, more: tuple[str, ...] = ()) -> object:
    if key == "engine.ds_config":
        more = ("engine.kind=deepspeed",)
    if key == "evaluate.zero_shot_data":
        more = ("evaluate.zero_shot_classes=imagenet",)
    section, name = key.split(".")
    config = load_config(str(recipe), [f"{key}={place}", *more])
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("place", ["~/x", "$SCRATCH/x", "'${SCRATCH}/x'"])
@pytest.mark.parametrize("key", KEYS)
def test_every_path_of_a_recipe(recipe, home, key, place):
    assert value(recipe, key, place) == f"{home}/x"


def test_lists_sources_and_sets(recipe, home):
    assert value(recipe, "data.train", "'~/{0..3}.tar::${SCRATCH}/b.tar'") == (
        f"{home}/{{0..3}}.tar::{home}/b.tar"
    )
    assert value(recipe, "data.val", "{coco: ~/c.tar}") == {"coco": f"{home}/c.tar"}
    sets = value(recipe, "evaluate.sets", "{cars: {data: ~/x, classes: $SCRATCH/y.json}}")
    assert isinstance(sets, dict)
    assert (sets["cars"].data, sets["cars"].classes) == (f"{home}/x", f"{home}/y.json")
    assert value(recipe, "model.teacher", "[~/a, $SCRATCH/b]") == [f"{home}/a", f"{home}/b"]


@pytest.mark.parametrize("key", KEYS)
def test_a_variable_that_is_not_set_is_named(recipe, home, key):
    with pytest.raises(UserError, match=rf"{key}: '\$NOWHERE/data/run' has the variable \$NOWHERE"):
        value(recipe, key, "$NOWHERE/data/run")


def test_a_dollar_in_the_name_of_a_file_stays(recipe, home):
    (home / "a$NOWHERE").mkdir()
    assert value(recipe, "data.train", f"'{home}/a$NOWHERE'") == f"{home}/a$NOWHERE"


@pytest.mark.parametrize(
    "line, name",
    [
        (["export", "run", "--output=~/x"], "output"),
        (["embed", "run", "--output=$SCRATCH/x"], "output"),
        (["evaluate", "run", "--weights=~/x"], "weights"),
        (["reinforce", "a.tar", "--to=~/x"], "to"),
        (["submit", "r.yaml", "--site=~/x"], "site"),
        (["caption", "run", "--images=~/x"], "images"),
        (["demo", "--dir=~/x"], "folder"),
        (["train", "~/x"], "recipe"),
        (["evaluate", "~/x"], "place"),
        (["shards", "a.csv", "~/x"], "out"),
        (["report", "~/x"], "place"),
    ],
)
def test_every_path_of_a_command(home, line, name):
    assert getattr(parse(line), name) == f"{home}/x"


def test_places_that_are_listed(home):
    assert parse(["average", "~/a@1,$SCRATCH/b@2"]).checkpoints == f"{home}/a@1,{home}/b@2"
    assert parse(["reinforce", "~/a.tar", "--teacher=~/t,u"]).teacher == f"{home}/t,u"
    assert parse(["index", "~/a.tar", "$SCRATCH/b.tar"]).shards == [
        f"{home}/a.tar",
        f"{home}/b.tar",
    ]


def test_an_unset_variable_of_a_command_is_a_mistake(home, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", "run", "--output=$NOWHERE/x"])
    assert ended.value.code == 2 and "$NOWHERE" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["train", "--dry-run"], ["doctor"], ["train"]])
def test_a_run_directory_on_a_disk_that_is_not_mounted(recipe, tmp_path, line):
    """Another disk is not measured in its place."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "unmounted" / "runs")
    verb, *options = line
    status, out = finish(start(recipe, f"run.dir={link}/run", *options, verb=verb))
    assert status == (1 if verb == "doctor" else 2), out
    assert f"{link} is a link to {tmp_path}/unmounted/runs, which does not exist" in out
    assert "mount it" in out and os.path.islink(link)
