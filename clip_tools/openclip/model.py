"""Which model an OpenCLIP command trains, what it starts from, and what of it is frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clip_train.errors import UserError
from clip_train.models.config import preset_names

CHECK = "CHECK: "  # begins a note on what the recipe may have wrong: it is a warning too
CLIPA = re.compile(
    r"(ViT-\w+-\d+)-CL(\d+)\b.*"
)  # names that its scripts have and OpenCLIP no longer

# OpenCLIP's models whose text tower starts from pretrained weights of Hugging Face's hub.
HF_TOWER = re.compile(r"(coca_)?(xlm-)?roberta-.*|mt5-.*|nllb-.*")
HF_LAYERS = {
    "roberta-ViT-B-32": 12, "coca_roberta-ViT-B-32": 12, "xlm-roberta-base-ViT-B-32": 12,
    "xlm-roberta-large-ViT-H-14": 24,
}  # fmt: skip
NO_NORMS = (
    "*.dense.*",
    "*.self.*",
)  # of a block: --lock-text alone leaves every LayerNorm to train
# OpenCLIP's other models that are neither presets here nor in a table of pretrained weights.
FAMILIES = re.compile(
    r"(EVA0|MobileCLIP|PE-Core-|ViT-.*SigLIP|ViTamin-|coca_|convnext_|swin_|vit_|RN\d|naflex).*"
)

Keys = dict[str, Any]  # of a recipe, flat
Notes = list[tuple[str, str]]  # flag, what to know of it


def set_model(keys: Keys, notes: Notes, given: Mapping[str, Any]) -> None:
    name = str(given["model"])
    if clipa := CLIPA.fullmatch(name):
        notes.append(("--model", f"OpenCLIP has no {name} any more: {clipa[1]} here, its texts of 77 tokens, not "
                      f"{clipa[2]}; a JSON of your own as model.name can have all of it"))  # fmt: skip
        name = clipa[1]
    own = f"{name.removesuffix('.json')}.json"  # which OpenCLIP knows by add_model_config
    if name == own or Path(own).is_file():
        keys["model.name"] = own
    else:
        keys["model.name"] = model_name(name, quick_gelu="force-quick-gelu" in given)
        known = keys["model.name"].removeprefix("open_clip:")
        if not (known in preset_names() or HF_TOWER.fullmatch(known) or FAMILIES.fullmatch(known)):
            unknown = (
                f"{CHECK}OpenCLIP 3.3.0 has no {known}: if it is a JSON of your own, set model.name to its path, or to "
                "open_clip:PATH if a tower is timm's or Hugging Face's"
            )
            notes.append(("--model", unknown))
    if "vit" not in name.lower():  # OpenCLIP's defaults depend on the name
        for key, value in (("optim.beta2", 0.999), ("optim.eps", 1e-8)):
            keys.setdefault(key, value)
    if "pretrained" in given:
        keys["model.init_from"] = weights_of(name, str(given["pretrained"]))
        if "train-data" not in given:
            notes.append(("--pretrained", "without --train-data OpenCLIP evaluates these weights alone; so does: "
                          f"clip-train evaluate THIS.yaml --weights {keys['model.init_from']}"))  # fmt: skip
    if "distill-model" in given and "distill-pretrained" in given:
        name = str(given["distill-model"])
        keys["model.teacher_name"] = model_name(name, quick_gelu=False, flag="distill-")
        keys["model.teacher"] = weights_of(name, str(given["distill-pretrained"]))


def weights_of(name: str, tag: str) -> str:
    """A tag is one of OpenCLIP's for that model."""
    return tag if set("/.:") & set(tag) else f"open_clip:{name.replace('/', '-')}/{tag}"


def model_name(name: str, quick_gelu: bool, flag: str = "") -> str:
    """Ours, or by OpenCLIP's own. UserError for one that no name of a recipe can stand for."""
    if name.startswith(("hf-hub:", "local-dir:")):
        raise UserError(
            f"--{flag}model {name}: a recipe has architecture and weights apart; give --{flag}model the architecture's "
            f"name, and --{flag}pretrained {name.removeprefix('local-dir:')}"
        )
    name = name.replace("/", "-")
    name += "-quickgelu" if quick_gelu and not name.endswith("-quickgelu") else ""
    return name if name in preset_names() else f"open_clip:{name}"


def set_text_tower(keys: Keys, notes: Notes, flags: Mapping[str, Any]) -> None:
    """A tower of Hugging Face's starts from its pretrained weights there, and is locked by its own rule."""
    name = str(keys["model.name"]).removeprefix("open_clip:")
    if not HF_TOWER.fullmatch(name):
        return
    if "model.init_from" not in keys:
        start = f"{name}-start.pt"
        keys["model.init_from"] = start
        options = "".join(
            f", {option}={keys[key]}"
            for option, key in (
                ("force_image_size", "model.image_size"),
                ("init_logit_bias", "model.init_logit_bias"),
            )
            if key in keys
        )
        notes.append(("--model", f"{CHECK}OpenCLIP starts the text tower of {name} from pretrained weights. Make the "
                      f"file that model.init_from names, once: python -c \"import open_clip, torch; torch.save("
                      f"open_clip.create_model('{name}'{options}).state_dict(), '{start}')\""))  # fmt: skip
    unlocked = keys.pop("model.lock_text_unlocked_layers", 0)
    if not keys.pop("model.lock_text", False):
        return
    layers = HF_LAYERS.get(name)
    norms = layers is None or "lock-text-freeze-layer-norm" in flags
    if layers is None:
        keys["model.freeze"] = ["text.transformer.*"]
    else:
        embeddings, blocks = "text.transformer.embeddings.", "text.transformer.encoder.layer."
        numbers = [*range(layers - unlocked)] if unlocked else ["*"]
        frozen = [f"{embeddings}{'*' if norms else '*_embeddings.weight'}"] * (unlocked <= layers)
        frozen += [f"{blocks}{n}.{end}" for n in numbers for end in (["*"] if norms else NO_NORMS)]
        keys["model.freeze"] = frozen
    if layers is None and unlocked:
        notes.append(("--lock-text-unlocked-layers", f"{CHECK}the layers of {name} are not known here: model.freeze "
                      f"freezes its whole transformer; leave its last {unlocked} layers out"))  # fmt: skip
    notes[:] = [note for note in notes if note[0] != "--lock-text-freeze-layer-norm"]
    notes.append(("--lock-text", "there the projection trains, and without --lock-text-freeze-layer-norm every "
                  "LayerNorm: model.freeze names what is frozen"))  # fmt: skip
