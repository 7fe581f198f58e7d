"""The faults of scripts/mutations.py can still be planted, by syntax, and the tests that they name exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _script():
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutations = _script()


def test_every_fault_has_its_place():
    lost = []
    for mutation in mutations.MUTATIONS:
        try:
            compile(mutation.planted((ROOT / mutation.file).read_text()), mutation.file, "exec")
        except (OSError, LookupError, SyntaxError) as e:
            lost.append(f"{mutation.fault}: {e}")
    assert not lost, "\n".join(lost)


@functools.cache
def names_in(file: str) -> set[str]:
    """Of its functions; "" is the file itself, where there is one."""
    path = ROOT / file
    return (
        {name for name, _ in mutations.definitions(ast.parse(path.read_text()))}
        if path.exists()
        else set()
    )


def test_the_tests_that_should_notice_exist():
    lost = [mutation.fault for mutation in mutations.MUTATIONS if not mutation.tests]
    for mutation in mutations.MUTATIONS:
        parts = [test.partition("::") for test in mutation.tests]
        lost += [
            f"{mutation.fault}: {file} {name}"
            for file, _, name in parts
            if name not in names_in(file)
        ]
    assert not lost, "\n".join(lost)


SOURCE = '''\
"""Größen: columns are counted in bytes."""
LIMIT = 5  # of tries

class Box:
    def put(self, x):
        self.names = "ü"; self.x = (self.scale
                                    * x)  # the product
        if self.x > LIMIT:
            self.close()
        return self.x - (self.x - self.y)

def close(self):
    self.close()
'''


@pytest.mark.parametrize(
    "function, old, new, before, after",
    [
        ("Box.put", "self.scale * x", "x + 1", "(self.scale\n" + 36 * " " + "* x)", "((x + 1))"),  # of two lines
        ("Box.put", "self.x - self.y", "x - 1", "(self.x - self.y)", "((x - 1))"),
        ("Box.put", "self.close()", "", "    self.close()\n        return", "    pass\n        return"),
        ("Box.put", "return self.x - (self.x - self.y)", "a = 1\nreturn a", "return self.x - (self.x - self.y)",
         "a = 1\n        return a"),
        ("close", "self.close()", "self.open()", ":\n    self.close()\n", ":\n    self.open()\n"),
        ("", "LIMIT = 5", "LIMIT = 6", "LIMIT = 5  #", "LIMIT = 6  #"),
    ],
)  # fmt: skip
def test_a_fault_replaces_its_place_and_nothing_else(function, old, new, before, after):
    assert SOURCE.count(before) == 1
    planted = mutations.Mutation("fault", "box", function, old, new, ()).planted(SOURCE)
    assert planted == SOURCE.replace(before, after)


@pytest.mark.parametrize(
    "function, old, message",
    [
        ("Box.get", "x", r"box has no Box\.get; nearest: Box\.put"),
        (
            "Box.put",
            "self.scale * y",
            r"holds 0 times, not once: self\.scale \* y; nearest: self\.scale \* x",
        ),
        ("Box.put", "self.x", "holds 3 times"),
        ("", "self.close()", "holds 2 times"),
    ],
)
def test_a_missing_or_ambiguous_place_names_the_nearest(function, old, message):
    with pytest.raises(LookupError, match=message):
        mutations.Mutation("fault", "box", function, old, "", ()).planted(SOURCE)


@pytest.mark.parametrize(
    "status, output, verdict",
    [
        (0, "3 passed", "green"),
        (1, "FAILED tests/test_a.py::test_b[1] - assert", "red"),
        (-1, "still running", "red"),
        (2, "ERROR tests/test_a.py - ImportError", "error"),
        (4, "ERROR: not found: tests/test_a.py::test_b", "error"),
        (5, "no tests ran", "error"),
    ],
)
def test_only_a_failed_test_is_red(status, output, verdict):
    assert mutations.judge(status, output)[0] == verdict
