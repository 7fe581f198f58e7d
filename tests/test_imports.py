"""What runs without a heavy dependency. The contracts of imports (pyproject.toml) are looked at by `make check`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("clip_train", "launcher", "clip_tools")


def test_clip_train_runs_without_deepspeed():
    code = "import sys; sys.modules['deepspeed'] = None; import clip_train.trainer, clip_train.engines.base"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_nothing_but_its_own_package_knows_an_engine():
    """What names DeepSpeed elsewhere tells a user what to write: `engine.kind`, and the keys that are its alone."""
    named = {}
    for file in [f for p in OURS for f in (ROOT / p).rglob("*.py")]:
        place = file.relative_to(ROOT).as_posix()
        lines = [
            line.strip() for line in file.read_text().splitlines() if "deepspeed" in line.lower()
        ]
        if lines and not place.startswith("clip_train/engines/deepspeed/"):
            named[place] = lines
    assert set(named) == {
        "clip_train/engines/__init__.py",  # the table of engines
        "clip_train/engines/config.py",
        "clip_train/engines/fsdp/__init__.py",
        "clip_train/engines/fsdp/engine.py",
        "clip_train/engines/plain/__init__.py",
        "clip_train/models/loading.py",  # a folder of its checkpoints is recognised, and refused
        "clip_train/versions.py",  # one module has the tested ranges of all packages
    }
    messages = (
        named["clip_train/engines/fsdp/__init__.py"] + named["clip_train/engines/fsdp/engine.py"]
    )
    messages += named["clip_train/engines/plain/__init__.py"]
    assert all("engine.kind=deepspeed" in line for line in messages)


# Private names that are not torch's or DeepSpeed's: of Python's library, fsspec, transformers and open_clip.
OTHERS = {
    "_actions", "_call_s3", "_config", "_current_frames", "_exit", "_fields", "_gradient_checkpointing_func", "_parent",
    "_pipe_file", "_replace",
}  # fmt: skip
# Torch's names that attributes of ours could have.
TORCH = {"_apply", "_buffers", "_modules", "_parameters", "_state", "_workers"}
DOORS = (
    "clip_train/torch_internals.py",
    "clip_train/engines/deepspeed/internals.py",
    "clip_train/storage/sftp_client.py",
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.AST, ours: set[str]) -> list[tuple[int, str]]:
    """Line and name of each private name of another package: imported, read from an object, or overridden."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in OURS:
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names for part in each.name.split(".")]
        elif isinstance(node, ast.Attribute) and node.attr not in OTHERS:
            of_self = ast.unparse(node.value) in ("self", "cls")
            if node.attr not in ours or (node.attr in TORCH and not of_self):
                names = [node.attr]
        elif isinstance(node, ast.FunctionDef) and node.name in TORCH:
            names = [node.name]
        found += [(node.lineno, name) for name in names if is_private(name)]
    return found


def test_private_names_of_torch_have_one_module():
    """And those of DeepSpeed and of paramiko: what a new version changes is found by the tests of these modules."""
    trees = {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text())
        for package in OURS
        for file in (ROOT / package).rglob("*.py")
    }
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ours = {node.name for node in nodes if isinstance(node, functions)}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                ours.add(node.id)
            elif ast.unparse(node.value) in ("self", "cls"):
                ours.add(node.attr)
    found = {place: private_names(tree, ours) for place, tree in trees.items()}
    assert all(found.pop(door) for door in DOORS)
    assert {place: names for place, names in found.items() if names} == {}


def test_the_checkpoint_writer_runs_without_torch():
    """It starts beside every run: torch would cost a second of that start, and 200 MiB on each node."""
    code = "import sys; sys.modules['torch'] = None; import clip_train.checkpoint.writer"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_recipe_is_read_without_torch():
    """`clip-train keys` and the mistakes of a recipe come at once, on a login node too."""
    code = "import sys; sys.modules['torch'] = None; import clip_train.recipe.recipe"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_help_of_the_command_imports_no_verb():
    code = (
        "import sys; from launcher.cli.main import build_parser; build_parser().format_help(); "
        "print(sorted({'torch', 'pydantic', 'clip_tools'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_the_help_of_each_verb_imports_no_torch():
    """Nor what else takes long; a mistake in the arguments is found by the same parser."""
    slow = "{'torch', 'numpy', 'PIL', 'rich', 'clip_train.recipe.recipe'}"
    code = (
        "import sys; from launcher.cli.main import VERBS, verb_parser; "
        f"print({{verb: sorted({slow} & set(sys.modules)) for verb in VERBS "
        "if verb_parser(verb).format_help()})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    imported = ast.literal_eval(done.stdout)
    assert len(imported) == 21 and not any(imported.values()), imported


def test_the_completion_script_is_made_without_torch():
    code = "import sys; sys.modules['torch'] = None; from launcher.cli.main import main; main(['completion', 'bash'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "complete -o default -F _clip_train clip-train" in done.stdout


def test_a_run_starts_without_what_only_some_runs_need():
    """Each takes a good part of a second of every start, on every rank."""
    heavy = (
        "torch.distributed.tensor",
        "deepspeed",
        "transformers",
        "open_clip",
        "torchao",
        "pyarrow",
        "torch.utils.tensorboard",
        "sklearn",
    )
    code = f"import sys, launcher.cli.main, launcher.train; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


BROUGHT_BY = {
    "pydantic_core": "pydantic",
    "open_clip": "open_clip_torch",
    "timm": "open_clip_torch",
    "triton": "torch",  # its builds for GPUs
    "aiohttp": "fsspec",  # its extra `http` is declared
}


def test_every_package_that_is_imported_is_declared():
    """Not come by with another one, which may leave it out some day."""
    declared = {
        re.split(r"[^\w.-]", line)[0].lower().replace("-", "_")
        for line in requires("clip-train") or ()
    }
    names = set()
    for file in [f for p in OURS for f in (ROOT / p).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
    others = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - set(OURS)
    known = packages_distributions()
    packages = {
        name: BROUGHT_BY.get(name, known.get(name, [name])[0]).lower().replace("-", "_")
        for name in others
    }
    assert {name for name, package in packages.items() if package not in declared} == set()
    assert len(packages) > 15
