import os
import signal
from collections.abc import Iterator

import pytest

from tests.checkpoint.runs import RUNS, writers


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    for pid in writers():  # of a test that has failed while they were stopped
        os.kill(pid, signal.SIGCONT)
    while RUNS:
        RUNS.pop().manager.close()
