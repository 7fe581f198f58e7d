"""What documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_tests_that_docs_name_exist():
    """`folder/file.py::test`, and `::test` of the file that was named last."""
    named = re.findall(r"`((?:\w+/)*\w+\.py)?(?:::(\w+))?`", (ROOT / "docs" / "tests.md").read_text())
    assert len(named) > 50
    text = ""
    for file, test in named:
        if file:
            place = next((folder / file for folder in (ROOT / "tests", ROOT) if (folder / file).is_file()), None)
            assert place is not None, file
            text = place.read_text()
        assert not test or f"def {test}(" in text, (file, test)


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
