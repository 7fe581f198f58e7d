"""The base of every recipe section: frozen, no unknown keys, documented fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """One section of the recipe. It stands beside the code that it configures and checks itself.

    Docstrings under the fields become their descriptions, which `clip-train train --help` prints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
