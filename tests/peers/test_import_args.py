"""`clip-train import-args` knows every flag that OpenCLIP's own parser takes, as the switch or value that it is."""

from __future__ import annotations

import argparse

import pytest

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from launcher.config.openclip import FLAGS, LISTS, SWITCHES

pytestmark = pytest.mark.peer


def test_all_flags(monkeypatch):
    from open_clip_train import params

    actions: list[argparse.Action] = []

    def listed(self, args=None, namespace=None):
        actions.extend(action for action in self._actions if action.dest != "help")
        return argparse.Namespace(lr=0, beta1=0, beta2=0, eps=0, model="", opt="adamw")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", listed)
    params.parse_args([])
    flags = {action.option_strings[0].removeprefix("--"): action for action in actions}
    assert flags.keys() == FLAGS
    assert {name for name, action in flags.items() if action.nargs == 0} == SWITCHES
    assert {name for name, action in flags.items() if action.nargs in ("+", "*")} == LISTS
