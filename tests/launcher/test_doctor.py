"""`clip-train doctor`: ok on a healthy set-up, and each planted fault named."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as torch_dist
from PIL import Image

from clip_tools.doctor import (
    MAX_SHARD_BYTES,
    check_group,
    check_rates,
    check_recipe,
    check_shared_memory,
    look,
    measure_pairs,
)
from clip_tools.shards.index import index_shards, write_indexes
from clip_train.errors import UserError
from clip_train.recipe.recipe import load_config
from launcher.checks import PLACES, Finding, check_store, error, require_places
from launcher.cli.main import entry, main
from tests.data.shards import jpeg, write_shard
from tests.data.test_equal import counted, told
from tests.launcher.conftest import ROOT, clean_environment, finish
from tests.ranks import run_ranks
from tests.warm import Command


def doctor(
    tmp_path: Path, *arguments: str, limit: int | None = None, **environ: str
) -> tuple[int, str]:
    """Exit status and what it prints; limit: of open files."""
    env = clean_environment() | environ
    env.pop("SLURM_CONF", None)
    target = None if limit is None else partial(with_open_files, limit)
    status, out = finish(
        Command(["doctor", *arguments], env=env, cwd=tmp_path, split=True, target=target)
    )
    return status, out


def with_open_files(limit: int) -> None:
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (limit, max(limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    )
    entry()


def fake_slurm(folder: Path) -> Path:
    folder.mkdir()
    config = "JobRequeue = 0\nKillWait = 5 sec\nProctrackType = proctrack/linuxproc\nSLURM_VERSION = 22.05.8\n"
    config += "PreemptMode = CANCEL\n"
    (folder / "scontrol").write_text(f'#!/bin/sh\nprintf "{config}"\n')
    (folder / "scontrol").chmod(0o755)
    return folder


def test_a_healthy_set_up(recipe, tmp_path):
    status, out = doctor(tmp_path, "--json", str(recipe), PATH="/usr/bin:/bin", limit=4096)
    assert status == 0, out
    report = json.loads(out)
    said = {finding["check"]: finding["message"] for finding in report["findings"]}
    checks = {
        "versions",
        "devices",
        "ranks",
        "process group",
        "limits",
        "shards",
        "store",
        "disk",
    }
    assert report["worst"] != "error" and checks <= set(said)
    assert "GB/s" in said["process group"]
    worse = {finding["check"] for finding in report["findings"] if finding["level"] != "ok"}
    assert not worse & {"slurm", "clock"} and "local to each node" not in out  # no Slurm here
    assert all(
        (finding["level"] == "ok") == (not finding["remedy"]) for finding in report["findings"]
    )


def test_all_nodes_are_those_of_a_job(monkeypatch):
    """Of a real one: tests/slurm/test_nodes.py."""
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    with pytest.raises(UserError, match="--all-nodes needs a Slurm job: salloc --nodes N"):
        next(check_group(all_nodes=True))


def test_the_group_does_not_import_from_the_working_directory(monkeypatch):
    """Where a user's random.py may be: an empty part of PYTHONPATH is that folder."""
    seen: dict[str, str] = {}

    def run(line, *, env, **others):
        seen.update(env)
        return subprocess.CompletedProcess(line, 1, "", "")

    monkeypatch.setattr("subprocess.run", run)
    for mine in ("", "/a:/b"):
        monkeypatch.setenv("PYTHONPATH", mine)
        (found,) = check_group()
        assert found.level == "error"
        assert seen["PYTHONPATH"] == ":".join([str(ROOT), *filter(None, [mine])])


def partners() -> tuple[set[int], list[dict[int, float]]]:
    """With whom this rank exchanges, and the rates of all."""
    seen, exchange = set(), torch_dist.P2POp

    def recorded(way, part, partner):
        seen.add(partner)
        return exchange(way, part, partner)

    torch_dist.P2POp = recorded
    try:
        return seen, measure_pairs(torch.device("cpu"))
    finally:
        torch_dist.P2POp = exchange


@pytest.mark.parametrize("world_size", [3, 4])
def test_each_rank_exchanges_with_all_others(world_size):
    for rank, (seen, rates) in enumerate(run_ranks(partners, world_size)):
        assert seen == {*range(world_size)} - {rank}
        assert len(rates) == world_size
        for other, by_partner in enumerate(rates):
            assert by_partner.keys() == {*range(world_size)} - {other}
            assert all(rates[partner][other] == rate > 0 for partner, rate in by_partner.items())


def test_a_folder_as_the_remote_store(recipe, tmp_path):
    """Each right is tried, and nothing is left in it."""
    config = load_config(str(recipe), [f"checkpoint.remote={tmp_path / 'remote'}"])
    findings = list(check_store(config))
    assert [f.level for f in findings] == ["ok"]
    assert list((tmp_path / "remote").rglob("*")) == []
    (tmp_path / "file").touch()
    findings = list(
        check_store(load_config(str(recipe), [f"checkpoint.remote={tmp_path / 'file'}"]))
    )
    assert findings[-1].level == "error" and findings[-1].remedy


def test_the_rates_of_the_disk_and_the_store(recipe, tmp_path):
    """4 MiB in a second are slow for a store. Nothing is left."""

    def found(remote: str) -> list[Finding]:
        return list(check_rates(load_config(str(recipe), [f"checkpoint.remote={remote}"])))

    disk, slow = found(f"tests.launcher.slow.SlowWrites://{tmp_path}/store")
    assert f"run.dir ({tmp_path}/run) is written at" in disk.message and " MB/s" in disk.message
    assert slow.level == "warning" and "is written at" in slow.message and slow.remedy
    assert [each.check for each in found(f"{tmp_path}/store")] == ["rates", "rates"]
    assert len(found("nope://nowhere")) == 1  # `check_store` has said it
    assert not [*tmp_path.rglob(".doctor*")] and not [*(tmp_path / "store").rglob("*")]


def test_a_check_of_a_place_has_one_entry(recipe, monkeypatch):
    """`doctor` shows what it finds; it stops `submit` and `train --dry-run`, in the same words."""

    def quota(config):
        yield error("quota", f"{config.run.name} may write 3 files", "ask for more")

    monkeypatch.setitem(PLACES, "recipe", quota)  # a name that a check of `doctor` has too
    found = list(look(str(recipe), []))
    shown = [f for f in found if f.check == "quota"]
    assert [(f.level, f.message) for f in shown] == [("error", "small may write 3 files")]
    assert any(f.check == "recipe" for f in found)
    with pytest.raises(UserError, match=r"^small may write 3 files; ask for more$"):
        require_places(load_config(str(recipe)))


def test_an_index_and_its_captions(data, recipe, tmp_path):
    """Present, missing, made with another caption key, not looked for; of the training data, not of data.val."""
    shutil.copytree(Path(data.train).parent, tmp_path / "set")
    train = [f"data.train={tmp_path / 'set' / Path(data.train).name}"]
    train += [f"data.val={data.train}"]

    def index(*more: str) -> list[str]:
        config = load_config(str(recipe), [*train, *more])
        found = [f for f in check_recipe(config) if f.check == "index"]
        return [f"{f.level}: {f.message} {f.remedy}" for f in found]

    (line,) = index()
    assert line.startswith("warning") and "clip-train index '" in line
    write_indexes(
        index_shards([str(each) for each in sorted((tmp_path / "set").glob("*.tar"))], workers=1)
    )
    (line,) = index()
    assert line.startswith("ok") and "600 samples in an epoch" in line
    (line,) = index("data.verify=off")
    assert line.startswith("ok")


def test_sizes_that_do_not_fit_the_samples_are_named(data, recipe, tmp_path):
    shutil.copytree(Path(data.train).parent, tmp_path / "set")
    shards = sorted(str(each) for each in (tmp_path / "set").glob("*.tar"))
    write_indexes(index_shards(shards, workers=1))
    train = [f"data.train={tmp_path / 'set' / Path(data.train).name}", "run.steps=null"]

    def found(*more: str) -> list[str]:
        config = load_config(str(recipe), [*train, *more])
        warnings = [f for f in check_recipe(config) if (f.level, f.check) == ("warning", "recipe")]
        return [f"{f.message} -> {f.remedy}" for f in warnings]

    assert found("run.epochs=2") == []
    (said,) = found("run.epochs=2", "data.num_samples=700")
    assert "data.num_samples (700)" in said and "600 samples -> set data.num_samples=null" in said
    (said,) = found("run.steps=30", "data.num_samples=700", "batch.global_size=640")
    assert "batch.global_size (640) is more than the samples of data.train (600)" in said
    assert found("run.steps=30", "batch.global_size=640", "data.resampled=true") == []


def test_shared_memory_is_compared_with_what_the_recipe_takes(recipe, monkeypatch):
    """2 workers of 3 slots of 32,768 images of 3 kB, where a container has 64 MiB."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def found(free: int, *more: str) -> Finding:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free << 20))
        config = load_config(str(recipe), ["batch.global_size=65536", "data.workers=2", *more])
        return next(each for each in check_recipe(config) if each.check == "limits")

    said = found(64)
    assert said.level == "warning" and "64 MiB free" in said.message and "576 MiB" in said.message
    assert found(600).level == found(0, "data.workers=0").level == "ok"
    (machine,) = check_shared_memory()
    assert machine.level == "warning" and "1,024 MiB" in machine.message


def findings(recipe: Path, check: str, *more: str) -> Finding | None:
    config = load_config(str(recipe), more)
    return next((each for each in check_recipe(config) if each.check == check), None)


def write_texts(path: Path, texts: list[str]) -> None:
    members = [((f"{i}.jpg", jpeg(i)), (f"{i}.txt", t.encode())) for i, t in enumerate(texts)]
    write_shard(path, [*chain(*members)])


@pytest.mark.parametrize("shards", [1, 8])
def test_equal_captions_are_counted_over_the_shards(recipe, tmp_path, shards):
    """Equal ones follow each other, as in a table that is sorted: each shard has its own."""
    captions = [f"caption {i // 20}" for i in range(120)] + [f"another {i}" for i in range(120)]
    per_shard = len(captions) // shards
    for number in range(shards):
        texts = captions[number * per_shard : (number + 1) * per_shard]
        write_texts(tmp_path / f"{number:02d}.tar", texts)
    train = f"data.train={tmp_path}/*.tar"
    size = load_config(str(recipe), []).batch.global_size
    found = findings(recipe, "captions", train)
    assert f"from {shards} of {shards} shards" in found.message
    assert told(found.message) == pytest.approx([counted(captions, size)], abs=0.5)
    assert found.level == "warning"
    assert findings(recipe, "captions", train, "loss.groups=caption").level == "ok"


def test_a_long_caption_is_shortened_in_messages(recipe, tmp_path, capsys):
    """In the doctor's line and in that of a dry run; a short one is shown as it is."""
    write_texts(tmp_path / "long.tar", ["a frog\n" + "translated " * 100, "x"])
    write_texts(tmp_path / "short.tar", ["a frog"])
    for name, shown in (
        ("long", r"'a frog\ntranslated translated translated translated translat…'"),
        ("short", "'a frog'"),
    ):
        train = f"data.train={tmp_path}/{name}.tar"
        assert findings(recipe, "shards", train).message.endswith(f": {shown}")
        assert main(["train", str(recipe), "--dry-run", "--ranks", "1", train]) == 0
        assert f"the first caption: {shown}\n" in capsys.readouterr().out


def test_many_shards_are_read_from_the_whole_list(recipe, tmp_path):
    """24 shards of 10 texts; those of the first 8 are equal in each."""
    captions = [f"caption {i // 10 if i < 80 else i}" for i in range(240)]
    for number in range(24):
        write_texts(tmp_path / f"{number:02d}.tar", captions[number * 10 : number * 10 + 10])
    found = findings(recipe, "captions", f"data.train={tmp_path}/*.tar")
    size = load_config(str(recipe), []).batch.global_size
    assert "from 8 of 24 shards" in found.message
    assert told(found.message) == pytest.approx([counted(captions, size)], rel=0.3)


def test_captions_that_differ_or_are_not_read_are_no_warning(recipe, tmp_path):
    write_texts(tmp_path / "0.tar", ["another"])
    assert "few samples" in findings(recipe, "captions", f"data.train={tmp_path}/0.tar").message
    assert findings(recipe, "captions", "data.train=synthetic://999") is None
    os.truncate(tmp_path / "0.tar", MAX_SHARD_BYTES)  # a hole
    assert findings(recipe, "captions", f"data.train={tmp_path}/0.tar") is None


def test_transparent_images_are_counted(recipe, tmp_path):
    file = io.BytesIO()
    Image.new("RGBA", (8, 8), (200, 0, 0, 90)).save(file, "PNG")
    members = [("0.png", file.getvalue()), ("0.txt", b"a"), ("1.jpg", jpeg(1)), ("1.txt", b"b")]
    write_shard(tmp_path / "0.tar", members)
    train = f"data.train={tmp_path}/0.tar"
    found = findings(recipe, "images", train)
    assert found.level == "warning" and "1 of the first 2 images have transparent" in found.message
    assert "data.alpha=drop" in found.remedy
    assert findings(recipe, "images", train, "data.alpha=drop").level == "ok"


def test_images_that_training_does_not_read_are_not_looked_at(recipe, tmp_path):
    """The first shard has none that `data.keep` keeps, the second one of each kind."""
    file = io.BytesIO()
    Image.new("RGBA", (8, 8), (200, 0, 0, 90)).save(file, "PNG")
    transparent, plain = ("png", file.getvalue()), ("jpg", jpeg(1))
    for shard, samples in enumerate(
        ([(transparent, 0)], [(transparent, 0), (plain, 1), (transparent, 1), (plain, 1)])
    ):
        members = []
        for number, ((extension, image), score) in enumerate(samples):
            members += [(f"{number}.{extension}", image), (f"{number}.txt", b"a")]
            members.append((f"{number}.json", b'{"score": %d}' % score))
        write_shard(tmp_path / f"{shard}.tar", members)
    train = f"{tmp_path}/*.tar"
    assert main(["index", train, "--columns", "json.score"]) == 0
    found = findings(recipe, "images", f"data.train={train}", "data.keep=score > 0.5")
    assert "1 of the first 3 images have transparent" in found.message


def test_planted_faults_are_each_named(recipe, tmp_path):
    """Faults that do not hide each other, in one go."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    slurm = fake_slurm(tmp_path / "slurm")
    status, out = doctor(
        tmp_path,
        str(recipe),
        "checkpoint.keep_last=100000000",
        "data.val=/nowhere/val.tar",
        "checkpoint.remote=nope://nowhere",
        limit=256,
        RANK="0",
        WORLD_SIZE="8",
        GLOO_SOCKET_IFNAME="nosuch0",
        PATH=f"{slurm}:/usr/bin:/bin",
    )
    assert status == 1
    for check, level, said in (
        ("ranks", "error", "MASTER_ADDR"),
        ("process group", "error", "GLOO_SOCKET_IFNAME"),
        ("limits", "warning", "ulimit -n 65536"),
        ("slurm", "warning", "JobRequeue=0"),
        ("slurm", "warning", "KillWait=5"),
        ("slurm", "warning", "proctrack/cgroup"),
        ("slurm", "warning", "PreemptMode=CANCEL"),
        ("recipe", "error", "data.val (/nowhere/val.tar)"),
        ("store", "error", "not a URL that fsspec can open"),
        ("disk", "error", "make room"),
        ("run", "error", "STOP"),
    ):
        assert any(
            line.startswith(f"{level:8}{check}: ") and said in line for line in out.splitlines()
        ), (said, out)


@pytest.mark.parametrize(
    "overrides, check, said",
    [
        (["optim.learning_rate=1"], "recipe", "did you mean optim.lr?"),
        pytest.param(
            ["engine.ds_config=zero9"], "recipe", "shipped ones are zero0", marks=pytest.mark.full
        ),
        pytest.param(
            ["data.train=/nowhere/{0..3}.tar"], "recipe", "/nowhere/0.tar", marks=pytest.mark.full
        ),
    ],
)
def test_mistakes_in_the_recipe(recipe, tmp_path, overrides, check, said):
    status, out = doctor(tmp_path, str(recipe), *overrides, PATH="/usr/bin:/bin")
    assert status == 1
    assert f"{'error':8}{check}: " in out and said in out, out
