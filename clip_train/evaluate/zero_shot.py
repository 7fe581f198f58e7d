"""Zero-shot classification: an image belongs to the class whose prompts its features are nearest to.

`C` classes, `b` images, `D` features.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from clip_train import dist
from clip_train.data.shards import is_folder
from clip_train.engine import Engine
from clip_train.errors import UserError, missing
from clip_train.evaluate.config import IMAGENET
from clip_train.evaluate.features import Encoded, Labeller, forward_together
from clip_train.storage.urls import is_remote, local_path, open_read

Tokenize = Callable[[list[str]], Tensor]  # b captions -> int64 [b, context_length]
CLIP_BENCHMARKS = (
    "zeroshot_classification_templates"  # its file beside classnames.txt, with {c} for the name
)


class ZeroShotClasses(BaseModel):
    """The content of `evaluate.zero_shot_classes`.

    The label of a validation sample is the first of these that it has: its `cls` (the `.cls` member, or that key of the
    `.json`); `label_key` of its `.json`; its first caption, if that is in `captions`, or is a class name or a prompt.
    `cls` and `label_key` hold a class name or an index, as a number or as text, alone or in a list of one. Text that is
    a class name is never an index, except in `cls`. A sample without a label is left out. A name that two classes share
    (ImageNet has two) is an error in `cls` and `label_key`, and labels no caption.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    classnames: list[str] = Field(min_length=1)
    templates: list[str] = Field(default=["a photo of a {}."], min_length=1)
    label_key: str = "label"
    captions: dict[str, int | str] = {}

    @field_validator("templates")
    @classmethod
    def _have_a_place(cls, templates: list[str]) -> list[str]:
        bad = [t for t in templates if t.count("{}") != 1]
        if bad:
            raise ValueError(
                f"every template needs one {{}} for the class name; {bad[0]!r} has not"
            )
        return templates

    @model_validator(mode="after")
    def _captions_are_of_classes(self) -> ZeroShotClasses:
        for caption, target in self.captions.items():
            self._index(target, f"captions[{caption!r}]")
        return self

    @classmethod
    def load(cls, place: str, templates: str | None = None) -> ZeroShotClasses:
        """By name, from a JSON file or from clip_benchmark's folder, local or remote, with the named templates or its
        own. Raises UserError."""
        field = f"evaluate.zero_shot_classes: {place}"
        try:
            content = _read(place)
        except FileNotFoundError as e:
            path, what = (
                "" if is_remote(place) else local_path(place),
                f"{field} does not exist ({e})",
            )
            raise missing(
                path, what, "give imagenet, a JSON file or clip_benchmark's folder"
            ) from None
        except ValueError as e:
            raise UserError(f"{field} is not JSON: {e}") from e
        if templates is not None and isinstance(content, dict):
            content["templates"] = _imagenet()[templates]
        try:
            return cls.model_validate(content)
        except ValidationError as e:
            mistakes = [
                f"{'.'.join(map(str, error['loc']))} {error['msg']}".strip() for error in e.errors()
            ]
            raise UserError(f"{field}: " + "; ".join(mistakes)) from None

    def prompts(self, index: int) -> list[str]:
        return [t.replace("{}", self.classnames[index]) for t in self.templates]

    def labeller(self) -> Labeller:
        """Of an index that is no class's, it raises ValueError."""
        alone = [i for i, name in enumerate(self.classnames) if self.classnames.count(name) == 1]
        by_caption = {prompt: i for i in alone for prompt in self.prompts(i)}
        by_caption |= {self.classnames[i]: i for i in alone}
        by_caption |= {c: self._index(target, "captions") for c, target in self.captions.items()}

        def label(caption: str, metadata: dict[str, Any]) -> int:
            if (cls := _number(metadata)) is not None:
                return self._index(cls, "a sample's cls")
            named = _element(metadata.get(self.label_key))
            if named is not None:
                return self._index(named, f"a sample's {self.label_key}")
            return by_caption.get(caption.strip(), -1)

        return label

    def _index(self, target: int | str, where: str) -> int:
        named = self.classnames.count(target) if isinstance(target, str) else 0
        if named == 1:
            return self.classnames.index(str(target))
        number = int(target) if not named and str(target).isdecimal() else -1
        if 0 <= number < len(self.classnames):
            return number
        which = f"the name of {named}" if named else "none"
        raise ValueError(f"{where} is {target!r}, {which} of the {len(self.classnames)} classes")


def _number(metadata: dict[str, Any]) -> Any:
    """The sample's `cls`: `.cls` members are written as text."""
    cls = _element(metadata.get("cls"))
    with contextlib.suppress(TypeError, ValueError):
        return int(cls)
    return cls


def _element(value: Any) -> Any:
    """Of a list of one its element: columns of captions are kept as lists."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def label_by_number(caption: str, metadata: dict[str, Any]) -> int:
    """A `Labeller` without classes. Raises ValueError."""
    cls = _number(metadata)
    if cls is not None and not (isinstance(cls, int) and cls >= 0):
        raise ValueError(f"a sample's cls is {cls!r}, no number of a class")
    return -1 if cls is None else cls


def _read(place: str) -> Any:
    """The content of a JSON file, or what stands for it. OSError, ValueError."""
    if place == IMAGENET:
        return {"classnames": _imagenet()["classnames"], "templates": _imagenet()["openai"]}
    if is_folder(place):
        names, templates = (
            _lines(f"{place.rstrip('/')}/{name}.txt") for name in ("classnames", CLIP_BENCHMARKS)
        )
        return {
            "classnames": names,
            "templates": [template.replace("{c}", "{}") for template in templates],
        }
    with open_read(place) as file:
        return json.loads(file.read())


def _lines(url: str) -> list[str]:
    with open_read(url) as file:
        return [line.strip() for line in file.read().decode().splitlines() if line.strip()]


def _imagenet() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "imagenet.json").read_text(encoding="utf-8"))


def zero_shot_metrics(
    engine: Engine, tokenize: Tokenize, classes: ZeroShotClasses, seen: Encoded, batch_size: int
) -> dict[str, float]:
    """Accuracies from 0 to 1 over the labelled images of all ranks, and the number of these. UserError: none."""
    embeddings = class_embeddings(engine, tokenize, classes, batch_size)
    num, labelled, top1, top5 = dist.sum_scalars(
        len(seen.image), *count_hits(seen.image, seen.labels, embeddings)
    )
    if not labelled:
        raise UserError(
            f"evaluate.zero_shot_classes: none of {num:.0f} validation samples has a label: they need 'cls' or "
            f"{classes.label_key!r} in their .json, or captions that name a class; or set evaluate.zero_shot_data"
        )
    return {
        "zero_shot_top1": top1 / labelled,
        "zero_shot_top5": top5 / labelled,
        "zero_shot_samples": labelled,
    }


def class_embeddings(
    engine: Engine, tokenize: Tokenize, classes: ZeroShotClasses, batch_size: int
) -> Tensor:
    """[C, D] float32 on the engine's device: the normalised mean of the prompts' normalised features.

    Each rank encodes its share of the classes; the last ranks repeat the last class where they do not
    divide, so that all call the engine equally often.
    """
    num = len(classes.classnames)
    per_rank = -(-num // dist.world_size())
    mine = [min(dist.rank() * per_rank + i, num - 1) for i in range(per_rank)]
    prompts = [prompt for i in mine for prompt in classes.prompts(i)]
    parts = forward_together(
        engine,
        lambda: [
            engine.encode("text", tokenize(prompts[i : i + batch_size]).to(engine.device)).float()
            for i in range(0, len(prompts), batch_size)
        ],
    )
    features = torch.cat(parts).view(per_rank, len(classes.templates), -1)
    embeddings = F.normalize(features.mean(dim=1), dim=-1)
    return dist.all_gather(embeddings)[:num]


def count_hits(features: Tensor, labels: Tensor, embeddings: Tensor) -> tuple[int, int, int]:
    """(labelled images, right at the first guess, among the first five).

    A class that ties with the right one counts as guessed before it: a collapsed model scores 0.

    Args:
        features: [b, D] float32.
        labels: int64 [b]; -1 is no label.
        embeddings: [C, D] float32.
    """
    features, labels = features[labels >= 0], labels[labels >= 0]
    scores = features @ embeddings.T  # [b, C]
    right = scores.gather(1, labels[:, None])
    # `not less` rather than `at least`: a NaN never scores
    ahead = (~(scores < right)).sum(dim=1) - 1  # less the class itself
    return len(labels), int((ahead < 1).sum()), int((ahead < 5).sum())
