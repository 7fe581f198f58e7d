"""A recipe's keys in words: the default and the allowed values of each."""

from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from clip_train.settings import Allowed, as_yaml

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def row_of(name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    """A key: its name, its default as YAML, its allowed values and its meaning."""
    default = "required"
    if not field.is_required():
        default = as_yaml(field.get_default(call_default_factory=True))
    words = [each.words for each in field.metadata if isinstance(each, Allowed)]
    allowed = words[0] if words else type_of(TypeAdapter(field.rebuild_annotation()).json_schema())
    return name, default, allowed, " ".join((field.description or "").split())


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
