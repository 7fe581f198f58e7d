"""`make versions`: the tests with each supported torch, DeepSpeed and Python; the results go into docs/versions.md.

The library (`contrastive_step` and its losses) has rows of its own, from its oldest torch on: its tests run away from
the checkout, with the wheel installed, and the seconds that its import takes are recorded.

One environment at a time in build/versions, which takes up to 6 GB and is removed after its run. pip's configuration
decides where the packages come from; a constraint of pip on torch keeps the newest one out.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from clip_train.versions import NEWEST, OLDEST, OLDEST_FOR_LIBRARY  # noqa: E402

PAGE = ROOT / "docs" / "versions.md"
FOLDER = ROOT / "build" / "versions"
USUAL = {"Python": "3.11", "torch": "2.13", "deepspeed": NEWEST["deepspeed"]}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MARKS = "not (full or acceptance or slurm or hosts or peer or browser)"
FULL, QUICK, LIBRARY = "`make test`", "`--quick`", "library"
QUICK_TESTS = (
    "tests/engine",
    "tests/launcher",
    *sorted(glob.glob("tests/test_*.py", root_dir=ROOT)),
)
LIBRARY_TORCH = (OLDEST_FOR_LIBRARY, "2.10", USUAL["torch"], NEWEST["torch"])
LIBRARY_TESTS = ("tests/losses", *sorted(glob.glob("tests/test_library*.py", root_dir=ROOT)))
# what these tests read, but for the packages
LIBRARY_FILES = ("tests", "docs", "examples", "pyproject.toml")
IMPORT = """
import time
start = time.perf_counter()
import clip_train
package = time.perf_counter() - start
import torch
start = time.perf_counter()
from clip_train import contrastive_step
print(package, time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Row:
    """One line of the table: what ran with what, and what came of it."""

    python: str
    torch: str
    deepspeed: str
    tests: str
    result: str
    date: str

    def line(self) -> str:
        return f"| {' | '.join(vars(self).values())} |"

    def replaces(self, line: str) -> bool:
        return line.startswith(
            f"| {self.python} | {self.torch} | {self.deepspeed} | {self.tests} |"
        )


def environments() -> Iterator[dict[str, str]]:
    """Each version of one thing with the usual versions of the others, without repetition."""
    seen = []
    choices = {
        "torch": (NEWEST["torch"], OLDEST["torch"], USUAL["torch"]),
        "deepspeed": (OLDEST["deepspeed"], NEWEST["deepspeed"]),
        "Python": PYTHONS,
    }
    for name, versions in choices.items():
        for version in versions:
            environment = USUAL | {name: version}
            if environment not in seen:
                seen.append(environment)
                yield environment


def chosen(environments: Iterable[dict[str, str]], only: list[str]) -> list[dict[str, str]]:
    """Those with all of these versions, as "torch=2.15"."""
    return [
        environment
        for environment in environments
        if {f"{name}={version}" for name, version in environment.items()}.issuperset(only)
    ]


def find_python(version: str) -> str | None:
    """An interpreter on PATH, or one that pyenv has installed."""
    pyenv = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))
    return next(iter(pyenv), None) or shutil.which(f"python{version}")


def install(environment: dict[str, str], interpreter: str, wheel: bool = False) -> Path:
    """A new environment with this checkout, or with its wheel; returns its Python."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", FOLDER], check=True)
    python = FOLDER / "bin" / "python"
    packages = [f"{name}=={environment[name]}.*" for name in ("torch", "deepspeed")]
    pip = [python, "-m", "pip", "--quiet"]
    ours = ["-e", f"{ROOT}[test]"]
    if wheel:
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", FOLDER, ROOT], check=True)
        [file] = FOLDER.glob("clip_train-*.whl")
        ours = [f"{file}[test]"]
    subprocess.run([*pip, "install", *packages, *ours], check=True)
    return python


def exact_versions(python: Path) -> tuple[str, str, str]:
    """Of Python, torch and DeepSpeed."""
    code = (
        "import platform; from importlib.metadata import version as v;"
        "print(platform.python_version(), v('torch'), v('deepspeed'))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.split()
    return first, second, third


def run_tests(python: Path, selection: tuple[str, ...], workers: int, folder: Path = ROOT) -> str:
    """Run them, and return the counts."""
    report = FOLDER / "report.xml"
    line = [python, "-m", "pytest", "-n", str(workers), "-m", MARKS, f"--junitxml={report}"]
    subprocess.run([*line, *selection], cwd=folder, check=False)
    return read_counts(report) if report.exists() else "pytest ended without a report"


def run_library_tests(python: Path, workers: int) -> str:
    """The counts, and the seconds of the imports, with the packages that are installed."""
    folder = FOLDER / "alone"
    folder.mkdir()
    for name in LIBRARY_FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        else:
            shutil.copy(ROOT / name, folder)
    counts = run_tests(python, LIBRARY_TESTS, workers, folder)
    line = [python, "-c", IMPORT]
    lines = [subprocess.check_output(line, cwd=folder, text=True).split() for _ in range(3)]
    package, step = (min(map(float, seconds)) for seconds in zip(*lines, strict=True))
    return (
        f"{counts}; `import clip_train` {package:.3f} s, "
        f"`contrastive_step` {step:.2f} s after torch"
    )


def read_counts(report: Path) -> str:
    suite = ElementTree.parse(report).getroot()[0]
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    return f"{passed} passed, {failed} failed, {count['skipped']} skipped"


def record(row: Row) -> None:
    """Put the row into the table, in place of an earlier one for the same versions and tests."""
    lines = PAGE.read_text().splitlines()
    old = [number for number, line in enumerate(lines) if row.replaces(line)]
    end = max(number for number, line in enumerate(lines) if line.startswith("|")) + 1
    lines[old[0] if old else end : old[0] + 1 if old else end] = [row.line()]
    PAGE.write_text("\n".join(lines) + "\n")
    print(row.line(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tests/engine, launcher, test_*.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME=VERSION", help="torch=2.15")
    parser.add_argument("--library", action="store_true", help="only the library's rows")
    args = parser.parse_args()
    for environment in chosen((USUAL | {"torch": torch} for torch in LIBRARY_TORCH), args.only):
        run_row(environment, LIBRARY, args.workers)
    if not args.library:
        for environment in chosen(environments(), args.only):
            run_row(environment, QUICK if args.quick else FULL, args.workers)


def run_row(environment: dict[str, str], tests: str, workers: int) -> None:
    """Install this environment, run these tests in it and record the result."""
    today = datetime.date.today().isoformat()
    versions = tuple(environment.values())
    interpreter = find_python(environment["Python"])
    if interpreter is None:
        result = "not run: no such Python on this machine"
        record(Row(*versions, tests, result, today))
        return
    try:
        python = install(environment, interpreter, wheel=tests == LIBRARY)
        versions = exact_versions(python)
        if tests == LIBRARY:
            result = run_library_tests(python, workers)
        else:
            result = run_tests(python, QUICK_TESTS if tests == QUICK else (), workers)
    except subprocess.CalledProcessError as e:
        result = f"not run: installation ended with status {e.returncode}"
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    record(Row(*versions, tests, result, today))


if __name__ == "__main__":
    main()
