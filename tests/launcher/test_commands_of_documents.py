"""The commands that README, docs and `--help` show, typed as they stand, on a small run: all that needs no cluster."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from clip_tools.demo import SyntheticData
from launcher.cli.options import VERBS
from tests.documents import ROOT, commands, examples_in, own_arguments, split
from tests.launcher.conftest import RECIPE, clean_environment, finish, run
from tests.warm import Command

pytestmark = [pytest.mark.full, pytest.mark.engine]

# What these need is not here: a store, a hub, OpenCLIP, the rest of the line, the reader's code.
# `demo` has a test of its own, as have runs with adapters (test_lora.py) and reinforced shards (test_reinforce.py).
ELSEWHERE = (
    "s3://", "hf-hub:", "open_clip:", "...", "epoch_32.pt", "/data/imagenet", "my_package",
    "--format peft", "datacompdr",
)  # fmt: skip
STATUSES = {"doctor": (0, 1), "checkpoints": (0, 1)}
RUNS = ("my-run", "clip", "first", "demo-shapes", "speed", "a", "b", "birds")


def lines() -> list[str]:
    shown = {
        line for page, line in commands() if page.name != "troubleshooting.md"
    }  # whose commands are mistakes
    shown |= {
        shlex.join(split(line)) for verb in VERBS.values() for line in examples_in(verb.examples)
    }
    ours = {
        shlex.join(["clip-train", *arguments])
        for line in shown
        if (arguments := own_arguments(line))
    }
    return sorted(
        line
        for line in ours
        if not any(each in line for each in ELSEWHERE) and line.split()[1] != "demo"
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory, data: SyntheticData, model: Path) -> Path:
    """A folder in which they are typed: recipes, `my.yaml`, a table, photos, shards, and a run that is done."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    recipe = yaml.safe_load(RECIPE.format(run_dir="runs/my-run", train=data.train, model=model))
    recipe["run"] |= {"steps": 7, "name": "my-run"}
    recipe["schedule"]["name"] = "constant"
    recipe["data"]["val"] = data.val
    recipe["evaluate"] = {"zero_shot_classes": data.classes}
    (folder / "my.yaml").write_text(yaml.safe_dump(recipe))
    shutil.copytree(Path(data.train).parent, folder / "shards")
    shutil.copytree(Path(data.val).parent, folder / "val")
    photos = folder / "photos"
    photos.mkdir()
    from tests.data.shards import jpeg

    for name in ("captions", "labelled", "birds", "birds-test"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["filepath", "title", "kind", "city"])
            for i in range(3):
                (photos / f"{i}.jpg").write_bytes(jpeg(i))
                (photos / f"{i}.txt").write_text(f"picture {i}")
                table.writerow([f"photos/{i}.jpg", f"picture {i}", f"kind {i}", "Oslo"])
    (folder / "birds").mkdir()
    shutil.copy(data.classes, folder / "birds" / "classes.json")
    (folder / "site.yaml").write_text("local_paths: [/nowhere]\n")  # this folder is under /tmp
    status, out = run(folder / "my.yaml")
    assert status == 0, out
    for name in RUNS[1:]:
        (folder / "runs" / name).symlink_to("my-run")
    return folder


def as_tried(line: str, home: Path) -> list[str]:
    """Its arguments, with what another machine has left out: nothing is started, and data are those that are here."""
    verb, *rest = own_arguments(line) or []
    here = [
        f"data.train={home}/shards/*.tar",
        "data.val=null",
        "engine.precision=fp32",
        "engine.linear=null",
    ]
    if verb in ("train", "submit"):
        here += ["model.init_from=null", "model.init_image_from=null", "model.init_text_from=null"]
        more = ["--offline", "--site", "site.yaml"] if verb == "submit" else []
        here.append("run.dir=new-runs")  # the run that is there is done: a dry run says so
        # five checkpoints of a large model need 31 GB of disk
        here.append("checkpoint.keep_last=1")
        own, options = rest, []
        if "--" in rest:  # what follows is for sbatch
            own, options = rest[: rest.index("--")], rest[rest.index("--") :]
        own = [each for each in own if each != "--dry-run"]
        return [verb, *own, *here, "--dry-run", *more, *options]
    if verb == "shards":
        return [verb, rest[0], f"made-of-{rest[0]}", *rest[2:]]
    if verb == "doctor" and rest:
        return [verb, *rest, *here]
    if verb in ("branch", "average"):  # which name steps of long runs
        return [verb, *(re.sub(r"\b(18000|20000)\b", "7", each) for each in rest)]
    if verb == "index":
        return [verb, f"{home}/shards/*.tar", *(each for each in rest if each.startswith("--"))]
    return [verb, *rest]


@pytest.mark.parametrize("line", lines())
def test_a_command_does_what_the_page_says(line, home):
    arguments = as_tried(line, home)
    before = None  # the command whose files this one reads
    if arguments[:1] == ["evaluate"] and "--weights" in arguments:
        before = ["export", "my.yaml"]
    if arguments[:1] == ["index"] and "--check" in arguments:
        before = ["index", f"{home}/shards/*.tar"]
    if before is not None:
        finish(Command(before, env=clean_environment(), cwd=home))
    status, out = finish(
        Command(arguments, env=clean_environment() | {"PYTHONPATH": str(ROOT)}, cwd=home)
    )
    assert status in STATUSES.get(arguments[0], (0,)) and "Traceback" not in out, out
    assert out
