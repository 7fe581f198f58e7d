"""Record the first images of the validation set with the captions that the model ranks first.

At each evaluation: a line in `examples.jsonl` of the run's folder, and the images in `examples/`.
report.html shows them.
"""

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.data.validation import ValBatch
from clip_train.evaluate.features import Encoded
from clip_train.metrics.jsonl import truncate_jsonl
from clip_train.metrics.skipped import Skipped
from clip_train.native import from_rows
from clip_train.storage.local import LocalStorage, open_own

FILE, FOLDER = "examples.jsonl", "examples"
NUM_IMAGES = 6
NUM_CAPTIONS = 3
LARGEST_SIDE = 224  # pixels of an image
MOST_CHARACTERS = 300  # of a caption
QUALITY = 85  # of a JPEG


@dataclass(frozen=True)
class Example:
    """One image of the validation set."""

    key: str
    captions: list[str]  # its own
    jpeg: bytes


@dataclass(frozen=True)
class RankedCaption:
    """A caption of the validation set that the model ranks among the first for an image."""

    caption: str
    cosine: float | None  # between the features; None: not a number
    own: bool  # it is one of the image's own captions


class Examples(Callback):
    """`evaluate` calls `watch` and `rank_captions`, the trainer `after_evaluate`."""

    def __init__(self, run_dir: Path, resume_step: int, skipped: Skipped) -> None:
        """resume_step: records of later steps are removed, as in eval.jsonl. OSError."""
        self._run_dir = run_dir
        self._skipped = skipped
        self._captions: list[str] = []  # of this rank's samples, in order
        self._examples: list[Example] = []  # the first samples of this rank
        # on rank 0: the images, and the captions ranked first for each
        self._latest: tuple[list[Example], list[list[RankedCaption]]] | None = None
        if dist.is_main():
            truncate_jsonl(run_dir / FILE, resume_step)

    def watch(self, batches: Iterable[ValBatch]) -> Iterator[ValBatch]:
        """Yield the same batches; keep their captions and the first images."""
        self._captions = []
        self._examples = []
        self._latest = None
        for batch in batches:
            missing = NUM_IMAGES - len(self._examples)
            samples = zip(batch.keys, batch.captions, batch.images[:missing], strict=False)
            for key, captions, pixels in samples:
                own_captions = [printable(caption) for caption in captions]
                self._examples.append(Example(key, own_captions, as_jpeg(pixels)))
            self._captions += [caption for captions in batch.captions for caption in captions]
            yield batch

    def rank_captions(self, encoded: Encoded, num_images: list[int], num_texts: list[int]) -> None:
        """Rank the captions of all ranks for the first images. Collective.

        encoded, num_images, num_texts: the samples of all ranks, and how many images and captions
        each rank has, as `gather` returns them.
        """
        count = min(NUM_IMAGES, len(encoded.image))
        ranked = dist.on_main(partial(best_captions, encoded, count))
        # a rank has only the text of its own captions: first_index, first_index + 1, ...
        first_index = sum(num_texts[: dist.rank()])
        wanted = {index for image_ranking in ranked for index, _ in image_ranking}
        rank_captions = {
            index: self._captions[index - first_index]
            for index in wanted
            if 0 <= index - first_index < len(self._captions)
        }
        captions: dict[int, str] = {}
        for part in dist.gather_objects(rank_captions):
            captions |= part
        examples = self._examples
        if num_images[0] < count:  # rank 0 has too few images
            before = sum(num_images[: dist.rank()])
            parts = dist.gather_objects(self._examples[: max(0, count - before)])
            examples = [example for part in parts for example in part]
        if dist.is_main():
            rankings: list[list[RankedCaption]] = []
            for example, image_ranking in zip(examples, ranked, strict=False):
                rankings.append([])
                for index, cosine in image_ranking:
                    caption = printable(captions[index])
                    own = caption in example.captions
                    rankings[-1].append(RankedCaption(caption, cosine, own))
            self._latest = examples[:count], rankings
        self._captions = []

    def after_evaluate(self, record: Mapping[str, Any]) -> None:
        if self._latest is not None:
            self._skipped.attempt(
                FILE,
                partial(self._write, record["step"], *self._latest),
                remedy="report.html lacks the examples of this evaluation",
            )
        self._latest = None

    def _write(
        self, step: int, examples: list[Example], rankings: list[list[RankedCaption]]
    ) -> None:
        folder = LocalStorage(self._run_dir / FOLDER)
        images = []
        for i, (example, captions) in enumerate(zip(examples, rankings, strict=True)):
            folder.put_bytes(f"{i}.jpg", example.jpeg)
            images.append(
                {
                    "key": example.key,
                    "captions": example.captions,
                    "ranked": [asdict(caption) for caption in captions],
                }
            )
        line = json.dumps({"step": step, "images": images}, allow_nan=False)
        with open_own(self._run_dir / FILE, "ab") as file:
            file.write(line.encode() + b"\n")


def best_captions(encoded: Encoded, count: int) -> list[list[tuple[int, float | None]]]:
    """For each of the first `count` images, the indices and cosines of the captions with the
    largest cosines. Captions with equal tokens count as one."""
    rankings: list[list[tuple[int, float | None]]] = []
    for image in encoded.image[:count]:
        similarity = encoded.text @ image  # [T]
        remaining = similarity.new_ones(len(similarity)).bool()  # [T]: not ranked yet
        best: list[tuple[int, float | None]] = []
        while len(best) < NUM_CAPTIONS and bool(remaining.any()):
            index = int(similarity.masked_fill(~remaining, -math.inf).argmax())
            cosine = float(similarity[index])
            best.append((index, cosine if math.isfinite(cosine) else None))
            remaining &= (encoded.texts != encoded.texts[index]).any(dim=1)
        rankings.append(best)
    return rankings


def printable(caption: str) -> str:
    """At most MOST_CHARACTERS that UTF-8 can encode."""
    if len(caption) > MOST_CHARACTERS:
        caption = caption[: MOST_CHARACTERS - 1] + "…"
    return caption.encode("utf-8", "replace").decode()


def as_jpeg(pixels: Tensor) -> bytes:
    """pixels: uint8 [3, S, S], or an image at its native resolution (`clip_train.native`)."""
    if pixels.ndim == 2:
        pixels = from_rows(pixels)
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
