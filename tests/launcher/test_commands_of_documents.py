"""The commands that README, docs and `--help` show, typed as they stand, on a small run: all that needs no cluster."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from clip_tools.demo import SyntheticData
from launcher.cli.main import VERBS, main, verb_parser
from tests.documents import ROOT, commands, examples_in, own_arguments, split
from tests.launcher.conftest import RECIPE, clean_environment, finish, run
from tests.warm import Command

pytestmark = [pytest.mark.full, pytest.mark.engine]

OPENCLIP = "needs OpenCLIP: tests/peers"
# Words of a command that is not run here -> why, and which test runs its like. tests/test_documents.py parses it.
ELSEWHERE = {
    "clip-train demo": "takes minutes: tests/launcher/test_cold.py, and `make demo`",
    "model.name=open_clip:": OPENCLIP,
    "caption open_clip:": OPENCLIP,
    "epoch_32.pt": "needs weights and a data set of clip_benchmark: tests/launcher/test_inspect.py",
    "/data/imagenet": "needs the 1000 classes of ImageNet: tests/evaluate",
    "my_package.losses": "a module of your own: tests/launcher/test_own_code.py",
    "my_package.stores": "needs a server of the reader: tests/storage/test_urls.py",
    "--format peft": "needs a run with adapters: tests/launcher/test_lora.py",
    "datacompdr": "needs reinforced shards: tests/launcher/test_reinforce.py",
    "recipes/siglip2_finetune.yaml": "needs weights of the hub: tests/peers/test_siglip.py",
    "recipes/siglip2_long.yaml": "needs weights of the hub: tests/peers/test_siglip.py",
    "doctor --hang": "needs a run that hangs: tests/launcher/test_hang.py",
    "json.negatives": "needs mined shards: tests/launcher/test_mine.py",
    "--push": "needs the hub: tests/launcher/test_push.py",
    "clip-train reinforce": "needs a teacher's weights: tests/launcher/test_reinforce.py",
}
# What a page names, and what is here in its place.
REPLACED = {
    "simplecache::s3://bucket/cc12m/{00000..01242}.tar": "shards/*.tar",
    "s3://bucket/cc12m/{00000..01242}.tar": "shards/*.tar",
    "data.val=s3://bucket/{0000..0099}.tar": "data.val=val/*.tar",
    "checkpoint.remote=s3://bucket/runs/first": "checkpoint.remote=store",
    "checkpoint.remote=s3://bucket/run": "checkpoint.remote=store",
    "checkpoint.remote=sftp://backup/srv/runs/first": "checkpoint.remote=store",
    "s3://bucket/runs/first": "runs/first",
    "s3://bucket/hard": "hard",
    "s3://bucket/run": "runs/first",
    "data.val=val.tar": "data.val=val/*.tar",
    "/data/wds_mscoco_captions/test": "val/*.tar",
    "/data/wds_cars": "wds_cars",
    "open_clip:ViT-B-32/laion2b_s34b_b79k": "runs/my-run/export",
    "open_clip:ViT-B-32/openai": "runs/my-run/export",
    "torchrun ... --model ...": "torchrun --nproc_per_node 8 -m main --model ViT-B-32 ...",
    " ...": " --train-data shards/{00000..00003}.tar --train-num-samples 1000000",
}
STATUSES = {"doctor": (0, 1), "checkpoints": (0, 1)}
RUNS = (
    "my-run",
    "clip",
    "first",
    "demo-shapes",
    "speed",
    "a",
    "b",
    "birds",
    "siglip2-b16",
    "siglip2-long",
)


def lines() -> list[str]:
    shown = {
        line for page, line in commands() if page.name != "troubleshooting.md"
    }  # whose commands are mistakes
    shown |= {
        shlex.join(split(line)) for verb in VERBS for line in examples_in(verb_parser(verb).epilog)
    }
    ours = {
        shlex.join(["clip-train", *arguments])
        for line in shown
        if (arguments := own_arguments(line))
    }
    return sorted(ours)


def is_elsewhere(line: str) -> bool:
    return any(words in line for words in ELSEWHERE)


def test_each_reason_has_a_command():
    for words in ELSEWHERE:
        assert any(words in line for line in lines()), words


def with_scores(source: Path, folder: Path) -> None:
    """The shards with a score and a uid of each sample, an index with both, and a list of every second uid."""
    from tests.data.shards import write_shard

    (folder / "shards").mkdir()
    uids = []
    for path in sorted(source.glob("*.tar")):
        members = []
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith(".json"):
                    uids.append((len(uids), 7))
                    fields = {"clip_score": len(uids) % 9 / 9, "uid": f"{uids[-1][0]:016x}{7:016x}"}
                    content = json.dumps({**json.loads(content), **fields}).encode()
                members.append((member.name, content))
        write_shard(folder / "shards" / path.name, members)
    columns = ["--columns", "json.clip_score,json.uid"]
    assert main(["index", f"{folder}/shards/*.tar", *columns]) == 0
    np.save(folder / "keep.npy", np.array(uids[::2], "u8,u8"))


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
    with_scores(Path(data.train).parent, folder)
    shutil.copytree(Path(data.val).parent, folder / "val")
    photos = folder / "photos"
    photos.mkdir()
    from tests.data.shards import jpeg, write_shard

    for name in ("captions", "labelled", "birds", "birds-test"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["filepath", "title", "kind", "city"])
            for i in range(3):
                (photos / f"{i}.jpg").write_bytes(jpeg(i))
                (photos / f"{i}.txt").write_text(f"picture {i}")
                table.writerow([f"photos/{i}.jpg", f"picture {i}", f"kind {i}", "Oslo"])
    demo = folder / "runs" / "data" / "shapes"  # as `clip-train demo` leaves it
    demo.mkdir(parents=True)
    shutil.copy(data.classes, demo)
    cars = folder / "wds_cars"
    (cars / "test").mkdir(parents=True)
    members = [(f"{i}.jpg", jpeg(i)) for i in range(6)]
    members += [(f"{i}.cls", b"%d" % (i % 2)) for i in range(6)]
    write_shard(cars / "test" / "0.tar", sorted(members))
    (cars / "test" / "nshards.txt").write_text("1\n")
    (cars / "train").symlink_to("test")
    (cars / "classnames.txt").write_text("sedan\nvan\n")
    (folder / "birds").mkdir()
    shutil.copy(data.classes, folder / "birds" / "classes.json")
    (folder / "site.yaml").write_text(
        "local_paths: [/nowhere]\n"  # this folder is under /tmp
        "container_runtime: apptainer\n"
        "kubernetes: {claims: {runs: /work}}\n"
    )
    (folder / "clip-train.sif").touch()
    (folder / "hosts").write_text("localhost slots=1\n")
    status, out = run(folder / "my.yaml")
    assert status == 0, out
    for name in RUNS[1:]:
        (folder / "runs" / name).symlink_to("my-run")
    return folder


def as_tried(line: str, home: Path) -> list[str]:
    """Its arguments, with what another machine has left out: nothing is started, and data are those that are here."""
    for shown, replacement in REPLACED.items():
        line = line.replace(shown, replacement)
    verb, *rest = own_arguments(line) or []
    here = [
        f"data.train={home}/shards/*.tar",
        "data.val=null",
        "engine.precision=fp32",
        "engine.linear=null",
    ]
    if verb in ("train", "submit"):
        here += ["run.epochs=null", "run.steps=10000"]  # epochs of these few samples are short
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
    if verb in ("branch", "average", "export"):  # which name steps of long runs
        return [verb, *(re.sub(r"\b(18000|20000)\b", "7", each) for each in rest)]
    if verb == "index":
        return [verb, f"{home}/shards/*.tar", *rest[1:]]
    return [verb, *rest]


@pytest.mark.parametrize("line", [line for line in lines() if not is_elsewhere(line)])
def test_a_command_does_what_the_page_says(line, home):
    arguments = as_tried(line, home)
    before = None  # the command whose files this one reads
    if arguments[:1] == ["evaluate"] and "--weights" in arguments:
        before = ["export", "my.yaml"]
    if "runs/my-run/export" in arguments[1:2]:
        before = ["export", "my.yaml"]
    if arguments[:1] == ["mine"]:
        before = ["embed", "my.yaml", "data.val=shards/*.tar"]
    if arguments[:1] == ["index"] and "--check" in arguments:
        before = ["index", f"{home}/shards/*.tar"]
    if before is not None:
        finish(Command(before, env=clean_environment(), cwd=home))
    status, out = finish(
        Command(arguments, env=clean_environment() | {"PYTHONPATH": str(ROOT)}, cwd=home)
    )
    assert status in STATUSES.get(arguments[0], (0,)) and "Traceback" not in out, out
    assert out
