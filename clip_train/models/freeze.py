"""Parameters by name: their tower, their layer in it, and which of them a recipe freezes."""

import difflib
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from clip_train.errors import UserError
from clip_train.models.batch_norm import BatchNorm2d
from clip_train.models.clip import parameter_sizes
from clip_train.models.config import AnyArchitecture, ModelConfig
from clip_train.models.low_rank import NAMES
from clip_train.models.positions import TEXT_POSITIONS
from clip_train.settings import shown
from clip_train.task import IMAGE_TEXT, groups

NORMS = ("ln_post", "ln_final")  # behind the blocks
TOP = re.compile(r"(?:visual\.|text\.)*(ln_post|ln_final|proj|text_projection)(?:\.|$)")
BLOCK = re.compile(r"\bresblocks\.(\d+)\.")


def depths(names: Iterable[str]) -> dict[str, int]:
    """Layers of each parameter below the top of its tower, by its name.

    0 is what follows the blocks, 1 the last block, the most the embeddings. The scalars are at 0.
    """
    names = list(names)
    towers = groups(IMAGE_TEXT, names)
    blocks = {name: int(found[1]) for name in names for found in BLOCK.finditer(name)}
    layers = dict.fromkeys(towers.values(), 0)
    for name, number in blocks.items():
        layers[towers[name]] = max(layers[towers[name]], number + 1)
    out = dict.fromkeys(names, 0)
    for name, tower in towers.items():
        if TOP.match(name) is None:
            out[name] = layers[tower] - blocks.get(name, -1)
    return out


def matching(key: str, value: Any, glob: str, names: Collection[str]) -> set[str]:
    """The parameters that match a glob in the recipe's `key`, which is `value`.

    UserError if there are none.
    """
    found = {name for name in names if fnmatchcase(name, glob)}
    if not found:
        near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4) or sorted(names)[:3]
        raise UserError(
            f"{key} ({shown(value)}): {glob} matches none of the model's parameters, such as "
            f"{', '.join(near)}; "
            "correct it (visual.* is the image tower), or take it out"
        )
    return found


def frozen_names(config: ModelConfig, names: Collection[str]) -> set[str]:
    """The parameters that the recipe does not train. UserError if it trains none.

    Locked towers are unlocked from the top by OpenCLIP's groups: the last norm with the last block.
    """
    depth, frozen = depths(names), set[str]()
    locks = {
        "image": (config.lock_image, config.lock_image_unlocked_groups),
        "text": (config.lock_text, config.lock_text_unlocked_layers),
    }
    for name in names:
        locked, unlocked = locks.get(IMAGE_TEXT.group(name) or "", (False, 0))
        top = TOP.match(name)
        group = 1 if top is not None and top[1] in NORMS else depth[name]
        if locked and group >= unlocked:
            frozen.add(name)
    if config.lora is not None:
        globs = list(config.lora.train)
        trained = [matching("model.lora.train", globs, glob, names) for glob in globs]
        adapters = {name for name in names if name.endswith(NAMES)}
        frozen |= set(names) - adapters.union(IMAGE_TEXT.scalars, *trained)
    for glob in config.freeze:
        frozen |= matching("model.freeze", config.freeze, glob, names)
    if len(frozen) == len(names):
        raise UserError(
            f"model.freeze ({shown(config.freeze)}), model.lock_image ({shown(config.lock_image)}) "
            "and "
            f"model.lock_text ({shown(config.lock_text)}) leave no parameter to train; freeze fewer"
        )
    return frozen


def check_drawn_positions(config: ModelConfig, names: Collection[str]) -> None:
    """UserError if `model.keep_positions` draws positions that the recipe does not train."""
    if not isinstance(config.keep_positions, str):
        return
    untrained = frozen_names(config, names).intersection(TEXT_POSITIONS)
    if not untrained:
        return
    name = min(untrained)
    remedy = f"take {name} out of model.freeze"
    if config.lora is not None:
        remedy = f'set model.lora.train=["{name}"]'
    elif config.lock_text:
        remedy = "set model.lock_text=false"
    raise UserError(
        f"model.keep_positions ({config.keep_positions}) draws positions behind those of the "
        f"weights, and {name} is not trained; {remedy}, or interpolate with model.keep_positions=0"
    )


def freeze(model: nn.Module, config: ModelConfig) -> None:
    """Freeze the parameters. Call it before the model goes into an engine, and before its optimizer
    is made."""
    parameters = dict(model.named_parameters())
    frozen = frozen_names(config, parameters)
    for name in frozen:
        parameters[name].requires_grad_(False)
    for name, module in model.named_modules():
        if (
            isinstance(module, BatchNorm2d)
            and f"{name}.weight" in frozen
            and name.startswith("visual.")
        ):
            module.frozen = config.lock_image_freeze_bn_stats


def trained_parameters(config: ModelConfig, architecture: AnyArchitecture) -> int:
    sizes = parameter_sizes(architecture)
    frozen = frozen_names(config, sizes)
    return sum(size for name, size in sizes.items() if name not in frozen)


def frozen_towers(config: ModelConfig, architecture: AnyArchitecture) -> frozenset[str]:
    """Those of which nothing is trained."""
    names = parameter_sizes(architecture)
    trained = groups(IMAGE_TEXT, names.keys() - frozen_names(config, names))
    return frozenset(IMAGE_TEXT.group_names) - set(trained.values())
