"""The weights a run starts from, the same at every ZeRO stage and number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from clip_train.errors import CheckpointError
from clip_train.models.clip import CLIP
from clip_train.models.config import ModelConfig
from clip_train.models.convert import load_openclip
from clip_train.protocols import Wanted


class WholeState:
    """A FragmentSource over whole parameters in memory: initial weights, or those of an export."""

    def __init__(self, state: Mapping[str, Tensor]):
        self._state = state

    def slots(self) -> set[str]:
        return {"param"}

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """It is all in memory."""

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        if name not in self._state or slot != "param":
            raise CheckpointError(f"these weights hold no {slot} of {name}")
        return self._state[name].flatten()[start : start + numel]


def initial_weights(config: ModelConfig, seed: int) -> WholeState:
    """What `model.init_from` holds, else OpenCLIP's initialisation drawn on the CPU from `seed`.

    Drawn in float32 and on the CPU for every precision, device and ZeRO stage, so that none of them changes
    where a run starts. It holds the whole model in memory until it is dropped.
    """
    if config.init_from is not None:
        return WholeState(load_openclip(config.init_from, config.architecture()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return WholeState(dict(CLIP(config.architecture()).named_parameters()))


def load_teacher(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> CLIP | None:
    """`model.teacher`, frozen and in eval mode; None where the recipe names none. UserError, CheckpointError."""
    architecture = config.teacher_architecture()
    if config.teacher is None or architecture is None:
        return None
    state = load_openclip(config.teacher, architecture)
    teacher = CLIP(architecture, patch_dropout=0.0)
    teacher.load_state_dict(state)
    teacher.to(device, dtype)
    teacher.logit_scale.data = state["logit_scale"].to(device)  # rounded to bf16 the factor would be off by up to 1.6%
    return teacher.eval().requires_grad_(False)
