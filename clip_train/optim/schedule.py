"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from clip_train.settings import (
    IMPORT_PATH,
    Allowed,
    Messages,
    Settings,
    call_imported,
    is_import_path,
    rule,
    shown,
)


class ScheduleConfig(Settings):
    """The `schedule` section: OpenCLIP's three schedules or another, all after a linear warm-up."""

    name: Annotated[
        str, Allowed("cosine, constant, constant-with-cooldown or the import path of a function")
    ] = Field("cosine", pattern=rf"^(cosine|constant|constant-with-cooldown|{IMPORT_PATH})$")
    """A function is called as `function(peak, step, steps, **options)` and returns the rate of step
    `step` (counted from 0) of `steps`. It may depend on these arguments only."""
    options: dict[str, Any] = Field({})
    """With an import path: the function's other arguments."""
    warmup_steps: NonNegativeInt = 2000
    """Steps in which the rate rises linearly to its peak."""
    cooldown_steps: NonNegativeInt = 0
    """With constant-with-cooldown: the last steps, in which the rate falls to `final_lr`."""
    cooldown_power: PositiveFloat = 1.0
    """With constant-with-cooldown: the power of the decay; 1 is linear."""
    final_lr: NonNegativeFloat = 0.0
    """The rate at the very end (of cosine and of the cooldown)."""

    @rule
    def _options_of_own_code(self) -> Messages:
        if self.options and not is_import_path(self.name):
            yield (
                f"schedule.options ({shown(self.options)}) need an import path as schedule.name "
                f"(it is {self.name}); take them out"
            )


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """The rate of step `step` (counted from 0) of a run of `steps` steps.

    The same numbers as OpenCLIP's `cosine_lr`, `const_lr` and `const_lr_cooldown`.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if is_import_path(config.name):
        return call_imported("schedule.name", config.name, config.options, peak, step, steps)
    if config.name == "cosine":
        progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return config.final_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - config.final_lr)
    start = steps - config.cooldown_steps
    if config.name == "constant-with-cooldown" and step >= start:
        remaining = (1 - (step - start) / config.cooldown_steps) ** config.cooldown_power
        return config.final_lr + remaining * (peak - config.final_lr)
    return peak
