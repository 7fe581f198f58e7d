"""`clip-train branch`: a new run that starts from another run's checkpoint and cools down."""

import argparse

from clip_train.errors import UserError
from launcher.cli.arguments import add_help, add_overrides, add_place
from launcher.runtime.log import log, warn

RECIPE = "branch.yaml"  # in the new run's folder, where training writes its own recipe.yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write the recipe of a run that begins at a checkpoint of PLACE and lowers the rate from there:
        the new run has its own name, run directory and checkpoint.remote. PLACE's run can continue.
        Its rate must be constant at that step. Overrides apply to the new run.
        """,
        """
        clip-train branch runs/clip --at 20000 --cooldown 4000
        clip-train branch runs/clip run.name=try schedule.final_lr=1e-6
        """,
    )
    add_place(parser)
    add_overrides(parser)
    parser.add_argument(
        "--at", metavar="N", type=int, help="the checkpoint of this step (default: the newest)"
    )
    parser.add_argument(
        "--cooldown",
        metavar="N",
        type=int,
        help="steps in which the rate falls (default: a fifth of the step)",
    )


def run(place: str, overrides: list[str], at: int | None, cooldown: int | None) -> int:
    """Write the new run's recipe into its folder, and print the line that trains it."""
    from clip_tools.branch import branched
    from clip_train.checkpoint.restore import commit_urls, open_read_only, stores_at
    from clip_train.recipe.recipe import check_config, with_samples, without_removed
    from clip_train.recipe.weights import find_run
    from clip_train.yaml_text import dump_yaml

    source, places, only = find_run(place, [])
    found = open_read_only(places, at, only)
    if source is None:
        source = check_config(without_removed(found.state["recipe"]), f"the recipe in {found.path}")
    source = with_samples(source)
    cooldown = cooldown or max(1, found.step // 5)
    config = branched(source, found.step, cooldown, found.path, overrides)
    folder, remote = config.run_dir, config.checkpoint.remote
    if remote is not None and commit_urls(stores_at(remote)):
        raise UserError(
            f"checkpoint.remote ({remote}) holds checkpoints already; choose another run.name"
        )
    try:
        folder.mkdir(parents=True)
        (folder / RECIPE).touch(0o600)  # the run needs the secrets in its URLs
        (folder / RECIPE).write_text(dump_yaml(config.model_dump(mode="json")))
    except OSError as e:
        raise UserError(
            f"run.dir ({folder}) cannot be made: {e.strerror}; choose another run.name"
        ) from e
    if source.checkpoint.keep_every is None or found.step % source.checkpoint.keep_every:
        warn(
            f"the source may remove {found.path} before the branch starts, because its "
            f"checkpoint.keep_every ({source.checkpoint.keep_every}) does not keep it"
        )
    log(
        f"from step {found.step} of {found.path} to step {config.steps}; train it with this line, "
        "or submit the same recipe"
    )
    print(f"clip-train train {folder / RECIPE}")
    return 0
