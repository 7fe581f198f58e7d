"""Every model that OpenCLIP knows, at reduced depth: built and trained for two steps of four micro-batches, or refused.

    PYTHONPATH=. .venv-peers/bin/python benchmarks/openclip_models.py [NAME ...]

One row each: whose modules, parameters at full size, and the losses of the two steps, or the reason. Towers keep their
widths; blocks are cut to two, timm's to two or one a stage, vocabularies to CLIP's; Hugging Face's text towers are
small ones of the same class (their configuration would come from the hub), and counted as such. Native are those that
this project builds itself; all others are `open_clip:NAME`. Of models that differ in sizes only the smallest is taken
(--all: each).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # noqa: F401  names a missing package

import tests.peers.torchvision_shim  # noqa: F401  before open_clip

import open_clip  # isort: skip
import timm  # isort: skip
import torch
import transformers

from clip_train.contrastive.info_nce import InfoNCE
from clip_train.contrastive.sigmoid import SigmoidLoss
from clip_train.engine import PlainEngine
from clip_train.errors import UserError
from clip_train.models.clip import build_model, count_parameters
from clip_train.models.config import load_architecture, preset_names
from clip_train.step import train_step
from clip_train.task import Batch

CREATE = timm.create_model
TEXTS = {  # what Hugging Face's hub would say of a text tower, with few layers
    "roberta": transformers.RobertaConfig(vocab_size=50265, num_hidden_layers=2),
    "xlm-roberta": transformers.XLMRobertaConfig(vocab_size=50265, num_hidden_layers=2),
    "google/mt5": transformers.MT5Config(vocab_size=50265, num_layers=2, num_decoder_layers=1),
    "facebook/nllb": transformers.M2M100Config(
        vocab_size=50265, encoder_layers=2, decoder_layers=1
    ),
}


def text_config(name: str, **options: Any) -> Any:
    return next(config for start, config in TEXTS.items() if name.startswith(start))


def shallow(name: str, **options: Any) -> torch.nn.Module:
    """timm.create_model with fewer blocks, in the words of whichever family takes them."""
    for cut in (
        {"depth": 2},
        {"depths": (1, 1, 1, 1)},
        {"layers": (1, 1, 1, 1)},
        {"layers": (1, 1, 1, 1, 1)},
        {},
    ):
        try:
            return CREATE(name, **options, **cut)
        except (TypeError, IndexError, AssertionError, ValueError):
            continue
    raise AssertionError(name)


def family(name: str, config: dict[str, Any]) -> str:
    """Models of one family differ in sizes only."""
    vision, text = config["vision_cfg"], config["text_cfg"]
    trunk = vision.get(
        "timm_model_name", "resnet" if isinstance(vision.get("layers"), list) else "vit"
    )
    trunk = re.sub(
        r"_?\d+|_(base|large|small|tiny|medium|huge|giant|so400m|xlarge|xxlarge|enormous)\w*",
        "",
        trunk,
    )
    keys = sorted(
        set(vision) - {"layers", "width", "image_size", "patch_size", "head_width", "mlp_ratio"}
    )
    words = sorted(
        set(text) - {"layers", "width", "heads", "vocab_size", "context_length", "mlp_ratio"}
    )
    return json.dumps(
        [trunk, keys, words, text.get("hf_model_name"), sorted(set(config) - {"init_logit_bias"})]
    )


def row(name: str, create: Callable[..., torch.nn.Module] = shallow) -> str:
    """A line of Markdown. create: in place of timm's."""
    prefix, whose = ("", "native") if name in preset_names() else ("open_clip:", "OpenCLIP's")
    try:
        count = count_parameters(load_architecture(prefix + name))
        config = open_clip.get_model_config(name)
        config["text_cfg"] |= {
            "layers": 2,
            "vocab_size": min(config["text_cfg"].get("vocab_size", 49408), 49408),
        }
        if "timm_model_name" not in config["vision_cfg"]:
            deep = config["vision_cfg"]["layers"]
            config["vision_cfg"]["layers"] = [1, 1, 1, 1] if isinstance(deep, list) else 2
        if "multimodal_cfg" in config:
            config["multimodal_cfg"] |= {
                "layers": 1,
                "vocab_size": config["text_cfg"]["vocab_size"],
            }
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model.json").write_text(json.dumps(config))
            architecture = load_architecture(f"{prefix}{folder}/model.json")
        timm.create_model = create
        torch.manual_seed(0)
        model = build_model(architecture)
    except UserError as e:
        return f"| {name} | {whose} | refused: {str(e).partition(': ')[2][:160] or str(e)[:160]} |"
    finally:
        timm.create_model = CREATE
    side, length = architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    texts = torch.randint(1, 30000, (4, length))  # of which the least vocabulary has more
    batch = Batch(
        torch.randint(0, 256, (4, 3, side, side), dtype=torch.uint8),
        texts,
        torch.arange(4),
        keys=[*"abcd"],
    )
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), 1e-3))
    objective = InfoNCE() if architecture.init_logit_bias is None else SigmoidLoss()
    try:
        two = [
            train_step(engine, batch, objective, micro_size=1, kept_graphs=1, lr=1e-3)
            for _ in range(2)
        ]
    except RuntimeError:  # a trunk whose parts do not fit any more
        if create is CREATE:
            raise
        return row(name, CREATE)
    assert all(each.grad_norm > 0 for each in two)
    return f"| {name} | {whose} | {count / 1e6:,.0f} M parameters; losses {two[0].loss:.3f}, {two[1].loss:.3f} |"


if __name__ == "__main__":
    transformers.AutoConfig.from_pretrained = text_config
    names = [each for each in sys.argv[1:] if each != "--all"] or open_clip.list_models()
    if len(sys.argv) == 1:
        smallest: dict[str, str] = {}
        for each in names:
            key, size = (
                family(each, open_clip.get_model_config(each)),
                open_clip.get_model_config(each)["embed_dim"],
            )
            if key not in smallest or size < open_clip.get_model_config(smallest[key])["embed_dim"]:
                smallest[key] = each
        names = sorted(smallest.values())
    outcomes: Counter[str] = Counter()
    for each in names:
        line = row(each)
        outcomes[f"{line.split(' | ')[1]} {'refused' if '| refused' in line else 'trained'}"] += 1
        print(line, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
