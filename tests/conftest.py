"""The small data set and recipe of tests/launcher, for the tiers that run the real command elsewhere."""

import os
import random
import signal
from collections.abc import Iterator

import pytest
import torch

from tests import devices, processor, tiers, warm
from tests.launcher.conftest import data, model, recipe  # noqa: F401

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# What is ignored or blocked here (under nohup, by a runner of jobs), all that the tests start would ignore as well.
for _number in SIGNALS:
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)  # a handler is not handed down
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def pytest_configure() -> None:
    if devices.chosen() == "cpu":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # on purpose: see `require_usable_gpu`
    torch.set_num_threads(
        processor.THREADS
    )  # the cores belong to several processes, and OpenMP's threads spin
    processor.answer_no()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slurm's file first: it waits most and takes longest, and the other worker does the rest beside it.

    With CLIP_TRAIN_TEST_ORDER=SEED modules are shuffled, and the tests of each module.
    """
    seed = os.environ.get("CLIP_TRAIN_TEST_ORDER")
    if seed:
        rng = random.Random(seed)
        modules = {item.nodeid.partition("::")[0]: rng.random() for item in items}
        place = {item: (modules[item.nodeid.partition("::")[0]], rng.random()) for item in items}
        items.sort(key=lambda item: place[item])
    items.sort(key=lambda item: "tests/slurm/" not in item.nodeid)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests will run, not where they are only listed or handed to workers."""
    if (
        session.items
        and not session.config.option.collectonly
        and session.config.getoption("dist", "no") == "no"
    ):
        warm.start_server()


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As they were: a command that a test calls in this process ignores signals at its end, and the next test's
    processes would inherit that."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


def pytest_terminal_summary(terminalreporter) -> None:
    tiers.tell(terminalreporter)
