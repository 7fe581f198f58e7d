"""Randomness of OpenCLIP's towers belongs to the sample: another micro-batch draws the same masks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_tools.embed import load
from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.models.clip import build_model
from clip_train.models.config import load_architecture
from clip_train.models.weights import export_openclip
from clip_train.recipe.recipe import check_config
from clip_train.recipe.resolve import resolve
from clip_train.step import two_pass
from clip_train.task import Batch, Context
from tests.peers.test_openclip_models import MODELS, architecture_of, inputs, model_of
from tests.toy import columns_of

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
transformers = pytest.importorskip("transformers")

DROPS: dict[str, dict[str, Any]] = {
    "siglip": {"timm_drop": 0.1, "timm_drop_path": 0.2, "patch_dropout": 0.5},
    "convnext": {"timm_drop": 0.1, "timm_drop_path": 0.2},
    "coca": {"patch_dropout": 0.5},
}
SIZES = {"vocab_size": 49408, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
BERT = transformers.RobertaConfig(**SIZES, num_hidden_layers=2, attention_probs_dropout_prob=0.0)
T5 = transformers.MT5Config(
    vocab_size=49408, d_model=32, d_kv=16, d_ff=64, num_heads=2, num_layers=2, num_decoder_layers=1
)
NLLB = transformers.M2M100Config(
    vocab_size=49408, d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
    decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=64, attention_dropout=0.0,
    encoder_layerdrop=0.0,
)  # fmt: skip


def with_text_tower(config: Any, folder: Path, monkeypatch: Any) -> Any:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, **_: config)
    text = {"hf_model_name": config.model_type, "context_length": 16}
    text |= {"hf_pooler_type": "mean_pooler", "hf_proj_type": "linear"}
    (folder / "model.json").write_text(json.dumps({**MODELS["convnext"], "text_cfg": text}))
    return load_architecture(f"open_clip:{folder / 'model.json'}")


def gradients(architecture: Any, *, recomputed: bool = False) -> list[torch.Tensor]:
    """Of the same batch in one micro-batch, in eight, and in four of which two keep their graphs."""
    model = model_of(architecture, activation_checkpointing=recomputed)
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), 1.0))
    loss = InfoNCE() if model.logit_bias is None else SigmoidLoss()
    out = []
    for micro_size, kept in ((8, 1), (1, 1), (2, 2)):
        model.zero_grad()
        batch = Batch(columns_of(*inputs(architecture)))
        torch.manual_seed(micro_size)  # nothing may come from torch's generator
        two_pass(engine, batch.micro_batches(micro_size), loss, Context(), kept_graphs=kept)
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        out.append(torch.cat(found))
    return out


def check(architecture: Any, *, of_text: bool = False) -> None:
    whole, *cut = gradients(architecture)
    for each in (*cut, *gradients(architecture, recomputed=True)):
        assert (each - whole).norm() <= 1e-9 * whole.norm()
    model = model_of(architecture)
    images, texts, seeds = inputs(architecture)
    first, again, other = (model(images, texts, seeds + s)[of_text] for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.allclose(first, other)  # it does draw


@pytest.mark.parametrize("name", DROPS)
def test_micro_batches_draw_what_the_whole_batch_draws(name: str, tmp_path: Path):
    check(architecture_of(name, tmp_path, **DROPS[name]))


@pytest.mark.parametrize("config", [BERT, T5, NLLB], ids=lambda config: config.model_type)
def test_so_do_text_towers_of_hugging_face(config: Any, tmp_path: Path, monkeypatch):
    architecture = with_text_tower(config, tmp_path, monkeypatch)
    check(architecture, of_text=True)


def test_dropout_has_the_right_rate_and_keeps_the_mean(tmp_path: Path):
    from clip_train.models.dropout import draw_by
    from clip_train.models.openclip.dropout import SeededDropPath, seed_modules

    path, plain = SeededDropPath.__mro__[1](0.25), torch.nn.Dropout(0.25)
    both = torch.nn.ModuleList([path, plain]).train()
    seed_modules(both)
    draw_by(torch.arange(4000))
    rows = path(torch.ones(8000, 3))  # two rows of each sample, as the windows of an image
    assert rows.unique().tolist() == [0.0, pytest.approx(4 / 3, rel=1e-4)]
    assert (rows == rows[:, :1]).all()
    assert (rows == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert plain(torch.ones(4000, 50)).mean().item() == pytest.approx(1.0, abs=0.01)


def training_error(architecture: Any) -> str:
    """The message for a recipe that trains this model."""
    sections = {
        "data": {"train": "x.tar"},
        "batch": {"global_size": 8},
        "run": {"dir": "run", "steps": 9999},
        "model": {"name": f"open_clip:{architecture.open_clip}"},
    }
    with pytest.raises(UserError) as error:
        resolve(check_config(sections, "r"), 1, read_data=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (BERT, "attention_probs_dropout_prob", 0.1),
        (NLLB, "attention_dropout", 0.1),
        (NLLB, "encoder_layerdrop", 0.5),
    ],
)
def test_attention_dropout_and_layer_drop_are_refused_in_training_only(
    config: Any, key: str, value: float, tmp_path: Path, monkeypatch
):
    config = type(config)(**{**config.to_dict(), key: value})
    architecture = with_text_tower(config, tmp_path, monkeypatch)
    message = training_error(architecture)
    assert f"has {key} ({value}) in its config.json" in message
    assert f"set {key} to 0 in a copy of that file" in message
    model = build_model(architecture)
    export_openclip(model.state_dict(), architecture, tmp_path / "out")
    images, texts, seeds = inputs(architecture)
    loaded = load(str(tmp_path / "out"))  # as `evaluate` and `embed` do
    assert torch.equal(loaded.model(None, texts)[1], loaded.model(None, texts, seeds)[1])


def test_a_tower_that_draws_otherwise_is_refused_by_name(tmp_path: Path, monkeypatch):
    import timm.models.vision_transformer as vit

    def noisy(self: Any, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        return plain(self, x, *more, **named) + torch.rand(len(x), 1, 1, device=x.device)

    plain = vit.Block.forward
    monkeypatch.setattr(vit.Block, "forward", noisy)
    architecture = architecture_of("siglip", tmp_path)
    message = training_error(architecture)
    assert re.search(r"visual\.trunk\.blocks\.\d+ draws .* by aten::rand", message), message
    build_model(architecture)
