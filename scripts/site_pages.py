"""mkdocs' hooks: the README is the site's first page; links to code, which is no page of it, become plain text."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
LINK = re.compile(r"(!?\[([^\]\n]*)\]\()([^)#\s]+)([^)\n]*\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that lie outside of docs/."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are from the site's folder, where all pages lie side by side."""
    folder = (ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    pages = {str(ROOT / source): name for name, source in PAGES.items()}

    def link(match: re.Match[str]) -> str:
        head, label, target, tail = match.groups()
        place = os.path.normpath(folder / target)
        if place in pages:
            return f"{head}{pages[place]}{tail}"
        if place.startswith(f"{ROOT}/docs/"):
            return f"{head}{os.path.relpath(place, ROOT / 'docs')}{tail}"
        return label if os.path.exists(place) else match[0]  # what is not there, mkdocs reports

    return LINK.sub(link, markdown)
