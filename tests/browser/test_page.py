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
from tests.metrics.pages import PIXEL, write_run

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280, 1920)


def check(
    browser: Chromium, page: Path, width: int, *, dark: bool, fragment: str = ""
) -> np.ndarray:
    """Its first screen, uint8 [height, width, 3]."""
    browser.show(page, width, dark=dark, fragment=fragment)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('h1, h2, .tile, figcaption, figure p, .notes li, .plot span')].filter(each =>"
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
    invalid = {
        "reason": "caption is empty",
        "shard": "s3://bucket/00001.tar",
        "key": "k" * 60,
        "picture": PIXEL,
    }
    found = {
        "bad_samples": {"caption is empty\ts3://bucket/00001.tar": 3},
        "pictures": [invalid] * 3,
    }
    (run / "invalid.json").write_text(json.dumps(found))
    page = write_report([run])
    pixels = check(browser, page, width, dark=dark)
    assert (pixels[:4].mean() < 64) == dark and (pixels[:4].mean() > 192) != dark
    other = write_run(tmp_path / "b", lr=3e-3)
    check(browser, write_report([page.parent, other], tmp_path / "both.html"), width, dark=dark)


def test_curves_answer_the_pointer(browser, tmp_path):
    """In the middle of the first chart all charts show their values at that step."""
    browser.show(write_report([write_run(tmp_path / "run")]), 1280, dark=False)
    box = "const box = document.querySelector('.plot').getBoundingClientRect(); "
    x, y = browser.evaluate(f"{{ {box} [box.left + box.width / 2, box.top + box.height / 2] }}")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown = browser.evaluate(
        "[...document.querySelectorAll('figcaption output')].map(each => each.textContent)"
    )
    assert shown[0].startswith("step 60: 0.083") and shown[1] == "step 60: 14", (
        shown
    )  # loss (5 / 60), logit scale
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert (
        browser.evaluate("document.querySelector('figcaption output').textContent")
        == f"{5 / 120:.4g}"
    )


def test_the_axis_may_be_time(browser, tmp_path):
    """Two attempts of half an hour, the second begun two hours after the first: step 60 is a fifth of the way."""
    page = write_report([write_run(tmp_path / "run")])
    browser.show(page, 1280, dark=False)
    line = "document.querySelector('.plot polyline').getAttribute('points')"
    over_steps = browser.evaluate(line)
    choose = "document.querySelector('input[value={}]').click()"
    browser.evaluate(choose.format("time"))
    xs = [float(point.split(",")[0]) for point in browser.evaluate(line).split()]
    assert (
        len(xs) == 120 and xs[29] == 100 and xs[59] == 200 and xs[60] == 803.3 and xs[119] == 1000
    )
    drawn = "['start', 'gap', 'save'].map(name => document.querySelector('.plot .' + name).getAttribute('d'))"
    assert browser.evaluate(drawn) == [
        "M800.0,0V1000",
        "M200.0,0H800.0V1000H200.0Z",
        "M200.0,1000v25",
    ]
    ticks = "[...document.querySelector('.plot').querySelectorAll('.x:not([hidden])')].map(each => each.textContent)"
    assert browser.evaluate(ticks) == ["0", "1 h", "2 h"]
    box = "const box = document.querySelector('.plot').getBoundingClientRect(); "
    x, y = browser.evaluate(f"{{ {box} [box.left + 0.1 * box.width, box.top + box.height / 2] }}")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.evaluate("document.querySelector('figcaption output').textContent").startswith(
        "0.25 h: 0.16"
    )
    assert (
        browser.evaluate("location.hash") == "#time"
    )  # which a page that is loaded anew finds again
    browser.evaluate(choose.format("step"))
    assert (
        browser.evaluate(line) == over_steps
        and "0" in browser.evaluate(ticks)
        and "1 h" not in browser.evaluate(ticks)
    )
    assert browser.broken() == []


@pytest.mark.parametrize("width", [390, 1280])
def test_over_time_it_shows_as_well(browser, tmp_path, width):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", 60, lr=3e-3)
    for runs in ([one], [one, two]):
        page = write_report(runs, tmp_path / f"{len(runs)}.html")
        check(browser, page, width, dark=True, fragment="#time")
        assert browser.evaluate("document.querySelector('.axis input:checked').value") == "time"


def take_pictures(run: str) -> None:
    page, folder = write_report([run]), Path(__file__).parents[2] / "docs" / "images"
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
