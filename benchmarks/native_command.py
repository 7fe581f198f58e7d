"""What a whole run at native resolution costs: `clip-train train` beside OpenCLIP's own NaFlex command.

    git clone https://github.com/mlfoundations/open_clip OPENCLIP    # main branch: no release has NaFlex
    .venv-peers/bin/python benchmarks/native_command.py --openclip OPENCLIP/src [--quick]

Both read the same shards (drawn shapes in JPEGs with aspect ratios from 1:3 to 3:1) and train a CLIP whose image tower
has patches of 16 px, 6 blocks of width 192, and the same text tower, in fp32 by AdamW, with one loader worker and one
thread each. A quarter of the patches go to images of 64, 128 and 256 patches each, and a micro-batch (OpenCLIP: a
batch) has at most 4,096 patches.

- ours: this project's ViT at native resolution; its batch is 112 samples in micro-batches, all of whose graphs are kept
- ours, one graph kept: the same with the features of the other micro-batches computed twice
- ours, NaFlexVit: timm's, the tower that OpenCLIP trains, through `open_clip:`
- ours, squares: this project's ViT on squares of 176 px, 121 patches, beside the mean budget of 110
- OpenCLIP: its command with `--use-naflex`
- OpenCLIP, squares: its command on squares of 176 px, timm's ViT of the same size

Counted are the CPU seconds of all processes of a command. Each command runs for few and for more samples, and the
difference is divided by the difference of samples, which leaves out imports and the start. They take turns.
"""

from __future__ import annotations

import io
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command import OPENCLIP, cpu_seconds
from common import finish, parser

from clip_tools.demo import BACKGROUNDS, COLORS, PHRASE, SHAPES, SIZES, Combination, draw_shape
from clip_train.data.tar import write_shards

TARGETS = {
    "native": "ours takes at most 0.75 of the CPU seconds a sample of OpenCLIP's command",
}
BUDGETS = (64, 128, 256)
# Samples at each budget for equally many patches: one of OpenCLIP's batches of each length
SHARES = {64: 4, 128: 2, 256: 1}
MEAN_BUDGET = sum(budget * share for budget, share in SHARES.items()) / sum(SHARES.values())
MICRO_TOKENS, SQUARE = 4096, 176
GLOBAL = 112  # samples: three batches of OpenCLIP's, one of each length
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
TIMM_SIZES = {"embed_dim": 192, "depth": 6, "num_heads": 3}
OURS = (
    "import sys, tests.peers.torchvision_shim; from launcher.cli.main import main; "
    "sys.exit(main(sys.argv[1:]))"
)


def samples(count: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    choices = [list(values) for values in (SIZES, COLORS, SHAPES, BACKGROUNDS)]
    for number in range(count):
        drawn: Combination = tuple(map(rng.choice, choices))  # type: ignore[assignment]
        ratio = 3 ** rng.uniform(-1, 1)
        size = (round(320 * ratio**0.5), round(320 / ratio**0.5))
        file = io.BytesIO()
        draw_shape(drawn, 128, rng).resize(size).save(file, "JPEG", quality=90)
        text = f"{PHRASE.format(*drawn)} number {number}"
        yield {"__key__": f"{number:06d}", "jpg": file.getvalue(), "txt": text.encode()}


def write_models(folder: Path) -> None:
    vision: dict[str, dict[str, Any]] = {
        "vit": {
            "image_size": SQUARE,
            "layers": 6,
            "width": 192,
            "head_width": 64,
            "patch_size": 16,
        },
        "timm-vit": {
            "image_size": SQUARE,
            "timm_model_name": "vit_tiny_patch16_224",
            "timm_pool": "",
            "timm_proj": "linear",
            "timm_model_kwargs": {"depth": 6, "img_size": SQUARE},
        },
        # the release that runs our side and the main branch have two names for the sizes
        "naflex-ours": {"timm_model_args": TIMM_SIZES},
        "naflex-theirs": {"timm_model_kwargs": TIMM_SIZES, "image_seq_len": max(BUDGETS)},
    }
    for name, config in vision.items():
        if name.startswith("naflex"):
            config |= {
                "image_size": 256,
                "timm_model_name": "naflexvit_base_patch16_gap",
                "timm_pool": "avg",
                "timm_proj": "linear",
            }
        description = {"embed_dim": 192, "vision_cfg": config, "text_cfg": TEXT}
        (folder / f"{name}.json").write_text(json.dumps(description))


def ours(folder: Path, model: str, count: int, run: str, *more: str) -> list[str]:
    recipe = folder / f"{run}.yaml"
    recipe.write_text(f"run: {{dir: {folder / run}, steps: {count // GLOBAL}}}\n")
    return [
        sys.executable, "-c", OURS, "train", str(recipe), f"model.name={model}",
        f"data.train={folder}/shards/*.tar", "data.workers=1", f"batch.global_size={GLOBAL}",
        "engine.precision=fp32", "optim.lr=1e-4", "schedule.warmup_steps=2", "checkpoint.resume=never",
        "log.progress=false", "log.tensorboard=false", *more,
    ]  # fmt: skip


def openclip(folder: Path, model: str, count: int, run: str, *more: str) -> list[str]:
    shards = sorted((folder / "shards").glob("*.tar"))
    return [
        sys.executable, "-c", OPENCLIP, str(folder / f"{model}.json"), "--model", model,
        "--train-data", f"{folder}/shards/{{{shards[0].stem}..{shards[-1].stem}}}.tar",
        "--train-num-samples", str(count), "--dataset-type", "webdataset", "--epochs", "1", "--batch-size", "37",
        "--workers", "1", "--precision", "fp32", "--lr", "1e-4", "--warmup", "2",
        "--logs", str(folder / "logs"), "--name", run, *more,
    ]  # fmt: skip


def commands(folder: Path, count: int, run: str, with_openclip: bool) -> dict[str, list[str]]:
    tokens = "data.tokens={" + ", ".join(f"{size}: {share}" for size, share in SHARES.items()) + "}"
    native = ["data.resize=native", tokens, f"batch.micro_tokens={MICRO_TOKENS}"]
    all_graphs = "batch.kept_graphs=all"
    vit = str(folder / "vit.json")
    naflex = f"open_clip:{folder / 'naflex-ours.json'}"
    found = {
        "ours": ours(folder, vit, count, f"native-{run}", *native, all_graphs),
        "ours, one graph kept": ours(folder, vit, count, f"one-{run}", *native),
        "ours, NaFlexVit": ours(folder, naflex, count, f"naflex-{run}", *native, all_graphs),
        "ours, squares": ours(
            folder, vit, count, f"squares-{run}", "batch.micro_size=37", all_graphs
        ),
    }
    if with_openclip:
        lengths = [str(length) for length in BUDGETS]
        found["OpenCLIP"] = openclip(
            folder, "naflex-theirs", count, f"naflex-{run}", "--use-naflex", "--naflex-seq-lens",
            *lengths, "--naflex-max-tokens-per-batch", str(MICRO_TOKENS),
        )  # fmt: skip
        found["OpenCLIP, squares"] = openclip(folder, "timm-vit", count, f"squares-{run}")
    return found


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--openclip", type=Path, help="src of a checkout of its main branch")
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    few, more, rounds = (
        (3 * GLOBAL, 5 * GLOBAL, 1) if args.quick else (3 * GLOBAL, 15 * GLOBAL, args.rounds)
    )
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        write_shards(folder / "shards", samples(16 * GLOBAL), 4 * GLOBAL)
        for number in range(rounds):
            short = commands(folder, few, f"few{number}", args.openclip is not None)
            long = commands(folder, more, f"more{number}", args.openclip is not None)
            for way in short:
                source = args.openclip if way.startswith("OpenCLIP") else None
                seconds = cpu_seconds(long[way], source) - cpu_seconds(short[way], source)
                taken.setdefault(way, []).append(seconds / (more - few))
                print(f"{way}: {taken[way][-1]:.4f} CPU s a sample", file=sys.stderr, flush=True)
    rows = []
    for way, seconds in taken.items():
        patches = (SQUARE // 16) ** 2 if "squares" in way else MEAN_BUDGET
        row = {
            "way": way,
            "CPU ms a sample": 1e3 * statistics.median(seconds),
            "CPU ms for each 1,000 patches": 1e6 * statistics.median(seconds) / patches,
        }
        if args.openclip:
            pairs = zip(seconds, taken["OpenCLIP"], strict=True)
            row["x OpenCLIP"] = statistics.median(mine / theirs for mine, theirs in pairs)
        rows.append(row)
    missed = [] if args.openclip else ["native: name a checkout of OpenCLIP with --openclip"]
    if args.openclip and rows[0]["x OpenCLIP"] > 0.75 and not args.quick:
        missed.append(f"native: {rows[0]['x OpenCLIP']:.2f} of OpenCLIP's")
    return finish("native_command", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
