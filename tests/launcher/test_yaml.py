"""YAML as it was typed, in recipes, overrides and site files, and as it is written: words stay words."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from clip_train.errors import UserError
from clip_train.recipe.recipe import check_config, load_config, parse_value
from clip_train.settings import checked_options
from clip_train.yaml_text import dump_line, dump_yaml, load_yaml
from launcher.cli.main import main
from launcher.slurm.profile import load_site

RECIPE = """\
run: {steps: 5000, name: 2024-01-01}
data: {train: a.tar, caption_key: [y, no], val: {on: a.tar, off: b.tar}}
model:
  name: tiny
  lora: {rank: 4, on: [attention]}
"""
WORDS = (
    "on", "On", "OFF", "yes", "No", "y", "n", "010", "0o17", "08", "1:30", "12:30:00", "1:30.5", "2024-01-01",
    "2024-01-01 10:00:00", "1e", "inf", "nan", "None", "=", "1.2.3", "0x", "1,000",
)  # fmt: skip
NUMBERS = {
    "1e-4": 1e-4, "1E5": 1e5, "1.5e3": 1500.0, ".5": 0.5, "-2": -2, "+3": 3, "1_000": 1000, "0x1F": 31, "0b11": 3,
    ".inf": float("inf"), "-.INF": float("-inf"),
}  # fmt: skip
ALL = [
    *WORDS,
    *NUMBERS,
    "true",
    "null",
    "~",
    "",
    "a: b",
    "- x",
    "<<",
    "é",
    1e-5,
    1e20,
    10**19,
    True,
    None,
    float("inf"),
]


def falling(peak, step, steps, steep=True, note="x"):
    """A schedule whose arguments have no annotations."""
    return peak if not steep else peak * (1 - step / steps)


@pytest.mark.parametrize("text", WORDS)
def test_a_word_is_the_text_that_was_typed(text):
    assert parse_value(text, "key") == text
    assert parse_value(f"- {text}", "key") == [text]
    assert parse_value(f"? {text}\n: 1", "key") == {text: 1}


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_a_number(text):
    value = parse_value(text, "key")
    assert value == NUMBERS[text] and type(value) is type(NUMBERS[text])


@pytest.mark.parametrize("value", ALL, ids=repr)
def test_what_is_written_reads_back(value):
    """Also by a reader of YAML 1.1, which is what other programs have."""
    for text in (dump_yaml({"a": value}), dump_yaml({"a": [value]}), dump_line({"a": value})):
        assert load_yaml(text)["a"] in (value, [value])
        assert yaml.safe_load(text)["a"] in (value, [value])
    assert load_yaml(dump_line(value)) == value


def test_a_recipe_keeps_its_words(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    given = ["model.lora={on: [mlp], train: [n]}", "engine.pack_texts=off", "data.resampled=yes"]
    for overrides, on in (([], "attention"), (given, "mlp")):
        config = load_config(str(file), overrides)
        assert config.model.lora is not None and config.model.lora.on == (on,)
        assert config.run.name == "2024-01-01"
        assert config.data.caption_key == ["y", "no"] and config.data.val == {
            "on": "a.tar",
            "off": "b.tar",
        }
        again = tmp_path / "again.yaml"
        again.write_text(config.to_yaml())
        assert load_config(str(again)) == config
    assert config.engine.pack_texts is False and config.data.resampled is True


@pytest.mark.parametrize("name", ["1e5", "1.5e3", "0b1", "123"])
def test_a_quoted_number_stays_a_name(name, tmp_path):
    """A resolved recipe, a branch and a submitted job all write the name again."""
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    config = load_config(str(file), [f"run.name='{name}'"])
    assert config.run.name == name
    file.write_text(config.to_yaml())
    assert load_config(str(file)) == config


SWITCHES = {"on": True, "Yes": True, "y": True, "off": False, "no": False, "N": False}


def test_an_infinite_option_stays_infinite(tmp_path):
    """In resolved.yaml, in a submitted recipe, and in the recipe that a checkpoint has."""
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    options = "loss.options={margin: .inf, low: -.inf}"
    config = load_config(str(file), ["loss.kind=my_package.loss", options])
    assert config.loss.options == {"margin": math.inf, "low": -math.inf}
    file.write_text(config.to_yaml())
    assert load_config(str(file)) == config
    assert check_config(json.loads(json.dumps(config.model_dump(mode="json"))), "x") == config


def test_a_message_does_not_invent_a_text(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    with pytest.raises(UserError, match="with what you typed in the quotes") as e:
        load_config(str(file), ["log.wandb_project=1e5"])
    assert "'\"100000" not in str(e.value)


@pytest.mark.parametrize("word, value", SWITCHES.items())
def test_a_boolean_takes_the_words_for_it(word, value, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    config = load_config(str(file), [f"log.wandb={word}", f"engine.compile={word}"])
    assert config.log.wandb is value and config.engine.compile is value
    path = "tests.launcher.test_yaml.falling"
    options = checked_options("schedule.name", path, {"steep": word, "note": word})
    assert options == {"steep": value, "note": word}


def test_a_site_file_keeps_its_words(tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text(
        "partition: on\naccount: 0012\ntime: 12:30:00\n"
        "sbatch: {kill-on-invalid-dep: yes, begin: 2024-01-01, exclusive: true, deadline: 10:30}\n"
    )
    site = load_site(str(file))
    assert (site.partition, site.account, site.time) == ("on", "0012", "12:30:00")
    assert site.sbatch == {
        "kill-on-invalid-dep": "yes", "begin": "2024-01-01", "exclusive": True, "deadline": "10:30",
    }  # fmt: skip


def test_an_imported_name_stays_a_name(capsys, tmp_path):
    line = "main.py --model ViT-B-32 --train-data x.tar --train-num-samples 3000000 --name 1e5 --wandb-project-name on"
    assert main(["import-args", line]) == 0
    file = tmp_path / "r.yaml"
    file.write_text(capsys.readouterr().out)
    config = load_config(str(file))
    assert (config.run.name, config.log.wandb_project) == ("1e5", "on")


def test_anchors_may_be_merged_and_keys_not_repeated(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        RECIPE
        + "optim: &a {lr: 1e-4, eps: 1e-8}\nschedule: {<<: {name: constant}, warmup_steps: 5}\n"
    )
    config = load_config(str(file))
    assert (config.optim.lr, config.optim.eps) == (1e-4, 1e-8)
    assert (config.schedule.name, config.schedule.warmup_steps) == ("constant", 5)
    file.write_text(RECIPE + "optim: {lr: 1, 'lr': 2}\n")
    assert main(["plan", str(file)]) == 2


@pytest.mark.parametrize("text", ["!!int x", "1" * 5000, "!!python/name:os.system", "[" * 1000])
def test_what_cannot_be_read_is_the_users_mistake(text, tmp_path, capsys):
    file = tmp_path / "r.yaml"
    file.write_text(f"run: {{steps: {text}}}\n")
    assert main(["plan", str(file)]) == 2
    said = capsys.readouterr().err
    assert "is not YAML" in said and "Traceback" not in said
    file.write_text(RECIPE)
    assert main(["plan", str(file), f"run.seed={text}"]) == 2
    assert "is not a YAML value" in capsys.readouterr().err


def test_a_recipe_may_be_json(tmp_path):
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"run": {"steps": 5000, "name": "on"}, "data": {"train": "a.tar"}}))
    assert load_config(str(file)).run.name == "on"
