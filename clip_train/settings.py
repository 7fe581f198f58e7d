"""The base class of every recipe section (frozen, no unknown keys, documented fields), and its
error messages.

An error is pydantic's message with the key, the value, the default and the remedy:
`optim.lr (-1) must be greater than 0; set optim.lr=0.0005 (the default) or another`.
"""

import difflib
import importlib
import inspect
import itertools
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from clip_train.errors import UserError
from clip_train.places import expanded
from clip_train.yaml_text import YamlError, dump_line

IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"  # such as torch.optim.RMSprop
AnySettings = TypeVar("AnySettings", bound="Settings")
LARGEST = 10**18  # a larger number is a typing error and would overflow somewhere in torch

# The ceiling of `logit_scale`, in training and in a recipe. It is OpenCLIP's: logits are cosines
# times a factor of at most 100, which is a temperature of at least 0.01.
MAX_LOGIT_SCALE = math.log(100)

Matmul = Literal["highest", "tf32"]
"""How GPUs multiply float32 matrices: in full, or with factors rounded to 11 bits."""
Recompute = bool | Literal["pointwise"]
"""Activations that the backward computes again: none, those of all blocks, or those of GELU and
norms."""
Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""A limit in seconds: at most three years, which clocks and timeouts can hold."""
ImportPath = Annotated[str, Field(pattern=rf"^{IMPORT_PATH}(:\w+)?$")]
"""The path of a user's own code: my_package.module.name, or my_package.module:name."""
Place = Annotated[str, AfterValidator(expanded)]
"""A path or URL, or several joined by `::`; `~` and `$VARIABLES` are replaced."""
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""The name of a data set for evaluation."""
MEAN = "mean"
"""In place of a data set's name: the scores that are means over sets."""
Messages = Iterator[str]
"""What a rule yields for values that break it: field, value and remedy."""
# Words that a key which is true or false accepts; for any other key they are texts.
SWITCHES = {"on": True, "yes": True, "y": True, "off": False, "no": False, "n": False}


@dataclass(frozen=True)
class AtResume:
    """In a field's `Annotated`: the effect of a change on a resumed run. Without it, a change is
    reported.

    refused: it would be another run, whose gradient would not continue as this one's began; unless
    it is forced
    layout:   reported in the line about ranks and stage
    rounding: how it is computed: the curve shows it by rounding alone
    silent:   what is written about it, and where
    """

    change: Literal["refused", "reported", "layout", "rounding", "silent"]


Refused = AtResume("refused")
Layout = AtResume("layout")
Rounding = AtResume("rounding")
Silent = AtResume("silent")


@dataclass(frozen=True)
class Allowed:
    """In a field's `Annotated`: its allowed values, where pydantic's message is hard to read, and
    an example.
    """

    words: str
    example: str | None = None  # instead of the default


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A key of an earlier version, for one release.

    Recipes in runs and checkpoints have every key, so values that change nothing are ignored. Any
    other value is a mistake, and its message says what to write instead.
    """

    instead: str
    ignored: Callable[[Any], bool]  # values that change nothing


def rule(check: Callable[[Any], Messages]) -> Callable[[Any], Messages]:
    """Mark a method of a section as a rule that involves several keys.

    It yields a message for each mistake. Each rule is a method of its own because it is skipped if
    it reads a key whose value is a mistake itself, or is missing; the other rules still run.
    """
    check.is_rule = True  # type: ignore[attr-defined]
    return check


class InvalidValueError(AttributeError):
    """A rule has read a key whose value is a mistake."""


INVALID: Any = object()
"""In a `Partial` section, the value of a key that is a mistake or is missing."""


@dataclass
class Mistakes:
    """The context of a validation: collects the messages of rules, so that one broken rule does not
    hide the others.

    partial: accept mistakes in single values, for the rules about the other values.
    """

    partial: bool = False
    messages: list[str] = dataclass_field(default_factory=list)


class Settings(BaseModel):
    """One section of the recipe. It is next to the code that it configures, and validates itself.

    Docstrings under the fields become their descriptions, which `clip-train keys` prints.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # options of a user's own code may be infinite
    )
    removed: ClassVar[Mapping[str, Removed]] = {}
    """Keys of earlier versions."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, section: Any, info: ValidationInfo) -> Any:
        """Leave out removed keys. In a partial section, leave out unknown keys too, and mark the
        keys that are missing or misspelled."""
        if not isinstance(section, dict):
            return section
        kept = {
            key: value
            for key, value in section.items()
            if key not in cls.removed or not cls.removed[key].ignored(value)
        }
        if not _is_partial(info):
            return kept
        known = {key: value for key, value in kept.items() if key in cls.model_fields}
        absent = [key for key, each in cls.model_fields.items() if each.is_required()]
        for unknown in kept.keys() - known.keys():
            absent += difflib.get_close_matches(str(unknown), cls.model_fields, n=1)
        return dict.fromkeys(absent, INVALID) | known

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_value(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        if not _is_partial(info):
            return handler(cls._refuse_slips(value, info))
        if value is INVALID:
            return INVALID
        try:
            return handler(cls._refuse_slips(value, info))
        except ValueError:  # pydantic's errors are of this kind
            return INVALID

    @classmethod
    def _refuse_slips(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject values that pydantic accepts but nobody intends: true for 1, empty text, huge
        numbers.
        """
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if value is False and any("off" in get_args(kind) for kind in kinds):
            return "off"
        is_number = isinstance(value, (int, float)) and bool(kinds & {int, float})
        is_text = isinstance(value, str) and str in kinds
        rules = [
            (
                isinstance(value, bool) and bool not in kinds,
                "Input should be a number or text, not true or false",
            ),
            (is_number and LARGEST < abs(value) < math.inf, "Input should be at most 10^18"),
            (
                is_text and (not value.strip() or "\0" in value),
                "Input should be text, not empty and without null bytes",
            ),
        ]
        for message in broken(rules):
            raise PydanticCustomError("slip", message)
        return value

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> "Settings":
        """Run all rules. Their messages are collected in the context, or raised without one."""
        invalid = [key for key, value in self.__dict__.items() if value is INVALID]
        for key in invalid:  # reading it now raises InvalidValueError
            del self.__dict__[key]
        mistakes = info.context if isinstance(info.context, Mistakes) else Mistakes()
        for check in self._rules():
            try:
                mistakes.messages += check(self)
            except InvalidValueError:
                continue
        if mistakes.messages and info.context is None:
            raise ValueError("; ".join(mistakes.messages))
        return self

    @classmethod
    def _rules(cls) -> list[Callable[[Any], Messages]]:
        """The methods that are marked as rules, in the order of the class."""
        methods = [each for base in reversed(cls.__mro__) for each in vars(base).values()]
        return [each for each in methods if getattr(each, "is_rule", False)]

    if not TYPE_CHECKING:  # it would hide misspelled attributes from mypy

        def __getattr__(self, name: str) -> Any:
            """Called for what is not there: a key that is a mistake, in a partial section."""
            if name in type(self).model_fields:
                raise InvalidValueError(name)
            return super().__getattr__(name)


def _is_partial(info: ValidationInfo) -> bool:
    return isinstance(info.context, Mistakes) and info.context.partial


def validated(
    model: type[AnySettings],
    raw: Any,
    explained: Callable[..., list[str]],
    further: Callable[[AnySettings], Messages] | None = None,
) -> tuple[AnySettings | None, list[str]]:
    """`raw` as the model, or None and every mistake: those in single values, as `explained` (an
    `explain` with its keywords) puts them, and those that break a rule.

    A rule that needs a value which is a mistake itself is not tried. further: finds more mistakes,
    but only if there are some already; reading such a value raises InvalidValueError.
    """
    mistakes, lines = Mistakes(), []
    try:
        checked = model.model_validate(raw, context=mistakes)
        if not mistakes.messages:
            return checked, []
    except ValidationError as e:
        lines = explained(e, model, raw)
        if not isinstance(raw, dict):
            return None, lines
        mistakes = Mistakes(partial=True)
        checked = model.model_validate(raw, context=mistakes)
    lines += mistakes.messages
    if further is not None:
        lines += further(checked)
    return None, list(dict.fromkeys(lines))


def broken(rules: Iterable[tuple[bool, str]]) -> list[str]:
    """The messages of all rules that are broken."""
    return [message for is_broken, message in rules if is_broken]


def _kinds(annotation: Any) -> set[Any]:
    """The types in an annotation: both for `Annotated[int, ...] | str`."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    inside = get_args(annotation)
    if get_origin(annotation) in (Literal, list, tuple, dict) or not inside:
        return {annotation}
    return set().union(*map(_kinds, inside))


# -- a user's own code

# Arguments of such a function before its options. Classes get none, except optimizers.
POSITIONAL = {"loss.kind": 5, "schedule.name": 3, "optim.name": 2, "data.aug_own": 1}


def is_installed(package: str) -> bool:
    """Also False for a mere folder of that name, which Python takes for a namespace."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def is_import_path(name: str) -> bool:
    """Whether a key that takes names or import paths has an import path."""
    return "." in name


# Objects that a program gave to `clip_train.train`, by key and path.
GIVEN: dict[tuple[str, str], Any] = {}


def given(things: Mapping[str, Any]) -> dict[str, str]:
    """For each key of the recipe, the path under which `import_path` returns the key's object
    itself in this process. The objects of an earlier call are forgotten.

    things: functions, classes, or objects of a class of one's own. The path names the function or
    class; with `functools.partial`, the one that it calls. The path of something in the program's
    own file begins with the file's name, so that another process can import it, as `clip-train
    export` does. UserError for what stands within a function, which no other process can find.
    """
    GIVEN.clear()
    options_model.cache_clear()
    paths = {}
    for key, thing in things.items():
        paths[key] = path_of(key, thing)
        GIVEN[key, paths[key]] = thing
    return paths


def path_of(key: str, thing: Any) -> str:
    """As `given` describes it."""
    named = thing
    while isinstance(named, partial):
        named = named.func
    if not hasattr(named, "__qualname__"):
        named = type(named)
    module, name = named.__module__, named.__qualname__
    if module == "__main__":
        program = sys.modules[module]
        module = Path(getattr(program, "__file__", None) or "program").stem
        if program.__spec__ is not None:  # python -m package.program
            module = program.__spec__.name
    path = f"{module}.{name}"
    if re.fullmatch(IMPORT_PATH, path) is None:
        raise UserError(
            f"{key} ({path}) is defined within a function, where a resume or an export does not "
            "find it: move it to the top level of a module"
        )
    return path


def import_path(
    key: str, path: str, base: type = object, remedy: str = "install it, or correct the path"
) -> Any:
    """Import the object at `path`, the value of `key`.

    base: the required base class; `object` allows any object. UserError.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        if (key, path) in GIVEN:
            found = GIVEN[key, path]
        else:
            found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise UserError(f"{key} ({path}) cannot be imported: {e}; {remedy}") from e
    if base is not object and not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"{key} ({path}) is not a subclass of {base.__module__}.{base.__name__}; give the path "
            "of such a class"
        )
    return found


def call_imported(
    key: str,
    path: str,
    options: Mapping[str, Any],
    *arguments: Any,
    base: type = object,
) -> Any:
    """Call what `path` names with these arguments and the section's `options`. UserError."""
    call = import_path(key, path, base)
    keywords = checked_options(key, path, options)
    try:
        return call(*arguments, **keywords)
    except (TypeError, ValueError) as e:
        raise UserError(
            f"{key} ({path}) cannot be used with {options_key(key)} ({shown(dict(options))}): {e}; "
            "correct them"
        ) from e


def options_key(key: str) -> str:
    """The key beside `key` that holds the keyword arguments."""
    return "data.aug_own_options" if key == "data.aug_own" else f"{key.partition('.')[0]}.options"


@cache
def options_model(key: str, path: str) -> type[BaseModel]:
    """The options that the function or class at `path`, the value of `key`, takes.

    They are its `Options`, or its keyword arguments, which are checked by their annotations. A
    callable written in C accepts any options.

    UserError for a path that cannot be imported.
    """
    found = import_path(key, path)
    own = getattr(found, "Options", None)
    if isinstance(own, type) and issubclass(own, BaseModel):
        return own
    taken = 0 if isinstance(found, type) and key != "optim.name" else POSITIONAL[key]
    try:
        parameters = [*inspect.signature(found, eval_str=True).parameters.values()][taken:]
        fields: dict[str, Any] = {
            p.name: (
                Any if p.annotation is p.empty else p.annotation,
                ... if p.default is p.empty else p.default,
            )
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        for p in parameters:
            if p.annotation is p.empty and isinstance(p.default, bool):
                fields[p.name] = (Annotated[Any, BeforeValidator(_as_switch)], p.default)
        loose = any(p.kind is p.VAR_KEYWORD for p in parameters)
        config = ConfigDict(extra="allow" if loose else "forbid", arbitrary_types_allowed=True)
        return create_model("Options", __config__=config, **fields)
    except (TypeError, ValueError, NameError, RuntimeError):  # written in C, or beyond pydantic
        return create_model("Options", __config__=ConfigDict(extra="allow"))


def _as_switch(value: Any) -> Any:
    """true or false for `on`, `off` and their like."""
    return SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def is_switch(value: Any) -> bool:
    """Whether it is true, false, or a word for one of them."""
    return isinstance(_as_switch(value), bool)


def checked_options(key: str, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` as `options_model` reads them. UserError: every mistake, with value and remedy."""
    model = options_model(key, path)
    try:
        return dict(model.model_validate(dict(options)))
    except ValidationError as e:
        known = ", ".join(model.model_fields) or "none"
        lines = explain(
            e,
            model,
            dict(options),
            unknown=f"{path} takes {known}".format,
            written=f"{options_key(key)}.{{}}".format,
        )
        raise UserError(f"{key} ({path}): {'; '.join(lines)}") from None


# -- errors

LONGEST = 80  # characters of a value that are shown


def explain(
    error: ValidationError,
    model: type[BaseModel],
    raw: Any,
    *,
    unknown: Callable[[str], str],
    within: str = "recipe",
    written: Callable[[str], str] = str,
) -> list[str]:
    """Every mistake of `raw`, once: key (value), pydantic's message, and what to write.

    unknown: from the path of an unknown key to a suggestion. within: the name of `raw`.
    written: from the path of a key to what the user writes, such as `--nodes` for `nodes`.
    """
    lines: dict[str, str] = {}
    messages: dict[str, list[str]] = {}  # by path: the branches of a union have an error each
    for each in error.errors(include_url=False):
        loc = each["loc"]
        keys, field, value = _locate(model, raw, loc)
        path = ".".join(map(str, keys))
        said = each["msg"]
        if each["type"] in ("extra_forbidden", "invalid_key"):
            path = ".".join(map(str, loc))
            removed = _removed(model, loc)
            if removed is not None:
                said = f" was removed: {removed.instead}"
            else:
                said = f": no such key; {unknown(path)}"
            lines[path] = f"{written(path)} ({shown(each['input'])}){said}"
        elif each["type"] == "missing" and keys == list(loc):
            remedy = f"add it to the {within}"
            if within == "recipe":
                remedy += f", or {_example(path, field, written)} to the command"
            lines[path] = f"{written(path)} is missing; {remedy}"
        elif each["type"] == "value_error":
            said = str(each["ctx"]["error"])
            # a rule across keys names them itself
            named = not keys or (path if len(keys) > 1 else str(keys[0])) in said
            lines[said] = said if named else f"{written(path)}: {said}"
        elif each["type"] in ("model_type", "model_attributes_type"):
            remedy = f"write {path}: and below it its keys, indented" if path else "see recipes/"
            name = written(path) if path else within
            lines[path] = f"{name} ({shown(value)}) must be a section; {remedy}"
        else:
            words = _hint(field).words or said
            messages.setdefault(path, []).append(words.removeprefix("Input should be "))
            allowed = " or ".join(dict.fromkeys(messages[path]))
            remedy = _remedy(path, field, value, written)
            lines[path] = f"{written(path)} ({shown(value)}) must be {allowed}; {remedy}"
    return list(lines.values())


def _locate(
    model: type[BaseModel], raw: Any, loc: tuple[int | str, ...]
) -> tuple[list[int | str], FieldInfo | None, Any]:
    """The keys of a mistake, its field and value. Pydantic's location also names the branches of
    unions.
    """
    keys: list[int | str] = []
    field, inner = None, model
    is_name = False  # the next part is a name of the user's, as in evaluate.sets
    for i, part in enumerate(loc):
        if is_name and loc[i + 1 :] == ("[key]",):  # the name itself is the mistake
            break
        if is_name and isinstance(part, str):
            is_name = False
        elif isinstance(part, str) and part in getattr(inner, "model_fields", ()):
            field = inner.model_fields[part]
            inner = _model_in(field.annotation)
            is_name = inner is not None and any(
                get_origin(kind) is dict for kind in _kinds(field.annotation)
            )
        elif not isinstance(part, int) or inner is None or i + 1 == len(loc):
            break
        keys.append(part)
        raw = raw.get(part) if isinstance(raw, dict) else raw[part]
    return keys, field, raw


def _removed(model: type[BaseModel], loc: tuple[int | str, ...]) -> Removed | None:
    """What is known of `section.key`, if an earlier version had it."""
    if len(loc) != 2 or loc[0] not in model.model_fields:
        return None
    section = _model_in(model.model_fields[str(loc[0])].annotation)
    return getattr(section, "removed", {}).get(loc[1])


def _model_in(annotation: Any) -> Any:
    """The model in `X | None`, `list[X]` and their like; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _hint(field: FieldInfo | None) -> Allowed:
    """The field's `Allowed`, or an empty one."""
    metadata = field.metadata if field is not None else []
    return next((each for each in metadata if isinstance(each, Allowed)), Allowed(""))


def _setting(written: str, value: Any) -> str:
    """How a key gets this value: `key=value`, or for an option of a command `--key value`."""
    return f"{written}{' ' if written.startswith('--') else '='}{value}"


def _example(path: str, field: FieldInfo | None, written: Callable[[str], str]) -> str:
    """A setting of a missing key; for a section, of its first key that has an example."""
    # what a command can set: it cannot name one entry of a list
    key = ".".join(itertools.takewhile(lambda part: not part.isdecimal(), path.split(".")))
    model = _model_in(field.annotation) if field is not None and "." not in path else None
    for name, inner in model.model_fields.items() if model else ():
        if _hint(inner).example:
            return _setting(written(f"{key}.{name}"), _hint(inner).example)
    return _setting(written(key), _hint(field).example or "...")


def _remedy(path: str, field: FieldInfo | None, value: Any, written: Callable[[str], str]) -> str:
    name = written(path)
    verb = "give" if name.startswith("--") else "set"
    if field is None or field.is_required() or _hint(field).example or path.count(".") > 1:
        return f"{verb} {_example(path, field, written)} or another"
    default = shlex.quote(as_yaml(field.get_default(call_default_factory=True)))
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    quoted = ""
    if number and str in _kinds(field.annotation):  # YAML takes it for a number
        if isinstance(value, float):  # which is not what was typed, such as 1e5
            quoted = _setting(name, "'\"...\"' with what you typed in the quotes, or ")
        else:
            quoted = _setting(name, f"'\"{value}\"', if that is meant, or ")
    return f"{verb} {quoted}{_setting(name, default)} (the default) or another"


def shown(value: Any) -> str:
    """A value as YAML, with text in quotes, shortened if it is long."""
    return clipped(repr(value) if isinstance(value, str) else as_yaml(value))


def clipped(text: str) -> str:
    """For messages: cut where it is long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def as_yaml(value: Any) -> str:
    """On one line."""
    plain = list(value) if isinstance(value, tuple) else value
    try:
        return dump_line(plain)
    except YamlError:  # the default value of an option, such as a tensor
        return repr(value)
