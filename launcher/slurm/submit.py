"""`clip-train submit`: check, freeze recipe and code beside the batch script, and hand it to sbatch.

The templates in slurm/ are used as they are: a few #SBATCH values are set, and one block of lines is added.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clip_train.checkpoint.config import preflight
from clip_train.errors import UserError
from clip_train.models.clip import count_parameters
from clip_train.storage.urls import is_remote, local_path, open_storage
from launcher.config.recipe import RunConfig, load_config
from launcher.config.validate import check
from launcher.runtime.consistency import code_version
from launcher.slurm.profile import Site, load_site
from launcher.slurm.scheduler import answer

ROOT = Path(__file__).resolve().parents[2]
FROZEN = ("clip_train", "launcher", "ds_configs")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm."""

    template: str
    nodes: int
    gpus_per_node: int
    tasks_per_node: int  # ranks
    cpus_per_task: int
    seconds: int
    time: str
    warn_seconds: int
    partition: str | None
    account: str | None
    qos: str | None
    exclude: str | None

    @property
    def world_size(self) -> int:
        return self.nodes * self.tasks_per_node


def make_job(site: Site, options: dict[str, Any]) -> Job:
    """The site's defaults with the command's options over them. UserError."""
    given = {name: value for name, value in options.items() if value is not None}

    def pick(name: str) -> Any:
        return given.get(name, getattr(site, name))

    nodes, gpus = pick("nodes"), pick("gpus_per_node")
    tasks, cpus = given.get("tasks_per_node", gpus), pick("cpus_per_task")
    for option, value, least in (("nodes", nodes, 1), ("gpus-per-node", gpus, 0), ("cpus-per-task", cpus, 1)):
        if value < least:
            raise UserError(f"--{option} ({value}) must be at least {least}; leave it out for the site's")
    if tasks < 1 and "tasks_per_node" in given:
        raise UserError(f"--tasks-per-node ({tasks}) must be at least 1; leave it out for one rank per GPU")
    if tasks < 1:
        raise UserError("--gpus-per-node (0) is a job on CPUs: say how many ranks with --tasks-per-node")
    if gpus and tasks != gpus:
        raise UserError(
            f"--tasks-per-node ({tasks}) must be --gpus-per-node ({gpus}): one rank for each GPU; leave it out"
        )
    seconds = parse_time(pick("time"))
    if seconds <= 2 * site.warn_seconds:
        raise UserError(
            f"--time ({pick('time')}, {seconds} s) leaves no time to train before the warning {site.warn_seconds} s "
            f"ahead of its end: ask for more than {2 * site.warn_seconds // 60} minutes, or lower warn_seconds in the "
            "site file"
        )
    return Job(
        given.get("template", "train"), nodes, gpus, tasks, cpus, seconds, pick("time"), site.warn_seconds,
        pick("partition"), pick("account"), pick("qos"), given.get("exclude"),
    )  # fmt: skip


def parse_time(text: str) -> int:
    """Seconds of sbatch's `minutes`, `minutes:seconds`, `hours:minutes:seconds` or `days-hours[:minutes[:seconds]]`."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise UserError(f"--time ({text}) is none of minutes, hours:minutes:seconds, days-hours; write 24:00:00")
    days, first, second, third = (int(part) if part is not None else None for part in match.groups())
    assert first is not None
    if days is not None:
        return days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return first * 3600 + (second or 0) * 60 + third
    return first * 60 + (second or 0)


# -- checks


def check_submission(config: RunConfig, job: Job, site: Site, *, offline: bool) -> None:
    """Everything that would only fail after hours in the queue. UserError; CheckpointError where a store is busy.

    offline: without a look at shards and at checkpoint.remote.
    """
    checked = check(config, job.world_size, read_data=not offline)
    run_dir, remote = config.run_dir.absolute(), config.checkpoint.remote
    places = {"run.dir": run_dir}
    if remote is not None and not is_remote(remote):
        places["checkpoint.remote"] = local_path(remote).absolute()
    for key, place in places.items():
        local = next((p for p in site.local_paths if place.is_relative_to(p)), None)
        if local is not None:
            raise UserError(
                f"{key} ({place}) is under {local}, which every node has for itself: a job that is requeued on another "
                "node would not find its checkpoints. Choose a shared folder (or correct local_paths in the site file)"
            )
    if config.checkpoint.resume == "never":
        raise UserError(
            "checkpoint.resume (never): each time that the job is requeued it would begin anew; set "
            "checkpoint.resume=auto, and choose a new run.name where the old run must not be gone on with"
        )
    folder = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"run.dir ({run_dir}) cannot be written by you: choose another, or mend {folder}'s permissions")
    # fp32 weights and two moments of each parameter, in as many checkpoints as are kept and one being written
    needed = 12 * count_parameters(checked.architecture) * (config.checkpoint.keep_last + 1)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"run.dir ({run_dir}) has {free / 1e9:.1f} GB free, and checkpoint.keep_last "
            f"({config.checkpoint.keep_last}) checkpoints and one in the making need {needed / 1e9:.1f} GB: "
            "make room, choose another, or keep fewer"
        )
    if remote is not None and not offline:
        for warning in preflight(open_storage(remote)):
            print(f"clip-train: warning: {warning}", file=sys.stderr)


def check_slurm(job: Job, run_dir: Path) -> None:
    """What only the cluster itself knows. UserError."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not here: submit from a login node, or look at the script with --dry-run")
    partitions = answer("sinfo", "-h", "-o", "%R").split()
    if job.partition is not None and partitions and job.partition not in partitions:
        raise UserError(f"--partition ({job.partition}) is not one of this cluster's: {', '.join(partitions)}")
    for file in sorted(run_dir.glob("submit/*/submit.json")):
        number = json.loads(file.read_text()).get("job")
        if number and answer("squeue", "-h", "-j", number, "-o", "%T"):
            raise UserError(
                f"job {number} is queued or running for {run_dir} already: two would write the same run. "
                f"Wait, or scancel {number}, or choose another run.name"
            )


# -- render


def render(template: str, job: Job, site: Site, *, name: str, folder: Path) -> str:
    """The template with this job's numbers. folder: where recipe.yaml and code/ are frozen."""
    values = {
        "job-name": name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1" if job.template == "torchrun" else str(job.tasks_per_node),
        "gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else None,
        "cpus-per-task": str(job.cpus_per_task * (job.tasks_per_node if job.template == "torchrun" else 1)),
        "time": job.time,
        "signal": f"USR1@{job.warn_seconds}",
        "output": f"{folder}/%x-%{'A-%a' if job.template == 'chain' else 'j'}.log",
    }
    extra = {"partition": job.partition, "account": job.account, "qos": job.qos, "exclude": job.exclude, **site.sbatch}
    lines: list[str] = []
    for given in template.splitlines():
        line = given
        match = re.match(r"#SBATCH --([a-z-]+)=(\S+)\s*(#.*)?$", line)
        if match and match[1] in values:
            value = values[match[1]]
            if value is None:
                continue
            head = f"#SBATCH --{match[1]}={value}"
            # the number in the template's remark may not be this one's
            line = f"{head:<36} {match[3]}" if match[3] and value == match[2] else head
        if line.startswith("set -euo pipefail"):
            at = max(i for i, before in enumerate(lines) if before.startswith("#SBATCH")) + 1
            lines[at:at] = [f"#SBATCH --{key}={value}" for key, value in extra.items() if value is not None]
        lines.append(line)
        if line.startswith("set -euo pipefail"):
            lines += ["", "# -- by clip-train submit: what was frozen, and this site's settings"]
            lines += [f"export CLIP_TRAIN_HOME={shlex.quote(str(folder / 'code'))}"]
            lines += [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
            if job.template == "torchrun":
                lines += [f"export RANKS_PER_NODE={job.tasks_per_node}"]
                lines += [f"export SAVE_SECONDS={job.warn_seconds}"]
            lines += [f"export {key}={shlex.quote(value)}" for key, value in site.environment.items()]
            lines += site.setup
            lines += [f"set -- {shlex.quote(str(folder / 'recipe.yaml'))}", "# --"]
    return "\n".join(lines) + "\n"


def frozen_recipe(config: RunConfig, base: Path) -> str:
    """The resolved recipe with absolute paths: the job starts in another folder."""
    recipe = config.model_dump(mode="json")
    recipe["run"]["dir"] = str(base / config.run_dir)
    for section, key in (
        ("data", "train"), ("data", "val"), ("model", "name"), ("model", "init_from"), ("model", "teacher"),
        ("evaluate", "zero_shot_classes"), ("engine", "ds_config"), ("checkpoint", "resume"),
    ):  # fmt: skip
        value = recipe.get(section, {}).get(key)
        if isinstance(value, str):
            recipe[section][key] = absolute(value, base)
    remote = config.checkpoint.remote
    if remote is not None and not is_remote(remote):
        recipe["checkpoint"]["remote"] = str(base / local_path(remote))
    return yaml.safe_dump(recipe, sort_keys=False)


def absolute(value: str, base: Path) -> str:
    """Each `::` source that is a relative path whose first folder or file is there, under `base`."""
    parts = []
    for part in value.split("::"):
        plain = re.split(r"[{*?\[]", part)[0]
        is_path = "://" not in part and ":" not in plain and not plain.startswith("/")
        there = is_path and plain and (base / (plain if "/" not in plain else plain.rpartition("/")[0])).exists()
        parts.append(str(base / part) if there else part)
    return "::".join(parts)


# -- submit


def run(args: argparse.Namespace) -> int:
    """Print the script (--dry-run), or write, freeze and submit it."""
    config, options, site = load_config(args.recipe, args.overrides), vars(args), load_site(args.site)
    job = make_job(site, options)
    check_submission(config, job, site, offline=args.offline)
    run_dir, base = config.run_dir.absolute(), Path.cwd()
    number = 1 + len(list(run_dir.glob("submit/*/submit.json")))
    folder = run_dir / "submit" / f"{number:04d}"
    template = (ROOT / "slurm" / f"{job.template}.sbatch").read_text()
    script = render(template, job, site, name=config.run.name, folder=folder)
    if args.dry_run:
        print(script, end="")
        return 0
    check_slurm(job, run_dir)
    freeze(folder, script, frozen_recipe(config, base), job)
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    sent = subprocess.run(
        ["sbatch", "--parsable", str(folder / "job.sbatch")],
        capture_output=True, text=True, check=False, timeout=120, env=environ,
    )  # fmt: skip
    if sent.returncode:
        raise UserError(f"sbatch refused {folder / 'job.sbatch'}: {sent.stderr.strip()}")
    identity = sent.stdout.strip().split(";")[0]
    described = json.loads((folder / "submit.json").read_text())
    (folder / "submit.json").write_text(json.dumps(described | {"job": identity}, indent=2) + "\n")
    print(f"job {identity}: {job.nodes} nodes x {job.tasks_per_node} ranks, {job.time}, from {folder}")
    print(f"watch:   squeue -j {identity}; tail -F {folder}/{config.run.name}-{identity}*.log")
    print(f"history: {run_dir / 'attempts.jsonl'}")
    print(f"stop:    touch {run_dir / 'STOP'}   (saves first);   cancel: scancel {identity}   (saves if Slurm lets it)")
    return 0


def freeze(folder: Path, script: str, recipe: str, job: Job) -> None:
    """job.sbatch, recipe.yaml, code/ and submit.json: a requeued job runs what was submitted."""
    try:
        (folder / "code").mkdir(parents=True)
        for package in FROZEN:
            shutil.copytree(
                ROOT / package, folder / "code" / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )
        (folder / "job.sbatch").write_text(script)
        (folder / "recipe.yaml").write_text(recipe)
        described = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "code": code_version(),
            "commit": answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or None,
            "python": sys.executable,
            "world_size": job.world_size,
        }
        (folder / "submit.json").write_text(json.dumps(described, indent=2) + "\n")
    except OSError as e:
        raise UserError(f"{folder} cannot be written: {e}; choose another run.dir") from e
