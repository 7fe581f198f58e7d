"""From transformers to here and back: features, pixels and ids, on random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tests.peers.torchvision_shim  # noqa: F401  before transformers
from clip_tools.exports import check_openclip, export_transformers
from clip_train.data.images import to_square
from clip_train.data.pixels import decode_image
from clip_train.errors import UserError
from clip_train.models.clip import build_model
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.weights import export_openclip, initial_weights, load_openclip
from clip_train.recipe.tokenizer import tokenizer_of

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip(
    "transformers", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
EXACT = {"rtol": 0.0, "atol": 1e-12}
TEXTS = ["a photo of a cat", "two dogs, 1999's best!", "x", "a " * 40, "Red  circle on\nblue", ""]


def started(folder: Path) -> Any:
    """The model here, from the folder alone, in float64."""
    config = ModelConfig(init_from=str(folder))
    assert config.name == str(folder)
    model = build_model(config.architecture()).double().eval()
    model.load_state_dict(dict(initial_weights(config, seed=0).whole()))
    return model


def features_of(theirs: Any, pixels: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        out = theirs(pixel_values=pixels, input_ids=ids)
    return [out.image_embeds, out.text_embeds, out.logits_per_image]


def ours(model: Any, images: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        image, text, scale, bias = model(images, ids)[:4]
    logits = scale * image @ text.T
    return [image, text, logits if bias is None else logits + bias]


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    small = [rng.integers(0, 256, (5, 7, 3), dtype=np.uint8) for _ in range(4)]
    sizes = [(90, 40), (32, 32), (31, 200), (300, 301)]
    return [Image.fromarray(a).resize(s) for a, s in zip(small, sizes, strict=True)]


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu"])
def test_siglip_comes_in_and_goes_out_exactly(tmp_path: Path, act: str):
    from tests.peers.siglip import save_siglip

    theirs = save_siglip(tmp_path / "theirs", hidden_act=act)
    model = started(tmp_path / "theirs")
    architecture = model.architecture
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    pixels = (images.double() / 255 - 0.5) / 0.5
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "theirs")
    ids = tokenizer_of(architecture)(TEXTS)
    expected = features_of(theirs, pixels, ids)
    for mine, other in zip(ours(model, images, ids), expected, strict=True):
        torch.testing.assert_close(mine, other, **EXACT)
    out = export_transformers(model.state_dict(), architecture, tmp_path / "out")
    again, info = transformers.SiglipModel.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in again.state_dict().items():  # exports are float32
        assert torch.equal(tensor, theirs.state_dict()[name].float()), name
    assert again.config.vision_config.hidden_act == act
    back = transformers.AutoProcessor.from_pretrained(out)
    for each in (processor, back):
        both = each(
            text=TEXTS,
            images=pictures(),
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        assert torch.equal(both["input_ids"], ids)
        for picture, found in zip(pictures(), both["pixel_values"], strict=True):
            square = to_square(decode_image(picture), 32, architecture.resize)
            assert abs((found * 0.5 + 0.5) * 255 - square).max() <= 2.001
    twice = started(out)
    assert twice.architecture.resize == architecture.resize
    for name, tensor in twice.state_dict().items():
        assert torch.equal(tensor.float(), model.state_dict()[name].float()), name


@pytest.mark.parametrize("keep", ["all", "all_but_last", 4, 0])
def test_siglip_reads_longer_texts_here_and_in_transformers(tmp_path: Path, keep: Any):
    """The pooled row is the last one of the longer table; features and ids equal transformers'."""
    from tests.peers.siglip import CONTEXT, save_siglip

    theirs, said = save_siglip(tmp_path / "theirs"), []
    name, longer = "text.positional_embedding", 3 * CONTEXT
    old = theirs.text_model.embeddings.position_embedding.weight.detach().float()
    keys = {"context_length": longer, "keep_positions": keep}
    config = ModelConfig(init_from=str(tmp_path / "theirs"), **keys)
    model = build_model(config.architecture()).double().eval()
    model.load_state_dict(dict(initial_weights(config, 0, said.append).whole()))
    new = model.state_dict()[name].float()
    assert new.shape == (longer, 32)
    first = {"all": CONTEXT, "all_but_last": CONTEXT - 1}.get(keep, keep)
    assert torch.equal(new[:first], old[:first])
    assert torch.equal(new[-1], old[-1]) == (keep != "all")
    words = {
        "all": "stay in their places, 32 are drawn behind them; texts are read at the last",
        "all_but_last": "32 are drawn before the last one, where texts are read",
        4: "to 48 tokens, the first 4 and the last as they are",
        0: "the text's from 16 to 48 tokens",
    }
    assert any(words[keep] in line for line in said), said
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    ids = tokenizer_of(model.architecture)(TEXTS)
    assert ids.shape == (6, longer)
    out = export_transformers(model.state_dict(), model.architecture, tmp_path / "out")
    peer = transformers.SiglipModel.from_pretrained(out).double().eval()
    processor = transformers.AutoProcessor.from_pretrained(out)
    both = processor(text=TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    assert torch.equal(both["input_ids"], ids)
    expected = features_of(peer, (images.double() / 255 - 0.5) / 0.5, ids)
    again = started(out)
    assert again.architecture.text_cfg.context_length == longer
    for mine, other in zip(ours(again, images, ids), expected, strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


def test_siglip_keeps_its_activation_through_openclips_layout(tmp_path: Path):
    from tests.peers.siglip import save_siglip

    save_siglip(tmp_path / "theirs")
    model = started(tmp_path / "theirs")
    architecture = model.architecture
    folder = export_openclip(model.state_dict(), architecture, tmp_path / "export")
    content = json.loads((folder / "open_clip_config.json").read_text())
    assert "timm_model_args" not in content["model_cfg"]["vision_cfg"]
    assert content["preprocess_cfg"]["resize_mode"] == "squash"
    again = load_architecture(f"open_clip:{folder}")
    assert again.model_copy(update={"open_clip": architecture.open_clip}) == architecture
    state = load_openclip(folder, again)
    assert all(
        torch.equal(t, state[n].double().to(t)) or torch.equal(t.float(), state[n])
        for n, t in model.state_dict().items()
    )
    with pytest.raises(UserError, match=r"no image tower with the sizes.*--format transformers"):
        check_openclip(architecture, print)


def test_clip_comes_in_and_goes_out_exactly(tmp_path: Path):
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    torch.manual_seed(0)
    for act in ("quick_gelu", "gelu"):
        config = transformers.CLIPConfig(
            text_config={**sizes, "hidden_act": act, "max_position_embeddings": 16,
                         "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407},
            vision_config={**sizes, "hidden_act": act, "image_size": 32, "patch_size": 8},
            projection_dim=24,
        )  # fmt: skip
        theirs = transformers.CLIPModel(config).double().eval()
        for p in theirs.parameters():
            p.data.add_(0.05 * torch.randn_like(p))
        folder = tmp_path / act
        theirs.save_pretrained(folder)
        transformers.CLIPImageProcessor(
            size={"height": 32, "width": 32}, do_center_crop=False, image_mean=[0.5] * 3
        ).save_pretrained(folder)
        model = started(folder)
        assert model.architecture.resize_mode == "squash"
        assert model.architecture.image_mean == (0.5,) * 3
        images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
        std = torch.tensor(model.architecture.image_std, dtype=torch.float64)[:, None, None]
        ids = tokenizer_of(model.architecture)(TEXTS)
        pixels = (images / 255 - 0.5) / std.float()
        expected = features_of(theirs.float(), pixels, ids)  # its mask overflows in float64
        for mine, other in zip(ours(model.float(), images, ids), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
        out = export_transformers(model.state_dict(), model.architecture, tmp_path / f"{act}-out")
        again = transformers.CLIPModel.from_pretrained(out)
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name].float()), name
        processor = transformers.AutoImageProcessor.from_pretrained(out)
        for picture in pictures():
            found = processor(picture, return_tensors="np")["pixel_values"][0]
            square = to_square(decode_image(picture), 32, model.architecture.resize).numpy()
            assert abs((found * std.numpy() + 0.5) * 255 - square).max() <= 2.001


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"config.json": {"model_type": "siglip2", "vision_config": {"num_patches": 250}}},
            "num_patches .250.*only a square number",
        ),
        (
            {
                "config.json": {"model_type": "siglip2"},
                "preprocessor_config.json": {
                    "max_num_patches": 256,
                    "image_mean": 0.5,
                    "resample": 0,
                },
            },
            "resample 0",
        ),
        ({"config.json": {"model_type": "bert"}}, "a model of transformers of the type bert"),
        (
            {"config.json": {"model_type": "siglip", "vision_config": {"layer_norm_eps": 1e-5}}},
            "vision_config.layer_norm_eps .1e-05",
        ),
        (
            {
                "config.json": {"model_type": "clip"},
                "preprocessor_config.json": {"size": {"shortest_edge": 256}, "crop_size": 224},
            },
            "only a resize of both sides",
        ),
    ],
)
def test_what_cannot_be_built_exactly_is_refused(tmp_path: Path, changes: Any, words: str):
    for name, content in changes.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        load_architecture(str(tmp_path))


COMMAND = (
    "import sys, tests.peers.torchvision_shim; from launcher.cli.main import main; "
    "sys.exit(main(sys.argv[1:]))"
)


def command(*line: str) -> tuple[int, str]:
    """`clip-train` in a process of its own, beside this torchvision: its status, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *line],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_recipe_of_siglip_2_trains_and_exports(tmp_path: Path):
    """On a small model of the same layout: in full, with a locked image tower, and with adapters."""
    from tests.data.shards import write_dataset
    from tests.peers.siglip import save_siglip

    theirs = save_siglip(tmp_path / "theirs").float()
    theirs.save_pretrained(tmp_path / "theirs")  # as the hub's, in float32
    train = write_dataset(tmp_path / "data", [40, 24])
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "siglip2_finetune.yaml"
    keys = (
        f"model.init_from={tmp_path / 'theirs'}", f"data.train={train}", f"data.val={train}",
        "run.steps=2", "schedule.warmup_steps=0", "batch.global_size=16", "batch.micro_size=8",
        "evaluate.every_steps=2", "engine.kind=fsdp", "engine.precision=fp32", "data.workers=0",
        "log.tensorboard=false",
    )  # fmt: skip
    kinds = {
        "full": (),
        "locked": ("model.lock_image=true",),
        "lora": ("model.lora={rank: 2, alpha: 4}", "optim.lr=1e-3"),
    }
    for name, more in kinds.items():
        line = (*keys, *more, f"run.dir={tmp_path / name}")
        status, out = command("train", str(recipe), *line)
        assert status == 0, out
        assert "evaluation resizes images by squash, bilinear" in out
        folder = tmp_path / f"{name}-export"
        format_ = ("--format", "transformers", "--output", str(folder))
        status, out = command("export", str(recipe), *line, *format_)
        assert status == 0 and "transformers.SiglipModel.from_pretrained" in out, out
        peer, info = transformers.SiglipModel.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        changed = {
            key
            for key, t in peer.state_dict().items()
            if not torch.equal(t, theirs.state_dict()[key])
        }
        assert changed and any(key.startswith("text_model.") for key in changed)
        assert any(key.startswith("vision_model.") for key in changed) == (name != "locked")
        assert ("vision_model.head.attention.in_proj_weight" in changed) == (name != "locked")
        from clip_tools.embed import load

        here = load(str(folder))
        processor = transformers.AutoProcessor.from_pretrained(folder)
        both = processor(
            text=TEXTS,
            images=pictures(),
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            found = peer.eval()(pixel_values=both["pixel_values"], input_ids=both["input_ids"])
        torch.testing.assert_close(here.texts(TEXTS), found.text_embeds, rtol=0, atol=1e-5)
        torch.testing.assert_close(here.images(pictures()), found.image_embeds, rtol=0, atol=5e-3)


def test_the_recipe_of_longer_texts_trains_and_exports(tmp_path: Path):
    """What so400m-long left as it was stays; positions behind the old ones are trained."""
    from tests.data.shards import write_dataset
    from tests.peers.siglip import CONTEXT, save_siglip

    theirs = save_siglip(tmp_path / "theirs").float()
    theirs.save_pretrained(tmp_path / "theirs")
    train = write_dataset(tmp_path / "data", [40, 24])
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "siglip2_long.yaml"
    line = (
        f"model.init_from={tmp_path / 'theirs'}", f"data.train={train}::{train}", "run.steps=2",
        f"data.val={{long: '{train}'}}", "batch.global_size=16", "batch.micro_size=8",
        "evaluate.every_steps=2", "engine.kind=fsdp", "engine.precision=fp32", "data.workers=0",
        "log.tensorboard=false", f"run.dir={tmp_path / 'run'}", "schedule.warmup_steps=0",
        "model.context_length=40", "data.lanes=4",
    )  # fmt: skip
    status, out = command("train", str(recipe), *line)
    assert status == 0, out
    assert "24 are drawn before the last one, where texts are read" in out
    folder = tmp_path / "export"
    format_ = ("--format", "transformers", "--output", str(folder))
    status, out = command("export", str(recipe), *line, *format_)
    assert status == 0, out
    peer, info = transformers.SiglipModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    before, after = theirs.state_dict(), peer.state_dict()
    name = "text_model.embeddings.position_embedding.weight"
    rows = after.pop(name)
    assert rows.shape == (40, 32)
    moved = (rows[[*range(CONTEXT - 1), -1]] - before.pop(name)).abs().amax(1)
    assert moved.min() > 0 and moved.max() < 2e-3  # two steps of 4e-4 and decay
    still = {key for key in after if torch.equal(after[key], before[key])}
    kept = ("vision_model.", "text_model.head.", "logit_")
    assert still == {key for key in after if key.startswith(kept)}
    processor = transformers.AutoProcessor.from_pretrained(folder)
    ids = processor(text=TEXTS, padding="max_length", truncation=True, return_tensors="pt")[
        "input_ids"
    ]
    assert ids.shape[1] == 40


def test_a_multilingual_sentencepiece_tokenizer_pads_as_trained(tmp_path: Path):
    """Like Gemma's of SigLIP 2: pieces with byte fallback, an end, padding behind it to the length."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    from tests.peers.siglip import CONTEXT, save_siglip

    texts = [
        "ein Foto einer Katze",
        "一只猫",
        "фото кошки",
        "a photo of a cat",
        "  two   Cats, 🐈 ",
    ]
    theirs = save_siglip(tmp_path / "theirs")
    pad, eos, bos, unk = special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = dict.fromkeys("".join(texts[:4]).replace(" ", "▁"))
    vocabulary = {piece: number for number, piece in enumerate([*special, *pieces, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=unk, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, 1)]
    )
    names = {"pad_token": pad, "eos_token": eos, "bos_token": bos, "unk_token": unk}
    transformers.GemmaTokenizerFast(
        tokenizer_object=tokenizer, **names, padding_side="right", add_bos_token=False,
        add_eos_token=True, model_max_length=10**30,
    ).save_pretrained(tmp_path / "theirs")  # fmt: skip
    architecture = load_architecture(str(tmp_path / "theirs"))
    ids = tokenizer_of(architecture)(texts)
    cat = [vocabulary[letter] for letter in "一只猫"]
    assert ids[1].tolist() == [*cat, 1, *[0] * (CONTEXT - 4)]
    cat_face = [vocabulary[f"<0x{byte:02X}>"] for byte in "🐈".encode()]
    long = tokenizer_of(architecture.model_copy(update={"text_cfg": architecture.text_cfg.model_copy(
        update={"context_length": 40})}))(texts)  # fmt: skip
    row = long[4].tolist()
    assert any(row[i : i + 4] == cat_face for i in range(36))
    assert (ids[:, -1] == 0).tolist() == [False, True, True, False, False]  # cut, or padded
    out = export_transformers(
        started(tmp_path / "theirs").state_dict(), architecture, tmp_path / "out"
    )
    for folder, length in ((tmp_path / "theirs", {"max_length": CONTEXT}), (out, {})):
        processor = transformers.AutoProcessor.from_pretrained(folder)
        both = processor(
            text=texts, padding="max_length", truncation=True, return_tensors="pt", **length
        )
        assert torch.equal(both["input_ids"], ids)
    assert theirs.config.text_config.max_position_embeddings == CONTEXT


ON_HUB = """
import json, sys, tests.peers.torchvision_shim
from clip_train.models.config import ModelConfig
from clip_train.models.hub import cached
from clip_train.models.weights import resize_of
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.recipe.weights import weights_here
from clip_train.storage.config import StorageConfig

config = ModelConfig(init_from="hf:me/siglip")
architecture = config.architecture()
before = cached(config.init_from)
with weights_here(config, StorageConfig()) as here:
    resize = resize_of(here)
ids = tokenizer_of(architecture)(["a photo of a cat"])[0].tolist()
print(json.dumps([config.name, architecture.vision_cfg.image_size, str(before), resize, ids]))
"""


def test_a_repository_of_the_hub_names_its_model(tmp_path: Path):
    from tests.peers.hub import Hub
    from tests.peers.siglip import save_siglip

    save_siglip(tmp_path / "theirs")
    with Hub() as hub:
        files = (tmp_path / "theirs").iterdir()
        hub.files = {("me/siglip", file.name): file.read_bytes() for file in files}
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        env.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", ON_HUB],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    name, size, before, resize, ids = json.loads(done.stdout.splitlines()[-1])
    assert (name, size, before) == ("hf:me/siglip", 32, "None")  # the weights come later
    assert resize == {"interpolation": "bilinear", "resize_mode": "squash"}
    assert (
        ids
        == tokenizer_of(load_architecture(str(tmp_path / "theirs")))(["a photo of a cat"])[
            0
        ].tolist()
    )
