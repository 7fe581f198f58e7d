"""Check a job, render its batch script, and copy recipe and code beside it.

The script is a template of slurm/ with this job's #SBATCH lines and one additional block of lines.
"""

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clip_train.data.keep import is_list
from clip_train.errors import UserError, raise_all
from clip_train.evaluate.config import IMAGENET
from clip_train.places import shipped, split_places
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.resolve import resolve
from clip_train.settings import broken
from clip_train.storage.urls import is_remote, local_path
from clip_train.yaml_text import dump_yaml
from launcher.checks import check_places, require_places
from launcher.runtime.environment import check_restarts
from launcher.runtime.rendezvous import ROOT, SOURCES, code_version, commit
from launcher.slurm.profile import Site
from launcher.slurm.scheduler import NO_ARRAY

FROZEN = (*SOURCES, "clip_tools")


# -- checks


def check_submission(config: Recipe, job: Site, *, offline: bool) -> None:
    """Check everything that would otherwise fail after hours in the queue. UserError.

    offline: skip the checks of shards and of checkpoint.remote.
    """
    problems: list[str | UserError] = [*mistakes_in_tasks(job)]
    try:
        check_restarts(config.checkpoint.resume, {}, requeues=True)
    except UserError as e:
        problems.append(e)
    if job.tasks:
        try:
            resolve(config, job.nodes * job.tasks, read_data=not offline)
        except UserError as e:
            problems.append(e)
    problems += [f"{each.message}: {each.remedy}" for each in check_places(config, job)]
    raise_all(problems)
    require_places(config, store=not offline)


def mistakes_in_tasks(job: Site) -> list[str]:
    """What is wrong with the number of ranks of a node."""
    rules = [
        (
            not job.tasks,
            "--gpus-per-node (0) is a job on CPUs: say how many ranks with --tasks-per-node",
        ),
        (
            job.gpus_per_node > 0 and job.tasks != job.gpus_per_node,
            f"--tasks-per-node ({job.tasks}) must be --gpus-per-node ({job.gpus_per_node}): one "
            "rank for each GPU; leave it out",
        ),
    ]
    return broken(rules)


# -- render


# sbatch options that would change what `check_submission` has checked -> what to do instead.
OWN_OPTIONS = {
    **dict.fromkeys(("array", "a"), NO_ARRAY),
    **dict.fromkeys(("nodes", "N"), "use submit's --nodes"),
    **dict.fromkeys(("time", "t"), "use submit's --time"),
    **dict.fromkeys(("ntasks-per-node", "ntasks", "n"), "use submit's --tasks-per-node"),
    **dict.fromkeys(("gpus-per-node", "gpus", "G"), "use submit's --gpus-per-node"),
    **dict.fromkeys(("cpus-per-task", "c"), "use submit's --cpus-per-task"),
    "signal": "use the site file's warn_seconds",
    "wrap": "the job's script is submit's own",
}


def quote(word: str) -> str:
    """Quote one word of an #SBATCH line. sbatch reads a backslash as an escape in both kinds of
    quotes. UserError for a line break."""
    if "\n" in word:
        raise UserError(f"{word!r} has a line break, which an #SBATCH line cannot hold; remove it")
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", word, re.ASCII):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def render(
    template: str,
    job: Site,
    *,
    name: str,
    folder: Path,
    options: Sequence[str] = (),
    container: Sequence[str] = (),
) -> str:
    """The template with this job's values. folder: holds the copies of recipe.yaml and code/.
    options: sbatch options of this job, as given after `--`; they override those of the site file.
    container: the words of `container_words`.
    """
    log = str(folder).replace("%", "%%") + "/%x-%j.log"
    settings = {"job-name": name, "output": log, **job.directives()}
    for word in [*(f"--{key}" for key in job.sbatch), *options]:
        # "--nodes=2" is "nodes"; "-N2" is "N"
        option = word[2:].partition("=")[0] if word.startswith("--") else word[1:2]
        if word.startswith("-") and option in OWN_OPTIONS:
            raise UserError(f"sbatch's {word}: {OWN_OPTIONS[option]}")
    directives = [
        quote(f"--{key}" if value is True else f"--{key}={value}")
        for key, value in settings.items()
        if value is not None and value is not False
    ]
    if options:
        directives.append(" ".join(map(quote, options)))
    added = [
        "",
        "# -- by clip-train submit: the frozen files, and this site's settings",
        f"export CLIP_TRAIN_HOME={shlex.quote(str(folder / 'code'))}",
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        *(f"export {key}={shlex.quote(str(value))}" for key, value in job.exports().items()),
        *job.setup,
        f"set -- {shlex.quote(str(folder / 'recipe.yaml'))}",
    ]
    if container:
        added.append(f"CONTAINER=({shlex.join(container)})")
    added.append("# --")
    lines: list[str] = []
    for line in template.splitlines():
        match = re.match(r"#SBATCH --([a-z-]+)", line)
        if line.startswith("set -euo pipefail"):
            lines += [*(f"#SBATCH {directive}" for directive in directives), line, *added]
        elif match is None or match[1] not in settings:
            lines.append(line)
    return "\n".join(lines) + "\n"


def frozen_recipe(config: Recipe, base: Path) -> str:
    """The resolved recipe with absolute paths: the job starts in another folder."""
    recipe = config.model_dump(mode="json")
    recipe["run"]["dir"] = str(base / config.run_dir)
    for section, key in (
        ("data", "train"), ("data", "val"),
        ("model", "name"), ("model", "init_from"), ("model", "init_image_from"),
        ("model", "init_text_from"), ("model", "teacher"), ("model", "teacher_name"),
        ("evaluate", "zero_shot_classes"), ("evaluate", "zero_shot_data"),
        ("engine", "ds_config"), ("checkpoint", "resume"),
    ):  # fmt: skip
        value = recipe.get(section, {}).get(key)
        if isinstance(value, dict):
            recipe[section][key] = {name: absolute(each, base) for name, each in value.items()}
        elif isinstance(value, list):
            recipe[section][key] = [each and absolute(each, base) for each in value]
        elif isinstance(value, str) and value != IMAGENET:
            recipe[section][key] = absolute(value, base)
    if config.data.keep is not None and is_list(config.data.keep):
        recipe["data"]["keep"] = absolute(config.data.keep, base)
    for one in (recipe["evaluate"]["sets"] or {}).values():
        one["data"] = absolute(one["data"], base)
        if one["classes"] not in (None, IMAGENET):
            one["classes"] = absolute(one["classes"], base)
    remote = config.checkpoint.remote
    if remote is not None and not is_remote(remote):
        recipe["checkpoint"]["remote"] = str(base / local_path(remote))
    return dump_yaml(recipe)


def absolute(value: str, base: Path) -> str:
    """Make each `::` source of `value` absolute if it is a relative path whose first part exists
    under `base`."""
    parts = []
    for part in split_places(value):
        first = re.split(r"[/{*?\[]", part)[0]
        there = first and "://" not in part and (base / first).exists()
        parts.append(str(base / part) if there else part)
    return "::".join(parts)


# -- freeze


def freeze(folder: Path, script: str, recipe: str, job: Site) -> dict[str, Any]:
    """Write job.sbatch, recipe.yaml, code/ and submit.json into `folder`: a requeued job runs these
    copies. Returns what submit.json has. UserError."""
    try:
        (folder / "code").mkdir(parents=True)
        sources = [ROOT / package for package in FROZEN]
        for source in (*sources, shipped("ds_configs")):
            shutil.copytree(
                source,
                folder / "code" / source.name,
                ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
            )
        (folder / "job.sbatch").write_text(script)
        (folder / "recipe.yaml").touch(0o600)  # the job needs the secrets in its URLs
        (folder / "recipe.yaml").write_text(recipe)
        described = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "code": code_version(),
            "commit": commit(),
            "python": sys.executable,
            "world_size": job.nodes * job.tasks,
        }
        (folder / "submit.json").write_text(json.dumps(described, indent=2) + "\n")
        return described
    except OSError as e:
        raise UserError(f"{folder} cannot be written: {e}; choose another run.dir") from e
