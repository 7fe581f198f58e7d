"""`python -m launcher` is `clip-train`."""

from launcher.cli import entry

entry()
