"""`clip-train export`: a checkpoint's weights as a folder for other libraries."""

import argparse

from clip_train import __version__
from clip_train.errors import UserError
from launcher.cli.arguments import (
    add_ema,
    add_help,
    add_output,
    add_overrides,
    add_place,
    add_step,
)
from launcher.runtime.log import log

LIBRARIES = ("open_clip", "transformers", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write a folder that open_clip, or transformers, loads, without a GPU. A run's
        folder of checkpoints or their URL is enough: no other file of the run is needed.
        """,
        """
        clip-train export runs/clip --output clip-b32           of a run on this disk
        clip-train export s3://bucket/run --step 20000          of a run elsewhere
        clip-train export runs/clip --format transformers       for transformers.CLIPModel
        clip-train export runs/clip --format peft               adapters (model.lora) alone
        clip-train export runs/clip --model-card --push hf:USER/NAME    to the Hugging Face hub
        """,
    )
    add_place(parser)
    add_overrides(parser)
    add_output(parser, None, "<run.dir>/export")
    add_step(parser)
    add_format(parser)
    add_ema(parser)
    parser.add_argument(
        "--model-card",
        action="store_true",
        help="also write README.md, with the base, data, recipe, scores and curve",
    )
    parser.add_argument(
        "--license", metavar="ID", help="the license in the model card, such as apache-2.0 or mit"
    )
    parser.add_argument(
        "--push",
        metavar="hf:USER/NAME",
        help="upload the folder to this repository of the Hugging Face hub, as one commit; a new "
        "repository is private. Needs HF_TOKEN, or `hf auth login`",
    )
    parser.add_argument("--public", action="store_true", help="a new repository is public")


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        dest="library",
        choices=LIBRARIES,
        default="open_clip",
        help="for which library (default: open_clip)",
    )


def run(
    place: str,
    overrides: list[str],
    output: str | None,
    step: int | None,
    library: str,
    ema: bool,
    model_card: bool,
    license: str | None,
    push: str | None,
    public: bool,
) -> int:
    """Write a checkpoint's weights as a folder that `open_clip` loads."""
    from clip_tools.export import run_folder, write_export
    from clip_tools.model_card import Card, write_card
    from clip_train.checkpoint.restore import open_read_only
    from clip_train.models import hub
    from clip_train.recipe.weights import find_run

    if license is not None and not model_card:
        raise UserError(f"--license ({license}) is written into the model card; add --model-card")
    if public and push is None:
        raise UserError("--public is for --push; add --push hf:USER/NAME, or take it out")
    repository = None
    if push is not None:
        repository = hub.check_upload(push)
    config, places, only = find_run(place, overrides)
    if config is None and overrides:
        raise UserError(
            f"{overrides[0]}: a checkpoint is exported as it is; leave it out, or name the recipe"
        )
    found = open_read_only(places, step, only)
    folder = output or ("export" if config is None else str(config.run_dir / "export"))
    exported = write_export([found], folder, library, ema=ema, config=config)
    if model_card:
        card = Card(
            recipe=found.state["recipe"],
            step=found.step,
            run_dir=run_folder(place, config),
            library=exported.library,
            load=exported.load_from(repository),
            ema=ema,
            license=license,
        )
        write_card(exported.folder, card)
        log(f"model card written to {exported.folder / 'README.md'}")
    if repository is not None:
        message = f"Step {found.step:,}, exported by clip-train {__version__}"
        url = hub.upload(exported.folder, repository, message, public=public)
        log(f"{exported.folder} uploaded to {url}")
    return 0
