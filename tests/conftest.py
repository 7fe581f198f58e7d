"""The small data set and recipe of tests/launcher, for the tiers that run the real command elsewhere."""

from tests.lab import LOUD
from tests.launcher.conftest import data, model, recipe  # noqa: F401


def pytest_terminal_summary(terminalreporter) -> None:
    """Tiers that this machine cannot run are told at the end, not among the skipped."""
    for tier in ("slurm", "hosts"):
        skipped = [r for r in terminalreporter.stats.get("skipped", []) if f"tests/{tier}/" in r.nodeid]
        reasons = {str(r.longrepr[2]) for r in skipped}
        why = next((reason for reason in reasons if LOUD.format(tier.upper()) in reason), None)
        if why is not None:
            told = f"{len(skipped)} TESTS OF THE TIER {tier.upper()} WERE NOT RUN: {why}"
            terminalreporter.write_sep("!", told, red=True, bold=True)
