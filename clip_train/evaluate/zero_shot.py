"""Zero-shot classification: predict the class whose prompts' features are nearest to the image's.

`C` classes, `b` images, `D` features.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails
from torch import Tensor

from clip_train import dist
from clip_train.data import decode
from clip_train.data.benchmark import read_classes, with_captions
from clip_train.data.decode import CaptionKey
from clip_train.data.fields import scalar
from clip_train.data.invalid import InvalidSample
from clip_train.data.shards import Reading, expand, open_shard
from clip_train.data.tar import TarError, TarSample, iter_samples
from clip_train.data.tokenizer import Tokenize
from clip_train.data.validation import ImageFolder, metadata_of
from clip_train.engines.base import Engine
from clip_train.errors import UserError, missing
from clip_train.evaluate.config import IMAGENET
from clip_train.evaluate.data_sets import EvaluationSet
from clip_train.evaluate.features import (
    Encoded,
    Labeller,
    first_values,
    forward_together,
    never,
    stop_together,
)
from clip_train.evaluate.retrieval import MatchRule, ranks_of_matches
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import is_remote, local_path, open_read

EXAMPLE = '{"classnames": ["owl", "red fox"], "templates": ["a photo of a {}."]}'
LOOK_AT = 200  # how many samples of the first shard have their labels checked before training


class ZeroShotClasses(BaseModel):
    """The content of `evaluate.zero_shot_classes`, or of the `classes` of a set.

    The label of a validation sample is the first of these that exists: its `cls` (the `.cls`
    member, or that key of the `.json`); `label_key` of its `.json`; its first caption, if that is
    a class name or a prompt. `cls` and `label_key` hold a class name or an
    index, as a number or as text, alone or in a list of one. Text that is a class name is never an
    index, except in `cls`. A sample without a label is left out. A name that two classes share
    (ImageNet has two) is an error in `cls` and `label_key`, and labels no caption.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    classnames: list[str] = Field(min_length=1)
    templates: list[str] = Field(default=["a photo of a {}."], min_length=1)
    label_key: str = "label"
    _key: str = PrivateAttr("evaluate.zero_shot_classes")  # of the recipe, for messages

    @property
    def key(self) -> str:
        return self._key

    @field_validator("templates")
    @classmethod
    def _have_a_place(cls, templates: list[str]) -> list[str]:
        templates = [template.replace("{c}", "{}") for template in templates]  # clip_benchmark's
        for template in templates:
            if template.count("{}") != 1:
                raise ValueError(
                    f"every template needs one {{}} for the class name; {template!r} has not"
                )
        return templates

    @classmethod
    def load(
        cls, place: str, templates: str | None = None, key: str = "evaluate.zero_shot_classes"
    ) -> "ZeroShotClasses":
        """The classes of a JSON file (local or remote), of the folder of a clip_benchmark set, or
        of ImageNet (by its name). templates: named ones in place of the file's. key: names the
        place in messages. UserError."""
        field = f"{key}: {place}"
        content: Any
        try:
            if place == IMAGENET:
                imagenet = _imagenet()
                content = {
                    "classnames": imagenet["classnames"],
                    "templates": imagenet["openai"],
                }
            else:
                content = read_classes(place)
                if content is None:
                    with open_read(place) as file:
                        content = json.loads(file.read())
        except (FileNotFoundError, IsADirectoryError) as e:
            path = "" if is_remote(place) else local_path(place)
            remedy = "give imagenet, a JSON file, or the folder of a clip_benchmark set"
            raise missing(path, f"{field} does not exist as a file ({e})", remedy) from None
        except ValueError as e:
            raise UserError(f"{field} is not JSON: {e}") from e
        if templates is not None and isinstance(content, dict):
            content["templates"] = _imagenet()[templates]
        try:
            classes = cls.model_validate(content)
        except ValidationError as e:
            mistakes = "; ".join(map(_describe_mistake, e.errors(include_url=False)))
            raise UserError(f"{field}: {mistakes}; such as {EXAMPLE}") from None
        classes._key = key
        return classes

    def prompts(self, index: int) -> list[str]:
        return [t.replace("{}", self.classnames[index]) for t in self.templates]

    def labeller(self) -> Labeller:
        """A function from a sample's caption and metadata to its class, -1 without a label. It
        raises ValueError for a label that is not a class."""
        unique = [i for i, name in enumerate(self.classnames) if self.classnames.count(name) == 1]
        by_caption = {prompt: i for i in unique for prompt in self.prompts(i)}
        by_caption |= {self.classnames[i]: i for i in unique}

        def label(caption: str, metadata: dict[str, Any]) -> int:
            cls = scalar(metadata.get("cls"))
            if isinstance(cls, str):  # `.cls` members are written as text
                cls = self._number_in(cls)
            if cls is not None:
                return self._index(cls, "a sample's cls")
            value = scalar(metadata.get(self.label_key))
            if value is not None:
                return self._index(value, f"a sample's {self.label_key}")
            return by_caption.get(caption.strip(), -1)

        return label

    def _number_in(self, text: str) -> int | str | None:
        """The number in a `.cls`, else its text; None for `nan`, if that is not a class."""
        try:
            number = scalar(float(text))
        except ValueError:
            return text
        if number is None and text in self.classnames:
            return text
        return number

    def _index(self, label: int | str, where: str) -> int:
        """The class of a label, which is a name or an index. ValueError."""
        num_named = self.classnames.count(label) if isinstance(label, str) else 0
        if num_named == 1:
            return self.classnames.index(str(label))
        if num_named == 0 and str(label).isdecimal() and int(label) < len(self.classnames):
            return int(label)
        which = f"the name of {num_named}" if num_named else "none"
        raise ValueError(f"{where} is {label!r}, {which} of the {len(self.classnames)} classes")


def _describe_mistake(error: ErrorDetails) -> str:
    """A mistake in the file of classes."""
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] == "extra_forbidden":
        return f"{path} is not a key of this file; its keys are {', '.join(ZeroShotClasses.model_fields)}"
    if error["type"] == "value_error":
        return f"{path}: {error['ctx']['error']}"
    type_name = type(error["input"]).__name__
    kinds = {
        "model_type": f"the file must hold an object ({{...}}), found {type_name}",
        "list_type": f"{path} must be a list, found {type_name}",
        "string_type": f"{path} must be text, found {type_name}",
        "too_short": f"{path} must have at least one entry",
    }
    return kinds.get(error["type"], f"{path}: {error['msg']}")


def _imagenet() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "imagenet.json").read_text(encoding="utf-8"))


def check_samples(
    data_set: EvaluationSet, caption_key: CaptionKey, storage: StorageConfig
) -> str | None:
    """Check the first labels or captions of a data set before training. Returns a note if none of
    the first samples has a label, or if files of a folder are skipped. UserError if a label is not a
    class, or if a set of `evaluate.sets` that should have captions has none.
    """
    key, place = data_set.key, data_set.place
    if data_set.classes is None:
        if data_set.counts_in_mean:
            check_captions(data_set, caption_key, storage)
        return None
    classes = ZeroShotClasses.load(data_set.classes, data_set.templates, data_set.classes_key)
    folder = None
    if not data_set.captions:
        folder = ImageFolder.find(place, key)
    if folder is not None:
        folder.label_by(classes.classnames, classes.key)
        if folder.skipped.counts:
            return (
                f"{key} ({place}): skipped {folder.skipped}, which are not images in the folder of a "
                "class; move or convert those that should count"
            )
        return None
    label = classes.labeller()
    labels: list[int] = []
    shard = expand(place, key)[0][0]
    for sample, caption in first_samples(shard, caption_key, storage):
        try:
            labels.append(label(caption or "", metadata_of(sample.members)))
        except ValueError as e:
            raise UserError(
                f"{key}: sample {sample.key} of {shard} does not fit {classes.key} "
                f"({data_set.classes}): {e}; correct the label, give the classes of this data, or "
                f"{data_set.without_zero_shot}"
            ) from e
    if not labels or max(labels) >= 0:
        return None
    return (
        f"{key}: none of the first {len(labels)} samples of {shard} has a label. An evaluation "
        "that finds no label is skipped; give the samples a 'cls' or a "
        f"{classes.label_key!r} in their .json, or {data_set.without_zero_shot}"
    )


def check_captions(
    data_set: EvaluationSet, caption_key: CaptionKey, storage: StorageConfig
) -> None:
    """UserError if none of the first samples of `evaluate.sets.NAME.data` has a caption."""
    shard = expand(data_set.place, data_set.key)[0][0]
    captions = [caption for _, caption in first_samples(shard, caption_key, storage)]
    if captions and all(caption is None for caption in captions):
        raise UserError(
            f"{data_set.key} ({data_set.place}): none of the first {len(captions)} samples of "
            f"{shard} has a caption. Labeled images need {data_set.classes_key}; otherwise give "
            "captions (data.caption_key says where they are), or take this set out"
        )


def first_samples(
    shard: str, caption_key: CaptionKey, storage: StorageConfig
) -> Iterator[tuple[TarSample, str | None]]:
    """The first samples of a shard, each with its first caption, or None without one. No samples if
    the shard cannot be read, which is not a mistake in labels."""
    with contextlib.suppress(TarError, OSError), open_shard(shard, Reading(storage)) as file:
        for sample in itertools.islice(iter_samples(file), LOOK_AT):
            caption = None
            with contextlib.suppress(InvalidSample):
                members = with_captions(sample.members, shard)
                caption = decode.texts_of(members, caption_key)[0]
            yield sample, caption


def zero_shot_metrics(
    classes: ZeroShotClasses, prompts: Tensor, encoded: Encoded, width: int | None = None
) -> dict[str, float]:
    """Accuracies from 0 to 1 over the labelled images of all ranks, the mean over the classes that
    have images of the accuracy over a class's images, and the number of labelled images.

    A class that ties with the right one is ranked before it, so a collapsed model scores 0.
    UserError if no image has a label.

    prompts: as `prompt_features` returns them. width: use the first values of the features; None:
    all values.
    """
    rank_embeddings = F.normalize(first_values(prompts, width).mean(dim=1), dim=-1)
    embeddings = dist.all_gather(rank_embeddings)[: len(classes.classnames)]  # [C, D]
    images = first_values(encoded.image, width)  # [b, D]
    has_label = encoded.labels >= 0  # [b]
    class_ids = torch.arange(len(embeddings), device=images.device)
    rule = MatchRule(encoded.labels[has_label], class_ids, ties_ahead=True)
    (ranks,) = dist.agreed(ranks_of_matches, images[has_label], embeddings, [rule])
    hits = [int((ranks <= k).sum()) for k in (1, 5)]
    num, labelled, top1, top5 = dist.sum_scalars(len(encoded.image), len(ranks), *hits)
    labels = encoded.labels[has_label].cpu()
    right = labels[(ranks <= 1).cpu()]
    per_class = [torch.bincount(each, minlength=len(embeddings)) for each in (right, labels)]
    right_of_class, images_of_class = dist.all_reduce_sum(torch.stack(per_class))  # [C] each
    if not labelled:
        raise UserError(
            f"{classes.key}: none of {num:.0f} validation samples has a label: they need 'cls' or "
            f"{classes.label_key!r} in their .json, or captions that name a class; or give other "
            "images, in evaluate.zero_shot_data or the data of a set"
        )
    seen = images_of_class > 0
    recalls = right_of_class[seen].double() / images_of_class[seen]
    return {
        "zero_shot_top1": top1 / labelled,
        "zero_shot_top5": top5 / labelled,
        "zero_shot_mean_per_class_recall": float(recalls.mean()),
        "zero_shot_samples": labelled,
    }


def prompt_features(
    engine: Engine,
    tokenize: Tokenize,
    classes: ZeroShotClasses,
    batch_size: int,
    asked_to_stop: Callable[[], bool] = never,
) -> Tensor:
    """The normalized features of the prompts of this rank's classes: [ceil(C / W), templates, D]
    float32 on the engine's device, on W ranks. EvaluationStopped as in `encode`.

    If W does not divide C, the last ranks repeat the last class, so that all ranks call the engine
    equally often.
    """
    num_classes = len(classes.classnames)
    per_rank = -(-num_classes // dist.world_size())
    rank_classes = [min(dist.rank() * per_rank + i, num_classes - 1) for i in range(per_rank)]
    prompts = [prompt for i in rank_classes for prompt in classes.prompts(i)]

    def encode_prompts(start: int) -> Tensor:
        tokens = tokenize(prompts[start : start + batch_size]).to(engine.device)
        return engine.encode("text", tokens).float()

    parts = []
    for start in range(0, len(prompts), batch_size):
        stop_together(asked_to_stop)
        parts.append(forward_together(engine, partial(encode_prompts, start)))
    return torch.cat(parts).view(per_rank, len(classes.templates), -1)
