"""What the end of a test run says of the tiers that need more than Python: what ran against what, what could not run.

Called from tests/conftest.py, the only one that the process sees which prints the end when workers run the tests.
"""

from __future__ import annotations

import pytest

from tests.s3.localstack import LocalStack
from tests.s3.server import chosen

WITHOUT_S3 = "the S3 server is not set up (scripts/setup_s3.sh; `make test` does it)"


def tell(reporter: pytest.TerminalReporter) -> None:
    _tell_of_s3(reporter)
    _tell_of_clouds(reporter)
    _tell_of_slurm(reporter)
    for tier in ("slurm", "hosts", "browser"):
        skipped = _reports(reporter, "skipped", tier)
        reasons = {str(report.longrepr[2]) for report in skipped}  # type: ignore[index]
        why = next((reason for reason in reasons if tier.upper() in reason), None)
        if why is not None:
            _shout(reporter, f"{len(skipped)} TESTS OF THE TIER {tier.upper()} WERE NOT RUN: {why}")


def _tell_of_s3(reporter: pytest.TerminalReporter) -> None:
    skipped, passed = _reports(reporter, "skipped", "s3"), _reports(reporter, "passed", "s3")
    if skipped and (missing := chosen().missing()):
        _shout(reporter, f"{len(skipped)} S3 TESTS WERE NOT RUN: {missing}")
    elif passed:
        reporter.write_line(f"{len(passed)} S3 tests passed against {chosen().name}")


def _tell_of_clouds(reporter: pytest.TerminalReporter) -> None:
    skipped = _reports(reporter, "skipped", "clouds")
    for why in sorted({str(report.longrepr[2]) for report in skipped}):  # type: ignore[index]
        count = sum(str(report.longrepr[2]) == why for report in skipped)  # type: ignore[index]
        _shout(reporter, f"{count} TESTS OF STORES WERE NOT RUN: {why}")


def _tell_of_slurm(reporter: pytest.TerminalReporter) -> None:
    ran = _reports(reporter, "passed", "slurm")
    if ran and LocalStack.missing() is not None:
        _shout(
            reporter,
            f"{len(ran)} SLURM SCENARIOS RAN WITH THEIR CHECKPOINTS ON DISK, NOT ON S3: {WITHOUT_S3}",
        )


def _reports(reporter: pytest.TerminalReporter, outcome: str, tier: str) -> list[pytest.TestReport]:
    found = [
        each
        for each in reporter.stats.get(outcome, [])
        if f"tests/{tier}/" in getattr(each, "nodeid", "")
    ]
    return [each for each in found if outcome == "skipped" or each.when == "call"]


def _shout(reporter: pytest.TerminalReporter, text: str) -> None:
    reporter.write_sep("!", text, red=True, bold=True)
