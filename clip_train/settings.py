"""The base of every recipe section: frozen, no unknown keys, documented fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = 10**18  # beyond it a number is a slip, and would be an overflow somewhere in torch

Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""Of a limit; the most is three years, which clocks and timeouts can hold."""


@dataclass(frozen=True)
class AtResume:
    """In a field's `Annotated`: what its change means to a run that resumes. A field without one is reported.

    refused: it would be another run, whose gradient would not continue as this one's began; unless it is forced
    layout:   reported in the line about ranks and stage
    rounding: how it is computed: the curve shows it by rounding alone
    silent:   what is written about it, and where
    """

    change: Literal["refused", "reported", "layout", "rounding", "silent"]


Refused = AtResume("refused")
Layout = AtResume("layout")
Rounding = AtResume("rounding")
Silent = AtResume("silent")


class Settings(BaseModel):
    """One section of the recipe. It stands beside the code that it configures and checks itself.

    Docstrings under the fields become their descriptions, which `clip-train train --keys` prints.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _means_something(cls, value: Any, info: ValidationInfo) -> Any:
        """What pydantic would take, and nobody means: true for 1, empty text, numbers without end."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if value is False and any("off" in get_args(kind) for kind in kinds):
            return "off"  # which YAML reads as false
        if isinstance(value, bool) and bool not in kinds:
            raise PydanticCustomError("no_switch", "true and false are no numbers")
        if isinstance(value, (int, float)) and LARGEST < abs(value) < math.inf and kinds & {int, float}:
            raise PydanticCustomError("too_large", "and of at most 10^18")
        if isinstance(value, str) and not value.strip() and str in kinds:
            raise PydanticCustomError("empty", "and not empty")
        if isinstance(value, str) and "\0" in value and str in kinds:
            raise PydanticCustomError("null_byte", "and without a null byte")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types in it: of `Annotated[int, ...] | str` both."""
    inside = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    if get_origin(annotation) in (Literal, list, tuple, dict) or not inside:
        return {annotation}
    return set().union(*map(_kinds, inside))
