"""How large the code is and how it is built: statements, functions, folders, imports, words.

    python scripts/structure.py            the figures; exit status 1 where one is over its limit

Statements and functions are counted, not lines: a limit on lines packs two statements into one.
Limits only go down, except where a feature that comes in is larger than what leaves. Words: a
reader of this field must not have to translate (docs/architecture.md). Each entry of `EXCEPTIONS`
says where a word is meant in its ordinary sense.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp  # of import-linter

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("clip_train", "launcher", "clip_tools")
LIMITS = {
    "statements": 16_563,
    "functions": 1_365,
    "walruses": 0,
    "lambdas": 43,
    "statements in a module": 330,
    "lines over 100 characters": 0,
    "modules in a folder": 13,
}

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


def count(file: Path) -> Counter[str]:
    """The statements, functions, walruses and lambdas of one file."""
    text = file.read_text()
    counts = Counter({"lines over 100 characters": sum(len(x) > 100 for x in text.splitlines())})
    for node in ast.walk(ast.parse(text)):
        counts["statements"] += isinstance(node, ast.stmt)
        counts["functions"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        counts["walruses"] += isinstance(node, ast.NamedExpr)
        counts["lambdas"] += isinstance(node, ast.Lambda)
    return counts


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
    counts = {file: count(file) for file in files}
    measured = sum(counts.values(), Counter())
    longest = max(files, key=lambda file: counts[file]["statements"])
    measured["statements in a module"] = counts[longest]["statements"]
    modules = [file for file in files if file.name != "__init__.py"]
    folder, most = Counter(file.parent for file in modules).most_common(1)[0]
    measured["modules in a folder"] = most
    for name, limit in LIMITS.items():
        print(f"{name}: {measured[name]:,} (at most {limit:,})")
    print(
        f"longest module: {longest.relative_to(ROOT)}; fullest folder: {folder.relative_to(ROOT)}"
    )
    ring, words = circle(), list(private_words())
    print(f"circle of imports: {' -> '.join(ring) or 'none'}")
    print(f"private words: {len(words)}", *words[:20], sep="\n  ")
    too_many = any(measured[name] > limit for name, limit in LIMITS.items())
    return int(too_many or bool(ring) or bool(words))


if __name__ == "__main__":
    sys.exit(main())
