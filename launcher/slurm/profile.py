"""The request to Slurm: the site's YAML file, overridden by the options of `clip-train submit`."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from clip_train.errors import UserError
from clip_train.places import expanded
from clip_train.recipe.recipe import read_recipe
from clip_train.settings import Place, Settings, explain, validated

ENV = "CLIP_TRAIN_SITE"
HOME = "~/.config/clip-train/site.yaml"


class Site(Settings):
    """Defaults of a cluster. An option of `submit` overrides the field with the same name."""

    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account to charge."""
    nodes: PositiveInt = 1
    """Number of nodes."""
    gpus_per_node: NonNegativeInt = 8
    """GPUs per node, one rank on each. 0: CPUs only, with --tasks-per-node ranks."""
    tasks_per_node: PositiveInt | None = None
    """Ranks per node if gpus_per_node is 0."""
    cpus_per_task: PositiveInt = 8
    """CPU cores per rank, shared with its loader's workers."""
    time: str = "24:00:00"
    """Time limit, as sbatch writes it."""
    warn_seconds: PositiveInt = 300
    """Seconds before the time limit at which the ranks get the signal; must be enough for a
    checkpoint. Slurm may be 30 s early."""
    template: Literal["train", "torchrun"] = "train"
    """The batch script: slurm/train.sbatch or slurm/torchrun.sbatch."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines to run before the ranks start: module load, conda activate, export HF_HOME=..."""
    sbatch: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Any other option of sbatch, such as `constraint: h100` or `reservation: week47`. true: an
    option without a value, such as `exclusive: true`; `yes` is passed on as a word."""
    local_paths: list[Place] = Field(
        default_factory=lambda: ["/tmp", "/dev/shm", "/var/tmp", "/run", "/local_scratch"]
    )
    """Node-local folders, which must not hold a run directory."""

    @property
    def tasks(self) -> int:
        """Ranks of a node."""
        return self.tasks_per_node or self.gpus_per_node


def load_site(path: str | None, options: Mapping[str, Any] | None = None) -> Site:
    """Read the site file: `path`, else $CLIP_TRAIN_SITE, else ~/.config/clip-train/site.yaml, else
    only the defaults. UserError.

    options: the arguments of `submit`; those that are not None override keys of the same name.
    """
    named = path or os.environ.get(ENV)
    file = Path(expanded(named or HOME))
    raw = read_recipe(str(file), what="site file") if named is not None or file.exists() else {}
    flags = {
        name: value
        for name, value in (options or {}).items()
        if name in Site.model_fields and value is not None
    }
    known = f"known keys: {', '.join(Site.model_fields)}"
    explained = partial(explain, unknown=lambda path: known, within="site file")
    site, mistakes = validated(Site, raw | flags, explained)
    if site is None:
        raise UserError(f"submit's options, or the site file {file}: {'; '.join(mistakes)}")
    return site
