"""The faults of scripts/mutations.py can still be planted: what they break has not moved away."""

from __future__ import annotations

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


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.fault)
def test_a_fault_can_be_planted(mutation, tmp_path):
    (tmp_path / mutation.file).parent.mkdir(parents=True)
    (tmp_path / mutation.file).write_text((ROOT / mutation.file).read_text())
    mutation.plant(tmp_path)
    compile((tmp_path / mutation.file).read_text(), mutation.file, "exec")


def test_the_tests_that_should_notice_exist(monkeypatch):
    monkeypatch.setattr(mutations, "LIMIT_SECONDS", 1200)  # nothing is broken here
    selections = sorted({test for m in mutations.MUTATIONS for test in m.tests})
    status, output = mutations.run_tests(ROOT, tuple(selections), "--collect-only")
    assert status == 0, output


def test_a_text_that_is_gone_is_told(tmp_path):
    gone = mutations.Mutation("gone", "a.py", "no such text", "", ())
    (tmp_path / "a.py").write_text("something else\n")
    with pytest.raises(LookupError, match="0 times"):
        gone.plant(tmp_path)


@pytest.mark.parametrize(
    "status, output, verdict",
    [
        (0, "3 passed", "green"),
        (1, "FAILED tests/test_a.py::test_b[1] - assert", "red"),
        (-1, "", "red"),
        (2, "ERROR tests/test_a.py - ImportError", "error"),
        (4, "ERROR: not found: tests/test_a.py::test_b", "error"),
        (5, "no tests ran", "error"),
    ],
)
def test_only_a_failed_test_is_red(status, output, verdict):
    assert mutations.judge(status, output)[0] == verdict
