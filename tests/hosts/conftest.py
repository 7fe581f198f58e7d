"""Two hosts of two ranks each on this machine, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import lab
from tests.launcher.conftest import ROOT

SETUP = ROOT / "scripts" / "setup_hosts.sh"


@pytest.fixture(scope="package")
def hosts(tmp_path_factory) -> Iterator[Path]:
    with lab("HOSTS", SETUP, tmp_path_factory.mktemp("hosts"), 2) as folder:
        yield folder
