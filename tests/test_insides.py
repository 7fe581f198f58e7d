"""Tests speak through public interfaces: each place that reaches inside has its reason here."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent
OURS = ("clip_train", "launcher", "clip_tools")

# "file: name" -> why no public interface will do.
PRIVATE: dict[str, str] = {
    "engine/test_linear.py: _int_mm": "torch's product of integers, which this processor may saturate",
    "launcher/faults/sitecustomize.py: _next_batch": "a rank that stands still at a chosen step, in the real command",
    "launcher/faults/sitecustomize.py: _record": "a rank that raises or sleeps at a chosen step, in the real command",
    "launcher/faults/sitecustomize.py: _save": "a save that hangs or takes long, in the real command",
    "pretended/gpu.py: _scaled_dot_product_efficient_attention": "torch's kernel, which its chooser takes on a GPU",
    "pretended/gpu.py: _scaled_dot_product_flash_attention": "the same, for half precision without a mask",
}

# "file: what is replaced" -> the boundary (network, disk, clock, allocator) at which it injects a fault.
PATCHES: dict[str, str] = {
    "launcher/test_log_lines.py: launcher.runtime.outcome.CONNECT_SECONDS": "rank 0 never starts",
    "test_library_inputs.py: clip_train.step.rng_state": "no device but the CPU has random numbers",
}


def uses(file: Path) -> tuple[Counter[str], Counter[str]]:
    """(private names of ours that it takes, names of ours that it replaces), with how often."""
    tree = ast.parse(file.read_text())
    where = file.relative_to(TESTS).as_posix()
    ours = imported(tree)
    private, patches = Counter[str](), Counter[str]()
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | assigned(
        tree
    )
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and not (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys")
            )
        ):
            if node.attr not in own:
                private[f"{where}: {node.attr}"] += 1
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            private.update(
                f"{where}: {alias.name}" for alias in node.names if is_private(alias.name)
            )
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "setattr"
        ):
            target = ast.unparse(node.args[0]).strip("'\"")
            if target.split(".")[0] in ours | set(OURS):
                name = (
                    "" if len(node.args) < 3 else f".{ast.unparse(node.args[1])}".replace("'", "")
                )
                patches[f"{where}: {target}{name}"] += 1
    return private, patches


def imported(tree: ast.Module) -> set[str]:
    """Names that stand for something of ours."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.asname
                for alias in node.names
                if alias.asname and alias.name.split(".")[0] in OURS
            }
    return found


def assigned(tree: ast.Module) -> set[str]:
    """Attributes that classes of the test itself set."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def is_private(name: str) -> bool:
    """`_forkserver` and its like are multiprocessing's."""
    return (
        not name.startswith("_forkserver")
        and name.startswith("_")
        and not (name.startswith("__") and name.endswith("__"))
    )


def test_tests_do_not_know_the_insides():
    private, patches = Counter[str](), Counter[str]()
    for file in TESTS.rglob("*.py"):
        for total, more in zip((private, patches), uses(file), strict=True):
            total.update(more)
    assert {name: n for name, n in private.items() if name not in PRIVATE} == {}
    assert {name: n for name, n in patches.items() if name not in PATCHES} == {}
    assert set(PRIVATE) | set(PATCHES) == set(private) | set(patches), "reasons for what is gone"


if __name__ == "__main__":
    for file in sorted(TESTS.rglob("*.py")):
        for kind, counted in zip(("private", "patch"), uses(file), strict=True):
            for name, n in counted.items():
                print(kind, n, name)
