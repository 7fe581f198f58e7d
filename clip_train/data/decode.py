"""From the members of a sample to its columns: texts, the uint8 image and any other value. The
reasons that make a sample invalid are here.
"""

import bisect
import contextlib
import functools
import io
import itertools
import json
import random
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clip_train.data.benchmark import with_captions
from clip_train.data.fields import is_missing, key_of, metadata
from clip_train.data.formats import IMAGE_EXTENSIONS, UNREAD_EXTENSIONS
from clip_train.data.images import TrainTransform, seeded, synthetic_sample
from clip_train.data.invalid import InvalidSample
from clip_train.data.order import hash64
from clip_train.data.pixels import Alpha, decode_image, jpeg_size
from clip_train.data.shards import SYNTHETIC
from clip_train.data.tar import TarSample
from clip_train.data.values import SampleValue
from clip_train.errors import ClipTrainError, UserError
from clip_train.inputs import IMAGE, Input, layout_of
from clip_train.settings import import_path

MAX_CAPTION_BYTES = 1 << 15  # in UTF-8; more is a document, which would hold up the tokenizer
SEED_BOUND = 1 << 63  # a sample's seed is in [0, SEED_BOUND)
# the last argument of hash64 for the lists of texts: each use of a seed has its own
TEXT_LISTS = -6
# Members of a sample of a reinforced data set, as DataCompDR names them.
AUGMENTATIONS, SYNTHETIC_TEXTS, FEATURES = "paug.json", "syn.json", "npz"
MAX_FEATURE_BYTES = 1 << 26  # of all arrays in a sample's .npz, once they are decompressed

Stage = Callable[[Iterable[dict[str, Any]]], Iterable[dict[str, Any]]]
"""A stage of webdataset's, such as webdataset.map(f): from samples to samples."""
CaptionKey = str | Sequence[str] | Mapping[str, float] | None
"""As `data.caption_key`: one name, names to be tried in order, or names with the weights to draw
them with."""


@dataclass(eq=False)
class Decoder:
    """From the members of a training sample to its columns."""

    transform: TrainTransform
    choose_texts: Callable[..., list[str]]  # from members and `seed` to `num_texts` texts
    num_texts: int  # T
    stages: Sequence[Stage | str] = ()  # or their import paths; each maps one sample to one or none
    layout: Sequence[Input] = ()  # of `data.inputs`
    # the column of each: its values, for the loss
    values: Mapping[str, SampleValue] = field(default_factory=dict)
    # images are augmented as stored with the sample, rather than by the seed
    stored_augmentations: bool = False
    # the width of all teachers' stored features together; 0: they are not read
    stored_width: int = 0
    alpha: Alpha = "white"  # as `data.alpha`

    def with_budgets(self, budgets: Mapping[int, float]) -> "Decoder":
        """With other budgets of patches, at native resolution."""
        if budgets == self.transform.budgets:
            return self
        return replace(self, transform=replace(self.transform, budgets=budgets))

    def __call__(self, members: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """One sample: for each column, a tensor, a number or a string. Raises InvalidSample.

        The loss reads all of them as columns of `clip_train.task.Context`, on the device if they
        are tensors or numbers. To add one, see `clip_train.data.values`. The loader and the
        micro-batch add "text_lengths", "patch_counts" and "places": do not use these names.

        images: uint8 [3, S, S], or `Patches.row`, or [B] bytes of `data.inputs`. texts: T strings,
        which the worker replaces by tokens. members: also "__key__", "__url__" and "__shard__", the number of its
        shard in the list of all.
        """
        key = members["__key__"]
        # unlike a key, a name occurs once in all shards
        sample = {"keys": key, "names": f"{members['__shard__']}:{key}", "sample_seeds": seed}
        if members["__url__"].startswith(SYNTHETIC):
            image, texts = synthetic_sample(seed, self.transform, self.num_texts)
            sample |= {"images": image, "texts": texts}
            return sample | {name: value.synthetic for name, value in self.values.items()}
        # the user's own code may draw random numbers
        runs_user_code = bool(self.stages or self.layout)
        with seeded(seed) if runs_user_code else contextlib.nullcontext():
            if self.stages:
                members = staged(members, self.stages)
            augmentation = None
            if self.stored_augmentations:
                augmentation = stored_augmentation(members, seed)
            # the functions of `data.inputs` get one argument: "__seed__" gives them the seed too
            members = {**members, "__seed__": seed}
            if self.layout:
                image_of_members = functools.partial(
                    self._image, seed=seed, augmentation=augmentation
                )
                sample["images"] = own_inputs(members, self.layout, image_of_members)
            else:
                sample["images"] = self._image(members, seed, augmentation)
            texts = sample["texts"] = self.choose_texts(members, seed=seed)
            if augmentation is not None and self.stored_width:
                sample["teacher_features"] = stored_features(
                    members, augmentation.place, texts, self.stored_width
                )
        return sample | {name: value(members, texts) for name, value in self.values.items()}

    def _image(
        self, members: Mapping[str, Any], seed: int, augmentation: "StoredAugmentation | None"
    ) -> Tensor:
        """uint8 [3, S, S], or `Patches.row`. Raises InvalidSample.

        augmentation: the stored one to apply; None: one by the seed.
        """
        if augmentation is not None:
            with invalid_if_failing(AUGMENTATIONS):
                image = image_of(members, alpha=self.alpha)
                return self.transform.stored(image, augmentation.parameters)
        size = None  # [w, h] before a reduced decode: the crop is drawn in it
        divisor = 1
        if self.transform.scaled_decode:
            size = jpeg_size(image_bytes(members))
        if size is not None:
            divisor = self.transform.divisor(*size, seed)
        image = image_of(members, divisor, alpha=self.alpha)
        return self.transform.rows(self.transform(image, seed, size))


def image_bytes(members: Mapping[str, Any]) -> Any:
    """The content of the image member: bytes, or the Pillow image or array that a stage has decoded
    from them. Raises InvalidSample."""
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
    """The image of a sample, as `pixels.decode_image` gives it. Raises InvalidSample."""
    return decode_image(image_bytes(members), divisor, alpha=alpha)


def captions(
    members: Mapping[str, Any], caption_key: CaptionKey, count: int = 1
) -> dict[str, list[str]]:
    """The usable captions by name: the member of that name, or else that key of the `.json`.

    From a list of names, the first `count` names that have captions are taken; from a mapping, all
    that have. Raises InvalidSample if there are no captions, with the reason of the first name that
    has a value."""
    names = caption_key or ["txt"]
    if isinstance(names, str):
        names = [names]
    usable: dict[str, list[str]] = {}
    reasons: list[str] = []
    for name in names:
        try:
            texts = captions_of_name(members, name)
        except InvalidSample as e:
            reasons.append(str(e))
        else:
            if texts:
                usable[name] = texts
        if len(usable) == count and not isinstance(caption_key, Mapping):
            break
    if not usable:
        raise InvalidSample(reasons[0] if reasons else "no caption")
    return usable


def captions_of_name(members: Mapping[str, Any], name: str) -> list[str]:
    """The usable captions of one name; [] if the sample has neither the member nor the key. Raises
    InvalidSample if its value cannot be used."""
    if name in members:
        content = members[name]
        # the reader gives None for a member that is too large
        if content is None:
            raise InvalidSample("member is too large")
        if name == SYNTHETIC_TEXTS:
            content = [*itertools.chain(*synthetic_texts(members).values())]
        return _texts(content)
    if name == "txt":
        return []
    value = metadata(members, strict=True).get(key_of(name))
    # `_texts` rejects a blank text, or a list of them, with a reason
    may_be_blank = isinstance(value, str | list)
    if is_missing(value) and not may_be_blank:
        return []
    return _texts(value)


def texts_of(
    members: Mapping[str, Any],
    caption_key: CaptionKey,
    count: int = 1,
    negatives: Mapping[str, int] | None = None,
    seed: int = 0,
) -> list[str]:
    """`count` captions, followed by `negatives[name]` texts of each name in `negatives`. Raises
    InvalidSample.

    seed: of the sample, uniform in [0, SEED_BOUND); 0 gives the first captions.

    Examples, for a sample with the captions {"txt": ["t"], "syn": ["s0", "s1", "s2"]}:

    - Names take turns, each with its next caption; the seed chooses a name's first one. Too few
      captions repeat. ["txt", "syn"], count 5 and a seed that chooses s1: t s1 t s2 t.
    - A mapping begins with a name that the seed chooses by weight, among the names that the sample
      has. {"txt": 1, "syn": 3}, count 2: s0 t in 3 of 4 cases, t s0 in the others (if the seed also
      chooses s0).
    - `negatives` {"syn": 2} adds two captions in a row, such as s2 s0. Their first one is chosen
      independently of those above.
    """
    usable = captions(members, caption_key, count)
    positives = list(usable.values())
    if isinstance(caption_key, Mapping):
        first = chosen_by_weight([caption_key[name] for name in usable], seed)
        positives = [*positives[first:], *positives[:first]]
    positives = positives[:count]
    negative_lists: list[list[str]] = []
    for name in negatives or {}:
        try:
            negative_lists.append(captions(members, name)[name])
        except InvalidSample as e:
            raise InvalidSample(f"data.negative_texts.{name}: {e}") from e
    offsets = offsets_of([*positives, *negative_lists], seed)
    chosen: list[str] = []
    for place in range(count):
        turn, name_index = divmod(place, len(positives))  # names take turns
        chosen.append(_at(positives[name_index], offsets[name_index] + turn))
    negative_offsets = offsets[len(positives) :]
    sizes = (negatives or {}).values()
    for texts, offset, size in zip(negative_lists, negative_offsets, sizes, strict=True):
        chosen += [_at(texts, offset + place) for place in range(size)]
    return chosen


def chosen_by_weight(weights: Sequence[float], seed: int) -> int:
    """The place of one of the weights, chosen with a probability proportional to it."""
    ends = list(itertools.accumulate(weights))
    # the inverse of the cumulative distribution
    return bisect.bisect_right(ends[:-1], seed / SEED_BOUND * ends[-1])


def offsets_of(lists: Sequence[Sequence[str]], seed: int) -> list[int]:
    """For each list of texts, an offset: its first text is `texts[offset % len(texts)]`.

    The first list with several texts gets the seed itself, each other one an independent number, so
    that all pairs of their texts occur. Seed 0 gives 0 for all.
    """
    offsets: list[int] = []
    seed_is_taken = False
    for number, texts in enumerate(lists):
        offset = seed
        if seed_is_taken and seed:
            offset = hash64(seed, number, TEXT_LISTS)
        offsets.append(offset)
        seed_is_taken = seed_is_taken or len(texts) > 1
    return offsets


def _at(texts: Sequence[str], place: int) -> str:
    """The text at a place, where the first text follows the last one."""
    return texts[place % len(texts)]


def _texts(value: Any) -> list[str]:
    """The usable captions among a member's or a key's value, or a list of them. Raises
    InvalidSample if there is none."""
    texts: list[str] = []
    reason = "caption is empty"
    contents = value if isinstance(value, list) else [value]
    for content in contents:
        # Bytes that are not UTF-8 are refused, as by OpenCLIP's loader; so is half a surrogate pair,
        # which JSON can spell.
        try:
            data = content.encode() if isinstance(content, str) else content
            text = data.decode() if isinstance(data, bytes) else None
        except UnicodeError:
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


def synthetic_texts(members: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The captions that a model wrote: all lists of the `.syn.json` whose name begins with
    `syn_text`; {} without a `.syn.json`. Raises InvalidSample."""
    with invalid_if_failing(SYNTHETIC_TEXTS):
        lists = json.loads(members.get(SYNTHETIC_TEXTS, b"{}"))
        return {name: [*lists[name]] for name in lists if name.startswith("syn_text")}


class StoredAugmentation(NamedTuple):
    """One of the augmentations that are stored with a sample."""

    place: int  # among them, from 0
    parameters: list[Any]  # as `TrainTransform.stored` takes them


def stored_augmentation(members: Mapping[str, Any], seed: int) -> StoredAugmentation:
    """One of the stored augmentations, by the seed. Raises InvalidSample."""
    with invalid_if_failing(AUGMENTATIONS):
        stored = json.loads(members[AUGMENTATIONS])["param_aug"]
        # DataCompDR stores a JSON text inside the JSON
        choices = json.loads(stored) if isinstance(stored, str) else stored
        place = random.Random(seed).randrange(len(choices))
        return StoredAugmentation(place, choices[place])


def stored_features(
    members: Mapping[str, Any], place: int, texts: Sequence[str], width: int
) -> Tensor:
    """float32 [(1 + T) width]: of the image under the augmentation at `place`, and of T texts.

    The `.npz` has `image_emb` [A, width], one row for each of A stored augmentations. The features
    of the texts are in one of two layouts:

    - `text_emb` [1 + S, width]: of the `.txt`, then of the S synthetic texts;
    - `text_emb` [1, width] of the `.txt`, and an array for each list of synthetic texts:
      `syn_text_emb` has those of `syn_text`.

    Raises:
        InvalidSample: the features are missing, do not have this width, or are not one row for
            each text.
        UserError: they are a pickle.
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
        decompressed_sizes = [array.file_size for array in zipfile.ZipFile(data).infolist()]
        if sum(decompressed_sizes) > MAX_FEATURE_BYTES:
            raise InvalidSample("npz is too large")
        arrays = np.load(data, allow_pickle=False)
        rows = [arrays["image_emb"][place]]
        text_rows = [arrays["text_emb"]]
        # in the order of the texts, whatever the order of the arrays
        for name in synthetic:
            if f"{name}_emb" in arrays.files:
                text_rows.append(arrays[f"{name}_emb"])
        text_features = np.concatenate(text_rows)
        stored_texts = [*_texts(members["txt"]), *itertools.chain(*synthetic.values())]
        if len(text_features) != len(stored_texts):
            raise InvalidSample("npz: features and texts differ in number")
        for text in texts:
            rows.append(text_features[stored_texts.index(text)])
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
    """Check a sample without decoding its image. Returns its caption; raises InvalidSample if it
    cannot be used.

    shard: its path or URL. stages, inputs, negatives: as `data.stages`, `data.inputs` and
    `data.negative_texts`. The stages and the functions of the inputs are called.
    """
    if sample.duplicate:
        raise InvalidSample("duplicate key")
    members = with_captions(sample.members, shard)
    members = {**members, "__key__": sample.key, "__seed__": 0}
    if stages:
        members = staged(members, stages)
    # the image is not decoded here, so its size does not matter
    layout = layout_of(inputs, image_size=1)
    if not layout or any(each.path == IMAGE for each in layout):
        image_bytes(members)
    computed = [each for each in layout if each.path != IMAGE]
    if computed:
        own_inputs(members, computed)
    return texts_of(members, caption_key, negatives=negatives)[0]


@contextlib.contextmanager
def invalid_if_failing(what: str) -> Iterator[None]:
    """Any error inside the block makes the sample invalid, except for `ClipTrainError`. The reason
    is `what` and the error's type."""
    try:
        yield
    except (InvalidSample, ClipTrainError):
        raise
    except Exception as e:
        raise InvalidSample(f"{what}: {type(e).__name__}") from e


def staged(members: Mapping[str, Any], stages: Sequence[Stage | str]) -> dict[str, Any]:
    """A sample after the user's stages, or their import paths, each of which gets it alone.

    Raises:
        InvalidSample: a stage fails, or gives nothing.
        UserError: a stage gives several samples.
    """
    staged_members = dict(members)
    for stage in stages:
        what = stage if isinstance(stage, str) else getattr(stage, "__name__", "a stage")
        with invalid_if_failing(f"data.stages ({what})"):
            call = import_path("data.stages", stage) if isinstance(stage, str) else stage
            results = [dict(result) for result in call([staged_members])]
        if not results:
            raise InvalidSample(f"data.stages ({what}) dropped it")
        if len(results) > 1:
            raise UserError(
                f"data.stages ({what}) must map one sample to one, and made {len(results)} of "
                f"{members['__key__']}: yield one, or none to drop the sample"
            )
        staged_members = results[0]
    return staged_members


def own_inputs(
    members: Mapping[str, Any],
    layout: Sequence[Input],
    image: Callable[[Mapping[str, Any]], Tensor] | None = None,
) -> Tensor:
    """The row of a sample, uint8 [B]: the inputs that `data.inputs` names, one behind the other.

    image: gives the input that is the image; None if the layout has none.

    Raises:
        InvalidSample: a function fails, or returns another shape or dtype than it declares.
        UserError: a function cannot be imported.
    """
    parts = []
    for each in layout:
        key = f"data.inputs.{each.name}"
        with invalid_if_failing(key):
            if each.path == IMAGE:
                assert image is not None
                value = image(members)
            else:
                value = import_path(key, each.path)(members)
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        if (tensor.shape, tensor.dtype) != (each.shape, getattr(torch, each.dtype)):
            # Invalid samples are counted by their message, which is the same for all. The check of
            # the first sample prints the cause as well.
            cause = TypeError(f"it returned {tensor.dtype} {list(tensor.shape)}")
            raise InvalidSample(f"{key}: not {each.dtype} {list(each.shape)}") from cause
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
    return torch.cat(parts)
