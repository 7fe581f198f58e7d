"""The teachers that a recipe names."""

from functools import partial
from typing import Any

import torch

from clip_train import dist
from clip_train.errors import RankError
from clip_train.losses.distillation import Teacher, run_teacher, stored_teacher
from clip_train.models.weights import load_teacher
from clip_train.processes import node_name
from clip_train.recipe.memory import DTYPES
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.weights import weights_here


def load_teachers(config: Recipe, device: torch.device) -> tuple[list[Teacher], str | None]:
    """The teachers of `model.teacher`, frozen and in the engine's precision, and the digests of
    their weights; or those whose features the shards hold, and None. Collective.

    RankError if nodes see different teachers.
    """
    scales: list[Any] = config.loss.teacher_scales or [None] * len(config.model.teachers())
    if config.model.teacher is None:
        widths = config.data.reinforced or []
        return [partial(stored_teacher, widths, t, scale) for t, scale in enumerate(scales)], None
    teachers: list[Teacher] = []
    digests: list[str] = []
    for alone, scale in zip(config.model.teachers(), scales, strict=False):
        with weights_here(alone, config.storage, ["teacher"]) as here:
            load = partial(load_teacher, alone, str(here.teacher), device)
            teacher, digest = dist.agreed(load, DTYPES[config.engine.precision])
        (first, own), *others = dist.gather_objects((node_name(), digest))
        other = next((node for node, others_digest in others if others_digest != own), None)
        if other is not None:
            raise RankError(
                f"model.teacher ({alone.teacher}) on {other} is not that of {first}; mount it on "
                "all"
            )
        teachers.append(partial(run_teacher, teacher, scale))
        digests.append(digest)
    return teachers, ",".join(digests)
