"""The command `clip-train`: `main`, and a module for each verb."""

from launcher.cli.main import entry

__all__ = ["entry"]
