"""A recipe's keys in words: the default and the allowed values of each."""

import inspect
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from clip_train.recipe.recipe import known_keys
from clip_train.settings import Allowed, as_yaml, options_key, options_model

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class KeyRow:
    """One key."""

    name: str
    default: str  # "required" without one
    allowed: str
    meaning: str

    @property
    def section(self) -> str:
        return self.name.split(".")[0]


def key_rows(prefix: str) -> list[KeyRow]:
    """The keys of a recipe that begin with `prefix`."""
    return [key_row(name, field) for name, field in known_keys() if name.startswith(prefix)]


def option_rows(key: str, import_path: str) -> list[KeyRow]:
    """The options of the function or class at `import_path`, the value of `key`. UserError for a
    path that cannot be imported."""
    return [
        KeyRow(
            name=f"{options_key(key)}.{name}",
            default="required" if field.is_required() else repr(field.get_default()),
            allowed=inspect.formatannotation(field.annotation),
            meaning=field.description or "",
        )
        for name, field in options_model(key, import_path).model_fields.items()
    ]


def key_row(name: str, field: FieldInfo) -> KeyRow:
    default = "required"
    if not field.is_required():
        default = as_yaml(field.get_default(call_default_factory=True))
    words = [each.words for each in field.metadata if isinstance(each, Allowed)]
    allowed = words[0] if words else type_of(TypeAdapter(field.rebuild_annotation()).json_schema())
    return KeyRow(name, default, allowed, meaning=" ".join((field.description or "").split()))


def type_of(schema: dict[str, Any]) -> str:
    """A JSON schema in words: `auto or integer >= 1`."""
    if "anyOf" in schema:
        return " or ".join(type_of(branch) for branch in schema["anyOf"])
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return " or ".join(as_yaml(choice) for choice in choices)
    if schema["type"] == "array":
        inside = schema["items"] if "items" in schema else schema["prefixItems"][0]
        return f"list of {schema.get('maxItems', '')} {type_of(inside)}".replace("  ", " ")
    bounds = [f" {sign} {schema[name]:,}" for name, sign in BOUNDS.items() if name in schema]
    return schema["type"] + " and".join(bounds)
