"""The recipe of a run that starts from another run's checkpoint and cools down."""

import posixpath

from clip_train.errors import UserError
from clip_train.optim.schedule import learning_rate
from clip_train.recipe.recipe import (
    Recipe,
    apply_overrides,
    check_config,
)
from clip_train.settings import is_import_path


def branched(
    source: Recipe, step: int, cooldown: int, checkpoint: str, overrides: list[str]
) -> Recipe:
    """The recipe of a run that starts from this checkpoint of `source` and cools down for this many
    steps. UserError if the learning rate at that step is not at its peak."""
    schedule, peak = source.schedule, source.optim.lr
    if is_import_path(schedule.name) or learning_rate(schedule, peak, step, source.steps) != peak:
        raise UserError(
            f"schedule.name ({schedule.name}): at step {step} of {source.steps} the rate is not at "
            "its peak, so it cannot cool down from there; branch from a run with "
            "schedule.name=constant, after its warm-up and before its own cooldown"
        )
    name = apply_overrides({}, overrides).get("run", {}).get("name", f"{source.run.name}-{step}")
    raw, remote = source.model_dump(mode="json"), source.checkpoint.remote
    if remote is not None:  # next to the source's folder; in a bucket, below the source's prefix
        above = posixpath.dirname(remote.rstrip("/"))
        remote = posixpath.join(remote if above.endswith(":") else above, name)
    raw["run"] |= {
        "name": name,
        "dir": str(source.run_dir.parent / name),
        "steps": step + cooldown,
        "epochs": None,
    }
    raw["schedule"] |= {"name": "constant-with-cooldown", "cooldown_steps": cooldown}
    raw["checkpoint"] |= {"resume": checkpoint, "remote": remote}
    return check_config(apply_overrides(raw, overrides), "the branch")
