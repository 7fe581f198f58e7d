"""The request to Slurm: the site's YAML file, overridden by the options of `clip-train submit`.

`Site` has all that a key of the site file is: its type, its default and its meaning; whether
`submit` has an option of this name (`Option`); and what becomes of its value in the batch script
(`directives`, `exports`).
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, NonNegativeInt, PositiveInt

from clip_train.errors import UserError
from clip_train.places import expanded
from clip_train.settings import Allowed, Place, Settings, explain, validated

ENV = "CLIP_TRAIN_SITE"
HOME = "~/.config/clip-train/site.yaml"


@dataclass(frozen=True)
class Option:
    """In a field's `Annotated`: `submit` has an option of the same name, which overrides the site
    file. The field's description is its help."""

    metavar: str
    type: type = str
    default: str = ""  # what the help calls it where the field's default is None


# As Kubernetes checks them.
ResourceName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
MountPath = Annotated[str, Field(pattern=r"^/[^:]*$")]
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?$")]


class Kubernetes(Settings):
    """What a JobSet needs to know of its cluster."""

    claims: Annotated[
        dict[ResourceName, MountPath],
        Allowed("names of claims with absolute paths, such as {runs: /work}"),
    ] = Field(default_factory=dict)
    """PersistentVolumeClaims and where each is mounted: `{datasets: /data, runs: /work}`."""
    secrets: Annotated[
        list[ResourceName], Allowed("names of Secrets, such as [s3-credentials]")
    ] = Field(default_factory=list)
    """Secrets whose keys become variables of the ranks, such as AWS_ACCESS_KEY_ID."""
    service_account: str | None = None
    """Service account of the pods, such as one with a role for the store."""
    node_selector: Annotated[
        dict[str, str], Allowed("""labels whose values are texts, such as {gpu: "true"}""")
    ] = Field(default_factory=dict)
    """Labels that the nodes must have."""
    shared_memory: Annotated[Quantity, Allowed("a quantity of Kubernetes, such as 16Gi")] = "16Gi"
    """Size of /dev/shm, through which the loader's workers pass batches. Counts as memory."""
    max_restarts: NonNegativeInt = 3
    """Failures after which the job is given up. Preemptions do not count."""


class Site(Settings):
    """Defaults of a cluster. An option of `submit` overrides the field with the same name."""

    nodes: Annotated[PositiveInt, Option("N", int)] = 1
    """Number of nodes."""
    gpus_per_node: Annotated[NonNegativeInt, Option("N", int)] = 8
    """GPUs per node, one rank on each. 0: CPUs only, with --tasks-per-node ranks."""
    tasks_per_node: Annotated[PositiveInt | None, Option("N", int)] = None
    """Ranks per node, where --gpus-per-node is 0."""
    cpus_per_task: Annotated[PositiveInt, Option("N", int)] = 8
    """CPU cores per rank, shared with its loader's workers."""
    time: Annotated[str, Option("HH:MM:SS")] = "24:00:00"
    """Time limit of one attempt, as sbatch writes it."""
    partition: Annotated[str | None, Option("NAME", default="the cluster's")] = None
    """Partition of the job."""
    account: Annotated[str | None, Option("NAME")] = None
    """Account to charge."""
    template: Annotated[Literal["train", "torchrun"], Option("NAME")] = "train"
    """The batch script: slurm/train.sbatch or slurm/torchrun.sbatch."""
    to: Annotated[Literal["slurm", "kubernetes"], Option("NAME")] = "slurm"
    """What runs the job. kubernetes: --dry-run prints a JobSet for `kubectl apply -f FILE`."""
    warn_seconds: PositiveInt = 300
    """Seconds before the time limit at which the ranks get the signal; must be enough for a
    checkpoint. Slurm may be 30 s early."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines to run before the ranks start: module load, conda activate, export HF_HOME=..."""
    sbatch: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Any other option of sbatch, such as `constraint: h100` or `reservation: week47`. true: an
    option without a value, such as `exclusive: true`; `yes` is passed on as a word."""
    container: Annotated[str | None, Option("IMAGE")] = None
    """Container image of the ranks: a file (.sif, .sqsh) or a name in a registry."""
    container_runtime: Annotated[
        Literal["auto", "pyxis", "apptainer", "singularity"], Option("NAME")
    ] = "auto"
    """What runs the image: pyxis (srun's --container-image), apptainer or singularity; auto: the one
    that this machine has."""
    container_mounts: list[Place] = Field(default_factory=list)
    """More folders for the container, `PATH` or `SOURCE:TARGET`. The run directory, local paths of
    the recipe, caches and /dev/shm are mounted anyway."""
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    """Volumes, secrets and limits of --to kubernetes."""
    local_paths: list[Place] = Field(
        default_factory=lambda: ["/tmp", "/dev/shm", "/var/tmp", "/run", "/local_scratch"]
    )
    """Node-local folders, which must not hold a run directory."""

    @property
    def tasks(self) -> int:
        """Ranks of a node."""
        return self.tasks_per_node or self.gpus_per_node

    @property
    def starts_with_torchrun(self) -> bool:
        """One task for each node, instead of one for each rank."""
        return self.template == "torchrun"

    def directives(self) -> dict[str, Any]:
        """The options of sbatch, by name. None: not given; true: an option without a value."""
        tasks, cpus = self.tasks, self.cpus_per_task
        if self.starts_with_torchrun:
            tasks, cpus = 1, self.cpus_per_task * self.tasks
        options: dict[str, Any] = {
            "nodes": self.nodes,
            "ntasks-per-node": tasks,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": cpus,
            "time": self.time,
            "signal": f"USR1@{self.warn_seconds}",
        }
        options |= self.sbatch
        # a key of its own wins over the same option in `sbatch`
        own = {"partition": self.partition, "account": self.account}
        return options | {name: value for name, value in own.items() if value is not None}

    def exports(self) -> dict[str, Any]:
        """The variables that the batch script exports."""
        variables: dict[str, Any] = {}
        if self.starts_with_torchrun:
            variables |= {"RANKS_PER_NODE": self.tasks, "SAVE_SECONDS": self.warn_seconds}
        if self.container is not None:
            # packages of the host in ~/.local are for another Python
            variables["PYTHONNOUSERSITE"] = 1
        return variables


def option_of(field: str) -> str:
    """The option of `submit` for a field of `Site`."""
    return f"--{field.replace('_', '-')}"


def add_site_options(parser: argparse.ArgumentParser) -> None:
    """An option for each field of `Site` that has an `Option`."""
    for name, field in Site.model_fields.items():
        for option in field.metadata:
            if not isinstance(option, Option):
                continue
            text = (field.description or "").rstrip(".")
            default = option.default if field.default is None else field.default
            if default:
                text += f" (default: the site's, else {default})"
            more: dict[str, Any] = {"metavar": option.metavar, "type": option.type}
            if get_origin(field.annotation) is Literal:
                more = {"choices": get_args(field.annotation)}
            parser.add_argument(option_of(name), help=text, **more)


def load_site(path: str | None, options: Mapping[str, Any] | None = None) -> Site:
    """Read the site file: `path`, else $CLIP_TRAIN_SITE, else ~/.config/clip-train/site.yaml, else
    only the defaults. UserError.

    options: the arguments of `submit`; those that are not None override keys of the same name.
    """
    from clip_train.recipe.recipe import read_recipe

    named = path or os.environ.get(ENV)
    file = Path(expanded(named or HOME))
    raw = {}
    where = "submit's options"
    if named or file.exists():
        raw = read_recipe(str(file), what="site file")
        where += f", or the site file {file}"
    flags = {
        name: value
        for name, value in (options or {}).items()
        if name in Site.model_fields and value is not None
    }
    known = f"known keys: {', '.join(Site.model_fields)}"

    def written(key: str) -> str:
        return option_of(key) if key in flags else key

    explained = partial(explain, unknown=lambda path: known, within="site file", written=written)
    site, mistakes = validated(Site, raw | flags, explained)
    if site is None:
        raise UserError(f"{where}: {'; '.join(mistakes)}")
    return site
