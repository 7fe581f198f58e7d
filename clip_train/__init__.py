"""CLIP training whose result does not depend on how the global batch is computed.

The names of `__all__` are this package's promise to programs (docs/api.md). Each is imported when
it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clip_train.callbacks import Callback
    from clip_train.data.loader import TrainLoader
    from clip_train.library import contrastive_step
    from clip_train.losses.info_nce import InfoNCE
    from clip_train.losses.maxsim import MaxSim
    from clip_train.losses.ranking import Ranking
    from clip_train.losses.sigmoid import SigmoidLoss
    from clip_train.recipe.recipe import Recipe
    from clip_train.recipe.recipe import load_config as load_recipe
    from clip_train.step_memory import contrastive_memory
    from clip_train.task import Context, LossOutput, Objective
    from launcher.program import train

__version__ = "0.1.0"

# name -> module:name
_PLACES = {
    "Callback": "clip_train.callbacks:Callback",
    "Context": "clip_train.task:Context",
    "InfoNCE": "clip_train.losses.info_nce:InfoNCE",
    "LossOutput": "clip_train.task:LossOutput",
    "MaxSim": "clip_train.losses.maxsim:MaxSim",
    "Objective": "clip_train.task:Objective",
    "Ranking": "clip_train.losses.ranking:Ranking",
    "Recipe": "clip_train.recipe.recipe:Recipe",
    "SigmoidLoss": "clip_train.losses.sigmoid:SigmoidLoss",
    "TrainLoader": "clip_train.data.loader:TrainLoader",
    "contrastive_memory": "clip_train.step_memory:contrastive_memory",
    "contrastive_step": "clip_train.library:contrastive_step",
    "load_recipe": "clip_train.recipe.recipe:load_config",
    "train": "launcher.program:train",
}
__all__ = [
    "Callback",
    "Context",
    "InfoNCE",
    "LossOutput",
    "MaxSim",
    "Objective",
    "Ranking",
    "Recipe",
    "SigmoidLoss",
    "TrainLoader",
    "contrastive_memory",
    "contrastive_step",
    "load_recipe",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'clip_train' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
