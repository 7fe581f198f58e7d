"""What README, docs and examples say: their pages, commands, and the parts of a page."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^ *```(\w*)")
STARTS = re.compile(
    r"(?:^|\s)(?:clip-train|-m launcher|--module launcher)(?= |$)"
)  # where a launcher of ranks ends and our own line begins


def code_lines(page: Path, *languages: str) -> Iterator[str]:
    """Lines of fenced blocks in these languages, and of indented ones where "" is among them; `\\` joins two."""
    language, joined = None, ""
    for line in page.read_text().splitlines():
        if fence := FENCE.match(line):
            language = fence[1] if language is None else None
            continue
        if language not in languages and not (
            language is None and "" in languages and line.startswith("    ")
        ):
            continue
        if line.endswith("\\"):
            joined += line[:-1]
            continue
        yield (joined + line).strip()
        joined = ""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Of its first line, from 1."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


LOOP = re.compile(r"for (?P<name>\w+) in (?P<value>\S+).*?; do (?P<line>.*); done")


def blocks(language: str) -> list[Block]:
    """The fenced blocks of all pages in this language."""
    pattern = re.compile(rf"^( *)```{language}\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in pattern.finditer(text):
            line = text[: match.start()].count("\n") + 2
            found.append(Block(page, line, textwrap.dedent(match[2])))
    return found


def commands() -> Iterator[tuple[Path, str]]:
    """(page, line) of all that is to be typed into a shell, without prompts, comments and redirections.

    `for s in 1 2; do LINE; done` is LINE with the first value.
    """
    for page in PAGES:
        for line in code_lines(page, "bash", "console", ""):
            command = line.removeprefix("$ ")
            if loop := LOOP.fullmatch(command):
                command = loop["line"].replace(f"${loop['name']}", loop["value"])
            words = split(command)
            if words:
                yield page, shlex.join(words)


def examples_in(text: str) -> Iterator[str]:
    """The commands of a help text, without what stands behind as an explanation."""
    for line in text.splitlines():
        if line.strip().startswith("clip-train "):
            yield re.split(r" {3,}| > ", line.strip())[0]


def split(line: str) -> list[str]:
    """Words of a line, [optional ones] included; none where it is no command."""
    try:
        words = shlex.split(line.replace("[--", "--").replace("run]", "run"), comments=True)
    except ValueError:  # YAML, a path: whatever stands in an indented block
        return []
    return words[: words.index(">")] if ">" in words else words


def own_arguments(line: str) -> list[str] | None:
    """What `clip-train` gets of this line, straight or through a launcher of ranks; None where it is another's."""
    found = STARTS.search(line)
    first = re.sub(r"^(\w+=\S* )+", "", line).split(" ", 1)[0]  # behind VARIABLE=value
    if found is None or first not in (
        "clip-train",
        "torchrun",
        "deepspeed",
        "mpirun",
        "srun",
        "python",
    ):
        return None
    return shlex.split(line[found.end() :])


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found: dict[str, int] = {}
    fenced = False
    for line in page.read_text().splitlines():
        fenced ^= bool(FENCE.match(line))
        if fenced or not re.match(r"#{1,6} ", line):
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("# ")).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {
        slug if not i else f"{slug}-{i}" for slug, last in found.items() for i in range(last + 1)
    }
