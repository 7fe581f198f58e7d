"""Every block of YAML in README and docs: read by the recipe's or the site file's own loader, and checked as far as
`train --dry-run` checks a recipe.

A block that is a part of a recipe is laid over a small recipe. Shards, weights and the reader's own package are
replaced by small local ones.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from clip_train.recipe.recipe import SECTIONS, load_config
from clip_train.yaml_text import dump_yaml, load_yaml
from launcher.cli.main import main
from launcher.slurm.profile import load_site
from tests.data.shards import jpeg, write_shard
from tests.documents import PAGES, ROOT, blocks
from tests.launcher.conftest import RECIPE

BLOCKS = blocks("yaml")
RECIPES = [block for block in BLOCKS if load_yaml(block.text).keys() <= SECTIONS.keys()]
SITES = [block for block in BLOCKS if block not in RECIPES]
# Words of a block that is only loaded -> the reason.
ONLY_LOADED = {
    "examples.audio": "its shards hold sounds; tests/test_examples.py trains the example",
}
if find_spec("torchvision") is None:
    ONLY_LOADED["torchvision"] = "torchvision is not installed"
WEIGHTS = ("init_from", "init_image_from", "init_text_from", "teacher")


def test_there_are_blocks_of_both_kinds():
    assert len(RECIPES) >= 15 and SITES


def test_all_yaml_is_in_a_block_that_says_so():
    """Not in an indented one, which no test reads."""
    pattern = re.compile(rf"^ {{4,}}(?:{'|'.join(SECTIONS)}):(?: |$)", re.MULTILINE)
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert pattern.findall(text) == [], page.name


@pytest.fixture
def my_package(tmp_path, monkeypatch) -> Path:
    """The package of the reader, made of the code that docs/extending.md shows."""
    folder = tmp_path / "my_package"
    folder.mkdir()
    code = [block.text for block in blocks("python") if block.page.name == "extending.md"]
    named = {
        "__init__.py": next(text for text in code if text.startswith("def half_life(")),
        "stages.py": next(text for text in code if "# my_package/stages.py" in text),
    }
    for name, text in named.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


def overrides(data, given: dict, folder: Path) -> list[str]:
    """What the machine of the reader has and this one lacks."""
    train = data.train
    if "stages" in given.get("data", {}):  # the stages of the page rename the images
        write_shard(
            folder / "00000.tar",
            [("0.picture", jpeg(0)), ("0.caption", b"A caption of many more than 20 characters")],
        )
        train = str(folder / "00000.tar")
    sources = len(str(given.get("data", {}).get("train", "")).split("::"))
    here = [f"data.train={'::'.join([train] * sources)}"]
    sets = given.get("data", {}).get("val")
    if isinstance(sets, dict):
        here.append(f"data.val={{{', '.join(f'{name}: {data.val}' for name in sets)}}}")
    elif sets is not None:
        here.append(f"data.val={data.val}")
    for name, one in given.get("evaluate", {}).get("sets", {}).items():
        here.append(f"evaluate.sets.{name}.data={data.val}")
        if "classes" in one:
            here.append(f"evaluate.sets.{name}.classes={data.classes}")
    here += [f"model.{key}=null" for key in WEIGHTS if key in given.get("model", {})]
    if "auto" in given.get("batch", {}).values():
        here.append("batch.memory_limit=80GB")  # of the reader's GPU
    return here


@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_a_block_is_a_recipe_or_a_part_of_one(block, data, model, my_package, tmp_path, capsys):
    given = load_yaml(block.text)
    file = tmp_path / "recipe.yaml"
    if {"run", "data"} <= given.keys():
        file.write_text(block.text)
    else:
        small = load_yaml(RECIPE.format(run_dir=tmp_path / "run", train=data.train, model=model))
        small["run"]["steps"] = 50_000  # a schedule of a document is longer than a small run
        if "name" in given.get("model", {}):
            small["model"] = {}
        sections = {name: small.get(name, {}) | given.get(name, {}) for name in {**small, **given}}
        file.write_text(dump_yaml(sections))
    config = load_config(str(file), [f"run.dir={tmp_path / 'run'}"])
    for section, values in given.items():
        kept = getattr(config, section).model_dump(mode="json", exclude_unset=True)
        assert values.keys() <= kept.keys(), section
    if any(words in block.text for words in ONLY_LOADED):
        return
    line = [str(file), f"run.dir={tmp_path / 'run'}", *overrides(data, given, tmp_path)]
    assert main(["train", *line, "checkpoint.keep_last=1", "--dry-run"]) == 0, (
        capsys.readouterr().err
    )
    assert "nothing was started" in capsys.readouterr().out


@pytest.mark.parametrize("block", SITES, ids=str)
def test_a_block_is_a_site_file(block, recipe, tmp_path, capsys):
    file = tmp_path / "site.yaml"
    file.write_text(block.text)
    given = load_yaml(block.text)
    site = load_site(str(file))
    read = site.model_dump()
    for key, value in given.items():
        if key == "kubernetes":  # a section, of which the block shows some keys
            assert read[key] | value == read[key]
        else:
            assert read[key] == value, key
    (tmp_path / "clip-train.sif").touch()
    text = block.text.replace("/tmp", "/nowhere")  # where this test's run is
    text = text.replace("/shared/images", str(tmp_path))
    if "local_paths" not in given:
        text += "\nlocal_paths: []\n"
    file.write_text(text.replace("container_runtime: auto ", "container_runtime: apptainer "))
    assert main(["submit", str(recipe), "--dry-run", "--offline", "--site", str(file)]) == 0
    script = capsys.readouterr().out
    for option, value in given.get("sbatch", {}).items():
        assert f"#SBATCH --{option}" in script or f'#SBATCH "--{option}={value}"' in script
