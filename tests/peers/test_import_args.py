"""`clip-train import-args` knows every flag that OpenCLIP's own parser takes, as the switch or value that it is."""

from __future__ import annotations

import argparse

import pytest
import yaml

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.models.clip import count_parameters
from clip_train.recipe.recipe import load_config
from launcher.cli.main import main
from tests.launcher.test_import_args import KINDS, LINES, RELEASED

pytestmark = pytest.mark.peer


def test_all_flags(monkeypatch):
    from open_clip_train import params

    actions: list[argparse.Action] = []

    def listed(self, args=None, namespace=None):
        actions.extend(action for action in self._actions if action.dest != "help")
        return argparse.Namespace(**{action.dest: action.default for action in actions})

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", listed)
    params.parse_args([])
    kinds = {0: "switch", "+": "list", "*": "list"}
    theirs = {
        name.removeprefix("--"): kinds.get(action.nargs, "value")
        for action in actions
        for name in action.option_strings
    }
    version_4 = "use-naflex" in theirs
    names = KINDS.keys() - {"horovod", "torchscript", "trace"} if version_4 else RELEASED
    assert theirs == {name: KINDS[name] for name in names}


def test_a_locked_text_tower_of_hugging_face_is_said(capsys):
    """OpenCLIP freezes other parameters of it than `model.lock_text` would."""
    line = "main.py --model roberta-ViT-B-32 --lock-text --lock-text-unlocked-layers 10"
    assert main(["import-args", f"{line} --train-data x.tar"]) == 0
    out = capsys.readouterr().out
    assert not {"lock_text", "lock_text_unlocked_layers"} & yaml.safe_load(out)["model"].keys()
    assert "--lock-text" in out and "model.freeze, such as text.transformer.*" in " ".join(
        out.split()
    )


def test_a_coca_of_its_readme(capsys, tmp_path):
    """Those that are built without OpenCLIP: tests/launcher/test_import_args.py."""
    (name,) = (name for name in LINES if "CoCa" in name)
    assert main(["import-args", LINES[name]]) == 0
    recipe = tmp_path / "coca.yaml"
    recipe.write_text(capsys.readouterr().out)
    loss = load_config(str(recipe)).loss
    assert (loss.contrastive_weight, loss.caption_weight) == (0, 1)
    assert count_parameters(load_config(str(recipe)).model.architecture()) == 638_450_177
