"""Reading how OpenCLIP was run: a command line or the script that it stands in, or its `params.txt` -> flags."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clip_tools.openclip.flags import FLAGS, LISTS, SWITCHES, UNSAID
from clip_train.errors import UserError

_MAIN = re.compile(r"(^|[./])main(\.py)?$")  # the word behind which the flags stand
_ASSIGNED = re.compile(r"\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;]*)\s*;?\s*")
_VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*))"
)
_PER_NODE, _NODES = (
    r"--(?:nproc[-_]per[-_]node|ntasks-per-node)[= ](\d+)",
    r"--(?:nnodes?|nodes)[= ](\d+)",
)
_IN_ALL = r"(?:--ntasks[= ]|\s-np? )(\d+)"


def read(given: str, stdin: str | None = None) -> tuple[dict[str, Any], int | None]:
    """Flags with their values, and how many ranks there were, where that can be seen. UserError.

    given: a command line; the path of a script that holds one, of a params.txt, or of the folder that has one; or `-`
    for `stdin`.
    """
    if given == "-":
        return read_command(stdin or "")
    path = Path(given)
    if os.path.isdir(given):
        path /= "params.txt"
    elif not os.path.isfile(given) and (
        " " in given or path.suffix not in (".sh", ".sbatch", ".txt")
    ):
        return read_command(given)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"cannot read {path}: {getattr(e, 'strerror', None) or e}; correct the path"
        ) from None
    return read_params(text) if path.suffix == ".txt" else read_command(text)


def read_command(text: str) -> tuple[dict[str, Any], int | None]:
    """The same of a command line, or of the script that it stands in: its variables and #SBATCH lines count too."""
    text = re.sub(r"\\[ \t]*\r?\n|\n\s*(?=--\w)", " ", text).rstrip("\\ \t\r\n")
    lines = text.splitlines()
    command = next(
        (
            line
            for line in lines
            if re.search(r"\bmain(\.py)?\s", line) and not line.startswith("#")
        ),
        text,
    )
    words = _words(_with_values(command, lines))
    start = next((i + 1 for i, word in enumerate(words) if _MAIN.search(word)), 0)
    launcher = " ".join([*(line for line in lines if line.startswith("#SBATCH")), *words[:start]])
    per_node, nodes, in_all = (
        re.search(pattern, launcher) for pattern in (_PER_NODE, _NODES, _IN_ALL)
    )
    ranks = (
        int(per_node[1]) * int(nodes[1] if nodes else 1)
        if per_node
        else int(in_all[1])
        if in_all
        else None
    )
    return _flags(words[start:]), ranks


def _words(command: str) -> list[str]:
    """As a shell splits it, `|`, `;` and their like as words of their own."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";<>|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError as e:
        raise UserError(
            f"this is no command line: {e}; quote it as one argument, or give - and pipe it in"
        ) from None


def _with_values(command: str, lines: list[str]) -> str:
    """Its variables replaced by what the script sets them to before, as far as that is plain text."""
    known: dict[str, str] = {}

    def value(found: re.Match[str]) -> str:
        name = found["braced"] or found["bare"]
        return known.get(name, found["default"] if found["default"] is not None else found[0])

    for line in itertools.takewhile(lambda each: each != command, lines):
        assigned = _ASSIGNED.fullmatch(line)
        if assigned and "$(" not in assigned[2] and "`" not in assigned[2]:
            known[assigned[1]] = _VARIABLE.sub(value, assigned[2].strip("\"'"))
    return _VARIABLE.sub(value, command)


def unset(value: Any) -> str | None:
    """The variable in it that no line of the script sets; None without one."""
    found = _VARIABLE.search(str(value))
    return found[0] if found else None


def _flags(words: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    unknown: list[str] = []
    while words:
        word = words.pop(0)
        if _ends(word, words):
            break
        name, equals, value = word.partition("=")
        flag = name.removeprefix("--").replace("_", "-")
        if not name.startswith("--"):
            raise UserError(f"{name!r} is no flag of OpenCLIP; a value with spaces needs quotes")
        if flag not in FLAGS:
            near = get_close_matches(flag, FLAGS, n=1)
            remedy = f"did you mean --{near[0]}?" if near else "leave it out"
            unknown.append(f"--{flag} is no flag of OpenCLIP; {remedy}")
            words = list(itertools.dropwhile(lambda each: not each.startswith("--"), words))
        elif flag in LISTS:
            flags[flag] = [value] if equals else []
            while words and not words[0].startswith("--") and not _ends(words[0], words[1:]):
                flags[flag].append(words.pop(0))
        elif flag in SWITCHES:
            flags[flag] = True
        elif equals or words:
            flags[flag] = value if equals else words.pop(0)
        else:
            raise UserError(f"--{flag} has no value; is the command cut?")
    if unknown:
        raise UserError("\n".join(unknown))
    return flags


def _ends(word: str, behind: list[str]) -> bool:
    """A comment, another command or a redirection (`2>&1`) begins here."""
    redirected = word.isdigit() and behind[:1] != [] and behind[0].startswith((">", "<"))
    return word.startswith("#") or word.strip(";<>|&") == "" or redirected


def read_params(text: str) -> tuple[dict[str, Any], int | None]:
    """OpenCLIP's `params.txt`: `name: value` lines, those at which it did what it does without them left out."""
    parts = (line.partition(":") for line in text.splitlines())
    found = {name.strip().replace("_", "-"): value.strip() for name, _, value in parts}
    ranks = found.get("world-size", "")
    kept = {
        k: v
        for k, v in found.items()
        if k in FLAGS
        and v not in ("None", "False", "", "{}", "[]")
        and v.removesuffix(":0") != UNSAID.get(k)  # cuda:0
    }
    flags = {k: True if k in SWITCHES else _listed(v) if k in LISTS else v for k, v in kept.items()}
    return flags, int(ranks) if ranks.isdigit() else None


def _listed(text: str) -> list[str]:
    """Of a list or a dict as Python prints it."""
    value = literal(text)
    if isinstance(value, dict):
        return [f"{k}={v}" for k, v in value.items()]
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


def literal(text: str) -> Any:
    """As OpenCLIP takes a value of `--aug-cfg`: what Python does not read is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
