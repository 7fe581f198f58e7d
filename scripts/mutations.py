"""Breaks the code on purpose, one fault of faults.txt at a time, and sees whether the tests notice.

    python scripts/mutations.py [-j 2] [--list] [--part 1/3] [WORDS ...]

WORDS: only faults whose name holds one. --part 1/3: every third fault, from the first on.

Each fault is planted in a temporary copy of the tree, and the smallest part of the tests that should turn red
is run there. The tests that failed are then run without any fault: red means nothing where green was not possible.
Exit status 1 if a fault goes unnoticed, 2 if one cannot be planted or its tests cannot be run.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = (
    60.0  # a fault may make a rank wait for ever; without it the slowest tests take 10 s
)
OURS = ("clip_train", "launcher", "clip_tools", "tests")


@dataclass(frozen=True)
class Mutation:
    """`old`, an expression or a statement, must stand exactly once in `function`: no fault quietly stops being planted.

    function: "name" or "Class.name"; "" is the whole module. new: "" where the statement is only removed.
    """

    fault: str
    module: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]  # pytest's node ids

    @property
    def file(self) -> str:
        return f"{self.module.replace('.', '/')}.py"

    def planted(self, source: str) -> str:
        """`source` of the module with the fault in it, all else as it was. LookupError: no place for it, or several."""
        tree = ast.parse(source)
        scopes = [node for name, node in definitions(tree) if name == self.function]
        if not scopes:
            names = [name for name, _ in definitions(tree)]
            raise LookupError(
                f"{self.fault!r}: {self.module} has no {self.function}{near(self.function, names)}"
            )
        (statement,) = ast.parse(self.old).body
        wanted = statement.value if isinstance(statement, ast.Expr) else statement
        kind = ast.expr if isinstance(wanted, ast.expr) else ast.stmt
        nodes = [node for scope in scopes for node in ast.walk(scope) if isinstance(node, kind)]
        found = [
            node
            for node in nodes
            if type(node) is type(wanted) and ast.dump(node) == ast.dump(wanted)
        ]
        if len(found) != 1:
            others = near(ast.unparse(wanted), [ast.unparse(node) for node in nodes])
            raise LookupError(
                f"{self.fault!r}: {self.module}:{self.function} holds {len(found)} times, not once: {self.old}{others}"
            )
        alone = kind is ast.stmt or any(
            isinstance(node, ast.Expr) and node.value is found[0] for node in ast.walk(tree)
        )
        return replace(source, found[0], self.new or "pass" if alone else f"({self.new})")


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The module itself as "", and (qualified name, node) of each function and class, however deep."""
    if not prefix:
        yield "", tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from (each for each in definitions(node, prefix) if each[0])


def near(wanted: str, texts: Sequence[str]) -> str:
    found = difflib.get_close_matches(wanted, {text for text in texts if text != wanted}, 3, 0.5)
    return "; nearest: " + " | ".join(found) if found else ""


def replace(source: str, node: ast.expr | ast.stmt, new: str) -> str:
    data = source.encode()  # columns are counted in bytes
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None and node.end_col_offset is not None
    begin, end = (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )
    text = new.replace("\n", "\n" + " " * node.col_offset)
    return (data[:begin] + text.encode() + data[end:]).decode()


def read_table(text: str) -> Iterator[Mutation]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    for i, end in zip(names, [*names[1:], len(lines)], strict=True):
        fields: dict[str, list[str]] = {"in": [], "-": [], "+": [], "by": []}
        for line in lines[i + 1 : end]:
            key, _, value = line.strip().partition(" ")
            fields[key].append(value)
        module, _, function = fields["in"][0].partition(":")
        old, new = ("\n".join(fields[sign]) for sign in "-+")
        yield Mutation(lines[i], module, function, old, new, tuple(fields["by"]))


MUTATIONS = tuple(read_table((ROOT / "scripts" / "faults.txt").read_text()))


def copy_of_the_tree(to: Path) -> Path:
    """What git tracks, as it lies there, and new files that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def start_server() -> None:
    """What pytest is forked from has imported all but our own code, which comes from the tree of the fault."""
    sys.path.append(str(ROOT))
    from tests import warm

    warm.start_server(
        ["pytest", *(name for name in warm.PRELOAD if name.split(".")[0] not in OURS)]
    )


def run_tests(
    tree: Path, tests: Iterable[str], *options: str, limit: float | None = None
) -> tuple[int, str, tuple[str, ...]]:
    """pytest's exit status (-1: it took too long), what it printed, and the ids of the tests that failed."""
    from tests import processes, warm

    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(tree.parent),
    }
    cache = tree.parent / f"{tree.name}.cache"
    shutil.rmtree(cache, ignore_errors=True)
    arguments = ["-o", f"cache_dir={cache}", "-m", "not full", "-rfE", *options, *tests]
    process = warm.Command(arguments, env=environment, cwd=tree, target=become_pytest)
    try:
        status, output = process.wait(limit), process.communicate()[0]
    except subprocess.TimeoutExpired:
        status, output = -1, f"still running after {limit:.0f} s"
    finally:
        processes.kill_tree(process)
    failed = cache / "v" / "cache" / "lastfailed"
    return status, output, tuple(json.loads(failed.read_text())) if failed.exists() else ()


def become_pytest() -> None:
    """In a new process, whose folder is the tree."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path != str(ROOT))]
    sys.modules["__main__"] = ModuleType("__main__")  # ranks would import this file in its place
    sys.dont_write_bytecode = True
    tempfile.tempdir = os.environ["TMPDIR"]  # what a killed test leaves goes with the tree
    import pytest

    from tests import warm

    warm.own_fork_server()  # ranks come from this process as it is now, too
    sys.exit(pytest.main(sys.argv[1:]))


def judge(status: int, output: str) -> tuple[str, str]:
    """("red", the test that caught it), ("green", ""), or ("error", why it tells nothing)."""
    if status == 0:
        return "green", ""
    if status == -1:  # a rank waits for ever
        return "red", output
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    if status == 1 and failed:
        return "red", failed[1]
    return "error", output.strip().rsplit("\n", 8)[-1] or f"pytest ended with status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only faults whose name holds one of these")
    parser.add_argument(
        "-j", "--jobs", type=int, default=2, help="copies of the tree tested at once"
    )
    parser.add_argument(
        "--part", type=part, default=slice(None), help="such as 2/3: the second of three parts"
    )
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.words or any(word in m.fault for word in args.words)]
    chosen = chosen[args.part]
    if args.list:
        print("\n".join(f"{m.fault}: {m.file}" for m in chosen))
        return 0

    return judge_all(chosen, args.jobs)


def part(text: str) -> slice:
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise ValueError(text)
    return slice(int(number) - 1, None, int(parts))


def judge_all(chosen: Sequence[Mutation], jobs: int) -> int:
    began = time.monotonic()
    verdicts = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        start_server()
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            trees.put(copy_of_the_tree(Path(folder, str(i))))

        def with_fault(mutation: Mutation) -> tuple[str, str, float, tuple[str, ...]]:
            tree, began = trees.get(), time.monotonic()
            path = tree / mutation.file
            whole = path.read_text()
            failed: tuple[str, ...] = ()
            try:
                path.write_text(mutation.planted(whole))
                status, output, failed = run_tests(tree, mutation.tests, "-x", limit=LIMIT_SECONDS)
                verdict, why = judge(status, output)
            except LookupError as e:
                verdict, why = "error", str(e)
            finally:
                path.write_text(whole)
                trees.put(tree)
            return verdict, why, time.monotonic() - began, failed or mutation.tests

        def without_a_fault(tests: Sequence[str]) -> tuple[int, str]:
            tree = trees.get()
            try:
                return run_tests(tree, tests)[:2]
            finally:
                trees.put(tree)

        try:
            width = max(len(m.fault) for m in chosen)
            noticed: dict[str, None] = {}
            for m, (colour, why, seconds, tests) in zip(
                chosen, pool.map(with_fault, chosen), strict=True
            ):
                print(f"{m.fault:{width}}  {colour:5}  {seconds:3.0f} s  {why}", flush=True)
                verdicts.append(colour)
                noticed.update(dict.fromkeys(tests))
            parts = [part for part in (list(noticed)[i::jobs] for i in range(jobs)) if part]
            for status, output in pool.map(without_a_fault, parts):
                if status != 0:
                    print(f"{output}\nthe tests are not green without a fault")
                    return 2
            print("the tests are green without a fault")
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(130)  # and with this process all the tests that it runs
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    red = verdicts.count("red")
    print(f"{red} of {len(chosen)} faults turn the tests red ({time.monotonic() - began:.0f} s)")
    return 2 if "error" in verdicts else 0 if red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
