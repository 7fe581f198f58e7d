"""report.html in a real browser, at all widths, light and dark: no error, no request, no sideways scrolling.

python -m tests.browser.test_page RUN    docs/images/report-*.png, of a run that you have trained
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clip_train.metrics.report import write_report
from tests.browser.chromium import Chromium, find
from tests.metrics.pages import write_run

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280, 1920)


def check(
    browser: Chromium, page: Path, width: int, *, dark: bool, fragment: str = ""
) -> np.ndarray:
    """Its first screen, uint8 [height, width, 3]."""
    browser.show(page, width, dark=dark, fragment=fragment)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('h1, h2, figcaption, figure p, .notes li, .plot span')].filter(each =>"
    cut += f" {{ const box = each.getBoundingClientRect(); return box.left < 0 || box.right > {width} }}).length"
    assert browser.evaluate(cut) == 0
    png = browser.screenshot(width, 900)
    assert browser.asked() == [page.as_uri()]
    assert browser.broken() == []
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert pixels.shape[1] == width
    return pixels


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_shows_without_errors_and_requests(browser, tmp_path, width, dark):
    run = write_run(
        tmp_path / "a-run-with-a-name-that-is-as-long-as-people-make-them-who-sweep-rates"
    )
    found = {"bad_samples": {"caption is empty\ts3://bucket/00001.tar": 3}}
    (run / "invalid.json").write_text(json.dumps(found))
    page = write_report(run)
    pixels = check(browser, page, width, dark=dark)
    assert (pixels[:4].mean() < 64) == dark and (pixels[:4].mean() > 192) != dark


def test_curves_answer_the_pointer(browser, tmp_path):
    """In the middle of the first chart all charts show their values at that step."""
    browser.show(write_report(write_run(tmp_path / "run")), 1280, dark=False)
    box = "const box = document.querySelector('.plot').getBoundingClientRect(); "
    x, y = browser.evaluate(f"{{ {box} [box.left + box.width / 2, box.top + box.height / 2] }}")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown = browser.evaluate(
        "[...document.querySelectorAll('figcaption output')].map(each => each.textContent)"
    )
    assert shown[0].startswith("step 60: 0.083") and shown[1] == "step 60: 0.001", (
        shown
    )  # loss (5 / 60), learning rate
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert (
        browser.evaluate("document.querySelector('figcaption output').textContent")
        == f"{5 / 120:.4g}"
    )


def take_pictures(run: str) -> None:
    page, folder = write_report(run), Path(__file__).parents[2] / "docs" / "images"
    program = find()
    assert program is not None
    with Chromium(program) as browser:
        for width, dark in ((1280, False), (390, True)):
            check(browser, page, width, dark=dark)
            picture = Image.open(io.BytesIO(browser.screenshot(width, 900))).convert("RGB")
            picture.save(
                folder / f"report-{'dark' if dark else 'light'}-{width}.png", optimize=True
            )


if __name__ == "__main__":
    take_pictures(sys.argv[1])
