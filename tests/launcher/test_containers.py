"""`submit --container`: the words that the batch script gives to pyxis or Apptainer, and what doctor sees inside."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from clip_tools.container import check_cores, check_locked_memory
from launcher.cli.main import main
from launcher.slurm.container import image_name, local_folders

SHARD_CACHES = ("FSSPEC_SIMPLECACHE_CACHE_STORAGE", "FSSPEC_FILECACHE_CACHE_STORAGE")
# What the batch script does with its words: printed, one a line, and the last word is a rank's.
PRINT = 'printf "%s\\n" srun ${CONTAINER[@]+"${CONTAINER[@]}"} bash'


@pytest.fixture
def here(tmp_path, monkeypatch, recipe) -> Path:
    """A folder with recipe.yaml, an image and a home; the machine has neither Slurm nor a runtime."""
    (tmp_path / "image.sif").touch()
    (tmp_path / "site.yaml").write_text("{gpus_per_node: 1, local_paths: []}\n")
    (tmp_path / "home" / ".aws").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLIP_TRAIN_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("HF_HOME", raising=False)
    for name in ("PYTHONPATH", *SHARD_CACHES):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def install(here: Path, name: str, prints: str = "") -> None:
    program = here / "bin" / name
    program.write_text(f"#!/bin/sh\necho '{prints}'\n")
    program.chmod(0o755)


def words(capsys, *options: str) -> list[str]:
    """The words between srun and bash, as the shell of the batch script makes them."""
    status = main(["submit", "recipe.yaml", "--dry-run", "--offline", *options])
    told = capsys.readouterr()
    assert status == 0, told.err
    line = next((each for each in told.out.splitlines() if each.startswith("CONTAINER=")), "")
    assert '${CONTAINER[@]+"${CONTAINER[@]}"}' in told.out
    shell = subprocess.run(
        ["/bin/bash", "-euc", f"{line}\n{PRINT}"], capture_output=True, text=True, check=True
    )
    return shell.stdout.splitlines()[1:-1]


def test_without_a_container_srun_starts_the_ranks(here, capsys):
    assert words(capsys) == []


def test_pyxis_gets_image_mounts_and_variables(here, data, capsys):
    install(here, "srun", "  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    (here / "site.yaml").write_text(
        "{gpus_per_node: 1, local_paths: [], container_mounts: ['/scratch:/fast'],"
        " setup: ['module load x; export NCCL_SOCKET_IFNAME=ib0 NCCL_DEBUG=\"A B\" && true']}\n"
    )
    image, mounts, folder, variables = words(capsys, "--container=nvcr.io/nvidia/pytorch:25.09-py3")
    assert image == "--container-image=nvcr.io#nvidia/pytorch:25.09-py3"
    assert folder == f"--container-workdir={here}/run"
    shards = Path(data.train).parent
    mounted = [f"{place}:{place}" for place in (here / "run", here / "home/.aws", "/dev/shm")]
    assert set(mounted) <= set(mounts.removeprefix("--container-mounts=").split(","))
    assert f"{shards}:{shards}" in mounts and mounts.endswith(",/scratch:/fast")
    assert {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "PYTHONPATH", "MASTER_PORT"} <= set(
        variables.removeprefix("--container-env=").split(",")
    )


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_apptainer_gets_a_command(here, capsys, runtime):
    install(here, "srun")  # of a Slurm without pyxis
    install(here, runtime)
    first, second, gpu, bind, mounts, image = words(capsys, "--container=image.sif")
    assert [first, second, gpu, bind] == [runtime, "exec", "--nv", "--bind"]
    assert {f"{here}/run", f"{here}/home/.aws", "/dev/shm"} <= set(mounts.split(","))
    assert image == f"{here}/image.sif"
    on_cpus = words(capsys, "--container=image.sif", "--gpus-per-node=0", "--tasks-per-node=1")
    assert "--nv" not in on_cpus


@pytest.mark.parametrize("variable", SHARD_CACHES)
def test_copies_of_shards_are_mounted_if_their_folder_exists(here, capsys, monkeypatch, variable):
    install(here, "apptainer")
    monkeypatch.setenv(variable, str(here / "copies"))
    *_, of_the_nodes, _ = words(capsys, "--container=image.sif")
    assert str(here / "copies") not in of_the_nodes.split(",")
    (here / "copies").mkdir()
    *_, mounts, _ = words(capsys, "--container=image.sif")
    assert str(here / "copies") in mounts.split(",")


def test_the_runtime_can_be_named(here, capsys):
    """As on a login node that has none of them."""
    words(capsys, "--container=image.sif", "--container-runtime=pyxis")
    assert words(capsys, "--container=image.sif", "--container-runtime=apptainer")[0] == "apptainer"


@pytest.mark.parametrize(
    "options, said",
    [
        (["--container=image.sif"], "neither pyxis (srun --container-image) nor apptainer"),
        (["--container=none.sif", "--container-runtime=pyxis"], "none.sif) does not exist"),
        (["--container=a", "--container-runtime=podman"], "invalid choice: 'podman'"),
        (
            ["--container=image.sif", "--container-runtime=pyxis", "run.dir=a,b"],
            "because of its comma",
        ),
        (
            ["--container=image.sif", "--container-runtime=apptainer", "run.dir=a:1"],
            "/a:1', because of its colon",
        ),
    ],
)
def test_mistakes_are_refused(here, capsys, options, said):
    try:
        status = main(["submit", "recipe.yaml", "--dry-run", "--offline", *options])
    except SystemExit as e:  # argparse's own
        status = e.code
    assert status == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "image, pyxis, apptainer",
    [
        ("clip:1", "clip:1", "docker://clip:1"),
        ("me/clip:1", "me/clip:1", "docker://me/clip:1"),
        ("docker://me/clip", "me/clip", "docker://me/clip"),
        ("nvcr.io/nvidia/p:1", "nvcr.io#nvidia/p:1", "docker://nvcr.io/nvidia/p:1"),
        ("nvcr.io#nvidia/p:1", "nvcr.io#nvidia/p:1", "docker://nvcr.io/nvidia/p:1"),
        ("host:5000/clip", "host:5000#clip", "docker://host:5000/clip"),
        ("oras://host/clip", "oras://host/clip", "oras://host/clip"),
    ],
)
def test_one_spelling_of_an_image_for_both(image, pyxis, apptainer):
    assert image_name(image, "pyxis") == pyxis
    assert image_name(image, "apptainer") == apptainer


def test_folders_of_a_recipe(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.tar").touch()
    recipe = {
        "data": {"train": {"x": f"{tmp_path}/a/{{0..3}}.tar::s3://b/x.tar", "y": "hf://c/d"}},
        "model": {"init_from": f"file://{tmp_path}/b/0.tar"},
        "evaluate": [f"{tmp_path}/c/*.tar", f"{tmp_path}/none/1.tar", 7, None, "ViT-B-32"],
        "log": {"notify": "/usr/bin/mail me"},
    }
    found = [*local_folders(recipe)]
    assert found == [tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path]


def limited(root: Path, quota: str) -> Path:
    """A root with the control group of a container."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")
    return root


def test_doctor_sees_a_cpu_quota(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    (free,) = check_cores(2, limited(tmp_path / "free", "max 100000"))
    assert (free.level, free.message) == ("ok", "16 CPU cores")
    (tight,) = check_cores(2, limited(tmp_path / "tight", "600000 100000"))
    assert tight.level == "warning" and tight.message.startswith("6 of the 16 CPU cores")
    assert "2 GPUs need at least 8" in tight.remedy
    (enough,) = check_cores(1, tmp_path / "tight")
    assert enough.level == "ok"


def test_doctor_asks_for_locked_memory_only_where_infiniband_is(tmp_path):
    assert [*check_locked_memory(64 << 10, tmp_path)] == []
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (small,) = check_locked_memory(64 << 10, tmp_path)
    assert small.level == "warning" and "64 KiB of locked memory" in small.message
    (unlimited,) = check_locked_memory(resource.RLIM_INFINITY, tmp_path)
    assert unlimited.level == "ok"
