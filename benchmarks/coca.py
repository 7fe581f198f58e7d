"""A tiny CoCa that learns to name shapes, exported and asked by OpenCLIP (`make peers`; 10 minutes on a CPU).

It trains on the demo's shapes with both losses, then writes captions of 608 images. Training has not seen their
combinations of size, colour, shape and background. This project writes captions from the run, OpenCLIP's `generate`
from the export. An attribute is right if the caption has its word and no other word for it. The vocabulary is that of
the captions.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
from common import finish, parser
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_tools.demo import BACKGROUNDS, COLORS, RECIPES, SHAPES, SIZES, TEMPLATES, shapes
from clip_tools.embed import load
from clip_tools.verbs.caption import CAPTIONED
from clip_train.data.images import to_square
from clip_train.data.pixels import decode_image
from launcher.cli.main import main as clip_train

ATTRIBUTES: dict[str, Any] = {
    "size": SIZES,
    "color": COLORS,
    "shape": SHAPES,
    "background": BACKGROUNDS,
}
START, END = 1, 2
TARGETS = {"captions": "OpenCLIP writes the same from the export"}
OVERRIDES = {
    "batch.global_size": 128, "batch.micro_size": 64, "batch.kept_graphs": 1, "engine.kind": "fsdp",
    "log.tensorboard": "false", "data.workers": 1,
}  # fmt: skip


def words() -> list[str]:
    fixed = " ".join(template.format("", "", "", "") for template in TEMPLATES)
    known = {
        *fixed.replace(",", " , ").split(),
        *(word for of in ATTRIBUTES.values() for word in of),
    }
    return ["<pad>", "<start>", "<end>", "<unknown>", *sorted(known)]


def save_tokenizer(folder: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(words())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", START), ("<end>", END)]
    )
    special = {
        "pad_token": "<pad>",
        "unk_token": "<unknown>",
        "bos_token": "<start>",
        "eos_token": "<end>",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def save_model(file: Path, tokenizer: Path) -> None:
    text = {"context_length": 18, "vocab_size": len(words()), "width": 64, "heads": 2, "layers": 2}
    vision = {"image_size": 32, "layers": 3, "width": 96, "head_width": 32, "patch_size": 8}
    pooler = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 8}
    model = {
        "embed_dim": 64,
        "custom_text": True,
        "vision_cfg": {**vision, **pooler, "output_tokens": True},
        "text_cfg": {
            **text,
            "embed_cls": True,
            "output_tokens": True,
            "hf_tokenizer_name": str(tokenizer),
        },
        "multimodal_cfg": {**text, "attn_pooler_heads": 2},
    }
    file.write_text(json.dumps(model, indent=1))


def unseen(shards: str) -> tuple[list[torch.Tensor], list[dict[str, str]]]:
    """Images, and the words that their captions should have."""
    images, truth = [], []
    for shard in sorted(Path(shards).parent.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                if member.name.endswith(".jpg"):
                    images.append(decode_image(content.read()))
                elif member.name.endswith(".json"):
                    truth.append(json.load(content))
    return images, truth


def by_openclip(export: Path, images: torch.Tensor) -> list[str]:
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{export}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{export}")
    mean, std = (
        torch.tensor(each).view(3, 1, 1)
        for each in (preprocess.transforms[-1].mean, preprocess.transforms[-1].std)
    )
    out = []
    for part in images.split(CAPTIONED):
        tokens = model.eval().generate(
            (part / 255 - mean) / std, seq_len=18, max_seq_len=18, generation_type="top_k", top_k=1,
            sot_token_id=START, eos_token_id=END,
        )  # fmt: skip
        out += tokenizer.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [caption.strip() for caption in out]


def shares(captions: list[str], truth: list[dict[str, str]]) -> dict[str, float]:
    right = {name: [] for name in (*ATTRIBUTES, "shape and colour", "all four")}
    for caption, attributes in zip(captions, truth, strict=True):
        said = set(caption.replace(",", " ").split())
        held = {name: said & set(of) == {attributes[name]} for name, of in ATTRIBUTES.items()}
        for name, holds in held.items():
            right[name].append(holds)
        right["shape and colour"].append(held["shape"] and held["color"])
        right["all four"].append(all(held.values()))
    return {name: sum(each) / len(each) for name, each in right.items()}


def main() -> int:
    command = parser(__doc__ or "")
    command.add_argument("--dir", type=Path, default=Path("runs/coca"))
    command.add_argument("--steps", type=int, default=900)
    args = command.parse_args()
    folder = args.dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = shapes(folder / "shapes")
    save_tokenizer(folder / "words")
    save_model(folder / "coca.json", folder / "words")
    keys = OVERRIDES | {
        "run.dir": folder / "run", "run.steps": args.steps, "model.name": f"open_clip:{folder}/coca.json",
        "data.train": data.train, "data.val": data.val, "evaluate.zero_shot_classes": data.classes,
    }  # fmt: skip
    recipe = str(RECIPES / "demo_shapes.yaml")
    said = [f"{name}={value}" for name, value in keys.items()]
    if clip_train(["train", recipe, *said]) or clip_train(["export", str(folder / "run")]):
        return 1
    export = folder / "run" / "export"
    save_tokenizer(export)  # where OpenCLIP looks for it
    pixels, truth = unseen(data.val)
    clip = load(str(folder / "run"))
    images = torch.stack([to_square(image, clip.image_size) for image in pixels])
    ours = [caption for part in images.split(CAPTIONED) for caption in clip.captions(part)]
    theirs = by_openclip(export, images)
    table = [
        {"captions by": name, "images": len(truth), **shares(captions, truth)}
        for name, captions in (("clip-train caption", ours), ("OpenCLIP, from the export", theirs))
    ]
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"such as {ours[0]!r} of {truth[0]['classname']!r}")
    missed = [] if same == len(ours) else [f"{same} of {len(ours)} captions are the same"]
    return finish("a CoCa's captions", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
