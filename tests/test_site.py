"""The documentation as a site: it builds without a warning, and no page asks another host for anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests import site as documentation
from tests.documents import ROOT

pytestmark = pytest.mark.full
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
    "use": "href",
    "object": "data",
}


class Loaded(HTMLParser):
    """What a browser fetches of a page by itself."""

    def __init__(self, page: Path):
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in LOADS and (url := dict(attrs).get(LOADS[tag])):
            self.found.append(url)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return documentation.build(tmp_path_factory.mktemp("site"))


def test_every_page_is_in_the_navigation(site):
    named = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named
    assert {name.replace(".md", ".html") for name in named} <= {
        page.name for page in site.glob("*.html")
    }


def test_no_page_asks_another_host(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        foreign = [url for url in Loaded(page).found if re.match(r"(https?:)?//", url)]
        assert not foreign, f"{page.name}: {foreign}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), sheet.name


def test_the_search_and_the_docstrings_are_there(site):
    assert "contrastive_step" in (site / "search" / "search_index.json").read_text()
    assert "GradScaler" in (site / "api.html").read_text()  # of its docstring
