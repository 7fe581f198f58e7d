"""From the members of a sample to its columns: texts, the uint8 image and any other value. The
reasons that make a sample invalid are here.
"""

import bisect
import contextlib
import io
import itertools
import json
import random
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clip_train.data.benchmark import with_captions
from clip_train.data.fields import is_missing, key_of, metadata, scalar
from clip_train.data.formats import IMAGE_EXTENSIONS, UNREAD_EXTENSIONS
from clip_train.data.images import TrainTransform, seeded, synthetic_sample
from clip_train.data.invalid import InvalidSample
from clip_train.data.order import hash64
from clip_train.data.pixels import Alpha, decode_image, jpeg_size
from clip_train.data.shards import SYNTHETIC
from clip_train.data.tar import TarSample
from clip_train.errors import ClipTrainError, UserError
from clip_train.inputs import IMAGE, Input, layout_of
from clip_train.settings import import_path
from clip_train.task import NO_ID, sample_id

MAX_CAPTION_BYTES = 1 << 15  # in UTF-8; more is a document, which would hold up the tokenizer
DRAWS = 1 << 63  # a sample's seed is below it
# Members of a sample of a reinforced data set, as DataCompDR names them.
AUGMENTATIONS, SYNTHETIC_TEXTS, FEATURES = "paug.json", "syn.json", "npz"
MAX_FEATURE_BYTES = 1 << 26  # of a sample's teachers, once they are decompressed

Stage = Callable[[Iterable[dict[str, Any]]], Iterable[dict[str, Any]]]
"""A stage of webdataset's, such as webdataset.map(f): from samples to samples."""
CaptionKey = str | Sequence[str] | Mapping[str, float] | None
"""As `data.caption_key`: one name, names to be tried in order, or names with the weights to draw
them with."""


@dataclass(eq=False)
class Decoder:
    """From the members of a training sample to its columns."""

    transform: TrainTransform
    texts_of: Callable[..., list[str]]  # from a sample and `draw` to its `num_texts` texts
    num_texts: int  # T
    stages: Sequence[Stage | str] = ()  # or their import paths; each maps one sample to one or none
    layout: Sequence[Input] = ()  # of `data.inputs`
    groups: str | None = None  # as `loss.groups`
    # of all teachers' stored features together; 0: they are not read; None: no augmentations either
    stored_width: int | None = None
    alpha: Alpha = "white"  # as `data.alpha`

    def __call__(self, members: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """One sample: for each column, a tensor, a number or a string. InvalidSample.

        To give each sample another value, add an entry to this mapping, of one type and shape for
        all samples. The loss reads it as a column of `clip_train.task.Context`, on the device if it
        is a tensor or a number. "text_lengths" and "places" are added later.

        images: uint8 [3, S, S], or [B] bytes of `data.inputs`. texts: T strings, which the worker
        replaces by tokens. members: also "__key__", "__url__" and "__shard__", the number of its
        shard in the list of all.
        """
        key = members["__key__"]
        sample = {"keys": key, "names": f"{members['__shard__']}:{key}", "sample_seeds": seed}
        if members["__url__"].startswith(SYNTHETIC):
            image, texts = synthetic_sample(seed, self.transform.image_size, self.num_texts)
            sample |= {"images": image, "texts": texts}
            if self.groups is not None:
                sample["ids"] = NO_ID
            return sample
        # code of the user's own may draw random numbers
        draws = bool(self.stages or self.layout)
        with seeded(seed) if draws else contextlib.nullcontext():
            if self.stages:
                members = staged(members, self.stages)
            members = {**members, "__seed__": seed}
            sample["images"] = own_inputs(members, self.layout, self._image)
            texts = sample["texts"] = self.texts_of(members, draw=seed)
            if self.stored_width:
                place, _ = stored_augmentation(members, seed)
                sample["teacher_features"] = stored_features(
                    members, place, texts, self.stored_width
                )
        if self.groups is not None:
            sample["ids"] = sample_id(group(members, texts[0], self.groups))
        return sample

    def _image(self, members: Mapping[str, Any]) -> Tensor:
        """uint8 [3, S, S]. InvalidSample."""
        seed = members["__seed__"]
        if self.stored_width is not None:
            with invalid_if_failing(AUGMENTATIONS):
                _, augmentation = stored_augmentation(members, seed)
                image = image_of(members, alpha=self.alpha)
                return self.transform.stored(image, augmentation)
        size = None
        divisor = 1
        if self.transform.scaled_decode:
            size = jpeg_size(image_bytes(members))
        if size is not None:
            divisor = self.transform.divisor(*size, seed)
        return self.transform(image_of(members, divisor, alpha=self.alpha), seed, size)


def image_bytes(members: Mapping[str, Any]) -> Any:
    """The image member's content, or the image decoded from it by a stage. InvalidSample."""
    for extension in IMAGE_EXTENSIONS:
        if extension in members:
            if members[extension] is None:
                raise InvalidSample("member is too large")
            if isinstance(members[extension], bytes) and not members[extension]:
                raise InvalidSample("image is empty")
            return members[extension]
    names = [name for name in members if not name.startswith("__")]
    if any(name.rpartition(".")[2] in IMAGE_EXTENSIONS for name in names):
        # a.b.jpg is the member b.jpg of the sample a
        raise InvalidSample("no image: dots in the key")
    for name in names:
        if name in UNREAD_EXTENSIONS:
            raise InvalidSample(f"no image: .{name} is not read")
    raise InvalidSample("no image")


def image_of(members: Mapping[str, Any], divisor: int = 1, *, alpha: Alpha = "white") -> Tensor:
    """The image of a sample, as `pixels.decode_image` gives it. InvalidSample."""
    return decode_image(image_bytes(members), divisor, alpha=alpha)


def captions(
    members: Mapping[str, Any], caption_key: CaptionKey, count: int = 1
) -> dict[str, list[str]]:
    """The usable captions by name: the member of that name, or else that key of the `.json`.

    A list of names gives only the first `count` that have any, a mapping all of them. InvalidSample
    if there is none."""
    names = caption_key or ["txt"]
    if isinstance(names, str):
        names = [names]
    usable: dict[str, list[str]] = {}
    reason = "no caption"
    for name in names:
        try:
            value = members.get(name)
            if value is None and name in members:
                raise InvalidSample("member is too large")
            if name == SYNTHETIC_TEXTS and value is not None:
                value = synthetic_texts(members)
            elif value is None and name != "txt":
                value = metadata(members, strict=True).get(key_of(name))
                if is_missing(value) and not isinstance(value, str | list):
                    value = None  # a blank text, or a list of them, is "caption is empty"
            if value is not None:
                usable[name] = _texts(value)
        except InvalidSample as e:
            if reason == "no caption":
                reason = str(e)
        if len(usable) == count and not isinstance(caption_key, Mapping):
            break
    if not usable:
        raise InvalidSample(reason)
    return usable


def texts_of(
    members: Mapping[str, Any],
    caption_key: CaptionKey,
    count: int = 1,
    negatives: Mapping[str, int] | None = None,
    draw: int = 0,
) -> list[str]:
    """`count` of the `captions`, then of each name in `negatives` so many texts. InvalidSample.

    draw: uniform in [0, DRAWS), where 0 gives the first ones. The names take turns. A mapping
    begins with the name that is drawn by its weight, among the names that the sample has. A name
    gives one of its captions by a draw of its own, then the next ones. Too few captions repeat.
    """
    usable = captions(members, caption_key, count)
    lists, first = [*usable.values()], 0
    if isinstance(caption_key, Mapping):
        ends = list(itertools.accumulate(caption_key[name] for name in usable))
        first = bisect.bisect_right(ends[:-1], draw / DRAWS * ends[-1])
    lists = [*lists[first:], *lists[:first]][:count]
    positive = len(lists)
    for name in negatives or {}:
        try:
            lists += captions(members, name).values()
        except InvalidSample as e:
            raise InvalidSample(f"data.negative_texts.{name}: {e}") from e
    draws = draws_of(lists, draw)
    turns = [(t % positive, t // positive) for t in range(count)]
    for number, more in enumerate((negatives or {}).values(), positive):
        turns += [(number, t) for t in range(more)]
    return [lists[n][(draws[n] + t) % len(lists[n])] for n, t in turns]


def draws_of(lists: Sequence[Sequence[str]], draw: int) -> list[int]:
    """A draw for each list of texts. The first list with several texts gets `draw` itself, each
    other one an independent number, so that all pairs of their texts occur."""
    draws: list[int] = []
    is_used = False
    for number, texts in enumerate(lists):
        own = draw
        if is_used and draw:
            own = hash64(draw, number, -6)
        draws.append(own)
        is_used = is_used or len(texts) > 1
    return draws


def group(members: Mapping[str, Any], caption: str, groups: str) -> str | None:
    """The name of a sample's group by `loss.groups`; None: it is of no group.

    caption: the one that was drawn. Its case and its blanks do not distinguish groups.
    """
    if groups == "caption":
        return " ".join(caption.lower().split())
    value = scalar(metadata(members).get(key_of(groups)))
    return None if value is None else str(value)


def _texts(value: Any) -> list[str]:
    """The usable captions among a member's or a key's value, or a list of them. InvalidSample if
    there is none."""
    texts: list[str] = []
    reason = "caption is empty"
    for content in value if isinstance(value, list) else [value]:
        try:  # bytes that are not UTF-8 are refused, as by OpenCLIP's loader
            data = content.encode() if isinstance(content, str) else content
            text = data.decode() if isinstance(data, bytes) else None
        except UnicodeError:  # also from JSON, which can spell half a surrogate pair
            reason = "caption is not UTF-8"
            continue
        if text is None:
            reason = "caption is not a text"
        elif len(data) > MAX_CAPTION_BYTES:
            reason = "caption is too long"
        elif not text.strip():
            reason = "caption is empty"
        else:
            texts.append(text)
    if not texts:
        raise InvalidSample(reason)
    return texts


def synthetic_texts(members: Mapping[str, Any]) -> list[Any]:
    """The captions that a model wrote, of all `syn_text` lists of the `.syn.json`; [] without one.
    InvalidSample."""
    with invalid_if_failing(SYNTHETIC_TEXTS):
        lists = json.loads(members.get(SYNTHETIC_TEXTS, b"{}"))
        return [text for key in lists if key.startswith("syn_text") for text in lists[key]]


def stored_augmentation(members: Mapping[str, Any], seed: int) -> tuple[int, list[Any]]:
    """One of the stored augmentations, by the seed: its place among them, and its parameters as
    `TrainTransform.stored` takes them. InvalidSample."""
    with invalid_if_failing(AUGMENTATIONS):
        stored = json.loads(members[AUGMENTATIONS])["param_aug"]
        choices = json.loads(stored) if isinstance(stored, str) else stored
        place = random.Random(seed).randrange(len(choices))
        return place, choices[place]


def stored_features(
    members: Mapping[str, Any], place: int, texts: Sequence[str], width: int
) -> Tensor:
    """float32 [(1 + T) width]: of the image under the augmentation at `place`, and of T texts.

    The `.npz` has `image_emb` [A, width] and `text_emb` [1 + S, width], of the `.txt` and the S
    synthetic texts, or only of the first, and those of a list `syn_text` are `syn_text_emb`.
    InvalidSample. UserError where they are a pickle.
    """
    if "pth.gz" in members and FEATURES not in members:
        raise UserError(
            "data.reinforced: a sample has its features as .pth.gz, a pickle, "
            "which can run any code and is not opened; write the shards again with "
            "`clip-train reinforce`, or take DataCompDR's with .npz"
        )
    synthetic = synthetic_texts(members)
    with invalid_if_failing(FEATURES):
        data = io.BytesIO(members[FEATURES])
        sizes = [array.file_size for array in zipfile.ZipFile(data).infolist()]  # decompressed
        if sum(sizes) > MAX_FEATURE_BYTES:
            raise InvalidSample("npz is too large")
        arrays = np.load(data, allow_pickle=False)
        more = [arrays[name] for name in arrays.files if re.fullmatch("syn_text.*_emb", name)]
        of_texts = np.concatenate([arrays["text_emb"], *more])
        known = [*_texts(members["txt"]), *synthetic]
        rows = [arrays["image_emb"][place], *(of_texts[known.index(text)] for text in texts)]
        features = np.concatenate(rows).astype(np.float32)
    if features.shape != ((1 + len(texts)) * width,) or not np.isfinite(features).all():
        raise InvalidSample(f"npz: not {width} finite features")
    return torch.from_numpy(features)


def usable_caption(
    sample: TarSample,
    shard: str,
    caption_key: CaptionKey,
    stages: Sequence[Stage | str] = (),
    inputs: Mapping[str, str] | None = None,
    negatives: Mapping[str, int] | None = None,
) -> str:
    """The caption of a sample that can be used, as far as one can see without decoding its image.

    shard: its path or URL. stages, inputs, negatives: as `data.stages`, `data.inputs` and
    `data.negative_texts`; they run.
    InvalidSample.
    """
    if sample.duplicate:
        raise InvalidSample("duplicate key")
    members = with_captions(sample.members, shard)
    fields = {**members, "__key__": sample.key, "__seed__": 0}
    if stages:
        fields = staged(fields, stages)
    layout = [own for own in layout_of(inputs, 1) if own.path != IMAGE]
    if layout:
        own_inputs(fields, layout, image_bytes)
    else:
        image_bytes(fields)
    return texts_of(fields, caption_key, negatives=negatives)[0]


@contextlib.contextmanager
def invalid_if_failing(what: str) -> Iterator[None]:
    """An error of a user's own code makes its sample invalid, by the error's type."""
    try:
        yield
    except (InvalidSample, ClipTrainError):
        raise
    except Exception as e:
        raise InvalidSample(f"{what}: {type(e).__name__}") from e


def staged(members: Mapping[str, Any], stages: Sequence[Stage | str]) -> dict[str, Any]:
    """A sample after the user's stages, or their import paths, each of which gets it alone.
    InvalidSample where a stage fails, or gives nothing; UserError where it gives several."""
    fields = dict(members)
    for stage in stages:
        what = stage if isinstance(stage, str) else getattr(stage, "__name__", "a stage")
        with invalid_if_failing(f"data.stages ({what})"):
            call = import_path("data.stages", stage) if isinstance(stage, str) else stage
            results = [dict(result) for result in call([fields])]
        if not results:
            raise InvalidSample(f"data.stages ({what}) dropped it")
        if len(results) > 1:
            raise UserError(
                f"data.stages ({what}) must map one sample to one, and made {len(results)} of "
                f"{members['__key__']}; its place in the order is one"
            )
        fields = results[0]
    return fields


def own_inputs(
    fields: Mapping[str, Any], layout: Sequence[Input], image: Callable[[Mapping[str, Any]], Tensor]
) -> Tensor:
    """The row of a sample, uint8 [B]: what `data.inputs` names. Without a layout: `image(fields)`.
    InvalidSample, UserError."""
    if not layout:
        return image(fields)
    parts = []
    for own in layout:
        key = f"data.inputs.{own.name}"
        with invalid_if_failing(key):
            call = image if own.path == IMAGE else import_path(key, own.path)
            value = call(fields)
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        if (tensor.shape, tensor.dtype) != (own.shape, getattr(torch, own.dtype)):
            cause = TypeError(f"it returned {tensor.dtype} {list(tensor.shape)}")
            raise InvalidSample(f"{key}: not {own.dtype} {list(own.shape)}") from cause
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
    return torch.cat(parts)
