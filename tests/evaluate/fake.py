"""An engine whose features are easy to compute, and a validation set with labels, duplicates and gaps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.evaluate.zero_shot import ZeroShotClasses
from clip_train.task import Features, MicroBatch

LOGIT_SCALE = 7.5

CLASSES = ZeroShotClasses(
    classnames=["red", "green", "blue", "a cat", "dog", "owl", "fox"],
    templates=["a photo of a {}.", "{}", "an old picture of {}"],
)


def tokenize(texts: list[str]) -> Tensor:
    """int64 [b, 32]: character codes"""
    return torch.tensor([[ord(c) for c in text.ljust(32, "\0")] for text in texts])


class FakeEngine:
    """Random projections, normalised. Counts its calls, which under ZeRO-3 must agree between ranks."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.device = torch.device("cpu")
        self.training = True
        self.calls: list[str] = []
        self._image = torch.randn(48, 6, generator=g)
        self._text = torch.randn(256, 6, generator=g)

    def remedy(self, phase: str) -> None:
        return None  # no rank waits for another within a forward

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def encode(self, name: str, inputs: Tensor) -> Tensor:
        assert not self.training
        return self._image_features(inputs) if name == "image" else self._text_features(inputs)

    def _image_features(self, images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.calls.append("image")
        return F.normalize(images.flatten(1).float() @ self._image + 1e-3, dim=1)

    def _text_features(self, texts: Tensor) -> Tensor:
        self.calls.append("text")
        weights = 1 + torch.arange(texts.shape[1])
        return F.normalize((self._text[texts] * weights[None, :, None]).sum(1), dim=1)

    def forward(self, micro_batch: MicroBatch) -> Features:
        image = self.encode("image", micro_batch.images)
        text = self.encode("text", micro_batch.texts)
        return {"image": image, "text": text, "logit_scale": torch.tensor([LOGIT_SCALE])}


@dataclass
class Batch:
    images: Tensor
    texts: Tensor
    captions: list[list[str]]
    metadata: list[dict[str, Any]]


def samples(num: int, most_captions: int = 3) -> Batch:
    """The whole validation set in one batch; some captions come several times."""
    g = torch.Generator().manual_seed(7)
    captions: list[list[str]] = []
    metadata: list[dict[str, Any]] = []
    for i in range(num):
        name = CLASSES.classnames[i * 5 % 7]
        first = [f"nothing {i}", name, f"a photo of a {name}.", "the sky", f"number {i}"][i % 5]
        more = [f"more {i}", ["the sky", f"most {i}"][i % 2]]
        captions.append([first, *more[: i % most_captions]])
        label: dict[str, Any] = {"label": name}
        metadata.append(
            [{}, {}, {"cls": [i % 7, str(i % 7), f"{i % 7}".encode()][i % 3]}, label, {"other": 1}][
                (i + i // 5) % 5
            ]
        )
    images = torch.randint(0, 256, (num, 3, 4, 4), dtype=torch.uint8, generator=g)
    return Batch(images, tokenize([text for each in captions for text in each]), captions, metadata)


def batches(whole: Batch, start: int, end: int, size: int) -> list[Batch]:
    first = [0, *itertools.accumulate(map(len, whole.captions))]
    return [
        Batch(
            whole.images[i:j],
            whole.texts[first[i] : first[j]],
            whole.captions[i:j],
            whole.metadata[i:j],
        )
        for i, j in ((i, min(i + size, end)) for i in range(start, end, size))
    ]
