"""What documents name is there: tests, links, anchors, messages, keys, commands."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import tomllib

import clip_train
from clip_train.evaluate.config import SetConfig
from clip_train.recipe.recipe import known_keys, parse_value
from launcher.cli.main import VERBS, main, parse, verb_parser
from tests.documents import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    code_lines,
    commands,
    examples_in,
    own_arguments,
)

KEYS = {key for key, _ in known_keys()}
ENDINGS = ("py", "yaml", "jsonl", "html", "json", "md", "png", "safetensors")
CODE = ("engine.step", "engine.build_engine")  # no keys
SECTIONS = "|".join(sorted({key.split(".")[0] for key in KEYS}))


@pytest.mark.parametrize("page, at_least", [("tests.md", 50), ("gradcache_bugs.md", 30)])
def test_the_tests_that_docs_name_exist(page, at_least):
    """`folder/file.py::test`, and `::test` of the file that was named last."""
    named = re.findall(r"`((?:\w+/)*\w+\.py)?(?:::(\w+))?`", (ROOT / "docs" / page).read_text())
    assert len(named) > at_least
    text = ""
    for file, test in named:
        if file:
            place = next(
                (folder / file for folder in (ROOT / "tests", ROOT) if (folder / file).is_file()),
                None,
            )
            assert place is not None, file
            text = place.read_text()
        assert not test or f"def {test}(" in text, (file, test)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        place = page.parent / target if target else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(place), f"{page.name}: {target}#{anchor}"


def test_pages_that_code_names_exist():
    """`docs/PAGE.md` and `docs/PAGE.md#ANCHOR` in messages, docstrings and comments."""
    folders = ("clip_train", "launcher", "clip_tools", "benchmarks", "examples", "scripts", "slurm")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    named = {
        found
        for file in [*files, ROOT / "Makefile"]
        if file.suffix in (".py", ".sbatch", ".sh", ".yaml", "")
        for found in re.findall(r"docs/([a-z0-9_]+\.md)(?:#([\w-]+))?", file.read_text())
    }
    assert len(named) > 10
    for name, anchor in named:
        page = ROOT / "docs" / name
        assert page.is_file(), name
        assert not anchor or anchor in anchors(page), f"{name}#{anchor}"


def test_the_first_patch_of_contributing_passes(monkeypatch):
    """Its file and its tests, as they are printed."""
    program, tests = [each.text for each in blocks("python") if each.page.name == "CONTRIBUTING.md"]
    module = ModuleType("examples.solarize")
    exec(program, module.__dict__)
    monkeypatch.setitem(sys.modules, "examples.solarize", module)
    found: dict[str, Any] = {}
    exec(tests, found)
    names = [name for name in found if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        found[name]()


def test_the_page_of_promises_has_the_packages_names():
    page = (ROOT / "docs" / "api.md").read_text()
    table = page.partition("## Names of `clip_train`")[2].partition(":::")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(clip_train.__all__)


def test_the_page_of_results_is_current():
    from scripts import results

    assert results.PAGE.read_text() == results.page(), "run: python scripts/results.py"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def templates() -> Iterator[str]:
    """Every text in the code, `\\0` where a value stands."""
    for file in [
        f for p in ("clip_train", "launcher", "clip_tools") for f in (ROOT / p).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_the_troubleshooting_page_exist():
    """Between `…`, word for word, and in one text of the code."""
    quoted = re.findall(
        r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(quoted) > 30
    texts = list(templates())
    for message in quoted:
        parts = [part.strip() for part in message.split("…") if part.strip()]
        assert sum(map(len, parts)) >= 12, f"too little of a message to find it by: {message}"
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in texts if parts[0] in text), (
            f"no such message: {message}"
        )


def test_the_page_of_keys_is_current(capsys):
    assert main(["keys", "--markdown"]) == 0
    page = ROOT / "docs" / "recipe.md"
    assert page.read_text() == capsys.readouterr().out, (
        "run: clip-train keys --markdown > docs/recipe.md"
    )
    assert all(f"`{key}`" in page.read_text() for key in KEYS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_in_prose_exist(page):
    """`section.key`, `section.key=value` and `section.key: value`."""
    for key in re.findall(rf"`((?:{SECTIONS})\.[a-z_]+)(?=[`=:. ])", page.read_text()):
        assert key in KEYS or key.split(".")[1] in ENDINGS or key in CODE, f"{page.name}: {key}"


COMMANDS = sorted(
    {(page.name, line) for page, line in commands() if own_arguments(line) is not None}
)


@pytest.mark.parametrize("page, line", COMMANDS)
def test_commands_in_pages_parse(page, line, capsys):
    arguments = own_arguments(line)
    if page == "troubleshooting.md":  # mistakes, which tests/launcher/test_twelve_mistakes.py types
        parse(arguments)
    else:
        check_line(arguments)


def check_line(arguments: list[str]) -> None:
    """By the real parser; overrides by name, and their values as YAML."""
    args = parse(arguments)
    for override in getattr(args, "overrides", []):
        key, _, value = override.partition("=")
        of_a_set = re.fullmatch(r"evaluate\.sets\.[\w-]+\.(\w+)", key)
        if of_a_set is not None:
            assert of_a_set[1] in SetConfig.model_fields, key
        else:
            assert key in KEYS, key
        parse_value(value, key)


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_lines_that_parse(verb, capsys):
    with pytest.raises(SystemExit) as e:
        parse([verb, "--help"])
    assert e.value.code == 0
    _, found, examples = capsys.readouterr().out.partition("examples:\n")
    lines = list(examples_in(examples))
    assert found and lines, "no example"
    for line in lines:
        arguments = own_arguments(line)
        assert arguments is not None and arguments[0] == verb
        check_line(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_options_in_prose_exist(page):
    for verb, rest in re.findall(r"`clip-train ([a-z][\w-]*)([^`]*)`", page.read_text()):
        assert verb in VERBS, f"{page.name}: clip-train {verb}"
        options = ["--help", *re.findall(r"--[a-z-]+", verb_parser(verb).format_usage())]
        for option in re.findall(r"(?<= )--[a-z-]+", re.sub(r"\"[^\"]*\"", "", rest)):
            assert option in options, f"{page.name}: clip-train {verb} {option}"


# Beginnings of lines that are typed into a shell and that `clip-train` does not read -> why no test runs them.
OTHERS = {
    "make ": "the project's own targets, which CI runs; they exist, see below",
    ". .venv/bin/activate": "after `make demo`",
    "sbatch ": "needs Slurm: tests/slurm",
    "tensorboard ": "a server",
    "pip install ": "downloads; the extras exist, see below",
    "python3 -m venv img2dataset-env": "downloads",
    "img2dataset-env/bin/": "downloads: examples/img2dataset.py has the same options",
    "python -m scripts.attack": "an hour: tests/test_attacked.py",
    "python -m tests.pretended.trace": "tests/pretended/test_gpu.py",
    "python benchmarks/gpu.py": "needs a GPU; --dry-run: tests/pretended/test_script.py",
    "scripts/gpu_wheels.sh": "downloads; --dry-run: tests/pretended/test_script.py",
    "CLIP_TRAIN_TEST_DEVICE=cuda": "needs a GPU",
    "docker ": "needs Docker: container/Dockerfile was built by hand, docs/containers.md says how",
    "apptainer ": "needs Apptainer: container/clip-train.def was built by hand",
    "kubectl ": "needs Kubernetes: tests/launcher/test_kubernetes.py",
    "export PDSH_SSH_ARGS_APPEND=": "needs two hosts: tests/hosts",
    "printf ": "needs two hosts: tests/hosts",
    "(head -n 1 captions.csv; ": "test_the_line_that_shuffles_a_table",
}
SCRIPTS = (
    "# rank.sh",
)  # first lines of blocks that are a whole file; the script of LSF: tests/launcher/test_env.py


def test_every_line_of_a_shell_block_has_a_test_or_a_reason():
    unused = set(OTHERS)
    for block in blocks("bash"):
        if block.text.startswith(SCRIPTS):
            continue
        for line in block.text.replace("\\\n", "").splitlines():
            if not line.split("#")[0].strip():
                continue
            reasons = {start for start in OTHERS if line.startswith(start)}
            unused -= reasons
            ours = "clip-train " in line or own_arguments(line) is not None
            assert reasons or ours, f"{block}: {line}"
    assert not unused


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_a_shell_reads_the_block(block):
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_line_that_shuffles_a_table(tmp_path):
    line = next(b.text for b in blocks("bash") if b.text.startswith("(head -n 1 captions.csv"))
    rows = [f"{i}.jpg,picture {i}" for i in range(50)]
    (tmp_path / "captions.csv").write_text("\n".join(["filepath,title", *rows]) + "\n")
    subprocess.run(["bash", "-ec", line], cwd=tmp_path, check=True)
    first, *shuffled = (tmp_path / "shuffled.csv").read_text().splitlines()
    assert first == "filepath,title" and shuffled != rows and sorted(shuffled) == sorted(rows)


def test_extras_that_pages_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {
        name
        for page in PAGES
        for group in re.findall(r"pip install '?\"?clip-train\[([\w,-]+)\]", page.read_text())
        for name in group.split(",")
    }
    assert named and named <= extras.keys()


def test_other_commands_name_what_exists():
    """Targets of the Makefile, programs and modules of this repository."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for page in PAGES for line in code_lines(page, "bash", "") if line]
    words = [line.split("#")[0].split()[1:] for line in lines if line.startswith("make ")]
    made = {word for each in words for word in each if "=" not in word}
    assert made and made <= targets, made - targets
    for line in lines:
        for program in re.findall(r"(?:^|\s)((?:benchmarks|scripts|examples|slurm)/[\w.]+)", line):
            assert (ROOT / program).is_file(), f"{line}: {program}"
