"""Write the weights of checkpoints as a folder for other libraries."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clip_tools.exports import (
    check_openclip,
    check_transformers,
    export_peft,
    export_transformers,
    is_chinese_clip,
    is_naflex,
    is_siglip,
)
from clip_train.checkpoint.reader import averaged
from clip_train.checkpoint.restore import Resumed
from clip_train.errors import UserError
from clip_train.models.clip import parse_saved
from clip_train.models.config import Architecture
from clip_train.models.files import WEIGHTS_NAMES
from clip_train.models.lora import Lora
from clip_train.models.weights import export_saved
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.weights import on_base
from clip_train.storage.urls import is_remote, local_path
from launcher.runtime.log import log, warn


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

    library: as `clip-train export --format`. config: the run's, which names the base of adapters.
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
        siglip, chinese = is_siglip(architecture), is_chinese_clip(architecture)
        ours = isinstance(architecture, Architecture)
        if architecture is None or not (siglip or chinese or ours):
            raise UserError(
                f"--format transformers holds CLIP's own towers, SigLIP's and ChineseCLIP's, not "
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
        kind = "CLIPModel"
        if siglip:
            kind = "Siglip2Model" if is_naflex(architecture) else "SiglipModel"
        elif chinese:
            kind = "ChineseCLIPModel"
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
