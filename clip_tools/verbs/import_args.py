"""`clip-train import-args`: an OpenCLIP command line as a recipe."""

import argparse
from typing import Any

from launcher.cli.arguments import add_help
from launcher.runtime.log import warn

ALWAYS = """\
# From an OpenCLIP command line. Differences in meaning:
# batch.global_size counts the samples of one step on all ranks; OpenCLIP's --batch-size, on one GPU
# a sample without a caption is invalid here and replaced; OpenCLIP trains on empty captions
# every epoch visits each sample once; OpenCLIP rounds an epoch to whole batches of each worker
# checkpoint.every_minutes saves every hour as well, so that a kill costs an hour at most"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Print the recipe for an OpenCLIP command line. Comments above it explain flags with another
        meaning here. Replace the variables of a script by their values first.
        """,
        """
        clip-train import-args "torchrun --nproc_per_node 8 -m main --train-data a.tar" > my.yaml
        clip-train import-args "python -m main --train-data a.tar" --world-size 16
        """,
    )
    parser.add_argument("command", metavar="COMMAND", help="one argument in quotes")
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=int,
        help="GPUs, if the command does not say (default: torchrun's, else 1)",
    )


def run(command: str, world_size: int | None) -> int:
    from clip_tools.openclip.command import CHECK, read_command, translate
    from clip_train.recipe.recipe import Recipe, check_config
    from clip_train.yaml_text import dump_yaml

    flags, ranks = read_command(command)
    world_size = world_size or ranks
    keys, notes = translate(flags, world_size or 1)
    if world_size is None:
        notes.insert(
            0,
            (
                "--world-size",
                f"{CHECK}this command does not give the number of GPUs, so 1 is assumed; add "
                "--world-size N",
            ),
        )
    sections: dict[str, Any] = {name: {} for name in Recipe.model_fields}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    recipe = {name: section for name, section in sections.items() if section}
    check_config(recipe, "the recipe made of this command")
    print(ALWAYS)
    for flag, what in dict.fromkeys(notes):
        print(f"# {flag}: {what}")
        if what.startswith(CHECK):
            warn(f"{flag}: {what.removeprefix(CHECK)}")
    print(dump_yaml(recipe), end="")
    return 0
