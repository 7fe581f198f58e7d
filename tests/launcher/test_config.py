"""Recipes: numbers, overrides, round trips, and the examples that the project ships."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import yaml

from clip_tools.plan import make_plan
from clip_train.errors import UserError
from clip_train.recipe.recipe import (
    OTHER_NAMES,
    apply_overrides,
    check_config,
    known_keys,
    load_config,
    parse_value,
    read_recipe,
    without_removed,
)
from clip_train.recipe.resolve import resolve
from clip_train.recipe.weights import find_run
from launcher.cli.main import VERBS, main, parse, verb_parser
from launcher.slurm.profile import Site
from tests.documents import examples_in, own_arguments, split

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
MINIMAL = {"run": {"steps": 5000}, "data": {"train": "a.tar"}}


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-4", 1e-4), ("5E3", 5e3), ("-2.5", -2.5), (".5", 0.5), ("3", 3), ("0x1", 1), ("true", True),
        ("null", None), ("1.2.3", "1.2.3"), ("ViT-B-32", "ViT-B-32"), ("[0.5, 1]", [0.5, 1]),
        ("1e", "1e"), ("e4", "e4"), ("'1e-4'", "1e-4"), ("2024-01-01a", "2024-01-01a"), ("", None),
    ],
)  # fmt: skip
def test_values_are_what_they_look_like(text, value):
    parsed = parse_value(text, "key")
    assert parsed == value and type(parsed) is type(value)


def test_overrides_do_not_touch_what_they_lie_over():
    raw = {"optim": {"lr": 1}}
    assert apply_overrides(raw, ["optim.lr=2", "model.name=tiny"]) == {
        "optim": {"lr": 2},
        "model": {"name": "tiny"},
    }
    assert raw == {"optim": {"lr": 1}}


def test_a_resolved_recipe_reads_back_as_itself(tmp_path):
    config = check_config(MINIMAL, "here")
    file = tmp_path / "recipe.yaml"
    file.write_text(config.to_yaml())
    assert load_config(str(file)) == config


def test_off_is_not_false():
    data = {"train": "a.tar", "verify": parse_value("off", "data.verify")}
    config = check_config({**MINIMAL, "data": data}, "here")
    assert config.data.verify == "off"
    assert check_config(yaml.safe_load(config.to_yaml()), "here") == config


def test_epochs_become_steps():
    config = check_config(
        {"run": {"epochs": 3}, "data": {"train": "a.tar", "num_samples": 1_000_000}}, "here"
    )
    assert config.steps == round(3 * 1_000_000 / 256)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.full if "_l" in path.stem or "_big" in path.stem else (),
        )
        for path in RECIPES
        if "siglip" not in path.stem  # on the hub: tests/peers/test_siglip.py runs it
    ],
)
def test_shipped_recipes_are_valid_and_can_be_planned(path):
    config = check_config(read_recipe(str(path)), str(path))
    plan = make_plan(resolve(config, 1 if "demo" in path.stem else 8, read_data=False))
    assert plan["memory_bytes"]["total"] > 0


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("vit_l14", 32),
        pytest.param("vit_bigg14", 128, marks=pytest.mark.full),
        pytest.param("datacompdr_12m", 32, marks=pytest.mark.full),
    ],
)
def test_no_other_stage_is_faster_than_that_of_a_big_recipe(name, ranks, capsys):
    recipe, seconds = RECIPES[0].with_name(f"{name}.yaml"), {}
    machines = ["--world-size", str(ranks), "--gpu", "H100", "--network", "400Gb"]
    assert main(["plan", str(recipe), "--json", *machines]) == 0
    for row in json.loads(capsys.readouterr().out)["communication"]["alternatives"]:
        seconds.setdefault(row["keys"]["engine.zero_stage"], row["seconds"])  # its best is first
    assert seconds.keys() == {0, 1, 2, 3}
    stage = read_recipe(str(recipe))["engine"]["zero_stage"]
    assert seconds[stage] <= 1.01 * min(seconds.values()), seconds


def test_the_phase_after_patch_dropout_begins_with_its_weights():
    first, last = (check_config(read_recipe(str(RECIPES[0].parent / f"{name}.yaml")), name) for name in (
        "vit_l14", "vit_l14_unmasked"
    ))  # fmt: skip
    assert last.model.init_from == str(first.run_dir) and last.run_dir != first.run_dir
    assert (first.model.patch_dropout, last.model.patch_dropout) == (0.5, 0)
    assert (last.model.name, last.data.train) == (first.model.name, first.data.train)


def test_every_key_says_what_it_means_or_is_plain():
    plain = {"optim.beta1", "optim.beta2", "optim.eps"}
    assert [key for key, field in known_keys() if not field.description and key not in plain] == []


def test_other_trainers_names_lead_to_keys_that_exist():
    assert set(OTHER_NAMES.values()) <= {key for key, _ in known_keys()}


def test_keys_are_printed(capsys):
    """Not a terminal: a line each, of key, default and meaning; YAML, and what may stand there."""
    assert main(["keys"]) == 0
    lines = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == {key for key, _ in known_keys()}
    assert lines["batch.kept_graphs"].startswith("auto\tinteger > 0 or all or auto. How many")
    assert lines["run.dir"].startswith("null\t") and lines["data.train"].startswith("required\t")
    assert main(["keys", "optim.be"]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [
        "optim.beta1",
        "optim.beta2",
    ]
    assert main(["keys", "optim.learnrate"]) == 2
    assert "no key starts with optim.learnrate; did you mean optim.lr" in capsys.readouterr().err


def test_help_teaches_and_names_the_verbs(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and "75" in out
    assert "doctor" in out and "submit" in out


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_examples_of_the_help_can_be_typed(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"] if verb else ["--help"])
    lines = [
        line[2:]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  clip-train ")
    ]
    assert len(lines) >= 2 and all(len(line) < 120 for line in lines)
    for line in lines:
        words = split(line.split("   ")[0])[1:]
        args = parse(words)
        assert args.verb == verb or not verb
        recipe = getattr(args, "recipe", None)
        if recipe is not None and recipe.startswith("recipes/"):
            load_config(str(RECIPES[0].parent / recipe.removeprefix("recipes/")), args.overrides)
        assert all("=" in each for each in getattr(args, "overrides", []))


@pytest.mark.parametrize("verb", VERBS)
def test_each_argument_is_a_parameter_of_its_verb(verb):
    parameters = inspect.signature(VERBS[verb].load().run).parameters
    example = next(iter(examples_in(verb_parser(verb).epilog or "")))
    arguments = vars(parse(own_arguments(example))).keys() - {"verb", "quiet", "verbose"}
    if verb == "submit":  # the options of the site file are one mapping
        arguments = arguments - Site.model_fields.keys() | {"options"}
    assert arguments == parameters.keys() - {"process"}


def test_a_removed_key_is_a_mistake_unless_it_changes_nothing(recipe):
    config = load_config(str(recipe))
    same = [
        "log.strict_callbacks=false",
        "checkpoint.orphan_grace_minutes=60",
        "launch.hang_start_seconds=3600.0",
        "launch.hang_step_seconds=null",
    ]
    assert load_config(str(recipe), same) == config
    with pytest.raises(
        UserError, match=r"storage\.read_ahead \(9\) was removed: leave it out, and"
    ):
        load_config(str(recipe), ["storage.read_ahead=9"])
    of_a_checkpoint = config.to_keep()
    of_a_checkpoint["storage"]["read_ahead"] = 9
    assert check_config(without_removed(of_a_checkpoint), "a checkpoint") == config


def test_plan_prints_the_arithmetic(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "run: {steps: 5000}\ndata: {train: a.tar}\nmodel: {name: tiny}\nbatch: {global_size: 512, micro_size: 100}\n"
    )
    assert main(["plan", str(file), "--world-size", "4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "512 = 4 ranks x 128, in 2 micro-batches of 100 with 1 graphs kept" in out


def test_a_run_folder_with_removed_keys_is_still_read(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run: {steps: 4}\ndata: {train: a.tar}\nschedule: {warmup_steps: 0}\n"
        "storage: {backoff_seconds: 0.3, attempts: 3}\n"
    )
    config, _, _ = find_run(str(tmp_path), ["run.seed=5"])
    assert config is not None and (config.storage.attempts, config.run.seed) == (3, 5)
    with pytest.raises(UserError, match=r"backoff_seconds .* was removed"):  # to be trained again
        find_run(str(recipe), [])
