"""report.html in a real browser, at all widths, light and dark: no error, no request, no sideways scrolling.

python -m tests.browser.test_page RUN    docs/images/report-*.png, of a run that you have trained: clip-train demo
                                         evaluate.every_steps=100
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
from tests.metrics.pages import evaluation, start, step, write_jsonl, write_run

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280, 1920)


# Texts that are split into more lines than words need: fewer than 4 characters a line.
SPLIT = """(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let node; node = walker.nextNode();) {
    const range = document.createRange(), text = node.textContent.trim();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter(box => box.width > 0);
    const lines = new Set(boxes.map(box => Math.round(box.top))).size;
    if (lines > 1 && text.length / lines < 4) found.push(text);
  }
  return found;
})()"""
# Numbers are never wrapped or cut.
CUT_NUMBERS = """[...document.querySelectorAll('output, .numbers dd, .scores b')].filter(each =>
  each.getClientRects().length > 1 || each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0)
  .map(each => each.textContent)"""


def check(
    browser: Chromium, page: Path, width: int, *, dark: bool, fragment: str = ""
) -> np.ndarray:
    """Its first screen, uint8 [height, width, 3]."""
    browser.show(page, width, dark=dark, fragment=fragment)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('h1, h2, figcaption, figure p, .notes li, .plot span')].filter(each =>"
    cut += f" {{ const box = each.getBoundingClientRect(); return box.left < 0 || box.right > {width} }}).length"
    assert browser.evaluate(cut) == 0
    assert browser.evaluate(SPLIT) == []
    assert browser.evaluate(CUT_NUMBERS) == []
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


def large_run(folder: Path, num_sets: int, evaluations: int) -> Path:
    """Sets, keys and captions with long names."""
    run = write_run(folder)
    names = [
        f"set-{i}-with-a-name-of-sixty-characters-as-somebody-made-it-up" for i in range(num_sets)
    ]
    steps = [120 * (i + 1) // evaluations for i in range(evaluations)]
    records = [evaluation(i, names, 0.3 + i / 1000) | {"zero_shot_top1": 0.123} for i in steps]
    write_jsonl(run / "eval.jsonl", records)
    more = {"clip_loss": 1.0, "distill_loss": 2.0, "grad_norm_image": 0.5, "grad_norm_text": 0.4}
    more |= {"mfu": 0.4, "mfu_computed": 0.3}
    write_jsonl(run / "metrics.jsonl", [step(i, **more) for i in range(1, 121)])
    long = "a.key.of." + "a-part-of-it." * 6
    changed = {
        long: "value" * 60,
        "data.val": {name: f"s3://bucket/{name}/*.tar" for name in names},
    }
    write_jsonl(
        run / "attempts.jsonl",
        [start(0, ("FAILED", "x" * 200), changed=changed, parameters=151277313)],
    )
    captions = ["a red fox in the snow", "word " * 60, "unbroken" * 30]
    ranked = [{"caption": caption, "cosine": 0.25, "own": False} for caption in captions]
    images = [{"key": str(i), "captions": captions[::-1], "ranked": ranked} for i in range(6)]
    write_jsonl(run / "examples.jsonl", [{"step": i, "images": images} for i in steps])
    (run / "examples").mkdir()
    for i in range(6):
        Image.new("RGB", (224, 224), (40 * i, 90, 120)).save(run / "examples" / f"{i}.jpg")
    return run


@pytest.mark.parametrize("num_sets, evaluations", [(1, 1), (12, 1), (12, 5)])
@pytest.mark.parametrize("width, dark", [(320, False), (390, True), (900, False), (1280, True)])
def test_long_names_and_many_sets_keep_numbers_whole(
    browser, tmp_path, num_sets, evaluations, width, dark
):
    page = write_report(large_run(tmp_path / "run", num_sets, evaluations))
    check(browser, page, width, dark=dark)
    titles = "[...document.querySelectorAll('figcaption span')]"
    recalls = f"{titles}.filter(each => each.textContent.endsWith(': recall')).length"
    assert browser.evaluate(recalls) == (num_sets if evaluations > 1 else 0)
    rows = "document.querySelectorAll('.scores tbody tr').length"
    assert browser.evaluate(rows) == num_sets + 1
    assert browser.evaluate("[...document.images].every(each => each.naturalWidth == 224)")
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SPLIT) == []


def test_lines_of_one_chart_answer_the_pointer(browser, tmp_path):
    """The chart of recall has six lines; its legend shows their values at the pointer."""
    browser.show(write_report(large_run(tmp_path / "run", 1, 5)), 1280, dark=False)
    box = "[...document.querySelectorAll('figure')].find(each => each.textContent.includes(': recall'))"
    legend = f"[...{box}.querySelectorAll('.legend > span')].map(each => each.textContent)"
    before = browser.evaluate(legend)
    assert [text.split("R@")[0] for text in before] == ["I→T ", "T→I "] * 3
    assert before[0] == "I→T R@142%"
    x, y = browser.evaluate(
        f"{{ const plot = {box}.querySelector('.plot'); plot.scrollIntoView({{block: 'center'}});"
        " const box = plot.getBoundingClientRect(); [box.left + box.width / 5, box.top + 50] }"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.evaluate(legend)[0] == "I→T R@132.4%"  # at step 24
    assert browser.evaluate(f"{box}.querySelector('figcaption output').textContent") == "step 24"
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.evaluate(legend) == before


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
    """The top of the page, light and wide, dark and narrow; and its validation images."""
    page, folder = write_report(run), Path(__file__).parents[2] / "docs" / "images"
    program = find()
    assert program is not None
    with Chromium(program) as browser:
        for name, width, shown_height, dark in (
            ("report-light-1280", 1280, 680, False),
            ("report-dark-390", 390, 900, True),
            ("report-examples-1280", 1280, None, False),
        ):
            check(browser, page, width, dark=dark)
            top, height = 0, shown_height
            if height is None:
                box = "document.querySelector('.examples').getBoundingClientRect()"
                top = int(browser.evaluate(f"{box}.top + window.scrollY")) - 90
                height = int(browser.evaluate(f"{box}.height")) + 106
            shot = browser.screenshot(width, height, top=top)
            picture = Image.open(io.BytesIO(shot)).convert("RGB")
            picture.save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    take_pictures(sys.argv[1])
