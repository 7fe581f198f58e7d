"""Every model that OpenCLIP knows, at reduced depth: built and trained for two steps of four micro-batches, or refused.

    PYTHONPATH=. .venv-peers/bin/python benchmarks/openclip_models.py [--random] [NAME ...]

One row each: whose modules, parameters at full size, and the losses of the two steps, or the reason. Towers keep their
widths; blocks are cut to two, timm's to two or one a stage, vocabularies to CLIP's; Hugging Face's text towers are
small ones of the same class (their configuration would come from the hub), and counted as such. Native are those that
this project builds itself; all others are `open_clip:NAME`. Of models that differ in sizes only the smallest is taken
(--all: each).

--random: with drop path and dropout of 0.1 and, where the tower takes it, patch dropout of 0.5, in float64: by how much
micro-batches of 1 and 2, two graphs kept, and recomputed activations change the gradient of a batch of 4. Batch norms
use their running statistics there. At most 1e-6, else the exit status is 1.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common  # noqa: F401  names a missing package

import tests.peers.torchvision_shim  # noqa: F401  before open_clip

import open_clip  # isort: skip
import timm  # isort: skip
import torch
import transformers
from torch import Tensor

from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.models.clip import build_model, count_parameters
from clip_train.models.config import AnyArchitecture, load_architecture, preset_names
from clip_train.step import train_step, two_pass
from clip_train.task import Batch, Context
from tests.toy import columns_of

CREATE = timm.create_model
TEXTS = {  # what Hugging Face's hub would say of a text tower, with few layers
    "roberta": transformers.RobertaConfig(
        vocab_size=50265, num_hidden_layers=2, attention_probs_dropout_prob=0.0
    ),
    "xlm-roberta": transformers.XLMRobertaConfig(
        vocab_size=50265, num_hidden_layers=2, attention_probs_dropout_prob=0.0
    ),
    "google/mt5": transformers.MT5Config(vocab_size=50265, num_layers=2, num_decoder_layers=1),
    "facebook/nllb": transformers.M2M100Config(
        vocab_size=50265,
        encoder_layers=2,
        decoder_layers=1,
        attention_dropout=0.0,
        encoder_layerdrop=0.0,
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


Small = tuple[AnyArchitecture, torch.nn.Module]


def build_small(
    name: str, create: Callable[..., torch.nn.Module], recomputed: bool = False, **vision: float
) -> Small:
    """With few blocks. create: in place of timm's. vision: further keys of `vision_cfg`."""
    prefix = "" if name in preset_names() and not vision else "open_clip:"
    config = open_clip.get_model_config(name)
    config["text_cfg"] |= {
        "layers": 2,
        "vocab_size": min(config["text_cfg"].get("vocab_size", 49408), 49408),
    }
    config["vision_cfg"] |= vision
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
    try:
        return architecture, build_model(architecture, activation_checkpointing=recomputed)
    finally:
        timm.create_model = CREATE


def batch_of(architecture: AnyArchitecture) -> Batch:
    side, length = architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    g = torch.Generator().manual_seed(0)
    columns = columns_of(
        torch.randint(0, 256, (4, 3, side, side), dtype=torch.uint8, generator=g),
        # the least vocabulary has more
        torch.randint(1, 30000, (4, length), generator=g),
        torch.arange(4),
        keys=[*"abcd"],
    )
    return Batch(columns)


def row(name: str, create: Callable[..., torch.nn.Module] = shallow) -> str:
    """A line of Markdown. create: in place of timm's."""
    prefix, whose = ("", "native") if name in preset_names() else ("open_clip:", "OpenCLIP's")
    try:
        count = count_parameters(load_architecture(prefix + name))
        architecture, model = build_small(name, create)
    except UserError as e:
        return f"| {name} | {whose} | refused: {str(e).partition(': ')[2][:160] or str(e)[:160]} |"
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), 1e-3))
    objective = InfoNCE() if architecture.init_logit_bias is None else SigmoidLoss()
    try:
        two = [
            train_step(
                engine, batch_of(architecture), objective, micro_size=1, kept_graphs=1, lr=1e-3
            )
            for _ in range(2)
        ]
    except RuntimeError:  # a trunk whose parts do not fit any more
        if create is CREATE:
            raise
        return row(name, CREATE)
    assert all(each.grad_norm > 0 for each in two)
    return f"| {name} | {whose} | {count / 1e6:,.0f} M parameters; losses {two[0].loss:.3f}, {two[1].loss:.3f} |"


PATCHES, DROPS = {"patch_dropout": 0.5}, {"timm_drop": 0.1, "timm_drop_path": 0.1}


def random_row(name: str) -> str:
    """A line of Markdown: the largest change of the gradient, relative."""
    is_timm = "timm_model_name" in open_clip.get_model_config(name)["vision_cfg"]
    error: Exception | None = None
    for vision in [DROPS | PATCHES, DROPS, {}] if is_timm else [PATCHES, {}]:
        for create in (shallow, CREATE):
            try:
                whole, *others = gradients(name, create, vision)
            except (UserError, RuntimeError) as e:
                error = e
                continue
            worst = max(((each - whole).norm() / whole.norm()).item() for each in others)
            outcome = "MISSED" if worst > 1e-6 else f"{worst:.0e}"
            return f"| {name} | {', '.join(vision) or 'its own'} | {outcome} |"
    return f"| {name} | refused | {str(error)[:200]} |"


def gradients(
    name: str, create: Callable[..., torch.nn.Module], vision: dict[str, float]
) -> Iterator[Tensor]:
    """Of one micro-batch of 4, of four, of two with both graphs, and of these with recomputation."""
    for micro_size, kept, recomputed in ((4, 1, False), (1, 1, False), (2, 2, False), (2, 2, True)):
        try:
            architecture, model = build_small(name, create, recomputed, **vision)
        except UserError:
            if recomputed:  # a tower that cannot
                continue
            raise
        engine = PlainEngine(model.double(), torch.optim.SGD(model.parameters(), 1e-3))
        engine.train()
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.eval()
        objective = InfoNCE() if architecture.init_logit_bias is None else SigmoidLoss()
        micro_batches = batch_of(architecture).micro_batches(micro_size)
        two_pass(engine, micro_batches, objective, Context(), kept_graphs=kept)
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        yield torch.cat(found)


if __name__ == "__main__":
    transformers.AutoConfig.from_pretrained = text_config
    options = {each for each in sys.argv[1:] if each.startswith("--")}
    given = [each for each in sys.argv[1:] if each not in options]
    names = given or open_clip.list_models()
    if not given and "--all" not in options:
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
        line = random_row(each) if "--random" in options else row(each)
        whose = "" if "--random" in options else line.split(" | ")[1]
        outcome = "refused" if "| refused" in line else "missed" if "MISSED" in line else "trained"
        outcomes[f"{whose} {outcome}".strip()] += 1
        print(line, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    sys.exit(int(outcomes["missed"] > 0))
