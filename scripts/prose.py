"""A linter of English: how often README, docs, docstrings, comments and messages break a rule.

    python scripts/prose.py               the counts
    python scripts/prose.py --show RULE   every place that breaks a rule

Advice, not a gate: a sentence may break a rule for a reason.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("clip_train", "launcher", "clip_tools")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
README_WORDS, WORDS = 25, 35  # of a sentence
NO_PROSE = ("#", "|", "![", "<")  # how headings, tables, pictures and HTML begin

RULES = {  # name -> what must not be in a sentence
    "is no X (is not an X)": r"\b(is|are|was|were|be) no (?!longer|more|less|fewer|better|worse)\w",
    "a preposition before what": r"\b(of|in|to|from|by|for|with|on|at|beside|behind) what\b",
    "that which, what is X": r"\bthat which\b|^what (is|are|can|cannot|has|comes)\b",
    "begins with Of": r"(?-i:^Of)\b",
    "goes on (continues)": r"\b(go|goes|went|going|gone) on\b",
    "comes to, has gone, lies in, stands in": (
        r"\b(comes to|ha(s|ve) gone|lies? (in|on|beside|at)|stands? (in|on|beside|at|behind))\b"
    ),
    "shared out (sharded)": r"\bshared? out\b|\bshares out\b|\bgiven back\b",
    "is said, is told": r"\b(is|are|was|were|be|been) (said|told)\b",
    "is to do (must)": r"\b(is|are) to (be|have|do|go|come|stay|hold|take|see)\b",
    "but for except": r"\b(all|none|nothing|no other|any|every|each)( \w+)? but\b",
}
PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in RULES.items()}
LONG, README_LONG = f"over {WORDS} words", f"README: over {README_WORDS} words"


class Sentence(NamedTuple):
    place: str  # file:line
    text: str


def sentences(place: str, text: str) -> Iterator[Sentence]:
    """The sentences of one paragraph; code and addresses count as one word each."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)  # a link is its text
    text = re.sub(r"`[^`]*`", "`x`", " ".join(text.split()))
    for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\"'({\[]|clip-train|torchrun)", text):
        if re.search(r"[a-z]{2}", sentence):
            yield Sentence(place, sentence.strip(" *-|"))


def pieces(text: str) -> Iterator[str]:
    """Paragraphs; entries of Args and rows of a table (two spaces apart) are pieces of their own."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        yield from re.split(r"\n(?=\s*\S[^\n]*\S {2,}\S| {4,}[\w*][\w, *]*: )", paragraph)


def of_page(file: Path) -> Iterator[Sentence]:
    """Paragraphs and items of lists; without code, tables, headings and pictures."""
    place, text = file.relative_to(ROOT).as_posix(), file.read_text()
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m.group().count("\n"), text, flags=re.M | re.S)
    paragraph: list[str] = []
    begin = 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        item = re.match(r"\s*([-*]|\d+\.) ", line)
        if not line.strip() or item or line.lstrip().startswith(NO_PROSE):
            yield from sentences(f"{place}:{begin}", " ".join(paragraph))
            paragraph, begin = [], number
        if line.strip() and " · " not in line and not line.lstrip().startswith(NO_PROSE):
            paragraph.append(line[item.end() :] if item else line)


def of_module(file: Path) -> Iterator[Sentence]:
    """Docstrings, messages (strings of three words or more) and comments."""
    place, source = file.relative_to(ROOT).as_posix(), file.read_text()
    tree = ast.parse(source)
    inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        parts = [node] if isinstance(node, ast.Constant) else getattr(node, "values", [])
        if isinstance(node, ast.Constant | ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts
            )
            if len(text.split()) > 2 and "$(" not in text:  # a shell script
                for piece in pieces(text):
                    yield from sentences(f"{place}:{node.lineno}", piece)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type")):
            yield from sentences(f"{place}:{token.start[0]}", token.string.lstrip("# "))


def found() -> dict[str, list[Sentence]]:
    """Rule -> the sentences that break it."""
    broken: dict[str, list[Sentence]] = {name: [] for name in (*RULES, LONG, README_LONG)}
    pages = [file for pattern in PAGES for file in sorted(ROOT.glob(pattern))]
    modules = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    for sentence in [
        *(s for file in pages for s in of_page(file)),
        *(s for file in modules for s in of_module(file)),
    ]:
        words = len(sentence.text.split())
        if words > WORDS:
            broken[LONG].append(sentence)
        if words > README_WORDS and sentence.place.startswith("README"):
            broken[README_LONG].append(sentence)
        for name, pattern in PATTERNS.items():
            if pattern.search(sentence.text):
                broken[name].append(sentence)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", metavar="RULE", help="a part of a rule's name")
    options = parser.parse_args()
    for name, places in found().items():
        print(f"{name}: {len(places)}")
        if options.show and options.show in name:
            for place, text in places:
                print(f"    {place}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
