"""Longer texts for a SigLIP: captions of 200 words whose end decides (in `.venv-peers`; 5 CPU minutes).

An image has one color above another. A short caption is a clause of 5 words that names both. A long one has 40 such
clauses, and only the last one is true. A SigLIP of transformers with 64 positions learns the short captions. It is then
fine-tuned on both kinds, with a locked image tower: as it is, which cuts captions to 64 tokens, and with 256 positions,
by each value of `model.keep_positions`. R@1 is the mean of both directions over 144 images, one for each pair of colors
(chance 0.007), and the mean over the seeds; `before` is with the weights as they come in.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads cost more than they give

import numpy as np
import torch
import transformers
from common import ROOT, finish, parser
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.data.tar import write_shards
from launcher.cli.main import main as clip_train

RECIPE = str(ROOT / "benchmarks/long_texts.yaml")
COLORS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 215, 40),
    "purple": (150, 60, 190), "orange": (245, 140, 30), "black": (25, 25, 25),
    "white": (245, 245, 245), "gray": (128, 128, 128), "pink": (250, 170, 190),
    "brown": (120, 75, 40), "cyan": (120, 220, 230),
}  # fmt: skip
PAIRS = [(upper, lower) for upper in COLORS for lower in COLORS]
CLAUSE = "there is {} above {}"  # 5 words
CLAUSES = 40  # of a long caption: 200 words
SHORT, LONG = 64, 256  # positions
LONGER = f"model.context_length={LONG}"
# The rows -> their keys.
VARIANTS = {
    f"{SHORT}: the end is cut off": [],
    f"{LONG}, 0 (interpolated)": [LONGER],
    f"{LONG}, 20": [LONGER, "model.keep_positions=20"],
    f"{LONG}, all": [LONGER, "model.keep_positions=all"],
    f"{LONG}, all_but_last": [LONGER, "model.keep_positions=all_but_last"],
}
TARGETS = {"longer": "with 256 positions, the long captions find their images; with 64 they cannot"}


def caption(pair: tuple[str, str], clauses: int, rng: random.Random) -> str:
    """The last clause is true."""
    said = [*rng.choices(PAIRS, k=clauses - 1), pair]
    return " ".join(CLAUSE.format(*each) for each in said)


def picture(pair: tuple[str, str], rng: np.random.Generator) -> bytes:
    halves = [np.tile(np.array(COLORS[color], float), (16, 32, 1)) for color in pair]
    pixels = np.concatenate(halves) + rng.normal(0, 12, (32, 32, 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def samples(pairs: list[tuple[str, str]], clauses: int, seed: int) -> Iterator[dict[str, Any]]:
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    for number, pair in enumerate(pairs):
        text = caption(pair, clauses, rng)
        yield {"__key__": f"{number:06d}", "png": picture(pair, noise), "txt": text}


def write_data(folder: Path, images: int) -> None:
    """`short` and `long`, each with shards to train on and one of every pair to evaluate."""
    pairs = random.Random(0).choices(PAIRS, k=images)
    for name, clauses in (("short", 1), ("long", CLAUSES)):
        write_shards(folder / name / "train", samples(pairs, clauses, 1), 1000)
        write_shards(folder / name / "val", samples(PAIRS, clauses, 2), 1000)


def save_siglip(folder: Path, seed: int) -> None:
    """As transformers saves one: random weights, a tokenizer of whole words, padded on the right."""
    words = ["<pad>", "<eos>", "<unk>", *CLAUSE.format("", "").split(), *COLORS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", vocabulary["<eos>"])]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        model_max_length=SHORT, padding_side="right",
    ).save_pretrained(folder)  # fmt: skip
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    text = {"vocab_size": len(words), "max_position_embeddings": SHORT, "projection_size": 64}
    config = transformers.SiglipConfig(
        vision_config={**sizes, "image_size": 32, "patch_size": 16}, text_config={**sizes, **text}
    )
    torch.manual_seed(seed)
    model = transformers.SiglipModel(config)
    model.logit_scale.data.fill_(math.log(10))  # as SigLIP starts; transformers has zeros
    model.logit_bias.data.fill_(-10)
    model.save_pretrained(folder)
    side = {"height": 32, "width": 32}
    transformers.SiglipImageProcessor(size=side, resample=2, do_convert_rgb=True).save_pretrained(
        folder
    )


def run(verb: str, *line: str) -> str:
    """What the command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = clip_train([verb, RECIPE, *line, "--quiet"])
    if status != 0:
        raise RuntimeError(f"clip-train {verb} {' '.join(line)} ended with {status}")
    return printed.getvalue()


def scores(line: str) -> tuple[float, float]:
    """R@1 on the long captions and on the short ones, means of both directions."""
    values = json.loads(line)
    return tuple(
        statistics.mean(values[f"{name}/{way}_R@1"] for way in ("image_to_text", "text_to_image"))
        for name in ("long", "short")
    )


def main() -> int:
    command = parser(__doc__ or "")
    command.add_argument("--seeds", type=int, default=2)
    args = command.parse_args()
    seeds, base_steps, steps = (1, 30, 25) if args.quick else (args.seeds, 300, 100)
    before: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    after: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, 3000)
        long, short = f"{folder}/long", f"{folder}/short"
        both = [f"data.train={long}/train/*.tar::{short}/train/*.tar", "data.train_weights=[1, 1]"]
        for seed in range(seeds):
            save_siglip(folder / f"random-{seed}", seed)
            base = folder / f"base-{seed}"
            keys = [
                f"run.seed={seed}",
                f"data.val={{long: {long}/val/*.tar, short: {short}/val/*.tar}}",
            ]
            weights = f"model.init_from={folder}/random-{seed}"
            data = f"data.train={short}/train/*.tar"
            run("train", *keys, data, weights, f"run.dir={base}", f"run.steps={base_steps}")
            export = f"{base}-export"
            clip_train(["export", str(base), "--format", "transformers", "--output", export])
            keys += [*both, f"model.init_from={export}"]
            for number, (variant, more) in enumerate(VARIANTS.items()):
                place = folder / f"{number}-{seed}"
                before[variant].append(
                    scores(run("evaluate", *keys, *more, "--weights", export, "--json"))
                )
                run(
                    "train",
                    *keys,
                    *more,
                    f"run.dir={place}",
                    f"run.steps={steps}",
                    "model.lock_image=true",
                )
                last = (place / "eval.jsonl").read_text().splitlines()[-1]
                after[variant].append(scores(last))
                print(variant, seed, before[variant][-1], after[variant][-1], file=sys.stderr)
    rows = []
    for variant in VARIANTS:
        row: dict[str, Any] = {"model.context_length, model.keep_positions": variant}
        for when, figures in (("before", before[variant]), ("after", after[variant])):
            for texts, values in zip(("long", "short"), zip(*figures, strict=True), strict=True):
                row[f"{texts}, {when}"] = round(statistics.mean(values), 3)
        rows.append(row)
    missed = [] if args.quick else check(rows)
    return finish("longer texts of a SigLIP, R@1", rows, TARGETS, missed, args)


def check(rows: list[dict[str, Any]]) -> list[str]:
    cut, *longer = rows
    worst = min(row["long, after"] for row in longer)
    if cut["long, after"] < 0.05 and worst > 10 * cut["long, after"]:
        return []
    return [f"longer: {worst} with {LONG} positions, {cut['long, after']} with {SHORT}"]


if __name__ == "__main__":
    sys.exit(main())
