"""The `data` section of a recipe, what follows from it, and a first look whether the shards fit
it."""

import contextlib
import itertools
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from clip_train.batch import BatchSizes, order_mistakes
from clip_train.data.fields import metadata
from clip_train.data.formats import IMAGE_EXTENSIONS
from clip_train.data.index import IndexedShard, ShardIndex, known_place, look_up
from clip_train.data.invalid import InvalidSample
from clip_train.data.keep import Expression, ExpressionError, Keep, KeptRows, is_list
from clip_train.data.shards import (
    SYNTHETIC,
    Reading,
    expand,
    open_shard,
    split_sources,
    synthetic_size,
)
from clip_train.data.tar import TarError, TarSample, iter_samples
from clip_train.errors import UserError, missing, unreadable
from clip_train.places import expanded
from clip_train.resizing import BudgetSchedule
from clip_train.settings import (
    Allowed,
    ImportPath,
    Messages,
    Place,
    Refused,
    SetName,
    Settings,
    Silent,
    as_yaml,
    rule,
    shown,
)
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import is_remote, local_path

SHARDS_TRIED = 3  # before training, until one can be used
CAPTIONS_MEASURED = 100  # before training
SHOWN_CHARACTERS = 60  # of a caption in a message
MOST_PATCHES = 65_535  # of an image: a side of its grid has 16 bits
SYNTHETIC_SAMPLES = 1_000_000  # of noise in an epoch, without data.num_samples
# limits of `lanes: auto` (`resolve_streams`)
FEW_STREAMS = 64  # the most for a small global batch
MANY_STREAMS = 1024  # the most for a large one
SAMPLES_PER_AUTO_STREAM = 32  # in a global batch, beyond FEW_STREAMS
GOOD_STREAMS = 16  # enough to mix shards and to feed ranks and workers
SAMPLES_PER_STREAM = 4  # at least, if streams do not divide the global batch
# limits of `shuffle_block: auto`
MAX_BLOCK = 512  # samples of one stream
MAX_SHUFFLED = 32_768  # samples of all streams together

Name = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(gt=0, le=1e9)]
Strength = Annotated[float, Field(ge=0, le=10)]
Probability = Annotated[float, Field(ge=0, le=1)]
Budget = Annotated[int, Field(gt=0, le=MOST_PATCHES)]
Budgets = dict[Budget, Weight]


def _expanded_list(keep: str) -> str:
    """`data.keep`: a path as in other keys, or an expression as it is."""
    return expanded(keep) if is_list(keep) else keep


class TrainWeightsStage(Settings):
    """A piece of `data.train_weights_schedule`."""

    until_step: PositiveInt
    """The first step, counted from 0, that no longer belongs to this piece."""
    train_weights: list[Annotated[float, Field(ge=0)]]
    """The share of samples from each source in this piece; 0: none."""


class TokenStage(Settings):
    """A piece of `data.tokens_schedule`."""

    until_step: PositiveInt
    """The first step, counted from 0, that no longer belongs to this piece."""
    tokens: Budgets | Budget
    """As data.tokens, in this piece."""


class DataConfig(Settings):
    """Where the samples come from and how they are read."""

    kind: Literal["shards", "synthetic"] = "shards"
    """synthetic: noise with made-up captions instead of data.train, without any files, to measure
    speed; data.num_samples of them are an epoch (null: 1,000,000)."""

    train: Annotated[Place, Allowed("text", example="'shards/{00000..00099}.tar'")]
    """WebDataset shards: a path with braces (`{00000..00099}.tar`) or globs, several sources joined
    by `::`."""

    train_weights: Annotated[
        list[Annotated[float, Field(gt=0)]] | None,
        # OpenCLIP writes 1::2
        BeforeValidator(lambda value: value.split("::") if isinstance(value, str) else value),
        Allowed("a list of numbers greater than 0, such as [3, 1], or null"),
    ] = None
    """The share of samples from each source joined by `::`, as [3, 1] or 3::1. Each source then has
    its own epochs. null: the sources are one list of shards, and an epoch has each sample once."""

    train_weights_schedule: Annotated[
        list[TrainWeightsStage] | None,
        Allowed("pieces such as [{until_step: 1000, train_weights: [1, 0]}], or null"),
    ] = None
    """Other shares of the sources in the first steps, as pieces [{until_step: 1000, train_weights:
    [1, 0]}, ...]. After the last piece, train_weights applies."""

    keep: Annotated[
        Annotated[str, Field(min_length=1), AfterValidator(_expanded_list)] | None,
        Allowed(
            "a condition over columns of the index, a .npy with uids, or null",
            example="'clip_score > 0.28'",
        ),
    ] = None
    """The samples of data.train that are read; all others count as if they were not there. A
    condition: "clip_score > 0.28 and lang == 'en'", over columns of the index (`clip-train index
    --columns json.clip_score,json.lang`). A .npy: a list of uids, as DataComp writes it; the index
    needs `--columns json.uid`. null: all samples."""

    resampled: bool = False
    """Draw shards with replacement rather than in epochs."""

    num_samples: Annotated[int, Field(gt=0)] | None = None
    """Samples in one epoch; only turns `run.epochs` into steps. An index of the shards has it:
    leave it out then."""

    verify: Annotated[Literal["auto", "off"], Silent] = "auto"
    """auto: remote shards with an index (`clip-train index`) are verified against it, block by
    block, while they are read; `clip-train index --check` verifies local ones."""

    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], Silent] = "auto"
    """Loader processes on each rank; 0 loads inside the trainer. Never changes the samples or their
    order. auto, with a GPU: the rank's share of its node's cores minus two, up to 16. auto, on a
    CPU: half of these cores, up to 4. Each worker there takes a core from the model's threads,
    unless OMP_NUM_THREADS is set."""

    lanes: Annotated[int, Field(gt=0, le=65_536)] | Literal["auto"] = "auto"
    """Streams that feed the global batch, fixed for the run. auto: the largest number that divides
    the size of every global batch, up to 64; up to a 32nd of the smallest size if that is more, and
    up to 1024 at most. If that number is below 16: a quarter of the smallest size, up to 64."""

    shuffle_block: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Undecoded samples that a stream permutes together. auto: 512, or 32,768 / streams if there
    are more than 64 streams.

    Memory: a rank holds (streams that it reads) x shuffle_block undecoded samples; 16 streams of
    512 samples of 80 kB are 655 MB. With data.train_weights, the sources share these samples.
    """

    prefetch: Annotated[int, Field(gt=0, le=1024), Silent] = 2
    """Batches that each worker keeps ready. Workers that share streams keep this number together,
    and at least one each."""

    caption_key: Annotated[
        Name
        | Annotated[list[Name], Field(min_length=1)]
        | Annotated[dict[Name, Weight], Field(min_length=1)]
        | None,
        Allowed(
            "a name, a list of names, names with numbers greater than 0, or null",
            example="'[txt, caption]'",
        ),
    ] = None
    """Where the caption is: a member of the sample (`txt`), or else a key of its `.json` (`json.x`
    is the key x); null: txt. A list: the first of these that the sample has. {original: 0.3,
    synthetic: 0.7}: each visit of the sample draws one, by the sample's seed, among those that it
    has. If the `.json` holds a list of captions, each visit draws one; evaluation takes all."""

    texts_per_image: Annotated[int, Field(ge=1, le=1024), Refused] = 1
    """Texts that each visit of an image is trained with, all of them positives; the loss is the
    mean of the losses with each of them. The names of data.caption_key take turns, and so do the
    captions in a list, from one that the sample's seed draws; a sample with fewer repeats them.
    Evaluation is not changed."""

    negative_texts: Annotated[
        dict[Name, Annotated[int, Field(ge=1, le=1024)]] | None,
        Allowed(
            "names with whole numbers from 1 to 1024, or null", example="'{json.negatives: 2}'"
        ),
        Refused,
    ] = None
    """Hard negatives of each image, {json.negatives: 2}: names as in data.caption_key, and the
    number of texts from each. From a list they are taken in a row; the sample's seed draws the
    first. They are negatives of every image, and no image is one of theirs. A sample without them
    is invalid."""

    reinforced: Annotated[
        list[Annotated[int, Field(gt=0)]] | None,
        Allowed("a list of whole numbers greater than 0, such as [768, 768], or null"),
        Refused,
    ] = None
    """Learn from shards as `clip-train reinforce` writes them (or DataCompDR): a sample's image is
    cut by one of its stored augmentations (`.paug.json`); its `.npz` has the features of teachers
    of these widths. []: no features are read, and model.teacher may name teachers."""

    val: Annotated[
        Place | dict[SetName, Annotated[Place, Field(min_length=1)]] | None,
        Allowed(
            "text, or texts by names of letters, digits, dashes and underscores, or null",
            example="'{coco: coco/*.tar, emoji: emoji/*.tar}'",
        ),
        Silent,
    ] = None
    """Validation shards, written like `train`; read once, in order. {coco: ..., emoji: ...}:
    several sets, whose numbers begin with `coco/` and `emoji/`."""

    allow_changed_shards: Annotated[bool, Silent] = False
    """Resume although shards were added, removed or changed: begin the first epoch of the new
    list."""

    bad_sample_limit: Annotated[float, Field(ge=0, le=1), Silent] = 0.05
    """The run stops when more than this fraction of the last 10,000 samples of a rank, and at least
    20 of them, are invalid."""

    aug_scale: Annotated[tuple[float, float], Allowed("a list of 2 numbers"), Refused] = (0.9, 1.0)
    """RandomResizedCrop: the crop's area as a fraction of the image's, from and to."""

    aug_ratio: Annotated[tuple[float, float], Allowed("a list of 2 numbers"), Refused] = (
        3 / 4,
        4 / 3,
    )
    """RandomResizedCrop: the crop's width divided by its height, from and to."""

    aug_relative_ratio: Annotated[bool, Refused] = False
    """data.aug_ratio is relative to the image's own ratio, for models that were trained on squashed
    images, such as SigLIP: with aug_scale [1, 1] and aug_ratio [1, 1] the whole image is
    squashed."""

    aug_color_jitter: Annotated[
        tuple[Strength, Strength, Strength, Annotated[float, Field(ge=0, le=0.5)]] | None,
        Allowed(
            "a list of 4 numbers from 0 to 10 (brightness, contrast, saturation, hue), the last at "
            "most 0.5, or null",
            example="'[0.4, 0.4, 0.4, 0.1]'",
        ),
        Refused,
    ] = None
    """torchvision's ColorJitter: strengths of brightness, contrast, saturation and hue. null:
    none."""

    aug_color_jitter_prob: Annotated[Probability, Refused] = 1.0
    """The probability that an image is jittered; data.aug_color_jitter says how."""

    aug_gray_scale_prob: Annotated[Probability, Refused] = 0.0
    """The probability that an image is made gray."""

    aug_flip_prob: Annotated[Probability, Refused] = 0.0
    """The probability that an image is mirrored. A caption with left or right is wrong then."""

    aug_erase_prob: Annotated[Probability, Refused] = 0.0
    """The probability that a rectangle is erased, with torchvision's RandomErasing's sizes and
    shapes, to CLIP's mean color."""

    aug_own: Annotated[
        ImportPath | None,
        Allowed("an import path, such as torchvision.transforms.v2.RandAugment, or null"),
        Refused,
    ] = None
    """An augmentation of your own: a function, or a class whose objects are called, from uint8
    [3, S, S] to the same. Its draws follow the sample's seed (docs/extending.md)."""

    aug_own_options: Annotated[dict[str, Any], Refused] = Field({})
    """The keyword arguments of data.aug_own, the function or the class."""

    inputs: Annotated[
        dict[Name, Literal["image"] | ImportPath] | None,
        Allowed(
            "names with import paths or image, such as {audio: my_package.decode.waveform}, or null"
        ),
        Refused,
    ] = None
    """Inputs of your own model instead of images, by name: functions from a sample's members to an
    array whose shape and dtype they declare; `image` is the image (docs/extending.md)."""

    stages: Annotated[
        list[ImportPath] | None,
        Allowed("a list of import paths, or null", example="'[my_package.stages.clean]'"),
        Refused,
    ] = None
    """webdataset stages, such as `clean = webdataset.map(f)`, applied to each sample of data.train
    and data.val before it is decoded. If a stage drops a sample, the sample is invalid."""

    alpha: Annotated[Literal["white", "drop"], Refused] = "white"
    """Transparent pixels. white: blended with white, as in transformers 5. drop: their transparency
    is ignored, and the color behind it shows, as in OpenCLIP and transformers 4."""

    resize: Literal["auto", "shortest", "squash", "longest", "native"] = "auto"
    """How evaluation, `embed`, `caption` and the library make a square of an image; exports have it
    too. auto: as the description of the weights (`init_from`) or of the model says, and else
    shortest. shortest: resize the shorter side, and keep the middle. squash: resize both sides.
    longest: resize the longer side, and pad with black. Training crops as data.aug_ratio says.
    native: no squares; training and evaluation keep each image's aspect ratio, and give the model
    as many patches as data.tokens allows (docs/native_resolution.md)."""

    tokens: Annotated[
        Budgets | Budget | None,
        Allowed(
            "a number of patches, or the share of samples at each, or null",
            example="'{128: 1, 256: 2, 576: 1}'",
        ),
        Refused,
    ] = None
    """With resize: native, the most patches of an image: 256, or budgets with the share of samples
    at each, {128: 1, 256: 2, 576: 1}, drawn by the sample's seed. Evaluation takes the largest.
    null: as many patches as a square of model.image_size has."""

    tokens_schedule: Annotated[
        list[TokenStage] | None,
        Allowed("a list of pieces, or null", example="'[{until_step: 9000, tokens: 64}]'"),
        Refused,
    ] = None
    """Other budgets for the first steps, as pieces [{until_step: 9000, tokens: 64}, {until_step:
    12000, tokens: {64: 1, 144: 1}}, ...]: from small to large images. After the last piece, tokens
    applies."""

    scaled_decode: Annotated[bool, Refused] = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its sides if its crop still has enough pixels for the
    model: 1.5 times as fast at 512 px. Pixels change a little (docs/data.md)."""

    @model_validator(mode="before")
    @classmethod
    def _noise_instead_of_files(cls, raw: Any) -> Any:
        """With `kind: synthetic`, `train` becomes a name for the noise, and the keys that need
        files get their defaults."""
        if not isinstance(raw, dict) or raw.get("kind") != "synthetic":
            return raw
        number = raw.get("num_samples")
        train = f"{SYNTHETIC}{SYNTHETIC_SAMPLES if number is None else number}"
        unused = {
            "train_weights": None,
            "train_weights_schedule": None,
            "keep": None,
            "resampled": False,
        }
        return {**raw, "train": train, **unused}

    @rule
    def _options_of_own_augmentation(self) -> Messages:
        if self.aug_own_options and self.aug_own is None:
            yield (
                f"data.aug_own_options ({as_yaml(self.aug_own_options)}) need data.aug_own; take "
                "them out"
            )

    @rule
    def _inputs_need_files(self) -> Messages:
        if self.kind == "synthetic" and self.inputs is not None:
            yield (
                f"data.inputs ({shown(self.inputs)}) cannot read data.kind (synthetic), which has "
                "no files; set data.inputs=null, or data.kind=shards"
            )

    @rule
    def _native_resolution(self) -> Messages:
        if self.resize != "native":
            if self.tokens is not None:
                yield (
                    f"data.tokens ({shown(self.tokens)}) is for native resolution: set "
                    "data.resize=native, or take it out"
                )
            if self.tokens_schedule is not None:
                yield (
                    f"data.tokens_schedule ({shown(self.tokens_schedule)}) is for native "
                    "resolution: set data.resize=native, or take it out"
                )
            return
        yield from order_mistakes("data.tokens_schedule", self.tokens_schedule or [])
        if self.tokens_schedule and self.tokens is None:
            yield (
                f"data.tokens_schedule ({shown(self.tokens_schedule)}) needs data.tokens, which "
                "applies after its last piece; set it"
            )
        for key in ("inputs", "reinforced"):
            if getattr(self, key) is not None:
                yield (
                    f"data.{key} ({shown(getattr(self, key))}) cannot be used at native resolution: "
                    f"set data.{key}=null, or data.resize=auto"
                )

    @rule
    def _reinforced_brings_augmentations(self) -> Messages:
        if self.reinforced is None:
            return
        if self.kind == "synthetic":
            yield self._not_with_reinforced("kind", self.kind)
        for key, field in type(self).model_fields.items():
            if key.startswith("aug_") or key in ("inputs", "scaled_decode"):
                value = getattr(self, key)
                if value != field.get_default(call_default_factory=True):
                    yield self._not_with_reinforced(key, value)

    def _not_with_reinforced(self, key: str, value: Any) -> str:
        return (
            f"data.reinforced ({self.reinforced}) uses the augmentations that are stored with the "
            f"samples: take out data.{key} ({shown(value)}), or set data.reinforced=null"
        )

    @rule
    def _weights_of_sources(self) -> Messages:
        sources = len(split_sources(self.train))
        if self.train_weights is not None and len(self.train_weights) != sources:
            yield (
                f"data.train_weights ({self.train_weights}) must have one for each of the "
                f"{sources} sources that :: joins in data.train"
            )

    @rule
    def _schedule_of_weights(self) -> Messages:
        stages = self.train_weights_schedule or []
        if stages and self.train_weights is None:
            yield (
                f"data.train_weights_schedule ({shown(self.train_weights_schedule)}) needs "
                "data.train_weights, which apply after it; set them, or "
                "data.train_weights_schedule=null"
            )
        yield from order_mistakes("data.train_weights_schedule", stages)
        sources = len(split_sources(self.train))
        for stage in stages:
            weights = stage.train_weights
            if len(weights) != sources or not any(weights):
                yield (
                    f"data.train_weights_schedule: train_weights ({weights}) until step "
                    f"{stage.until_step} must have one number for each of the {sources} sources "
                    "that :: joins in data.train, and one above 0"
                )

    @rule
    def _keep_can_be_used(self) -> Messages:
        if self.keep is None:
            return
        if self.verify == "off":
            yield (
                f"data.keep ({shown(self.keep)}) reads the index, and data.verify=off leaves it "
                "alone; set data.verify=auto, or data.keep=null"
            )
        if not is_list(self.keep):
            try:
                Expression.parse(self.keep)
            except ExpressionError as e:
                yield (
                    f"data.keep ({shown(self.keep)}): {e}; write one such as 'clip_score > 0.28', "
                    "or the path of a .npy"
                )

    @rule
    def _areas_of_crops(self) -> Messages:
        yield from self._range("aug_scale", self.aug_scale, most=1.0)

    @rule
    def _shapes_of_crops(self) -> Messages:
        yield from self._range("aug_ratio", self.aug_ratio, most=math.inf)

    def _range(self, key: str, limits: tuple[float, float], most: float) -> Messages:
        low, high = limits
        if not 0 < low <= high <= most:
            yield (
                f"data.{key} ({low}, {high}) must satisfy 0 < from <= to <= {most:g}; "
                f"OpenCLIP's is {type(self).model_fields[key].default}"
            )

    @property
    def budgets(self) -> BudgetSchedule | None:
        """The budgets of `tokens` and its schedule; None: the model's own."""
        if self.tokens is None:
            return None
        stages = self.tokens_schedule or []
        pieces = [stage.tokens for stage in stages] + [self.tokens]
        return BudgetSchedule(
            tuple({piece: 1.0} if isinstance(piece, int) else piece for piece in pieces),
            tuple(stage.until_step for stage in stages),
        )

    @property
    def num_texts(self) -> int:
        """T: texts of an image, its positives first."""
        return self.texts_per_image + sum((self.negative_texts or {}).values())

    @property
    def kept(self) -> Keep | None:
        """For `look_up`."""
        return None if self.keep is None else Keep(self.keep, self.train)

    @property
    def val_places(self) -> dict[str, str]:
        """The validation sets' shards by key: `data.val`, or `data.val.coco`."""
        if isinstance(self.val, dict):
            return {f"data.val.{name}": place for name, place in self.val.items()}
        return {"data.val": self.val} if self.val else {}

    @property
    def augmentation(self) -> dict[str, Any]:
        """The values of the `aug_` keys, by name without the prefix, as `TrainTransform` takes them.
        The user's own augmentation is not among them."""
        own = {"aug_own", "aug_own_options"}
        keys = {key for key in type(self).model_fields if key.startswith("aug_")} - own
        return {key.removeprefix("aug_"): getattr(self, key) for key in sorted(keys)}


def resolve_streams(lanes: int | Literal["auto"], sizes: BatchSizes) -> int:
    """The number of streams: a function of the global batches' sizes alone, so that the order never
    depends on the number of ranks.

    Any number works with any sizes and ranks. If it divides all sizes, each stream gives the same
    number of samples to every batch. If it does not, some samples are read by several ranks (and
    decoded by one); the fewer samples a stream gives to a batch, the more are. Hence `auto` is a
    divisor if there is a large enough one, else a number that takes a few samples from each stream.
    """
    if lanes != "auto":
        return lanes
    smallest, common = min(sizes.sizes), math.gcd(*sizes.sizes)
    most = min(MANY_STREAMS, max(FEW_STREAMS, smallest // SAMPLES_PER_AUTO_STREAM))
    divisor = max(d for d in range(1, most + 1) if common % d == 0)
    if divisor >= min(GOOD_STREAMS, smallest):
        return divisor
    return max(divisor, min(FEW_STREAMS, smallest // SAMPLES_PER_STREAM))


def resolve_workers(cores: int, device: str) -> int:
    """Loader processes of a rank with so many cores on a device of this type. A rank with a GPU
    needs a core for the trainer and one for the thread that pins and copies batches. 16 workers
    decode 19,000 samples/s, more than a GPU uses."""
    workers = min(cores - 2, 16)
    if device == "cpu":
        workers = min(cores // 2, 4)
    return max(1, workers)


def order_keys(
    config: DataConfig, sizes: BatchSizes, seed: int, index: ShardIndex | None = None
) -> dict[str, Any]:
    """All on which the order depends beside the shards, under the names of the recipe; as JSON. The
    shards themselves are compared by `resume_data`, by content: a folder may move.

    index: of data.train; None: its samples are not compared."""
    streams = resolve_streams(config.lanes, sizes)
    block = config.shuffle_block
    if block == "auto":
        block = max(1, min(MAX_BLOCK, MAX_SHUFFLED // streams))
    weights = config.train_weights
    captions: Any = config.caption_key
    if isinstance(captions, dict):
        shares = _normalized([*captions.values()])
        captions = [[name, share] for name, share in zip(captions, shares, strict=True)]
    pieces = [
        [piece.until_step, _normalized(piece.train_weights)]
        for piece in config.train_weights_schedule or []
    ]
    return {
        "run.seed": seed,
        "batch.global_size": str(sizes),
        "data.lanes": streams,
        "data.shuffle_block": block,
        "data.train_weights": _normalized(weights) if weights else None,
        "data.train_weights_schedule": pieces or None,
        "data.keep": index.kept.text if index is not None and index.kept is not None else None,
        "data.resampled": config.resampled,
        "data.caption_key": captions,
    }


def _normalized(weights: list[float]) -> list[float]:
    return [round(weight / sum(weights), 9) for weight in weights]


@dataclass(frozen=True)
class SourceSummary:
    """The result of `check_source`."""

    first_key: str
    first_caption: str
    index: ShardIndex  # of data.train
    caption_characters: int = 0  # the median of the first captions; 0: not measured

    @property
    def caption_start(self) -> str:
        """The first caption, shortened for a message."""
        if len(self.first_caption) <= SHOWN_CHARACTERS:
            return self.first_caption
        return self.first_caption[: SHOWN_CHARACTERS - 1] + "…"


def check_source(config: DataConfig, storage: StorageConfig | None = None) -> SourceSummary:
    """Expand `data.train`, and read the first sample of its first shard.

    If it cannot be used, the next shards are tried: one damaged file does not prevent a start.

    Raises:
        UserError: nothing matches, a file is missing, `data.keep` cannot be used, or none of the
            first SHARDS_TRIED shards has a first sample that can be used. Then it is the first
            shard's error. Each names the field, the value and the remedy.
    """
    storage = storage or StorageConfig()
    sources = expand_existing(config.train, "data.train")
    index = look_up(sources, config.verify, storage, config.kept)
    first = 0  # shard of the source
    for source, num_shards in zip(split_sources(config.train), index.sources, strict=True):
        is_empty = not any(index.places[first : first + num_shards])
        first += num_shards
        if config.kept and config.train_weights and is_empty:
            raise UserError(
                f"{config.kept} keeps no sample of the source {source} of data.train; correct it, or "
                "take the source out of data.train and data.train_weights"
            )
    if synthetic_size(index.shards[0]) is not None:
        # for people, who read it in `doctor` and in a dry run
        return SourceSummary(first_key="noise", first_caption="words drawn at random", index=index)
    first_error: UserError | None = None
    # training does not read a shard of which `data.keep` keeps nothing
    read = (number for number, places in enumerate(index.places) if places or index.kept is None)
    for number in itertools.islice(read, SHARDS_TRIED):
        shard = index.shard(number)
        reading = Reading(storage, shard.entry.checksums if shard.entry else None)
        try:
            key, caption = _first_sample(shard, reading, config)
            characters = _median_length(shard, reading, config)
            return SourceSummary(key, caption, index, characters)
        except UserError as e:
            first_error = first_error or e
    assert first_error is not None  # `look_up` finds a shard with a kept sample
    raise first_error


def kept_samples(file: BinaryIO, shard: IndexedShard) -> Iterator[TarSample]:
    """The samples of an open shard that `data.keep` keeps; without it, all. Raises as
    `iter_samples`."""
    kept = KeptRows(shard.kept)
    start = known_place(shard.entry, kept.rows(0, 1)[0])
    is_kept = partial(kept.holds, first=start.number)
    for number, sample in enumerate(iter_samples(file, start.offset, is_read=is_kept)):
        if is_kept(number):
            yield sample


def first_samples(
    index: ShardIndex, storage: StorageConfig, num_shards: int
) -> Iterator[TarSample]:
    """The samples that training reads of the first local shards, at most `num_shards`. A damaged
    shard ends at its damage."""
    for number, places in enumerate(index.places):
        shard = index.shard(number)
        is_left_out = index.kept is not None and not places
        if is_left_out or is_remote(shard.url) or not os.path.isfile(local_path(shard.url)):
            continue
        if num_shards == 0:
            return
        num_shards -= 1
        reading = Reading(storage, shard.entry.checksums if shard.entry else None)
        with contextlib.suppress(TarError, OSError), open_shard(shard.url, reading) as file:
            yield from kept_samples(file, shard)


def _first_sample(indexed: IndexedShard, reading: Reading, config: DataConfig) -> tuple[str, str]:
    """The key and the caption of the first sample that training reads from a shard. UserError if it
    cannot be used."""
    from clip_train.data import decode  # late: it imports torch, and a recipe is read without torch

    shard = indexed.url
    caption_key, stages = config.caption_key, config.stages or ()
    try:
        with open_shard(shard, reading) as file:
            sample = next(kept_samples(file, indexed), None)
    except TarError as e:
        raise UserError(
            f"data.train ({shard}) cannot be read as a tar file: {e}; write it again"
        ) from e
    except OSError as e:
        raise unreadable(
            e, f"data.train ({shard}) cannot be opened ({type(e).__name__}: {e})"
        ) from e
    if sample is None:
        raise UserError(
            f"data.train ({shard}) holds no sample: a sample is files such as 000.jpg and 000.txt "
            "in a tar"
        )
    try:
        if config.reinforced is not None:
            augmentation = decode.stored_augmentation(sample.members, seed=0)
            if config.reinforced:
                decode.stored_features(
                    sample.members, augmentation.place, [], sum(config.reinforced)
                )
        caption = decode.usable_caption(
            sample,
            shard,
            caption_key,
            stages=stages,
            inputs=config.inputs,
            negatives=config.negative_texts,
        )
        return sample.key, caption
    except InvalidSample as e:
        reason = f"{e} ({e.__cause__})" if e.__cause__ else str(e)
    members = ", ".join(f".{extension}" for extension in sample.members)
    keys = ", ".join(map(str, metadata(sample.members))) or "none that can be read"
    place = f"data.train ({shard})"
    if config.keep is not None:
        place += ", without the samples that data.keep leaves out"
    raise UserError(
        f"{place}: the first sample, {sample.key}, cannot be used: {reason}. Its members are "
        f"{members}. A sample's name ends at the first dot. An image is one of "
        f"{', '.join(IMAGE_EXTENSIONS)}; a caption is a .txt. If captions are in a .json, "
        f"set data.caption_key (now {as_yaml(caption_key)}) to one of its keys: {keys}"
    )


def _median_length(shard: IndexedShard, reading: Reading, config: DataConfig) -> int:
    """The median of the characters of the first captions of a local shard; 0 if they are not read
    or a stage makes them."""
    from clip_train.data import benchmark, decode  # late, as in `_first_sample`

    lengths: list[int] = []
    if is_remote(shard.url) or config.stages:
        return 0
    # damage of the shard is found and reported when it is read
    with contextlib.suppress(TarError, OSError), open_shard(shard.url, reading) as file:
        for sample in itertools.islice(kept_samples(file, shard), CAPTIONS_MEASURED):
            with contextlib.suppress(InvalidSample):
                members = benchmark.with_captions(sample.members, shard.url)
                lengths.append(len(decode.texts_of(members, config.caption_key)[0]))
    return int(statistics.median(lengths)) if lengths else 0


def expand_existing(spec: str, field: str) -> list[list[str]]:
    """The shards that `spec` names, by source. UserError if one of them is a local file that does
    not exist."""
    sources = expand(spec, field)
    shards = [shard for source in sources for shard in source]
    # a remote one that does not exist is found when it is opened
    absent = [
        shard for shard in shards if not is_remote(shard) and not os.path.isfile(local_path(shard))
    ]
    if not absent:
        return sources
    if local_path(absent[0]).is_dir():
        raise UserError(
            f"{field} ({absent[0]}) is a folder, not shards: give '{absent[0].rstrip('/')}/*.tar' for "
            f"those in it; `clip-train shards {absent[0]} OUT` makes shards of images: give "
            "'OUT/*.tar' then"
        )
    raise missing(
        local_path(absent[0]),
        f"{field} ({spec}): {len(absent)} of {len(shards)} shards do not exist; the first is "
        f"{absent[0]}",
        "correct the path or the range in braces",
    )
