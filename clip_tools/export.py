"""`clip-train export`: a checkpoint's weights as a folder for other libraries."""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clip_tools.exports import (
    check_openclip,
    check_transformers,
    export_peft,
    export_transformers,
    is_siglip,
)
from clip_tools.model_card import Card, write_card
from clip_train import __version__
from clip_train.checkpoint.reader import averaged
from clip_train.checkpoint.restore import Resumed, open_read_only
from clip_train.errors import UserError
from clip_train.models import hub
from clip_train.models.clip import parse_saved
from clip_train.models.config import Architecture
from clip_train.models.files import WEIGHTS_NAMES
from clip_train.models.lora import Lora
from clip_train.models.weights import export_saved
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.weights import find_run, on_base
from clip_train.storage.urls import is_remote, local_path
from launcher.cli.arguments import (
    add_ema,
    add_help,
    add_overrides,
    add_place,
    add_step,
    path_or_url,
)
from launcher.runtime.log import log, warn

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
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=path_or_url,
        help="folder to write (default: <run.dir>/export)",
    )
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


def run_folder(place: str, config: Recipe | None) -> Path | None:
    """The run's folder, which has its curve and scores; None if only its checkpoints are here."""
    if config is None:
        return None
    folders = [config.run_dir]
    if not is_remote(place):
        folders.insert(0, local_path(place))  # it may have been moved
    for folder in folders:
        if (folder / "metrics.jsonl").is_file():
            return folder
    return None


@dataclass(frozen=True)
class Exported:
    """A folder that was written."""

    folder: Path
    library: str | None  # as the hub calls it; None: weights of a model of the user's own
    load: str  # the line of Python that loads it

    def load_from(self, repository: str | None) -> str:
        """The line for a model card: from the hub's repository, or from a folder."""
        folder = str(self.folder.resolve())
        if repository is None or self.library is None:
            return self.load.replace(folder, "FOLDER")
        return self.load.replace("local-dir:", "hf-hub:").replace(folder, repository)


def write_export(
    found: list[Resumed],
    folder: str,
    library: str,
    *,
    ema: bool,
    config: Recipe | None = None,
) -> Exported:
    """Write the mean of these checkpoints, and print how it is loaded.

    library: one of LIBRARIES. config: the run's, which names the base of adapters.
    """
    description = found[0].state["architecture"]  # works even if the recipe's files have changed
    if not isinstance(description, dict):
        parse_saved(description)  # its message names the mistake
    other = description.get("own") or description.get("open_clip")
    average = partial(averaged, [each.reader for each in found], ema)  # fetches the weights
    if library == "peft":
        if not description.get("lora") or len(found) > 1:
            raise UserError(
                f"--format peft holds the adapters (model.lora) of one checkpoint, and "
                f"{found[0].path} has none, or is one of several: export with --format open_clip"
            )
        like, read = average()
        lora = Lora.model_validate(description["lora"])
        written = export_peft({name: read(name) for name in like}, lora, folder)
        line = f"peft.PeftModel.from_pretrained(model, '{written.resolve()}')"
    elif library == "transformers":
        architecture = None if description.get("own") else parse_saved(description)
        siglip = is_siglip(architecture)
        if architecture is None or not (siglip or isinstance(architecture, Architecture)):
            raise UserError(
                f"--format transformers holds CLIP's own towers and SigLIP's, not "
                f"{other or 'a ResNet'}'s: export with --format open_clip"
            )
        check_transformers(architecture)  # before the weights are fetched
        if siglip and (architecture.text_cfg.model_dump().get("tokenizer_kwargs") or {}).get(
            "clean"
        ):
            warn(
                "texts were lower-cased here, without punctuation, as OpenCLIP's tokenizer does; the "
                "exported one may not: give transformers such texts"
            )
        like, read = average()
        state = on_base(found[0], {name: read(name) for name in like}, config)
        plain = architecture.model_copy(update={"lora": None})
        written = export_transformers(state, plain, folder)
        kind = "SiglipModel" if siglip else "CLIPModel"
        line = f"transformers.{kind}.from_pretrained('{written.resolve()}')"
    else:
        if description.get("open_clip"):
            check_openclip(parse_saved(description), warn)  # before the weights are fetched
        like, read = average()
        if description.get("lora"):
            like = on_base(found[0], {name: read(name) for name in like}, config)
            read = like.__getitem__
        written = export_saved(like, description, folder, read)
        line = f"open_clip.create_model_and_transforms('local-dir:{written.resolve()}')"
        if description.get("own"):
            line = f"safetensors.torch.load_file('{written.resolve() / WEIGHTS_NAMES[0]}')"
    steps = " and ".join(f"step {each.step} of {each.path}" for each in found)
    log(f"{'the mean of ' * (len(found) > 1)}{steps} exported to {written}")
    print(f"load it with {line}")
    hub_library = None if library == "open_clip" and description.get("own") else library
    return Exported(written, hub_library, line)
