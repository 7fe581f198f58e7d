"""`clip-train import-args` knows every flag that OpenCLIP's own parser takes, as the switch or value that it is."""

from __future__ import annotations

import argparse

import pytest

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from launcher.cli.main import main
from launcher.config.openclip import AFTER_330, FLAGS, LISTS, OLDER, SWITCHES
from tests.launcher.test_import_args import LINES

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
    assert flags.keys() == FLAGS - AFTER_330 - OLDER.keys()
    assert {name for name, action in flags.items() if action.nargs == 0} == SWITCHES & flags.keys()
    assert {name for name, action in flags.items() if action.nargs in ("+", "*")} == LISTS & flags.keys()


def test_a_coca_of_its_readme_is_planned(capsys, tmp_path):
    (name,) = (name for name in LINES if "CoCa" in name)
    assert main(["import-args", LINES[name]]) == 0
    recipe = tmp_path / "coca.yaml"
    recipe.write_text(capsys.readouterr().out)
    assert main(["plan", str(recipe), "--json"]) == 0
