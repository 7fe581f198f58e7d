"""Zero-shot classification: an image belongs to the class whose prompts its features are nearest to.

`C` classes, `b` images, `D` features.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from clip_train import dist
from clip_train.engine import Engine
from clip_train.errors import UserError
from clip_train.storage.urls import open_read

Tokenize = Callable[[list[str]], Tensor]  # b captions -> int64 [b, context_length]


class ZeroShotClasses(BaseModel):
    """The content of `evaluate.zero_shot_classes`.

    A validation sample's label is, in this order: its `cls`, an index (of the `.cls` member or the
    `.json`); `label_key` of its `.json`, an index or a class name; its caption, if that is in `captions`,
    a class name or a prompt. A sample that has none of these is left out.
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
            raise ValueError(f"every template needs one {{}} for the class name; {bad[0]!r} has not")
        return templates

    @model_validator(mode="after")
    def _unambiguous(self) -> ZeroShotClasses:
        repeated = {name for name in self.classnames if self.classnames.count(name) > 1}
        if repeated:
            raise ValueError(f"class names must differ; repeated: {', '.join(sorted(repeated)[:5])}")
        for caption, target in self.captions.items():
            self._index(target, f"captions[{caption!r}]")
        return self

    @classmethod
    def load(cls, path: str) -> ZeroShotClasses:
        """From a JSON file, local or remote. Raises UserError."""
        field = f"evaluate.zero_shot_classes: {path}"
        try:
            with open_read(path) as f:
                content = json.loads(f.read())
        except FileNotFoundError:
            raise UserError(f"{field} does not exist") from None
        except ValueError as e:
            raise UserError(f"{field} is not JSON: {e}") from e
        try:
            return cls.model_validate(content)
        except ValidationError as e:
            mistakes = [f"{'.'.join(map(str, error['loc']))} {error['msg']}".strip() for error in e.errors()]
            raise UserError(f"{field}: " + "; ".join(mistakes)) from None

    def prompts(self, index: int) -> list[str]:
        return [t.replace("{}", self.classnames[index]) for t in self.templates]

    def labeller(self) -> Callable[[str, dict[str, Any]], int]:
        """(caption, metadata) -> class index, or -1 where the sample has no label. Raises UserError."""
        by_caption = {prompt: i for i in range(len(self.classnames)) for prompt in self.prompts(i)}
        by_caption |= {name: i for i, name in enumerate(self.classnames)}
        by_caption |= {c: self._index(target, "captions") for c, target in self.captions.items()}

        def label(caption: str, metadata: dict[str, Any]) -> int:
            if (cls := metadata.get("cls")) is not None:
                with contextlib.suppress(TypeError, ValueError):
                    cls = int(cls)  # `.cls` members are written as text
                return self._index(cls, "a sample's cls")
            if metadata.get(self.label_key) is not None:
                return self._index(metadata[self.label_key], f"a sample's {self.label_key}")
            return by_caption.get(caption.strip(), -1)

        return label

    def _index(self, target: int | str, where: str) -> int:
        if isinstance(target, int) and 0 <= target < len(self.classnames):
            return target
        if isinstance(target, str) and target in self.classnames:
            return self.classnames.index(target)
        raise ValueError(f"{where} is {target!r}, none of the {len(self.classnames)} classes")


def class_embeddings(engine: Engine, tokenize: Tokenize, classes: ZeroShotClasses, batch_size: int) -> Tensor:
    """[C, D] float32 on the engine's device: the normalised mean of the prompts' normalised features.

    Each rank encodes its share of the classes; the last ranks repeat the last class where they do not
    divide, so that all call the engine equally often.
    """
    num = len(classes.classnames)
    per_rank = -(-num // dist.world_size())
    mine = [min(dist.rank() * per_rank + i, num - 1) for i in range(per_rank)]
    prompts = [prompt for i in mine for prompt in classes.prompts(i)]
    parts = [
        engine.encode_text(tokenize(prompts[i : i + batch_size]).to(engine.device)).float()
        for i in range(0, len(prompts), batch_size)
    ]
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
