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
class Ranked:
    """A caption of the validation set, beside an image."""

    caption: str
    cosine: float | None  # None: it is not a number
    own: bool  # it is one of the image's own captions


class Examples(Callback):
    """`evaluate` calls `watch` and `rank_captions`, the trainer `after_evaluate`."""

    def __init__(self, run_dir: Path, resume_step: int, skipped: Skipped) -> None:
        """resume_step: records of later steps are removed, as in eval.jsonl. OSError."""
        self._run_dir, self._skipped = run_dir, skipped
        self._captions: list[str] = []  # of this rank's samples, in order
        self._examples: list[Example] = []  # the first of this rank's
        self._latest: tuple[list[Example], list[list[Ranked]]] | None = None  # on rank 0
        if dist.is_main():
            truncate_jsonl(run_dir / FILE, resume_step)

    def watch(self, batches: Iterable[ValBatch]) -> Iterator[ValBatch]:
        """The same batches; their captions and the first images are kept."""
        self._captions, self._examples, self._latest = [], [], None
        for batch in batches:
            missing = NUM_IMAGES - len(self._examples)
            first = zip(batch.keys, batch.captions, batch.images[:missing], strict=False)
            for key, captions, pixels in first:
                own = [printable(caption) for caption in captions]
                self._examples.append(Example(key, own, as_jpeg(pixels)))
            self._captions += [caption for captions in batch.captions for caption in captions]
            yield batch

    def rank_captions(self, encoded: Encoded, num_images: list[int], num_texts: list[int]) -> None:
        """Collective. encoded: the samples of all ranks, as `gather` returns them, with how many
        images and captions each rank has."""
        count = min(NUM_IMAGES, len(encoded.image))
        ranked = dist.on_main(partial(best_captions, encoded, count))
        # each rank knows its own captions
        begin = sum(num_texts[: dist.rank()])
        wanted = {index for of_image in ranked for index, _ in of_image}
        mine = {
            index: self._captions[index - begin]
            for index in wanted
            if 0 <= index - begin < len(self._captions)
        }
        captions: dict[int, str] = {}
        for of_rank in dist.gather_objects(mine):
            captions |= of_rank
        examples = self._examples
        if num_images[0] < count:
            before = sum(num_images[: dist.rank()])
            of_ranks = dist.gather_objects(self._examples[: max(0, count - before)])
            examples = [example for of_rank in of_ranks for example in of_rank]
        if dist.is_main():
            shown = [
                [
                    Ranked(printable(captions[i]), cosine, printable(captions[i]) in each.captions)
                    for i, cosine in of_image
                ]
                for each, of_image in zip(examples, ranked, strict=False)
            ]
            self._latest = examples[:count], shown
        self._captions = []

    def after_evaluate(self, record: Mapping[str, Any]) -> None:
        if self._latest is not None:
            self._skipped.attempt(
                FILE,
                partial(self._write, record["step"], *self._latest),
                remedy="report.html lacks the examples of this evaluation",
            )
        self._latest = None

    def _write(self, step: int, examples: list[Example], ranked: list[list[Ranked]]) -> None:
        folder = LocalStorage(self._run_dir / FOLDER)
        images = []
        for i, (example, captions) in enumerate(zip(examples, ranked, strict=True)):
            folder.put_bytes(f"{i}.jpg", example.jpeg)
            images.append(
                {
                    "key": example.key,
                    "captions": example.captions,
                    "ranked": [asdict(each) for each in captions],
                }
            )
        line = json.dumps({"step": step, "images": images}, allow_nan=False)
        with open_own(self._run_dir / FILE, "ab") as file:
            file.write(line.encode() + b"\n")


def best_captions(encoded: Encoded, count: int) -> list[list[tuple[int, float | None]]]:
    """For each of the first `count` images the captions with the largest cosines: their indices
    and cosines. Captions that are equal for the model are one."""
    out: list[list[tuple[int, float | None]]] = []
    for image in encoded.image[:count]:
        similarity = encoded.text @ image  # [T]
        left = similarity.new_ones(len(similarity)).bool()
        best: list[tuple[int, float | None]] = []
        while len(best) < NUM_CAPTIONS and bool(left.any()):
            index = int(similarity.masked_fill(~left, -math.inf).argmax())
            cosine = float(similarity[index])
            best.append((index, cosine if math.isfinite(cosine) else None))
            left &= (encoded.texts != encoded.texts[index]).any(dim=1)
        out.append(best)
    return out


def printable(caption: str) -> str:
    """At most MOST_CHARACTERS that UTF-8 can encode."""
    if len(caption) > MOST_CHARACTERS:
        caption = caption[: MOST_CHARACTERS - 1] + "…"
    return caption.encode("utf-8", "replace").decode()


def as_jpeg(pixels: Tensor) -> bytes:
    """pixels: uint8 [3, S, S]."""
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
