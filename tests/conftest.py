"""The small data set and recipe of tests/launcher, for the tiers that run the real command elsewhere."""

from tests.launcher.conftest import data, model, recipe  # noqa: F401
