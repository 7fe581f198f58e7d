"""Load a run, or any weights, by name in Python (`load`), embed whole data sets
(`clip-train embed`) and caption images (`clip-train caption`)."""

import argparse
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from clip_tools.inspect import as_ranks, to_evaluate
from clip_train import dist
from clip_train.data.formats import SkippedFiles, is_image, walk_files
from clip_train.data.images import crop_for_evaluation
from clip_train.data.invalid import InvalidSample
from clip_train.data.pixels import Alpha, decode_image
from clip_train.data.reader import count_missing
from clip_train.data.shared import shared_index
from clip_train.data.tokenizer import Tokenize
from clip_train.data.validation import ValLoader
from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError, unreadable
from clip_train.models.clip import build_model
from clip_train.models.config import AnyArchitecture
from clip_train.processes import usable_cores
from clip_train.recipe.resolve import check_place
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.storage.local import LocalStorage
from clip_train.task import IMAGE_TEXT, FragmentSource
from launcher.runtime.log import log, warn

ROWS = 65_536  # samples of a rank in one file
CAPTIONED = 64  # images at a time


@dataclass(frozen=True)
class Loaded:
    """A model for inference, with its preprocessing and tokenizer."""

    model: nn.Module  # in evaluation mode, float32, without gradients
    tokenizer: Tokenize  # b texts -> int64 [b, context_length]
    image_size: int  # S
    source: str  # where the weights are from
    alpha: Alpha = "white"  # as `data.alpha`

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
        return cls(model, tokenizer_of(architecture), image_size, source, alpha)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def preprocess(self, image: Image.Image | bytes) -> Tensor:
        """An image, or the bytes of its file -> uint8 [3, S, S], as in training and evaluation: the
        model itself normalizes. UserError if it does not decode."""
        try:
            pixels = decode_image(image, alpha=self.alpha)
        except InvalidSample as e:
            raise UserError(f"the image cannot be used: {e}; convert it to RGB of 8 bits") from e
        return crop_for_evaluation(pixels, self.image_size)

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
    args = argparse.Namespace(
        place=place, overrides=list(overrides), weights=weights, step=step, ema=ema
    )
    config, architecture, source, where = to_evaluate(args)
    return Loaded.of(architecture, source, where, device, config.data.alpha)


def embed_run(args: argparse.Namespace) -> int:
    """Write the features of `data.val`; under torchrun the samples are split over the ranks."""
    with as_ranks(args) as device:
        config, architecture, source, where = to_evaluate(args)
        places = config.data.val_places
        if not places:
            raise UserError("data.val is null: add data.val=<the shards to embed>")
        for key, place in places.items():
            dist.on_main(partial(check_place, place, key))
        loaded = dist.agreed(Loaded.of, architecture, source, where, str(device), config.data.alpha)
        for key, place in places.items():
            loader = ValLoader(
                count_missing(
                    shared_index(key, place, config.data.verify, config.storage), config.storage
                ),
                image_size=loaded.image_size,
                context_length=architecture.text_cfg.context_length,
                batch_size=config.evaluate.batch_size,
                rank=dist.rank(),
                world_size=dist.world_size(),
                caption_key=config.data.caption_key,
                labelled=args.images_only,
                workers=usable_cores(),
                storage=config.storage,
                tokenizer=loaded.tokenizer,
                stages=config.data.stages,
                inputs=config.data.inputs,
                alpha=config.data.alpha,
            )
            name = key.removeprefix("data.val").removeprefix(".")  # of a set: its own folder
            store = LocalStorage(os.path.join(args.output, name))
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


def caption_run(args: argparse.Namespace) -> int:
    """Print a line of JSON for each image of `args.images`, and of the folders in it, by name: its
    file and its caption. 1 if one cannot be read."""
    try:
        paths = [Path(args.images, name) for name in walk_files(args.images)]
    except OSError as e:
        raise unreadable(e, f"--images ({args.images}) cannot be listed: {e}") from e
    files = [path for path in paths if is_image(path)]
    skipped = SkippedFiles.of(path for path in paths if not is_image(path))
    if not files:
        raise UserError(f"--images ({args.images}): no folder with images; correct it")
    if skipped.counts:
        warn(f"--images ({args.images}): skipped {skipped}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(
        args.place,
        *args.overrides,
        weights=args.weights,
        step=args.step,
        ema=args.ema,
        device=device,
    )
    status = 0
    for start in range(0, len(files), CAPTIONED):
        images = {}
        for file in files[start : start + CAPTIONED]:
            try:
                images[file] = model.preprocess(file.read_bytes())
            except (UserError, OSError) as e:
                status = 1
                warn(f"{file} cannot be read: {e}")
        captions = model.captions(torch.stack([*images.values()])) if images else []
        for file, caption in zip(images, captions, strict=True):
            print(json.dumps({"file": str(file), "caption": caption}, ensure_ascii=False))
    return status
