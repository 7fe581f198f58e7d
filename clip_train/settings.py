"""The base of every recipe section (frozen, no unknown keys, documented fields), and its mistakes in words to act on.

`data.workers (-1) must be a whole number from 0 to 1,024`: what is allowed is read off the field's type, so that it
cannot differ from what is checked.
"""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = 10**18  # beyond it a number is a slip, and would be an overflow somewhere in torch

Matmul = Literal["highest", "tf32", "bf16x3"]
"""How the loss multiplies matrices (`clip_train.contrastive.matmul`)."""
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

    Docstrings under the fields become their descriptions, which `clip-train keys` prints.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
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
        if (
            isinstance(value, (int, float))
            and LARGEST < abs(value) < math.inf
            and kinds & {int, float}
        ):
            raise PydanticCustomError("too_large", "and of at most 10^18")
        if isinstance(value, str) and not value.strip() and str in kinds:
            raise PydanticCustomError("empty", "and not empty")
        if isinstance(value, str) and "\0" in value and str in kinds:
            raise PydanticCustomError("null_byte", "and without a null byte")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types in it: of `Annotated[int, ...] | str` both."""
    inside = (
        get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    )
    if get_origin(annotation) in (Literal, list, tuple, dict) or not inside:
        return {annotation}
    return set().union(*map(_kinds, inside))


# -- mistakes in words, from the JSON schema that pydantic makes of a model

NAMES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
    "object": "names with values",
}
COMMAND_DEPTH = 2  # `key.path=value` of a recipe is section.key
LONGEST = 80  # characters of a value that are shown
AND = (
    "too_large",
    "empty",
    "null_byte",
)  # of `Settings`: their message goes on where the type's words end
Schema = dict[str, Any]


@dataclass(frozen=True)
class Allowed:
    """In a field's `Annotated`: what may stand there where its type does not tell, and an example."""

    words: str
    example: str | None = None  # instead of the default

    def __get_pydantic_json_schema__(
        self, core_schema: Any, handler: Callable[[Any], Schema]
    ) -> Schema:
        return {**handler(core_schema), "words": self.words, "example": self.example}


@functools.cache
def schema_of(model: type[BaseModel]) -> Schema:
    """Its JSON schema, with what a reference refers to in its place."""
    schema = model.model_json_schema()

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(each) for each in node]
        if not isinstance(node, dict):
            return node
        target = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else {}
        return {
            key: inlined(value)
            for key, value in {**target, **node}.items()
            if key not in ("$ref", "$defs")
        }

    return inlined(schema)


def explain(
    error: ValidationError,
    model: type[BaseModel],
    raw: Any,
    *,
    unknown: Callable[[str], str],
    within: str = "recipe",
) -> list[str]:
    """Every mistake of `raw`, once: field (value), what it must be, and what to write.

    unknown: from the path of a key that does not exist to what may have been meant. within: what `raw` is called.
    """
    schema = schema_of(model)
    lines: dict[str, str] = {}  # by path: the branches of a union have an error each
    for each in error.errors(include_url=False):
        place = _find(schema, each["loc"])
        path = ".".join(map(str, place.path))
        match each["type"]:
            case "extra_forbidden" | "invalid_key":
                path = ".".join(map(str, each["loc"]))
                line = f"{path} ({shown(each['input'])}): there is no such key; {unknown(path)}"
            case "missing" if place.path == each["loc"]:
                command = f", or {place.example()} to the command" if within == "recipe" else ""
                line = f"{path} is missing; add it to the {within}{command}"
            case "value_error":
                line = str(each["ctx"]["error"])
                line = line if not path or str(place.path[0]) in line else f"{path}: {line}"
            case _:
                value = _value(raw, place.path, each["input"])
                more = (
                    f", {each['msg']}"
                    if each["type"] in AND
                    else ", and finite" * (each["type"] == "finite_number")
                )
                words = f"{allowed(place.schema)}{more}"
                line = f"{path or within} ({shown(value)}) must be {words}; {place.remedy(value)}"
        lines.setdefault(line if each["type"] == "value_error" else path, line)
    return list(lines.values())


def allowed(schema: Schema) -> str:
    """What may stand there: `auto or a whole number of at least 1`."""
    if "words" in schema:
        return schema["words"]
    if "anyOf" in schema:  # words first, `null` last
        branches = sorted(
            schema["anyOf"],
            key=lambda each: (each["type"] == "null") - bool({"const", "enum"} & each.keys()),
        )
        return _or(word for each in branches for word in (_choices(each) or [allowed(each)]))
    if choices := _choices(schema):
        return _or(choices)
    if schema["type"] == "array":
        each, length = (
            (schema["items"], "")
            if "items" in schema
            else (schema["prefixItems"][0], f" of {schema['maxItems']}")
        )
        return f"a list{length}, each {allowed(each)}"
    if "properties" in schema:
        return f"keys of its own ({', '.join(schema['properties'])})"
    return NAMES[schema["type"]] + _bounds(schema)


def shown(value: Any) -> str:
    """A value as YAML has it, text in quotes, cut where it is long."""
    return clipped(repr(value) if isinstance(value, str) else as_yaml(value))


def clipped(text: str) -> str:
    """For messages: cut where it is long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def as_yaml(value: Any) -> str:
    """On one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1_000_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True)
class _Place:
    """Where a mistake is. Pydantic's location also has names of a union's branches, which mean nothing to a user."""

    path: tuple[str | int, ...]
    schema: Schema  # of what stands there
    required: bool
    whole: Schema  # of what a command can set: of a list that `path` leads into

    @property
    def key(self) -> str:
        """What a command can set."""
        return ".".join(
            str(part) for part in itertools.takewhile(lambda part: isinstance(part, str), self.path)
        )

    def example(self) -> str:
        """`key=value` for what is missing; of a section, whose keys alone can be set by a command, of one in it."""
        key, schema = self.key, self.whole
        if "properties" in schema and len(self.path) == 1:
            keys = schema["properties"]
            name = next((name for name in keys if keys[name].get("example")), next(iter(keys)))
            key, schema = f"{key}.{name}", keys[name]
        return f"{key}={schema.get('example') or '...'}"

    def remedy(self, value: Any) -> str:
        if "properties" in self.schema and len(self.path) == 1:
            empty = (
                "an empty section? delete it, or " if value is None and not self.required else ""
            )
            return f"{empty}write {self.key}: and below it its keys, indented"
        if not self.key:
            return "see recipes/"
        if (
            "default" not in self.schema
            or self.schema.get("example")
            or any(isinstance(part, int) for part in self.path)
        ):
            return f"set {self.example()} or another"
        default = shlex.quote(as_yaml(self.schema["default"]))
        types = [
            each["type"] for each in self.schema.get("anyOf", [self.schema]) if not _choices(each)
        ]
        unquoted = (
            "string" in types and isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        quoted = (
            f"{self.key}='\"{value}\"', if that is meant, or " if unquoted else ""
        )  # YAML takes it for a number
        return f"set {quoted}{self.key}={default} (the default) or another"


def _find(schema: Schema, loc: tuple[int | str, ...]) -> _Place:
    place = _Place((), schema, True, schema)
    for part in loc:
        options = [each for each in place.schema.get("anyOf", ()) if each["type"] != "null"]
        inner = (
            options[0] if len(options) == 1 else place.schema
        )  # X | None; of others `part` names a branch
        if part in inner.get("properties", ()):
            found = inner["properties"][part]
        elif isinstance(part, int) and "properties" in inner.get("items", {}):
            found = inner["items"]
        else:
            break  # of a list of numbers the whole is shown
        path = (*place.path, part)
        whole = found if len(path) <= COMMAND_DEPTH else place.whole
        place = _Place(path, found, part in inner.get("required", ()), whole)
    return place


def _choices(schema: Schema) -> list[str]:
    if schema.get("type") == "boolean":
        return ["true", "false"]
    return [
        as_yaml(each) for each in schema.get("enum", [schema["const"]] if "const" in schema else [])
    ]


def _bounds(schema: Schema) -> str:
    """` of at least 1`, ` greater than 0`, ` from 0 to 1`."""
    words = {
        "exclusiveMinimum": "greater than",
        "minimum": "of at least",
        "exclusiveMaximum": "less than",
        "maximum": "at most",
    }
    found = {name: schema[name] for name in words if name in schema}
    if schema["type"] == "integer" and "exclusiveMinimum" in found:
        found["minimum"] = found.pop("exclusiveMinimum") + 1
    number = {
        name: f"{int(value) if value == int(value) else value:,}" for name, value in found.items()
    }
    if "minimum" in number and "maximum" in number:
        return f" from {number['minimum']} to {number['maximum']}"
    return " and".join(f" {words[name]} {number[name]}" for name in words if name in number)


def _or(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = words
    comma = "," if any(" or " in word or "," in word for word in first) else ""
    return f"{', '.join(first)}{comma} or {last}" if first else last


def _value(raw: Any, path: Sequence[str | int], otherwise: Any) -> Any:
    """What the recipe has there."""
    for part in path:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return otherwise
    return raw
