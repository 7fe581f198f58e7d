"""Features of the same images and texts by one library: for scripts/newcomers_hour.py, which compares them.

    python scripts/features_of.py ours RECIPE INPUTS OUT.npy
    python scripts/features_of.py open_clip "open_clip.create_model_and_transforms('local-dir:...')" INPUTS OUT.npy
    python scripts/features_of.py transformers "transformers.CLIPModel.from_pretrained('...')" INPUTS OUT.npy

The last two take the line that `clip-train export` prints, and all else from the folder that it names. INPUTS holds
images (*.png, of the model's size) and texts.json. OUT: [2, n, D], normalised, images first.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
Features = tuple[torch.Tensor, torch.Tensor]


def ours(recipe: str, images: list[Any], texts: list[str]) -> Features:
    """From the run's newest checkpoint, not from an export."""
    from clip_tools.place import run_at
    from clip_train.data.tokenizer import Tokenizer
    from clip_train.engines.base import PlainEngine
    from clip_train.models.clip import build_model, parse_saved

    _, found = run_at(recipe, [])
    architecture = parse_saved(found.state["architecture"])
    model = build_model(architecture)
    PlainEngine(model).load_fragments(found.reader, {})
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(
        0, 3, 1, 2
    )  # uint8
    return model.eval()(pixels, Tokenizer(architecture.text_cfg.context_length)(texts))[:2]


def by_open_clip(line: str, images: list[Any], texts: list[str]) -> Features:
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip
    import open_clip  # isort: skip

    model, _, preprocess = eval(line, {"open_clip": open_clip})
    tokenizer = open_clip.get_tokenizer(named_in(line))
    return model.eval()(torch.stack([preprocess(image) for image in images]), tokenizer(texts))[:2]


def by_transformers(line: str, images: list[Any], texts: list[str]) -> Features:
    import tests.peers.torchvision_shim  # noqa: F401  before transformers
    import transformers  # isort: skip

    model, folder = eval(line, {"transformers": transformers}), named_in(line)
    pixels = transformers.CLIPImageProcessor.from_pretrained(folder)(images, return_tensors="pt")[
        "pixel_values"
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    found = model.eval()(pixel_values=pixels, **tokens)
    return found.image_embeds, found.text_embeds


def named_in(line: str) -> str:
    """What stands between the quotes."""
    return re.findall(r"'(.*)'", line)[0]


if __name__ == "__main__":
    kind, place, inputs, out = sys.argv[1:]
    files = sorted(Path(inputs).glob("*.png"))
    by = {"ours": ours, "open_clip": by_open_clip, "transformers": by_transformers}[kind]
    with torch.no_grad():
        image, text = by(
            place,
            [Image.open(file).convert("RGB") for file in files],
            json.loads((Path(inputs) / "texts.json").read_text()),
        )
    np.save(out, torch.nn.functional.normalize(torch.stack([image, text]), dim=-1).numpy())
