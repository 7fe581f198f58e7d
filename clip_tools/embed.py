"""Load a run, or any weights, by name in Python (`load`), and embed whole data sets
(`clip-train embed`)."""

import argparse
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from clip_tools.place import weights_at
from clip_train import dist
from clip_train.data.config import existing
from clip_train.data.images import to_square
from clip_train.data.invalid import InvalidSample
from clip_train.data.pixels import Alpha, decode_image
from clip_train.data.reader import count_missing
from clip_train.data.shared import shared_index
from clip_train.data.tokenizer import Tokenize
from clip_train.data.validation import ValLoader
from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.models.clip import build_model
from clip_train.models.config import AnyArchitecture
from clip_train.processes import usable_cores
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.resizing import AS_CLIP, Resize
from clip_train.storage.local import LocalStorage
from clip_train.task import IMAGE_TEXT, FragmentSource
from launcher.cli.arguments import (
    add_ema,
    add_help,
    add_overrides,
    add_place,
    add_step,
    add_weights,
    path_or_url,
)
from launcher.cli.process import Process
from launcher.runtime.log import log

ROWS = 65_536  # samples of a rank in one file


@dataclass(frozen=True)
class Loaded:
    """A model for inference, with its preprocessing and tokenizer."""

    model: nn.Module  # in evaluation mode, float32, without gradients
    tokenizer: Tokenize  # b texts -> int64 [b, context_length]
    image_size: int  # S
    source: str  # where the weights are from
    alpha: Alpha = "white"  # as `data.alpha`
    resize: Resize = AS_CLIP  # as the model was trained

    @classmethod
    def of(
        cls,
        architecture: AnyArchitecture,
        weights: FragmentSource,
        source: str,
        device: str,
        alpha: Alpha = "white",
    ) -> "Loaded":
        model = build_model(architecture)
        PlainEngine(model).load_fragments(weights, {})
        model = model.to(device).eval().requires_grad_(False)
        image_size = architecture.vision_cfg.image_size
        tokenizer = tokenizer_of(architecture)
        return cls(model, tokenizer, image_size, source, alpha, architecture.resize)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def preprocess(self, image: Image.Image | bytes) -> Tensor:
        """An image, or the bytes of its file -> uint8 [3, S, S], as in evaluation: the
        model itself normalizes. UserError if it does not decode."""
        try:
            pixels = decode_image(image, alpha=self.alpha)
        except InvalidSample as e:
            raise UserError(f"the image cannot be used: {e}; convert it to RGB of 8 bits") from e
        return to_square(pixels, self.image_size, self.resize)

    def pixels(self, images: Tensor) -> Tensor:
        """uint8 [b, 3, S, S], or rows of `data.inputs` -> float32 [b, D], normalized."""
        return IMAGE_TEXT.encode(self.model, "image", images.to(self.device)).float()

    def images(self, images: Sequence[Image.Image | bytes]) -> Tensor:
        """b images, or the bytes of their files -> float32 [b, D], normalized: the scalar products
        with `texts` are cosines."""
        return self.pixels(torch.stack([self.preprocess(image) for image in images]))

    def texts(self, texts: Sequence[str]) -> Tensor:
        """b texts -> float32 [b, D], normalized."""
        tokens = self.tokenizer(list(texts)).to(self.device)
        return IMAGE_TEXT.encode(self.model, "text", tokens).float()

    @torch.no_grad()
    def captions(self, images: Tensor) -> list[str]:
        """uint8 [b, 3, S, S] -> a caption for each, by greedy decoding. UserError for a model that
        is not a CoCa."""
        model: Any = self.model
        if not hasattr(model, "captions"):
            raise UserError(
                f"{self.source} is not a CoCa and has no decoder that writes captions; train one "
                "with model.name=open_clip:coca_ViT-B-32"
            )
        from clip_train.models.openclip.model import decoded

        start, end = self.tokenizer([""])[0, :2].tolist()
        rows = model.captions(images.to(self.device), start, end)[:, 1:].tolist()
        return decoded(model.architecture, [row[: [*row, end].index(end)] for row in rows])


def load(
    place: str,
    *overrides: str,
    weights: str | None = None,
    step: int | None = None,
    ema: bool = False,
    device: str = "cpu",
) -> Loaded:
    """The model of a run (its recipe, its folder, or the URL of its checkpoints), or of any weights
    that `clip-train evaluate` takes.

    Args:
        overrides: as on a command line, such as "model.name=ViT-B-32" for a file of weights.
        weights: instead of the run's newest checkpoint.
        step: the checkpoint of this step.
        ema: the moving average of its weights.
        device: where the model is put.

    Raises:
        UserError, CheckpointError: as in `clip-train evaluate`.
    """
    found = weights_at(place, list(overrides), weights, step, ema)
    alpha = found.config.data.alpha
    return Loaded.of(found.architecture, found.source, found.where, device, alpha)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write the image and text features of data.val, with the keys and captions of the samples.
        PLACE is as for evaluate. Under torchrun each rank embeds its share.
        """,
        """
        clip-train embed runs/clip data.val='s3://bucket/{0000..0099}.tar' --output features
        clip-train embed open_clip:ViT-B-32/openai data.val='val/*.tar' --images-only
        """,
    )
    add_place(parser)
    add_overrides(parser)
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=path_or_url,
        default="features",
        help="folder to write (default: features)",
    )
    parser.add_argument(
        "--images-only",
        action="store_true",
        help="samples need no captions, and no texts are embedded",
    )
    add_weights(parser)
    add_step(parser)
    add_ema(parser)


def run(
    place: str,
    overrides: list[str],
    output: str,
    images_only: bool,
    weights: str | None,
    step: int | None,
    ema: bool,
    process: Process,
) -> int:
    """Write the features of `data.val`; under torchrun the samples are split over the ranks."""
    with process.as_rank() as device:
        found = weights_at(place, overrides, weights, step, ema)
        config, where = found.config, found.where
        places = config.data.val_places
        if not places:
            raise UserError("data.val is null: add data.val=<the shards to embed>")
        for key, data in places.items():
            dist.on_main(partial(existing, data, key))
        loaded = dist.agreed(
            Loaded.of, found.architecture, found.source, where, str(device), config.data.alpha
        )
        for key, data in places.items():
            loader = ValLoader(
                count_missing(
                    shared_index(key, data, config.data.verify, config.storage), config.storage
                ),
                image_size=loaded.image_size,
                context_length=found.architecture.text_cfg.context_length,
                batch_size=config.evaluate.batch_size,
                rank=dist.rank(),
                world_size=dist.world_size(),
                caption_key=config.data.caption_key,
                labelled=images_only,
                workers=usable_cores(),
                storage=config.storage,
                tokenizer=loaded.tokenizer,
                stages=config.data.stages,
                inputs=config.data.inputs,
                alpha=config.data.alpha,
                resize=loaded.resize,
            )
            name = key.removeprefix("data.val").removeprefix(".")  # of a set: its own folder
            store = LocalStorage(os.path.join(output, name))
            written = dist.agreed(write_features, loaded, loader, store, f"{dist.rank():05d}")
            total, invalid = dist.sum_scalars(written, len(loader.invalid))
            if dist.is_main():
                log(f"{where}: {total:.0f} samples embedded, {invalid:.0f} could not be used")
                print(store.url)
    return 0


@torch.no_grad()
def write_features(loaded: Loaded, loader: ValLoader, store: LocalStorage, prefix: str) -> int:
    """Writes, for each `ROWS` samples of this rank, files whose rows belong together.

    `image-R-F.npy` and `text-R-F.npy`, float32 [rows, D] (the first caption's), and
    `samples-R-F.jsonl` with "key", "shard" and "captions". R is `prefix`, F counts from 0. Returns the
    number of samples. DataError.
    """
    files = total = 0
    image: list[Tensor] = []
    text: list[Tensor] = []
    lines: list[str] = []

    def flush() -> None:
        nonlocal files
        name = f"{prefix}-{files:05d}"
        for kind, parts in {"image": image, "text": text}.items():
            if parts:
                content = io.BytesIO()
                np.save(content, torch.cat(parts).cpu().numpy())
                store.put_bytes(f"{kind}-{name}.npy", content.getvalue())
        store.put_bytes(f"samples-{name}.jsonl", "\n".join([*lines, ""]).encode())
        for rows in (image, text, lines):
            rows.clear()
        files += 1

    for batch in loader:
        image.append(loaded.pixels(batch.images))
        if not loader.labelled:
            text.append(loaded.texts([captions[0] for captions in batch.captions]))
        lines += [
            json.dumps({"key": key, "shard": shard, "captions": captions}, ensure_ascii=False)
            for key, shard, captions in zip(batch.keys, batch.shards, batch.captions, strict=True)
        ]
        total += len(batch.keys)
        if len(lines) >= ROWS:
            flush()
    if lines:
        flush()
    return total
