"""How large the code is, and how it is built: lines, files in a folder, circles of imports, words.

    python scripts/structure.py            the figures; exit status 1 where one is over its limit

Limits only go down. Words: a reader of this field must not have to translate (docs/architecture.md); each entry of
`EXCEPTIONS` says where one is meant in its ordinary sense.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp  # of import-linter

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("clip_train", "launcher")
LINES, FILES, MODULE = 23_900, 14, 350

WORDS = (
    "lifeline", "liveness", "meeting", "house", "rooms", "seam", "told", "last words", "hand over", "overtaken",
    "put off", "bring", "beginning", "strays", "survey", "saver", "dealing", "taught", "marks", "lane", "lanes",
    "bad sample", "bad samples",
)  # fmt: skip
EXCEPTIONS = {
    r"^    lanes: |resolve_streams\(lanes|lanes != \"auto\"|return lanes$": "the key data.lanes",
    r"\"lanes\":|plan\['lanes'\]": "its name in `clip-train plan`",
}
"""A regular expression for the whole match with what stands around it -> why it is meant so."""


def sources() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def circle() -> list[str]:
    """The modules of one circle of imports; empty: there is none."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
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
    files = sources()
    lines = sum(map(num_lines, files))
    folder, most = Counter(file.parent for file in files).most_common(1)[0]
    longest = max(files, key=num_lines)
    ring, words = circle(), list(private_words())
    print(f"lines of {' and '.join(PACKAGES)}: {lines:,} (at most {LINES:,})")
    print(f"files in a folder: {most} in {folder.relative_to(ROOT)} (at most {FILES})")
    print(f"longest module: {num_lines(longest)} lines, {longest.relative_to(ROOT)} (at most {MODULE})")
    print(f"circle of imports: {' -> '.join(ring) or 'none'}")
    print(f"private words: {len(words)}", *words[:20], sep="\n  ")
    return int(lines > LINES or most > FILES or num_lines(longest) > MODULE or bool(ring) or bool(words))


if __name__ == "__main__":
    sys.exit(main())
