from collections.abc import Iterator

import pytest

from tests.checkpoint.runs import RUNS, wake_writers


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    wake_writers()  # of a test that has failed while they were stopped
    while RUNS:
        RUNS.pop().manager.close()
