"""The documentation's site in a real browser: every page, on a phone and a screen, light and dark.

python -m tests.browser.test_documents    docs/images/site-*.png
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests import site as documentation
from tests.browser.chromium import Chromium, find

pytestmark = pytest.mark.browser
PICTURES = (
    ("index.html", 1280, False),
    ("your_data.html", 1280, True),
    ("troubleshooting.html", 390, True),
)

# Of what stands in the article: text that is too small or too faint (WCAG's contrast, its colours over the backgrounds
# behind them), pictures that are not there. Of the page: whether it scrolls sideways.
LOOK = """
(() => {
  const shade = text => { const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a ?? 1]; };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const light = color => color.map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    const own = element ? shade(getComputedStyle(element).backgroundColor) : [255, 255, 255, 1];
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(element.parentElement));
  };
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth)
    found.push(`it is ${document.documentElement.scrollWidth} px wide`);
  const walker = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT);
  let letters = 0;
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || element.closest('.headerlink, .md-clipboard, script, style, svg') || !element.getClientRects().length)
      continue;
    letters += text.length;
    const style = getComputedStyle(element), ground = behind(element);
    const [a, b] = [light(over(shade(style.color), ground)), light(ground)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
    const least = size >= 24 ? 3 : 4.5;
    if (contrast < least || size < 10)
      found.push(`${text.slice(0, 30)} (${element.className}): contrast ${contrast.toFixed(2)}, ${size} px`);
  }
  if (letters < 100) found.push(`only ${letters} letters`);
  for (const image of document.querySelectorAll('article img')) if (!image.naturalWidth) found.push(image.src);
  return found;
})()
"""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Its address on this machine."""

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Silent, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[list[str], str]]:
    """(names of pages, where they are served)"""
    folder = documentation.build(tmp_path_factory.mktemp("site"))
    names = sorted(page.name for page in folder.glob("*.html") if page.name != "404.html")
    assert len(names) > 20
    with serve(folder) as address:
        yield names, address


def look(browser: Chromium, address: str, name: str, width: int, *, dark: bool) -> list[str]:
    """What is wrong with a page."""
    browser.show(address + name, width, dark=dark)
    found = browser.evaluate(LOOK)
    scheme = browser.evaluate("document.body.dataset.mdColorScheme")
    found += [] if scheme == ("slate" if dark else "default") else [f"it is {scheme}"]
    found += [f"asks for {url}" for url in browser.asked() if not url.startswith(address)]
    return [*found, *map(str, browser.broken())]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_is_readable_and_asks_no_other_host(browser, site, width, dark):
    names, address = site
    found = {name: look(browser, address, name, width, dark=dark) for name in names}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_the_search_finds(browser, site):
    """In the browser, by the index beside the pages."""
    _, address = site
    browser.show(address + "index.html", 1280, dark=False)
    browser.evaluate("document.querySelector('input.md-search__input').focus()")
    browser.call("Input.insertText", text="kept_graphs")
    hits = "new Promise(done => { const look = () => { const all = document.querySelectorAll("
    hits += "'.md-search-result__item a'); all.length ? done([...all].map(each => each.href)) : setTimeout(look, 50) };"
    hits += " look() })"
    assert any("recipe.html" in url for url in browser.evaluate(hits))
    assert browser.broken() == []


def take_pictures() -> None:
    images, program = Path(__file__).parents[2] / "docs" / "images", find()
    assert program is not None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        address = stack.enter_context(serve(documentation.build(Path(folder))))
        browser = stack.enter_context(Chromium(program))
        for name, width, dark in PICTURES:
            assert look(browser, address, name, width, dark=dark) == []
            picture = (
                Image.open(io.BytesIO(browser.screenshot(width, 900))).convert("RGB").quantize(64)
            )
            page = name.removesuffix(".html").replace("_", "-")
            picture.save(
                images / f"site-{page}-{'dark' if dark else 'light'}-{width}.png", optimize=True
            )


if __name__ == "__main__":
    take_pictures()
