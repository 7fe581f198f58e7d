"""Load a run, or any weights, by name in Python (`load`), and write features (`clip-train embed`)."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from clip_tools.place import weights_at
from clip_train.data.images import for_evaluation
from clip_train.data.invalid import InvalidSample
from clip_train.data.pixels import Alpha, decode_image
from clip_train.data.tokenizer import Tokenize
from clip_train.data.validation import ValLoader
from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.models.clip import build_model
from clip_train.models.config import AnyArchitecture
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.resizing import AS_CLIP, Patches, Resize
from clip_train.storage.local import LocalStorage
from clip_train.task import IMAGE_TEXT, FragmentSource

ROWS = 65_536  # samples of a rank in one file


@dataclass(frozen=True)
class Loaded:
    """A model for inference, with its preprocessing and tokenizer."""

    model: nn.Module  # in evaluation mode, float32, without gradients
    tokenizer: Tokenize  # b texts -> int64 [b, context_length]
    image_size: int  # S
    where: str  # the weights are from, for messages
    alpha: Alpha = "white"  # as `data.alpha`
    resize: Resize = AS_CLIP  # as the model was trained
    patches: Patches | None = None  # native resolution; None: squares

    @classmethod
    def of(
        cls,
        architecture: AnyArchitecture,
        source: FragmentSource,
        *,
        where: str,
        device: str,
        alpha: Alpha = "white",
    ) -> "Loaded":
        """Build a model, and load its weights from `source`."""
        model = build_model(architecture)
        PlainEngine(model).load_fragments(source, {})
        return cls(
            model=model.to(device).eval().requires_grad_(False),
            tokenizer=tokenizer_of(architecture),
            image_size=architecture.vision_cfg.image_size,
            where=where,
            alpha=alpha,
            resize=architecture.resize,
            patches=architecture.patches,
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def preprocess(self, image: Image.Image | bytes) -> Tensor:
        """An image, or the bytes of its file -> uint8 [3, S, S], or `Patches.row`, as in evaluation:
        the model itself normalizes. UserError if it does not decode."""
        try:
            pixels = decode_image(image, alpha=self.alpha)
        except InvalidSample as e:
            raise UserError(f"the image cannot be used: {e}; convert it to RGB of 8 bits") from e
        return for_evaluation(pixels, self.image_size, self.resize, self.patches)

    def pixels(self, images: Tensor) -> Tensor:
        """uint8 [b, 3, S, S], or rows of `data.inputs` -> float32 [b, D]: features, of unit
        length."""
        return IMAGE_TEXT.encode(self.model, "image", images.to(self.device)).float()

    def images(self, images: Sequence[Image.Image | bytes]) -> Tensor:
        """b images, or the bytes of their files -> float32 [b, D]: features, of unit length. Their
        products with those of `texts` are cosines."""
        return self.pixels(torch.stack([self.preprocess(image) for image in images]))

    def texts(self, texts: Sequence[str]) -> Tensor:
        """b texts -> float32 [b, D]: features, of unit length."""
        tokens = self.tokenizer(list(texts)).to(self.device)
        return IMAGE_TEXT.encode(self.model, "text", tokens).float()

    @torch.no_grad()
    def captions(self, images: Tensor) -> list[str]:
        """uint8 [b, 3, S, S] -> a caption for each, by greedy decoding. UserError for a model that
        is not a CoCa."""
        model: Any = self.model
        if not hasattr(model, "captions"):
            raise UserError(
                f"{self.where} is not a CoCa and has no decoder that writes captions; train one "
                "with model.name=open_clip:coca_ViT-B-32"
            )
        from clip_train.models.openclip.model import decoded

        # the tokens of an empty text are the start token and the end token
        start, end = self.tokenizer([""])[0, :2].tolist()
        captions = []
        for tokens in model.captions(images.to(self.device), start, end)[:, 1:].tolist():
            # a caption of the largest length has no end token
            length = tokens.index(end) if end in tokens else len(tokens)
            captions.append(tokens[:length])
        return decoded(model.architecture, captions)


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
    return Loaded.of(
        found.architecture,
        found.source,
        where=found.where,
        device=device,
        alpha=found.config.data.alpha,
    )


@torch.no_grad()
def write_features(loaded: Loaded, loader: ValLoader, store: LocalStorage, prefix: str) -> int:
    """Write one set of files per `ROWS` samples of this rank. Row i of each file is the same sample.

    R is `prefix`, and F counts from 0:

        image-R-F.npy      float32 [rows, D]
        text-R-F.npy       float32 [rows, D], of the first caption; not written for labeled data
        samples-R-F.jsonl  "key", "shard" and "captions"

    Returns the number of samples. Raises DataError.
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
