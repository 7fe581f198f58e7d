"""The words that put a job's ranks into a container: options of srun with pyxis, or Apptainer's command.

They come between `srun` and the ranks' command in slurm/*.sbatch. The batch script itself, and with
it the controller, runs outside: it needs Slurm's commands. All paths are the same inside.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from clip_train.errors import UserError
from clip_train.places import expanded, split_places
from clip_train.storage.urls import is_remote, local_path
from launcher.slurm.profile import Site

Runtime = Literal["pyxis", "apptainer", "singularity"]
FILES = (".sif", ".sqsh", ".img")  # images that are files; others are names in a registry
# Paths of the image itself, which a mount would hide.
OF_THE_IMAGE = tuple(
    map(Path, ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr"))
)
# Variables of the batch script that win over those of the image. Apptainer lets the host's win.
KEPT = (
    "MASTER", "MASTER_ADDR", "MASTER_PORT",
    "PYTHONFAULTHANDLER", "PYTHONNOUSERSITE", "PYTHONPATH", "PYTHONSAFEPATH",
)  # fmt: skip
EXPORT = re.compile(r"\bexport\s([^;&|]*)")
NAME = re.compile(r"(?:^|\s)(\w+)=")
# Folders for the copies of simplecache:: and filecache:: shards.
SHARD_CACHES = ("FSSPEC_SIMPLECACHE_CACHE_STORAGE", "FSSPEC_FILECACHE_CACHE_STORAGE")


def container_words(job: Site, recipe: dict[str, Any]) -> list[str]:
    """The words between `srun` and the command of a rank; none without a container. UserError.

    recipe: with absolute paths, as the job reads it.
    """
    if job.container is None:
        return []
    runtime = find_runtime(job)
    image = image_name(job.container, runtime)
    mounts = [mount(runtime, place) for place in folders(recipe)]
    for place in job.container_mounts:  # SOURCE:TARGET as it is written
        mounts.append(one_mount(place) if ":" in place else mount(runtime, place))
    if runtime == "pyxis":
        exports = [text for line in job.setup for text in EXPORT.findall(line)]
        names = {name for text in exports for name in NAME.findall(text)} - {"PATH"}
        return [
            f"--container-image={image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={recipe['run']['dir']}",
            f"--container-env={','.join(sorted({*KEPT, *names}))}",
        ]
    words: list[str] = [runtime, "exec"]
    if job.gpus_per_node:
        words.append("--nv")
    return [*words, "--bind", ",".join(mounts), image]


def find_runtime(job: Site) -> Runtime:
    """`container_runtime`, or what this machine has."""
    if job.container_runtime != "auto":
        return job.container_runtime
    if shutil.which("srun") is not None:
        shown = subprocess.run(
            ["srun", "--help"], capture_output=True, text=True, check=False, timeout=60
        )
        if "--container-image" in shown.stdout:
            return "pyxis"
    if shutil.which("apptainer") is not None:
        return "apptainer"
    if shutil.which("singularity") is not None:
        return "singularity"
    raise UserError(
        "--container: neither pyxis (srun --container-image) nor apptainer or singularity was "
        "found on this machine; if the nodes have one, name it with --container-runtime"
    )


def image_name(image: str, runtime: Runtime) -> str:
    """The image as the runtime writes it: `nvcr.io/nvidia/pytorch:25.09-py3` is
    `nvcr.io#nvidia/pytorch:25.09-py3` for pyxis and `docker://nvcr.io/...` for Apptainer."""
    place = Path(expanded(image))
    if image.startswith(("/", ".", "~", "$")) or place.suffix in FILES or place.exists():
        if not place.exists():
            raise UserError(f"--container ({image}) does not exist; build it: docs/containers.md")
        return str(place.absolute())
    name = image.removeprefix("docker://")
    if "://" in name:
        return name
    registry, _, path = name.replace("#", "/", 1).partition("/")
    has_registry = bool(path) and re.search(r"[.:]|^localhost$", registry) is not None
    if runtime == "pyxis":
        return f"{registry}#{path}" if has_registry else name
    return f"docker://{name.replace('#', '/', 1)}"


def folders(recipe: dict[str, Any]) -> list[str]:
    """What the ranks read and write outside the image: the run directory, the local paths of the
    recipe, caches and credentials, modules of the user, shared memory. None is inside another."""
    others = {section: value for section, value in recipe.items() if section != "run"}
    # the run directory does not exist before the job is submitted
    places = [Path(recipe["run"]["dir"]), *local_folders(others)]
    home = Path.home()
    caches = [
        Path(os.environ.get("HF_HOME") or home / ".cache/huggingface"),
        home / ".aws",
        home / ".config/gcloud",
        home / ".azure",
    ]
    caches += [Path(os.environ[each]) for each in SHARD_CACHES if os.environ.get(each)]
    caches += [Path(each) for each in os.environ.get("PYTHONPATH", "").split(":") if each]
    places += [place.absolute() for place in caches if place.is_dir()]
    found: list[Path] = []
    for place in sorted(places):
        inside = [*OF_THE_IMAGE, *found]
        if place != Path("/") and not any(place.is_relative_to(each) for each in inside):
            found.append(place)
    return [*map(str, found), "/dev/shm"]


def local_folders(value: Any) -> Iterator[Path]:
    """The folders of all local absolute paths in a recipe. Of `/data/{0..9}.tar` it is `/data`; of
    one that does not exist yet, the nearest folder that does."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key != "notify":  # a shell command
                yield from local_folders(each)
        return
    if isinstance(value, list):
        for each in value:
            yield from local_folders(each)
        return
    if not isinstance(value, str):
        return
    for part in split_places(value):
        if part.startswith("file://") or (part.startswith("/") and not is_remote(part)):
            path = str(local_path(part))
            start = re.split(r"[*?{\[]", path)[0]
            place = Path(start if start == path else start.rpartition("/")[0] or "/")
            yield next(each for each in (place, *place.parents) if each.is_dir())


def mount(runtime: Runtime, place: str) -> str:
    """A mount under the same path. UserError."""
    if ":" in place:
        raise UserError(
            f"a container cannot mount {place!r}, because of its colon; rename it, or choose another "
            "place (run.dir, run.name)"
        )
    if runtime == "pyxis":
        return one_mount(f"{place}:{place}")
    return one_mount(place)


def one_mount(place: str) -> str:
    """UserError for a comma, which separates mounts."""
    if "," in place:
        raise UserError(
            f"a container cannot mount {place!r}, because of its comma; rename it, or mount a "
            "folder above it under another name (container_mounts)"
        )
    return place
