"""The small data set and recipe of tests/launcher, for the tiers that run the real command elsewhere."""

import signal

from tests.lab import LOUD
from tests.launcher.conftest import data, model, recipe  # noqa: F401

# What is ignored here (under nohup, or by a runner of jobs) all that the tests start would ignore as well.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)  # a handler is not handed down


def pytest_terminal_summary(terminalreporter) -> None:
    """Tiers that this machine cannot run are told at the end, not among the skipped."""
    for tier in ("slurm", "hosts"):
        skipped = [r for r in terminalreporter.stats.get("skipped", []) if f"tests/{tier}/" in r.nodeid]
        reasons = {str(r.longrepr[2]) for r in skipped}
        why = next((reason for reason in reasons if LOUD.format(tier.upper()) in reason), None)
        if why is not None:
            told = f"{len(skipped)} TESTS OF THE TIER {tier.upper()} WERE NOT RUN: {why}"
            terminalreporter.write_sep("!", told, red=True, bold=True)
