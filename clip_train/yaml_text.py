"""YAML as recipes, overrides and site files use it. This is the only module that imports `yaml`.

YAML 1.1, which PyYAML reads, turns many words into something else. Here a plain scalar is a number,
`true`, `false` or null only if it looks like one; anything else is the text that was typed:

`on`, `off`, `yes`, `no`   words (YAML 1.1: booleans); a key that is a boolean accepts them as well
`1e-4`, `1.5e3`            numbers (YAML 1.1: texts)
`010`, `1:30`, `12:30:00`  texts (YAML 1.1: numbers to base 8 and 60)
`2024-01-01`               a text (YAML 1.1: a date)
"""

import re
from typing import Any

import yaml

BOOLEAN, INTEGER, FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))
MERGE = "tag:yaml.org,2002:merge"
# Tags that PyYAML gives to plain scalars, and that are given by other patterns here, or by none.
REPLACED = {BOOLEAN, INTEGER, FLOAT, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
# (tag, pattern, first characters of the scalars that it can match)
PATTERNS = (
    (BOOLEAN, re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    (
        INTEGER,
        re.compile(r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F][\da-fA-F_]*|0b[01][01_]*)$"),
        "-+0123456789",
    ),
    (
        FLOAT,
        re.compile(
            r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$"
            r"|^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)$"
            r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
        ),
        "-+0123456789.",
    ),
)


class YamlError(ValueError):
    """A text is not YAML; the message is one line."""


class _Loader(yaml.SafeLoader):
    """Reads plain scalars by PATTERNS. A repeated key is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        # keys that `<<: *anchor` merges may be given again
        own = [key for key, _ in node.value if key.tag != MERGE]
        keys = [self.construct_object(key, deep=True) for key in own]
        repeated = {str(key) for key in keys if keys.count(key) > 1}
        if repeated:
            raise yaml.constructor.ConstructorError(
                None, None, f"repeated key: {', '.join(sorted(repeated))}", node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a text if this loader or YAML 1.1 would read it as something else."""


for _tag, _pattern, _first in PATTERNS:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))
# Booleans of YAML 1.1 that PyYAML does not know, but Kubernetes' reader does.
_Dumper.add_implicit_resolver(BOOLEAN, re.compile("^[yYnN]$"), list("yYnN"))


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Several lines as they are, after `|`, where YAML can."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def load_yaml(text: str) -> Any:
    """One YAML document. YamlError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise YamlError(" ".join(str(e).split())) from None


def dump_yaml(value: Any) -> str:
    """A document that `load_yaml`, and any other reader of YAML, reads as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def dump_line(value: Any) -> str:
    """The same on one line, as in an override. YamlError for a value that YAML cannot express."""
    try:
        text = yaml.dump(
            value, Dumper=_Dumper, default_flow_style=True, width=1_000_000, allow_unicode=True
        )
    except yaml.representer.RepresenterError as e:
        raise YamlError(" ".join(str(e).split())) from None
    return text.removesuffix("\n").removesuffix("\n...")
