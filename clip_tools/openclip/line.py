"""Reading how OpenCLIP was run: a command line, the script that holds it, or its `params.txt`."""

import argparse
import ast
import re
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clip_tools.openclip.flags import FLAGS, LISTS, SWITCHES, UNSAID
from clip_train.errors import UserError

ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;`(]*)\s*;?\s*$", re.M)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
PER_NODE = re.compile(r"--(?:nproc[-_]per[-_]node|ntasks-per-node)[= ](\d+)")
NODES = re.compile(r"--(?:nnodes?|nodes)[= ](\d+)")
IN_ALL = re.compile(r"(?:--ntasks[= ]|\s-np? )(\d+)")


def read(given: str, stdin: str | None = None) -> tuple[dict[str, Any], int | None]:
    """Flags with their values, and the number of ranks if it can be seen. UserError.

    given: a command line; the path of a script that holds one, of a params.txt, or of the folder
    that has one; or `-` for `stdin`.
    """
    if given == "-":
        return read_command(stdin or "")
    path = Path(given)
    named = " " not in given and path.suffix in (".sh", ".sbatch", ".txt")
    if len(given) > 4000 or not (named or path.exists()):
        return read_command(given)
    if path.is_dir():
        path /= "params.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path}: {e}; correct the path") from None
    return read_params(text) if path.suffix == ".txt" else read_command(text)


def read_command(text: str) -> tuple[dict[str, Any], int | None]:
    """Read a command line, or a script with its variables and #SBATCH lines."""
    text = re.sub(r"\\[ \t]*\r?\n|\n\s*(?=--\w)", " ", text).rstrip("\\ \t\r\n")
    lines = text.splitlines()
    commands = [line for line in lines if re.search(r"^[^#].*\bmain(\.py)?\s", line)]
    command = commands[0] if commands else text
    known: dict[str, str] = {}

    def value(found: re.Match[str]) -> str:
        return known.get(found[1] or found[3], found[2] or found[0])

    for name, assigned in ASSIGNED.findall(text.partition(command)[0]):
        known[name] = VARIABLE.sub(value, assigned.strip("\"'"))
    command = re.sub(r"\s\d(?=[<>])", " ", VARIABLE.sub(value, command))  # 2>&1
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";<>|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as e:
        raise UserError(
            f"this is not a command line: {e}; quote it as one argument, or give - and pipe it in"
        ) from None
    is_main = [re.search(r"(^|[./])main(\.py)?$", word) is not None for word in words]
    start = is_main.index(True) + 1 if any(is_main) else 0
    ends = [i for i, word in enumerate(words) if word[0] == "#" or not word.strip(";<>|&")]
    end = next((i for i in ends if i >= start), len(words))
    launcher = " ".join([*(line for line in lines if line.startswith("#SBATCH")), *words[:start]])
    ranks, nodes = PER_NODE.search(launcher), NODES.search(launcher)
    per_node = int(nodes[1]) if ranks and nodes else 1
    ranks = ranks or IN_ALL.search(launcher)
    return _flags(words[start:end]), int(ranks[1]) * per_node if ranks else None


def _flags(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for flag in FLAGS:
        if flag in SWITCHES:
            parser.add_argument(f"--{flag}", dest=flag, action="store_true")
        else:
            parser.add_argument(f"--{flag}", dest=flag, nargs="*" if flag in LISTS else None)
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words[i] = name.replace("_", "-") + equals + value
    try:
        found, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as e:
        raise UserError(f"{e.argument_name} has no value; is the command cut?") from None
    mistakes = []
    for flag in [word for word in unknown if word.startswith("--")]:
        near = get_close_matches(flag.removeprefix("--"), FLAGS, n=1)
        remedy = f"did you mean --{near[0]}?" if near else "leave it out"
        mistakes.append(f"{flag} is not a flag of OpenCLIP; {remedy}")
    if unknown and not mistakes:
        mistakes.append(
            f"{unknown[0]!r} is not a flag of OpenCLIP; a value with spaces needs quotes"
        )
    if mistakes:
        raise UserError("\n".join(mistakes))
    return vars(found)


def read_params(text: str) -> tuple[dict[str, Any], int | None]:
    """OpenCLIP's `params.txt`: `name: value` lines, without those that have its defaults."""
    parts = (line.partition(":") for line in text.splitlines())
    found = {name.strip().replace("_", "-"): value.strip() for name, _, value in parts}
    flags: dict[str, Any] = {}
    for name, said in found.items():
        is_default = said.removesuffix(":0") == UNSAID.get(name)  # cuda:0
        if name not in FLAGS or is_default or said in ("None", "False", "", "{}", "[]"):
            continue
        value = literal(said) if name in LISTS else said
        if isinstance(value, dict):
            value = [f"{key}={each}" for key, each in value.items()]
        elif name in LISTS:
            value = [str(each) for each in value] if isinstance(value, list | tuple) else [said]
        flags[name] = True if name in SWITCHES else value
    ranks = found.get("world-size", "")
    return flags, int(ranks) if ranks.isdigit() else None


def literal(text: str) -> Any:
    """As OpenCLIP takes a value of `--aug-cfg`: what Python does not read is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
