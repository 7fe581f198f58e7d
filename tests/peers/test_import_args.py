"""`clip-train import-args` knows every flag that OpenCLIP's own parser takes, as the switch or value that it is."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

import pytest
import yaml

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.models.clip import count_parameters
from launcher.cli.main import main
from launcher.config.recipe import load_config
from tests.launcher.test_import_args import KINDS, LINES, RELEASED

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
    kinds = {0: "switch", "+": "list", "*": "list"}
    theirs = {name: kinds.get(action.nargs, "value") for name, action in flags.items()}
    assert theirs == {name: KINDS[name] for name in RELEASED}


@pytest.mark.parametrize("norms", ["", "--lock-text-freeze-layer-norm"])
@pytest.mark.parametrize("unlocked", [0, 1, 10, 12, 13])
def test_a_locked_text_tower_freezes_what_openclip_freezes(unlocked, norms, capsys):
    from open_clip.hf_model import HFTextEncoder
    from transformers import RobertaConfig

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 16}
    config = RobertaConfig(num_hidden_layers=12, **sizes)
    tower = HFTextEncoder("", 4, config, "mean_pooler", "mlp")
    tower.transformer.pooler = None  # as its models are built: add_pooling_layer=False
    tower.lock(unlocked, freeze_layer_norm=bool(norms))
    theirs = {f"text.{name}" for name, p in tower.named_parameters() if not p.requires_grad}
    capsys.readouterr()  # of what OpenCLIP prints
    line = f"main.py --model roberta-ViT-B-32 --lock-text --lock-text-unlocked-layers {unlocked}"
    assert main(["import-args", f"{line} {norms} --train-data x.tar"]) == 0
    freeze = yaml.safe_load(capsys.readouterr().out)["model"]["freeze"]
    names = [f"text.{name}" for name, _ in tower.named_parameters()]
    assert {name for name in names if any(fnmatchcase(name, glob) for glob in freeze)} == theirs
    assert all(any(fnmatchcase(name, glob) for name in names) for glob in freeze)


def test_a_coca_of_its_readme(capsys, tmp_path):
    """Those that are built without OpenCLIP: tests/launcher/test_import_args.py."""
    (name,) = (name for name in LINES if "CoCa" in name)
    assert main(["import-args", LINES[name]]) == 0
    recipe = tmp_path / "coca.yaml"
    recipe.write_text(capsys.readouterr().out)
    loss = load_config(str(recipe)).loss
    assert (loss.contrastive_weight, loss.caption_weight) == (0, 1)
    assert count_parameters(load_config(str(recipe)).model.architecture()) == 638_450_177
