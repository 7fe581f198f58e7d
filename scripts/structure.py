"""Circles of imports, and private words.

    python scripts/structure.py            exit status 1 if there is a circle or a private word

A reader of this field must not have to translate (docs/architecture.md). Each entry of
`EXCEPTIONS` says where a word is meant in its ordinary sense.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp  # of import-linter

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("clip_train", "launcher", "clip_tools")

WORDS = (
    "lifeline", "liveness", "meeting", "house", "rooms", "seam", "told", "last words", "hand over", "overtaken",
    "put off", "bring", "beginning", "strays", "survey", "saver", "dealing", "taught", "marks", "lane", "lanes",
    "bad sample", "bad samples",
)  # fmt: skip
EXCEPTIONS = {
    r"^    lanes: |resolve_streams\(lanes|lanes != \"auto\"|return lanes$|data\.lanes|lanes=streams|`lanes: auto`": (
        "the key data.lanes"
    ),
    r"\"lanes\":|plan\['lanes'\]": "its name in `clip-train plan`",
}
"""A regular expression for the whole match with what stands around it -> why it is meant so."""


def sources() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def circle() -> list[str]:
    """The modules of one circle of imports; empty: there is none."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


def private_words() -> Iterator[str]:
    """`file:line: word` for each that is no exception."""
    pattern = re.compile(rf"(?<![\w.\[]){'(' + '|'.join(WORDS) + ')'}(?![\w])", re.IGNORECASE)
    texts = [*sources(), ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for file in texts:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            for match in pattern.finditer(line):
                if not any(re.search(exception, line) for exception in EXCEPTIONS):
                    yield f"{file.relative_to(ROOT)}:{number}: {match[0]}"


def main() -> int:
    ring, words = circle(), list(private_words())
    print(f"circle of imports: {' -> '.join(ring) or 'none'}")
    print(f"private words: {len(words)}", *words[:20], sep="\n  ")
    return int(bool(ring) or bool(words))


if __name__ == "__main__":
    sys.exit(main())
