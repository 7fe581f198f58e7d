"""One headless Chromium for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium, find


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    program = find()
    if program is None:
        pytest.skip(
            "BROWSER MISSING: no chromium on the path, nor in $CLIP_TRAIN_CHROMIUM; scripts/setup_browser.sh"
        )
    with Chromium(program) as chromium:
        yield chromium
