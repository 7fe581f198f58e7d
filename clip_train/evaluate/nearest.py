"""What the model makes of some validation images: the captions that it finds nearest, for people to look at.

`n` samples on this rank, `D` features.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clip_train.data.decode import picture
from clip_train.data.validation import ValBatch
from clip_train.evaluate.features import Encoded
from clip_train.storage.local import LocalStorage

FILE = "nearest.json"
SHOWN, NEAREST = 8, 3  # images; captions of each


class Examples:
    """Validation batches as they pass: some images of the first one, and every caption of this rank."""

    def __init__(self, batches: Iterable[ValBatch]) -> None:
        self.batches = batches
        self.captions: list[str] = []
        self.chosen: list[int] = []  # places of the images among the samples
        self.first: list[str] = []  # captions of these
        self.images: list[Tensor] = []  # uint8 [3, S, S]
        self.image = self.text = torch.zeros(0, 0)

    def __iter__(self) -> Iterator[ValBatch]:
        for batch in self.batches:
            if not self.captions:
                self.chosen = [*range(0, len(batch.images), max(1, len(batch.images) // SHOWN))][
                    :SHOWN
                ]
                self.images = [batch.images[i].cpu() for i in self.chosen]
                self.first = [batch.captions[i][0] for i in self.chosen]
            self.captions += [caption for each in batch.captions for caption in each]
            yield batch

    def take(self, found: Encoded) -> None:
        """Their features, from `evaluate`; none of the texts where nothing asks for them."""
        self.image, self.text = found.image, found.text

    def nearest(self) -> list[dict[str, Any]]:
        """Of each image `picture` (a data URI), `caption`, and `nearest`: different captions with their cosine."""
        if not len(self.text):
            return []
        cosine = (normalize(self.image[self.chosen]) @ normalize(self.text).T).cpu()
        found = []
        for caption, pixels, row in zip(self.first, self.images, cosine, strict=True):
            best: dict[str, float] = {}
            for place in row.argsort(descending=True).tolist():
                best.setdefault(self.captions[place], float(row[place]))
                if len(best) == NEAREST:
                    break
            found.append(
                {
                    "picture": picture(pixels.permute(1, 2, 0).numpy()),
                    "caption": caption,
                    "nearest": [*best.items()],
                }
            )
        return found

    def write(self, folder: Path) -> None:
        """`nearest.json` in the run's folder, for its report. OSError."""
        LocalStorage(folder).put_bytes(FILE, json.dumps({"examples": self.nearest()}).encode())
