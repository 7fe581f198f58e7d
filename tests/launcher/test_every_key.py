"""A bad value for every key of the recipe: told in one line with the key, the value and what to write instead."""

from __future__ import annotations

import copy
import math
import re
import shlex
from typing import Any

import pytest

from clip_train.errors import UserError
from clip_train.recipe.recipe import apply_overrides, check_config, known_keys, parse_value
from clip_train.recipe.resolve import resolve
from clip_train.settings import LARGEST
from tests.launcher.conftest import run

KEYS = [key for key, _ in known_keys()]
BAD: dict[str, Any] = {
    "a word": "manyfold", "empty text": "", "blank text": "  ", "a null byte": "x\0y", "long text": "x" * 5000,
    "negative": -1, "zero": 0, "a fraction": 0.5, "a negative fraction": -0.5, "huge": 10**30, "a huge float": 1e300,
    "infinite": math.inf, "not a number": math.nan, "a switch": True, "nothing": None, "an empty list": [],
    "a list": [1], "a list of text": ["manyfold"], "keys": {"manyfold": 1},
}  # fmt: skip
TAKES_ANY_NAMES = ("data.caption_key", "data.negative_texts")
NEVER = (
    "empty text",
    "blank text",
    "a null byte",
    "huge",
    "a huge float",
    "infinite",
    "not a number",
    "keys",
)
# What Python says, and users do not.
JARGON = re.compile(
    r"constrained|literal\[|pydantic|NoneType|\bNone\b|[Ii]nput should|Field required|\btype=|<class|Traceback"
    r"|\bfunction-|\bstr\b|\bint\b|\bbool\b"
)


def recipe_with(key: str, value: Any) -> dict[str, Any]:
    """A good recipe but for one key."""
    raw: dict[str, Any] = {
        "run": {"steps": 5000}, "data": {"train": "a.tar"}, "model": {"name": "tiny"},
        "batch": {"global_size": 32, "micro_size": 8},
    }  # fmt: skip
    if key == "run.epochs":
        raw["run"], raw["data"]["num_samples"] = {}, 10_000_000
    section, name = key.split(".")
    if ".tokens" in key:
        raw["data"] |= {"resize": "native", "tokens": 256}
    raw.setdefault(section, {})[name] = copy.deepcopy(value)
    return raw


def told(raw: dict[str, Any]) -> str:
    """What `clip-train` has against a recipe, "" for nothing. Whatever is not a UserError would be a traceback."""
    try:
        resolve(check_config(raw, "recipe.yaml"), 1, read_data=False)
    except UserError as e:
        return str(e)
    return ""


def as_shown(value: Any) -> list[str]:
    """How a message may have the value."""
    if isinstance(value, str):
        return [repr(value)[:40], f"({value[:40]}"]
    special = {"None": "null", "True": "true", "inf": ".inf", "nan": ".nan", "1e+300": "1.0e+300"}
    if isinstance(value, list):
        return [
            str(value).replace("'", ""),
            str([True]),
            str([1.0]),
            *(f"({each!r})" for each in value),
            *(f"({each})" for each in value),
        ]
    if isinstance(value, dict):
        inside = (f".{name} ({each})" for name, each in value.items())
        return [str(value).replace("'", ""), *inside]
    return [special.get(str(value), str(value))]


@pytest.mark.parametrize("key", KEYS)
def test_a_bad_value_is_told_in_plain_words(key):
    for what, value in BAD.items():
        message = told(recipe_with(key, value))
        assert message or what not in NEVER or (key in TAKES_ANY_NAMES and what == "keys"), (
            f"{key}: {what} was taken"
        )
        if not message:
            continue
        lines = [line.strip() for line in message.split("\n")]
        if len(lines) > 1:
            assert lines.pop(0) == "recipe.yaml: 1 mistake", message
        (line,) = lines
        assert key in line and len(line) < 1000, message
        assert not JARGON.search(line.replace(str(value), "")), message
        assert any(each in line for each in as_shown(value)), message
        assert re.search(r"; |must be|give |or |: ", line.split(")", 1)[-1]), (
            f"no remedy: {message}"
        )
        if "must be" in line and (remedy := re.search(r"; set .*$", line)):
            assert tried(key, remedy[0]), f"the remedy does not help: {message}"


def tried(key: str, remedy: str) -> bool:
    """Whether what the message would have written is accepted."""
    words = shlex.split(
        remedy.removeprefix("; set ")
        .replace(" or another", "")
        .replace(", if that is meant, or", "")
    )
    overrides = [word for word in words if word.startswith(f"{key}=")]
    assert overrides, remedy
    good = [apply_overrides(recipe_with(key, "manyfold"), [override]) for override in overrides]
    return not told(good[-1])


@pytest.mark.parametrize("section", sorted({key.split(".")[0] for key in KEYS}))
@pytest.mark.parametrize("value", [None, 5, "text", [1]], ids=str)
def test_a_section_that_is_none(section, value):
    message = told({"run": {"steps": 5000}, "data": {"train": "a.tar"}, section: value})
    assert f"{section} (" in message and "must be a section; write " in message, message
    assert not JARGON.search(message), message


@pytest.mark.parametrize(
    "override, said",
    [
        (
            "data.lanes=0",
            "data.lanes (0) must be greater than 0 or 'auto'; set data.lanes=auto (the default)",
        ),
        ("data.workers=true", "data.workers (true) must be a number or text, not true or false"),
        (
            "optim.lr=-1",
            "optim.lr (-1) must be greater than 0; set optim.lr=0.0005 (the default) or another",
        ),
        ("optim.beta1=1", "optim.beta1 (1) must be less than 1"),
        ("engine.zero_stage=4", "engine.zero_stage (4) must be 0, 1, 2 or 3"),
        (
            "engine.activation_checkpointing=8",
            "must be a valid boolean, unable to interpret input or 'pointwise' or 'auto'; set",
        ),
        ("data.verify=on", "data.verify ('on') must be "),
        ("checkpoint.every_steps=0", "must be greater than or equal to 1; set"),
        ("run.name=a b", "run.name ('a b') must be letters, digits, dots, dashes and underscores"),
        (
            "run.name=7",
            """set run.name='"7"', if that is meant, or run.name=clip (the default) or another""",
        ),
        (
            "run.steps=1e30",
            "run.steps (1.0e+30) must be a whole number of at least 1; set run.steps=10000",
        ),
        (
            "data.aug_scale=[0.5]",
            "must be a list of 2 numbers; set data.aug_scale='[0.9, 1.0]' (the",
        ),
        (
            "data.aug_color_jitter=[0.4, 0.4, 0.4, 0.6]",
            "must be a list of 4 numbers from 0 to 10 (brightness, contrast, saturation, hue), the last at most 0.5",
        ),
        ("data.aug_ratio=[2, 1]", "data.aug_ratio (2.0, 1.0) must satisfy 0 < from <= to"),
        (
            "data.caption_key={a: 0}",
            "data.caption_key ({a: 0}) must be a name, a list of names, names with numbers",
        ),
        (
            "data.train_weights=[1, x]",
            "data.train_weights ([1, x]) must be a list of numbers greater than 0",
        ),
        (
            "batch.schedule=[{until_step: 0, global_size: 8}]",
            "batch.schedule.0.until_step (0) must be greater than 0; set batch.schedule=",
        ),
        (
            "loss.tile=-1",
            "loss.tile (-1) must be greater than 0 or 'auto'; set loss.tile=auto",
        ),
    ],
)
def test_words(override, said):
    key, _, text = override.partition("=")
    assert said in told(recipe_with(key, parse_value(text, key)))


@pytest.mark.engine
def test_the_largest_seed_that_is_allowed_trains(recipe):
    status, out = run(recipe, f"run.seed={LARGEST}", "run.steps=1", "schedule.warmup_steps=0")
    assert status == 0, out


def test_each_mistake_once():
    raw = recipe_with("data.lanes", "x") | {"optim": {"lr": -1, "beta3": 1}}
    assert told(raw).count("\n") == 3
    assert told({}).count("is missing; add it to the recipe, or ") == 2
