"""The base of every recipe section (frozen, no unknown keys, documented fields), and its mistakes in words to act on.

`data.workers (-1) must be a whole number from 0 to 1,024`: what is allowed is read off the field's type, so that it
cannot differ from what is checked.
"""

from __future__ import annotations

import itertools
import math
import shlex
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
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


# -- mistakes in words

NAMES = {
    int: "a whole number", float: "a number", str: "text", type(None): "null",
    dict: "names with values",
}  # fmt: skip
COMMAND_DEPTH = 2  # `key.path=value` of a recipe is section.key
LONGEST = 80  # characters of a value that are shown
Loc = Sequence[str | int]


AND = ("too_large", "empty", "null_byte")  # of `Settings`: their message goes on where the type's words end


@dataclass(frozen=True)
class Allowed:
    """In a field's `Annotated`: what may stand there where its type does not tell, and an example."""

    words: str
    example: str | None = None  # instead of the default


@dataclass(frozen=True)
class _Place:
    """Where a mistake is. Pydantic's location also has names of a union's branches, which mean nothing to a user."""

    path: tuple[str | int, ...]
    kind: Any  # the type there
    field: FieldInfo | None  # the last named one on the way
    whole: Any  # the type of what the command can set: of a list that `path` leads into


def explain(
    error: ValidationError, model: type[BaseModel], raw: Any, *, unknown: Callable[[str], str], within: str = "recipe"
) -> list[str]:
    """Every mistake of `raw`, once: field (value), what it must be, and what to write.

    unknown: from the path of a key that does not exist to what may have been meant. within: what `raw` is called.
    """
    lines: dict[str, str] = {}  # by path: the branches of a union have an error each
    for each in error.errors(include_url=False):
        place = _find(model, each["loc"])
        path = ".".join(map(str, place.path))
        named = itertools.takewhile(lambda part: isinstance(part, str), place.path)  # a list is set as a whole
        key = ".".join(map(str, named))
        match each["type"]:
            case "extra_forbidden" | "invalid_key":
                path = ".".join(map(str, each["loc"]))
                line = f"{path} ({shown(each['input'])}): there is no such key; {unknown(path)}"
            case "missing" if place.path == each["loc"]:
                command = f", or {_example(place, key)} to the command" if within == "recipe" else ""
                line = f"{path} is missing; add it to the {within}{command}"
            case "value_error":
                line = str(each["ctx"]["error"])
                line = line if not path or str(place.path[0]) in line else f"{path}: {line}"
            case _:
                value = _value(raw, place.path, each["input"])
                more = f", {each['msg']}" if each["type"] in AND else ", and finite" * (each["type"] == "finite_number")
                words = f"{allowed(place.kind)}{more}"
                line = f"{path or within} ({shown(value)}) must be {words}; {_remedy(place, key, value)}"
        lines.setdefault(line if each["type"] == "value_error" else path, line)
    return list(lines.values())


def allowed(kind: Any) -> str:
    """What may stand for a type: `auto or a whole number of at least 1`."""
    kind, metadata = _bare(kind)
    words = next((each.words for each in metadata if isinstance(each, Allowed)), None)
    if words is not None:
        return words
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        branches = sorted(arguments, key=_order)
        return _or(word for each in branches for word in (_choices(each) or [allowed(_with(each, metadata))]))
    if (choices := _choices(kind)) is not None:
        return _or(choices)
    if origin in (list, tuple):
        inner = [each for each in arguments if each is not Ellipsis]
        return f"a list{f' of {len(inner)}' if origin is tuple else ''}, each {allowed(inner[0])}"
    if _is_model(kind):
        return f"keys of its own ({', '.join(kind.model_fields)})"
    return NAMES[origin or kind] + _bounds(metadata, kind)


def shown(value: Any) -> str:
    """A value as YAML has it, text in quotes, cut where it is long."""
    text = repr(value) if isinstance(value, str) else as_yaml(value)
    return clipped(text)


def clipped(text: str) -> str:
    """For messages: cut where it is long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def as_yaml(value: Any) -> str:
    """On one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1_000_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _find(model: type[BaseModel], loc: Loc) -> _Place:
    path: list[str | int] = []
    kind: Any = model
    whole: Any = model
    field: FieldInfo | None = None
    for part in loc:
        inner, _ = _bare(kind)
        options = [each for each in get_args(inner) if each is not type(None)]
        if get_origin(inner) in (Union, types.UnionType) and len(options) == 1:
            inner, _ = _bare(options[0])  # X | None; of others `part` names a branch
        if _is_model(inner) and part in inner.model_fields:
            field = inner.model_fields[str(part)]
            kind = _annotated(field.annotation, field.metadata)
        elif isinstance(part, int) and get_origin(inner) is list and _is_model(get_args(inner)[0]):
            kind = get_args(inner)[0]
        else:
            break  # of a list of numbers the whole is shown
        path.append(part)
        if len(path) <= COMMAND_DEPTH:
            whole = kind
    return _Place(tuple(path), kind, field, whole)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _bare(kind: Any) -> tuple[Any, list[Any]]:
    """A type without its Annotated, and what that says."""
    metadata: list[Any] = []
    while get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        for each in more:
            metadata += [each, *(each.metadata if isinstance(each, FieldInfo) else [])]
    return kind, metadata


def _with(kind: Any, metadata: list[Any]) -> Any:
    """Bounds of a union, as of `int | None` with `ge=1`, are its numbers'."""
    return _annotated(kind, metadata) if kind in (int, float) else kind


def _annotated(kind: Any, metadata: list[Any]) -> Any:
    for each in metadata:
        kind = Annotated[kind, each]
    return kind


def _choices(kind: Any) -> list[str] | None:
    if kind is bool:
        return ["true", "false"]
    return [as_yaml(each) for each in get_args(kind)] if get_origin(kind) is Literal else None


def _order(kind: Any) -> int:
    """Words first, `null` last."""
    return 0 if get_origin(kind) is Literal else 2 if kind is type(None) else 1


def _bounds(metadata: list[Any], kind: type) -> str:
    """` of at least 1`, ` greater than 0`, ` from 0 to 1`."""
    found = {name: getattr(each, name) for name in ("gt", "ge", "lt", "le") for each in metadata if hasattr(each, name)}
    if kind is int and "gt" in found:
        found["ge"] = found.pop("gt") + 1
    number = {name: f"{int(value) if value == int(value) else value:,}" for name, value in found.items()}
    if "ge" in number and "le" in number:
        return f" from {number['ge']} to {number['le']}"
    words = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "at most"}
    return "".join(f"{' and' if i else ''} {words[name]} {number[name]}" for i, name in enumerate(number))


def _or(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = words
    comma = "," if any(" or " in word or "," in word for word in first) else ""
    return f"{', '.join(first)}{comma} or {last}" if first else last


def _example(place: _Place, key: str) -> str:
    """`key=value` for what is missing; of a section, whose keys alone can be set on a command line, of one in it."""
    inner, metadata = _bare(place.whole)
    if _is_model(inner) and len(place.path) == 1:
        fields = inner.model_fields.items()
        name, field = next((each for each in fields if _marked(each[1].metadata)), next(iter(fields)))
        key, metadata = f"{key}.{name}", field.metadata
    marked = _marked(metadata)
    return f"{key}={marked.example if marked else '...'}"


def _marked(metadata: list[Any]) -> Allowed | None:
    return next((each for each in metadata if isinstance(each, Allowed) and each.example is not None), None)


def _remedy(place: _Place, key: str, value: Any) -> str:
    inner, metadata = _bare(place.kind)
    required = place.field is None or place.field.is_required() or key != ".".join(map(str, place.path))
    if _is_model(inner) and len(place.path) == 1:
        empty = "an empty section? delete it, or " if value is None and not required else ""
        return f"{empty}write {key}: and below it its keys, indented"
    if required or _marked(metadata):
        return f"set {_example(place, key)} or another" if key else "see recipes/"
    assert place.field is not None
    default = shlex.quote(as_yaml(place.field.get_default(call_default_factory=True)))
    quoted = f"{key}='\"{value}\"', if that is meant, or " if _is_unquoted(inner, value) else ""
    return f"set {quoted}{key}={default} (the default) or another"


def _is_unquoted(kind: Any, value: Any) -> bool:
    """A number or a date where text may stand: YAML wants it in quotes."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and str in (kind, *get_args(kind))


def _value(raw: Any, path: Loc, otherwise: Any) -> Any:
    """What the recipe has there."""
    for part in path:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return otherwise
    return raw
