"""Dynamo's counters under every variation of a run.

`python -m tests.engine.graphs` prints the table of docs/engines.md. It needs OpenCLIP, timm and
transformers (scripts/setup_peers.sh).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from clip_train.engines.base import PlainEngine
from clip_train.engines.compile import compile_units, units
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP, build_model
from clip_train.models.config import AnyArchitecture, Architecture, load_architecture
from clip_train.native import blank_image, patch_counts
from clip_train.step import train_step
from clip_train.task import Batch, text_lengths
from tests.models.small import small_architecture
from tests.toy import columns_of

TEXT = {"context_length": 16, "vocab_size": 600, "width": 32, "heads": 2, "layers": 2}
VIT = {"image_size": 32, "layers": 3, "width": 64, "head_width": 32, "patch_size": 16}
TIMM = {"image_size": 32, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"}
HUGGING_FACE = {
    "model_type": "xlm-roberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 600, "max_position_embeddings": 40, "pad_token_id": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BLOCKS = {"open_clip: ViT": 5, "open_clip: timm": 8, "open_clip: Hugging Face": 5}


def openclip(name: str, folder: Path) -> AnyArchitecture:
    """One of `BLOCKS`, tiny; `folder` has its files as long as it is built."""
    (folder / "config.json").write_text(json.dumps(HUGGING_FACE))
    hugging_face = {
        "hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_proj_type": "mlp",
        "hf_pooler_type": "mean_pooler", "context_length": 16,
    }  # fmt: skip
    content = {
        "embed_dim": 64,
        "custom_text": not name.endswith("ViT"),
        "vision_cfg": TIMM if name.endswith("timm") else VIT,
        "text_cfg": hugging_face if name.endswith("Face") else TEXT,
    }
    (folder / "model.json").write_text(json.dumps(content))
    return load_architecture(f"open_clip:{folder}/model.json")


def batch_for(architecture: AnyArchitecture, n: int, longest: int, pack: bool = False) -> Batch:
    """Texts of at most `longest` tokens, which micro-batches cut if the tower allows it."""
    g, text = torch.Generator().manual_seed(n), architecture.text_cfg
    side = architecture.vision_cfg.image_size
    images = torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=g)
    last = min(text.context_length, 599)
    texts = torch.randint(5, 99, (n, last), generator=g)
    texts[:, longest - 1], texts[:, longest:] = 99, 0
    lengths = text_lengths(texts) if text.ends else None
    keys = [str(i) for i in range(n)]
    return Batch(
        columns_of(images, texts, torch.arange(n), keys, text_lengths=lengths), pack_texts=pack
    )


def count(model: Any, backend: str = "eager", pack: bool = False) -> dict[str, int]:
    """Graphs after each variation, all of them so far; frames that were given up; graph breaks."""
    architecture = model.architecture
    torch.compiler.reset()
    counters.clear()
    default = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(backend)
    compile_units(model)
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), 1e-3))
    graphs: dict[str, int] = {}

    def step(n: int, kept: int = 1, longest: int = 8) -> None:
        batch = batch_for(architecture, n, longest, pack)
        train_step(engine, batch, InfoNCE(), micro_size=4, kept_graphs=kept, lr=1e-3)

    def note(variation: str) -> None:
        graphs[variation] = counters["stats"]["unique_graphs"]

    try:
        step(8)
        note("a step")
        for longest in range(8, architecture.text_cfg.context_length + 1, 8):
            step(8, longest=longest)
        note("text lengths")
        for n in (11, 10, 9):  # a last micro-batch of 3, 2 and 1
            step(n)
            step(n, kept=3)
        note("last micro-batch")
        engine.train(False)
        with torch.no_grad():
            seen = batch_for(architecture, 6, 8)
            engine.encode("image", seen.images)
            engine.encode("text", seen.texts)
        note("evaluation")
        blocks = units(model)
        frozen = {"frozen image tower": [model.visual], "frozen blocks": [blocks[0], blocks[-1]]}
        for variation, modules in frozen.items():
            for module in modules:
                module.requires_grad_(False)
            step(8)
            model.requires_grad_(True)
            note(variation)
        frames = counters["frames"]
        given_up = frames["total"] - frames["ok"]
        return {**graphs, "fallbacks": given_up, "breaks": sum(counters["graph_break"].values())}
    finally:
        torch.compiler.set_default_backend(default)
        torch.compiler.reset()


def native_rows(model: CLIP, batch: Batch, step: int) -> Batch:
    """The batch with images of other shapes in each step."""
    size, n = model.architecture.vision_cfg.patch_size, len(batch)
    grids = [(1 + (i + step) % 5, 1 + (3 * i + step) % 5) for i in range(n)]
    images = torch.stack([blank_image(size, 25, grid) for grid in grids])
    return replace(
        batch, columns=batch.columns.plus(images=images, patch_counts=patch_counts(images))
    )


def growth(model: CLIP, pack: bool, is_native: bool = False) -> tuple[int, int]:
    """Graphs after ten steps and an evaluation, and after twenty more steps and another one.

    Each step has other text lengths, and some a shorter last micro-batch. is_native: and other
    sizes of images, cut by patches."""
    torch.compiler.reset()
    counters.clear()
    default = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    compile_units(model)
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), 1e-3))
    seen = []
    try:
        for step in range(30):
            n, longest = 8 + step % 4, 3 + 7 * step % 21
            batch = batch_for(model.architecture, n, longest, pack)
            if is_native:
                batch = native_rows(model, batch, step)
            train_step(
                engine,
                batch,
                InfoNCE(),
                micro_size=4,
                micro_tokens=40 if is_native else None,
                kept_graphs=1 + step % 3,
                lr=1e-3,
            )
            if step in (9, 29):
                engine.train(False)
                with torch.no_grad():
                    engine.encode("image", batch.images)
                    engine.encode("text", batch_for(model.architecture, 5 + step, 8).texts)
                engine.train(True)
                seen.append(counters["stats"]["unique_graphs"])
    finally:
        torch.compiler.set_default_backend(default)
        torch.compiler.reset()
    return seen[0], seen[1]


def native(dropout: float = 0.0) -> CLIP:
    text = {"context_length": 24, "vocab_size": 600, "width": 20, "heads": 2, "layers": 3}
    vision = {"image_size": 16, "layers": 3, "width": 32, "head_width": 16, "patch_size": 4}
    architecture = small_architecture(text_cfg=text, vision_cfg=vision)
    assert isinstance(architecture, Architecture)
    return CLIP(architecture, dropout=dropout)


def main() -> None:
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip

    rows = {
        f"native{text}{drawn}": count(native(0.1 if drawn else 0.0), pack=bool(text))
        for text in ("", ", packed texts")
        for drawn in ("", ", dropout")
    }
    with tempfile.TemporaryDirectory() as folder:
        rows |= {name: count(build_model(openclip(name, Path(folder)))) for name in BLOCKS}
    columns = [*rows["native"]]
    print(f"| model | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(str(row[column]) for column in columns)} |")


if __name__ == "__main__":
    main()
