"""Batch scripts: what submit renders, what it refuses, and that shells accept all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clip_train.recipe.recipe import load_config
from clip_train.yaml_text import load_yaml
from launcher.cli.main import main
from launcher.slurm.profile import Site, load_site
from launcher.slurm.submit import absolute, frozen_recipe
from tests.launcher.conftest import ROOT

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = [
    *sorted((ROOT / "slurm").glob("*.sbatch")),
    *sorted((ROOT / "scripts").glob("*.sh")),
    *sorted(GOLDEN.glob("*")),
]
SITE = """\
partition: gpu
account: clip
setup: ["export NCCL_SOCKET_IFNAME=ib0", "module load cuda"]
sbatch: {constraint: h100}
local_paths: [/dev/shm]
"""


@pytest.fixture
def here(tmp_path, monkeypatch, recipe) -> Path:
    """A folder with recipe.yaml and site.yaml; the site allows run directories under /tmp."""
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "large.yaml").write_text(SITE.replace("h100", "h100, qos: large"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIP_TRAIN_SITE", str(tmp_path / "site.yaml"))
    return tmp_path


@pytest.mark.parametrize(
    "name, options",
    [
        ("8", ["--nodes=1", "--gpus-per-node=8"]),
        ("1024", ["--nodes=128", "--gpus-per-node=8", "--time=2-00:00:00", "--site=large.yaml"]),
        ("1024-torchrun", ["--nodes=128", "--gpus-per-node=8", "--template=torchrun"]),
    ],
)
def test_dry_run(here, capsys, name, options):
    """UPDATE_GOLDEN=1 writes them anew: look at the difference."""
    status = main(["submit", "recipe.yaml", "batch.global_size=8192", "--dry-run", *options])
    told = capsys.readouterr()
    assert status == 0, told.err
    script = told.out.replace(str(here), "/shared/me").replace(
        str(Path(sys.executable).parent), "/venv/bin"
    )
    file = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(script)
    assert script == file.read_text()
    assert not (here / "run").exists()


def test_what_is_installed(here, tmp_path):
    """Nothing of the checkout is missed: no file that is not Python, and submit finds its template."""
    built = tmp_path / "built"
    line = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {folder.name for folder in built.iterdir()} == {"clip_train", "launcher", "clip_tools"}
    inside = {"recipes": "clip_train", "ds_configs": "clip_train", "slurm": "clip_train"}
    for folder in ("clip_train", "launcher", "clip_tools", *inside):
        files = {file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file()}
        data = {file for file in files if file.suffix != ".py" and "__pycache__" not in file.parts}
        there = built / inside.get(folder, "")
        assert {file for file in data if not (there / file).is_file()} == set()
    line = [
        sys.executable,
        "-m",
        "launcher",
        "submit",
        "recipe.yaml",
        "--dry-run",
        "--offline",
        "--gpus-per-node=1",
    ]
    done = subprocess.run(
        line,
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(built)},
    )
    assert done.returncode == 0, done.stderr
    assert "exec python -m launcher.slurm.controller" in done.stdout


def test_torchrun_waits_as_long_as_the_site_gives_for_a_save(here, capsys):
    (here / "site.yaml").write_text("{warn_seconds: 1800, local_paths: []}\n")
    assert (
        main(["submit", "recipe.yaml", "--dry-run", "--gpus-per-node=1", "--template=torchrun"])
        == 0
    )
    assert "export SAVE_SECONDS=1800\n" in capsys.readouterr().out


def test_a_time_or_a_number_with_a_zero_in_front_is_a_text(here, capsys):
    site = "{time: 12:00:00, account: 0123, sbatch: {begin: 16:00:00, nice: 0x10, mem: 1_000}}"
    (here / "site.yaml").write_text(site.replace("}}", "}, local_paths: []}"))
    assert main(["submit", "recipe.yaml", "--dry-run", "--gpus-per-node=1"]) == 0
    script = capsys.readouterr().out
    for option in ("time=12:00:00", "account=0123", "begin=16:00:00", "nice=16", "mem=1000"):
        assert f"#SBATCH --{option}\n" in script, script


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shells_accept_it(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    line = ["shellcheck", "-s", "bash", "-x", "-P", str(ROOT / "scripts"), str(script)]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--nodes=8", "--gpus-per-node=8"],
            "batch.global_size (32) must be at least the number of ranks (64)",
        ),
        (
            ["--gpus-per-node=8", "--tasks-per-node=4"],
            "--tasks-per-node (4) must be --gpus-per-node (8)",
        ),
        (["--gpus-per-node=0"], "--tasks-per-node"),
        (["--nodes=0"], "--nodes (0) must be greater than 0; give --nodes 1 (the default)"),
        (["--cpus-per-task=0"], "--cpus-per-task (0) must be greater than 0"),
        (["--tasks-per-node=0"], "--tasks-per-node (0) must be greater than 0"),
        (["run.dir=/dev/shm/run"], "under /dev/shm, which is local to each node"),
        (["model.name=ViT-bigG-14", "checkpoint.keep_last=100000"], "make room"),
        (["checkpoint.resume=never"], "the batch script runs this command again"),
        (["data.train=/nowhere/{0..3}.tar"], "/nowhere/"),
        (["--site=bad.yaml"], "known keys: nodes"),
        (
            ["--site=worse.yaml"],
            "cpus_per_task (0) must be greater than 0; set cpus_per_task=8",
        ),
        (["run.dir=recipe.yaml/run"], "cannot be written"),
        (
            ["checkpoint.remote=/dev/shm/all"],
            "checkpoint.remote (/dev/shm/all) is under /dev/shm, which is local",
        ),
        (
            ["checkpoint.remote=recipe.yaml"],
            "recipe.yaml) cannot be written to: File exists; correct its",
        ),
        (["checkpoint.remote=nope://bucket/run"], "not a URL that fsspec can open"),
        (["checkpoint.remote=s3://"], "checkpoint.remote: s3://: write s3://bucket/prefix"),
    ],
)
def test_wrong_submissions_are_refused(here, capsys, arguments, said):
    (here / "bad.yaml").write_text("partitoin: gpu\n")
    (here / "worse.yaml").write_text("cpus_per_task: 0\n")
    assert main(["submit", "recipe.yaml", "--dry-run", "--gpus-per-node=1", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_a_site_file(here, capsys, monkeypatch):
    """An empty variable is as none."""
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("CLIP_TRAIN_SITE", "")
    assert load_site(None) == Site()
    line = ["submit", "recipe.yaml", "--dry-run", "--gpus-per-node=1", "--offline"]
    assert main([*line, "--nodes=0"]) == 2
    said = capsys.readouterr().err
    assert "submit's options: --nodes (0) must be greater than 0" in said
    assert "site.yaml" not in said


def test_without_sbatch(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(["submit", "recipe.yaml", "--offline", "--gpus-per-node=1"]) == 2
    assert "sbatch was not found" in capsys.readouterr().err


def test_what_is_frozen_and_sent(here, tmp_path, monkeypatch, capsys):
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "sbatch").write_text("#!/bin/sh\necho 4711\n")
    (bin / "squeue").write_text("#!/bin/sh\n")
    for file in bin.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    assert main(["submit", "recipe.yaml", "run.dir=here", "--gpus-per-node=1"]) == 0
    told = capsys.readouterr().out
    assert "scancel 4711" in told and "here/STOP" in told
    folder = here / "here" / "submit" / "0001"
    assert json.loads((folder / "submit.json").read_text())["job"] == "4711"
    frozen = load_config(str(folder / "recipe.yaml"))
    assert frozen.run_dir == here / "here"
    assert (folder / "recipe.yaml").stat().st_mode & 0o777 == 0o600  # it keeps secrets of URLs
    assert (folder / "code" / "launcher" / "slurm" / "controller.py").read_text() == (
        ROOT / "launcher" / "slurm" / "controller.py"
    ).read_text()
    done = subprocess.run(
        [sys.executable, "-c", "import launcher, clip_train; print(launcher.__file__, clip_train.__file__)"],
        cwd=folder / "code", capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.stdout.count(str(folder / "code")) == 2


def test_relative_paths_are_frozen_absolute(here, tmp_path):
    (tmp_path / "shards").mkdir()
    assert (
        absolute("shards/{0..3}.tar::s3://b/x.tar", tmp_path)
        == f"{tmp_path}/shards/{{0..3}}.tar::s3://b/x.tar"
    )
    assert absolute("ViT-B-32", tmp_path) == "ViT-B-32"
    assert absolute("/abs/x.tar", tmp_path) == "/abs/x.tar"
    config = load_config("recipe.yaml", ["run.dir=null", "checkpoint.remote=all/small"])
    assert f"dir: {tmp_path}/runs/small" in frozen_recipe(config, tmp_path)
    assert f"remote: {tmp_path}/all/small" in frozen_recipe(config, tmp_path)
    config = load_config("recipe.yaml", ["checkpoint.remote=s3://all/small"])
    assert "remote: s3://all/small" in frozen_recipe(config, tmp_path)
    for name in ("uids.npy", "teacher.json"):
        (tmp_path / name).touch()
    teachers = ["model.teacher=[s3://b/a, s3://b/b]", "model.teacher_name=[null, teacher.json]"]
    config = load_config("recipe.yaml", ["data.keep=uids.npy", *teachers])
    frozen = load_yaml(frozen_recipe(config, tmp_path))
    assert frozen["data"]["keep"] == f"{tmp_path}/uids.npy"
    assert frozen["model"]["teacher_name"] == [None, f"{tmp_path}/teacher.json"]
    config = load_config("recipe.yaml", ["data.keep=shards > 1"])  # a column of that name
    assert load_yaml(frozen_recipe(config, tmp_path))["data"]["keep"] == "shards > 1"
    config = load_config("recipe.yaml", ["data.val={a: 'shards/*.tar', b: 's3://b/x.tar'}"])
    assert f"a: {tmp_path}/shards/*.tar\n    b: s3://b/x.tar" in frozen_recipe(config, tmp_path)


def test_offline(here, capsys):
    """Neither shards nor the store are looked at; the script is the same."""
    line = ["submit", "recipe.yaml", "--dry-run", "--gpus-per-node=1"]
    assert main(line) == 0
    script = capsys.readouterr().out
    away = ["data.train=/nowhere/{0..3}.tar", "checkpoint.remote=gs://bucket/run"]
    assert main([*line, *away, "--offline"]) == 0
    assert capsys.readouterr().out == script
    assert main([*line, *away]) == 2


def dry_run(capsys, *line: str) -> tuple[int, str, str]:
    status = main(["submit", "recipe.yaml", "--gpus-per-node=1", "--dry-run", *line])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_directives_are_quoted_as_sbatch_reads_them(here, capsys):
    site = {"comment": 'a "b" c', "exclusive": True, "no-kill": False, "mem": 0}
    (here / "site.yaml").write_text(json.dumps({"sbatch": site, "local_paths": []}))
    status, script, err = dry_run(capsys, "run.dir=my 100% run")
    assert status == 0, err
    lines = script.splitlines()
    assert '#SBATCH "--comment=a \\"b\\" c"' in lines
    assert "#SBATCH --exclusive" in lines and "#SBATCH --mem=0" in lines
    assert not any("no-kill" in line for line in lines)
    assert f'#SBATCH "--output={here}/my 100%% run/submit/0001/%x-%j.log"' in lines


def test_more_options_of_sbatch(here, capsys):
    more = ["--", "--constraint=a100", "--dependency", "afterok:12"]
    status, script, err = dry_run(capsys, *more)
    assert status == 0, err
    assert "#SBATCH --constraint=a100 --dependency afterok:12\n" in script


def test_a_partition_of_the_command_wins_over_every_other(here, capsys):
    (here / "site.yaml").write_text(
        SITE.replace("partition: gpu\naccount: clip\n", "").replace(
            "constraint: h100", "partition: old, account: a"
        )
    )
    status, script, err = dry_run(capsys, "--partition=new")
    assert status == 0, err
    assert (
        "--partition=new\n" in script
        and "partition=old" not in script
        and "--account=a\n" in script
    )


def test_an_option_of_sbatch_in_front_of_the_dashes(here, capsys):
    with pytest.raises(SystemExit):
        dry_run(capsys, "--reservation=mine")
    assert "--reservation=mine; options of sbatch go after --" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, said",
    [("--array=1-3", "run.seed=$s"), ("-a1-3", "run.seed=$s"), ("-N2", "use submit's --nodes")],
)
def test_options_of_sbatch_that_would_make_another_job(here, capsys, option, said):
    status, _, err = dry_run(capsys, "--", option)
    assert status == 2 and said in err


def test_a_dry_run_asks_sbatch(here, tmp_path, monkeypatch, capsys):
    """Played by a script, which sees the batch script: what it refuses is a mistake."""
    bin = tmp_path / "bin"
    bin.mkdir()
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    outage = "Unable to contact slurm controller"
    for status, expected, says in ((1, 2, "no such partition"), (1, 0, outage), (0, 0, "")):
        line = f'grep -q SBATCH && echo "$* {says}" >&2; exit {status}'
        (bin / "sbatch").write_text(f"#!/bin/sh\n{line}\n")
        (bin / "sbatch").chmod(0o755)
        done, script, err = dry_run(capsys)
        assert done == expected and "#SBATCH" in script
        assert says in err and ("refuses" in err) == (expected == 2)


def test_a_dry_run_shows_the_script_that_it_refuses(here, capsys):
    """Whoever looks for the mistake wants to see it."""
    status, script, err = dry_run(capsys, "run.dir=/dev/shm/run")
    assert status == 2 and "under /dev/shm, which is local to each node" in err
    assert "#SBATCH --nodes" in script and "launcher.slurm.controller" in script
