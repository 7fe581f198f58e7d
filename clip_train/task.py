"""The interfaces of a training step: batches, features, fragments, the task of a model, and a loss.

A `Task` names the features that a model returns and the groups of its parameters. An `Objective` is
the loss over the global batch. No other code depends on the kind of model.

Capital letters, here and everywhere: `W` ranks, `k` micro-batches of `b` samples on each rank,
`n` samples on a rank, `N` in the global batch, `D` the width of the features. If W does not divide
N, the first N % W ranks hold one sample more than the others. If b does not divide n, the last
micro-batch is short.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from clip_train.batch import chunk_sizes, num_chunks, token_chunks
from clip_train.columns import Columns
from clip_train.settings import MAX_LOGIT_SCALE, Matmul

Phase = Literal["forward pass", "loss", "backward pass"]  # of a step, before the optimizer's
EMA = "param_ema"  # the slot of a parameter's moving average
Features: TypeAlias = dict[str, Tensor]
"""The output of a model for a micro-batch, by name: rows [b, ...], one for each sample, and scalars
[1].

CLIP has "image" and "text", [b, D] and normalized, and the scalars "logit_scale" (the factor
itself, exp of the parameter) and, for a sigmoid loss, "logit_bias". They are float32 (or float64)
whatever the model's precision. Gradients with respect to features have the same names and shapes.

A name that ends in "_loss" is a loss that adds up over samples (`clip_train.step`): rows
[b, 2], each a sum over a sample's terms and the number of these terms.
"""
LOCAL_LOSS = "_loss"  # the end of the names of losses which add up over samples
# A micro-batch's texts are cut at multiples of this: each length is another shape to compile.
TEXT_STEP = 8


@dataclass
class Batch:
    """One rank's share of a global batch, in the canonical order (see `clip_train.data`).

    Ranks hold contiguous shares of it, one after another, whatever their number.
    """

    columns: Columns
    """n samples. Every batch has "images", "texts" and "sample_seeds", see the properties below.

    A batch of `TrainLoader` also has all other columns of `clip_train.data.decode.Decoder`: the
    lists "keys" and "names"; with `data.reinforced` "teacher_features", float32 [n, F], of image
    and texts; with `loss.groups` "ids", int64 [n]. The loader adds the list "text_lengths" if the
    model reads nothing behind a text's end, and at native resolution the list "patch_counts", the
    number of patches of each image."""
    # "reason\tshard" -> invalid samples among its places
    bad_samples: dict[str, int] = field(default_factory=dict)
    shares: tuple[int, ...] = ()  # W: samples of each rank; empty: equally many
    pack_texts: bool = False  # the model takes `num_tokens`, and texts are computed without padding
    # the number of micro-batches that some rank needs at least (`least_chunks`); 0: not known
    num_chunks: int = 0

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def images(self) -> Tensor:
        """uint8 [n, 3, H, W], not normalized: the model does that on the device. With `data.inputs`
        [n, B], the bytes of their values (`clip_train.inputs.unpack`). At native resolution
        [n, 1 + T, 3 p p] (`clip_train.native`)."""
        return self.columns["images"]

    @property
    def texts(self) -> Tensor:
        """int64 [n, context_length], or [n, T, context_length]: several of each image, positives
        first."""
        return self.columns["texts"]

    @property
    def sample_seeds(self) -> Tensor:
        """int64 [n]: the key of everything random about a sample."""
        return self.columns["sample_seeds"]

    @property
    def keys(self) -> list[str]:
        """n sample keys, as in the shards."""
        return self.columns["keys"]

    @property
    def names(self) -> list[str]:
        """n: what distinguishes each sample from all others. Keys of two shards may be equal: many
        tools number each data set from 0."""
        return self.columns["names"]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device` (asynchronously from pinned memory)."""
        return replace(self, columns=self.columns.to(device))

    def repeated(self, n: int, shares: tuple[int, ...]) -> Batch:
        """A batch of `n` samples that repeats these, in place of one that does not come."""
        if n == len(self):
            return replace(self, shares=shares)
        rows = [row % len(self) for row in range(n)]
        columns = self.columns.take(rows, torch.tensor(rows, device=self.images.device))
        return Batch(columns, shares=shares, pack_texts=self.pack_texts)

    def least_chunks(self, micro_tokens: int) -> int:
        """The number of micro-batches that this rank needs for its images, with at most
        `micro_tokens` patches in each. All ranks take the largest number: `num_chunks`."""
        return len(token_chunks(sorted(self.columns["patch_counts"]), micro_tokens))

    def micro_batches(self, micro_size: int, micro_tokens: int | None = None) -> MicroBatches:
        """`micro_size` samples each, or at most `micro_tokens` patches of images; equally many
        micro-batches on every rank.

        Of `micro_size` samples, the last may be shorter (`chunk_sizes`). If the samples have the
        column "text_lengths" (`text_lengths`), they go from short to long texts, so that little
        padding is left; at native resolution, from small to large images instead. Texts are cut
        after the end of the longest, at one of a few lengths. Nothing is read from the device.
        """
        n, context_length = len(self), self.texts.shape[-1]
        lengths = np.array(self.columns.get("text_lengths") or [context_length] * n).reshape(n, -1)
        patches = self.columns.get("patch_counts")
        tokens = lengths.max(axis=1) if patches is None else np.array(patches)  # to sort by
        places = tokens.argsort(kind="stable")
        counts = self.shares or (n,)
        if micro_tokens is None:
            k = num_chunks(max(counts), min(counts), micro_size)
            sizes = chunk_sizes(n, k, micro_size)
        else:
            most = min(counts)  # the rank with the fewest samples cannot have more chunks
            sizes = token_chunks(tokens[places].tolist(), micro_tokens, min(self.num_chunks, most))
            if len(sizes) > most:  # each sample was a chunk: the two smallest share one
                sizes[:2] = [2]
        order = None
        if len(sizes) > 1 and tokens.min() < tokens.max():
            lengths = lengths[places]
            on_host = torch.tensor(places)
            if self.texts.is_cuda:
                on_host = on_host.pin_memory()
            order = Permutation(places, on_host.to(self.texts.device, non_blocking=True))
        ends = list(itertools.accumulate(sizes))
        parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return MicroBatches(self, parts, lengths, order)


@dataclass
class Permutation:
    """Places of n samples in a batch, in another order."""

    on_host: np.ndarray  # int64 [n]
    on_device: Tensor  # int64 [n], the same on the device of the batch


@dataclass
class MicroBatches(Sequence["MicroBatch"]):
    """The micro-batches of a batch. Each is made when it is asked for: sorted images are copies."""

    batch: Batch
    parts: list[slice]  # k
    lengths: np.ndarray  # int64 [n, T], of the texts, in the order of the parts
    order: Permutation | None  # places of the samples in the batch; None: 0, 1, ...

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def tokens_per_text(self) -> float:
        """The mean number of tokens that the model computes for a text, padding included."""
        if self.batch.pack_texts:
            return float(self.lengths.mean())
        computed = sum(self.longest(part) * (part.stop - part.start) for part in self.parts)
        return computed / len(self.lengths)

    @property
    def patches_per_image(self) -> float | None:
        """The mean number of patches of an image; None: all are squares of one size."""
        patches = self.batch.columns.get("patch_counts")
        return None if patches is None else sum(patches) / len(patches)

    def longest(self, part: slice) -> int:
        """The length to which the texts of a micro-batch are cut: one of a few."""
        return -(-int(self.lengths[part].max()) // TEXT_STEP) * TEXT_STEP

    def __getitem__(self, index: Any) -> Any:
        part, batch = self.parts[index], self.batch
        lengths = self.lengths[part]
        # cut first, so that sorting copies no more than the model reads
        columns = batch.columns.plus(texts=batch.texts[..., : self.longest(part)])
        rows = [*range(part.start, part.stop)]
        if self.order is not None:
            rows = self.order.on_host[part].tolist()
        patches, num_patches = batch.columns.get("patch_counts"), None
        if patches is not None:
            counts = [patches[row] for row in rows]
            num_patches = sum(counts)
            columns = columns.plus(images=batch.images[:, : 1 + max(counts)])
        if self.order is None:
            columns = columns.cut(part.start, part.stop)
        else:
            places = self.order.on_device[part]
            columns = columns.take(rows, places).plus(places=places)
        num_tokens = int(lengths.sum()) if batch.pack_texts else None
        return MicroBatch(columns, num_tokens, num_patches)


def text_ends(texts: Tensor) -> Tensor:
    """int64 [..., L] -> int64 [...]: where each text ends, at its highest id."""
    return texts.argmax(dim=-1)


def text_lengths(texts: Tensor) -> list[Any]:
    """Tokens of each text, int64 [n, L] or [n, T, L], up to its end. A causal tower reads nothing
    behind it."""
    return (text_ends(texts) + 1).tolist()


@dataclass
class MicroBatch:
    """The samples of one forward pass."""

    columns: Columns  # b samples: those of a `Batch`, with texts of L <= context_length tokens
    num_tokens: int | None = None  # of the texts up to their ends, for a model that packs them
    # of all images together, at native resolution; None: they are squares of one size
    num_patches: int | None = None

    @property
    def images(self) -> Tensor:
        """uint8 [b, 3, H, W], or [b, B], or [b, 1 + T, 3 p p], as in `Batch`."""
        return self.columns["images"]

    @property
    def texts(self) -> Tensor:
        """int64 [b, L], or [T b, L], those of an image one after another."""
        return self.columns["texts"].flatten(0, -2)

    @property
    def sample_seeds(self) -> Tensor:
        """int64 [b]"""
        return self.columns["sample_seeds"]

    @property
    def places(self) -> Tensor | None:
        """int64 [b]: the samples' places in the rank's share; None: they follow the last
        micro-batch's."""
        return self.columns.get("places")


NO_ID = -1  # of a sample without a key; it equals no sample's


def sample_id(key: str | None) -> int:
    """63 bits of a hash of the key, the same in every process. None: NO_ID."""
    if key is None:
        return NO_ID
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_ids(keys: Iterable[str | None]) -> Tensor:
    """Keys -> int64 [n], the `sample_id` of each."""
    return torch.tensor([sample_id(key) for key in keys], dtype=torch.int64)


FLAG_BASE = 2**13  # four digits are 52 bits, float64 has 53


class Flags(NamedTuple):
    """Flags by which a rank reports its state in a step. A flag set by one rank is set on all
    ranks.

    The flags are summed over the ranks in the same collective as the norm of the gradients, so they
    need no collective of their own. They travel as one number: gloo passes each element of a short
    tensor around the ring separately.
    """

    # It was asked to stop while its data does not come. It repeats its last batch, so that the other
    # ranks reach the end of this step. Then all ranks discard the step and stop.
    starved: bool = False
    stop: bool = False  # it was asked to stop after this step
    again: bool = False  # out of memory in its backward pass: the step is discarded and repeated
    smaller: bool = False  # its micro-batch became smaller in this step

    def packed(self) -> float:
        """A number whose sum over at most 8,191 ranks is exact in float64; `unpacked` reads it."""
        return float(sum(FLAG_BASE**place for place, is_set in enumerate(self) if is_set))

    @classmethod
    def unpacked(cls, total: float) -> Flags:
        """The flags that at least one rank has set. total: the sum of the ranks' `packed`."""
        ranks = (int(total) // FLAG_BASE**place % FLAG_BASE for place in range(len(cls._fields)))
        return cls(*(count > 0 for count in ranks))


NO_FLAGS = Flags()


@dataclass(frozen=True)
class StepResult:
    """The results of a step, the same on all ranks."""

    grad_norm: float  # global, before the clip
    skipped: bool = False  # fp16 only: the gradients overflowed, nothing was updated
    # the norm of each group of parameters that is trained ("grad_norm_image", ...); from
    # `train_step` also the scalars of the loss, and what the objective reports
    metrics: dict[str, float] = field(default_factory=dict)
    loss: float = math.nan  # of the global batch, before the update; `train_step` knows it
    accum_steps: int = 1  # micro-batches of each rank
    flags: Flags = NO_FLAGS  # of all ranks together, from `train_step`
    rounds: int = 1  # 2 if the step was computed again, because exponentials underflowed


@dataclass
class Fragment:
    """A contiguous piece of a parameter and its optimizer state, or of a buffer, on one rank.

    Checkpoints are made of these, so they do not depend on the number of ranks or the ZeRO stage.
    """

    name: str  # of the parameter, as in the model's state dict
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # first element, in the flattened parameter
    # "param" (fp32 master), optimizer slots ("exp_avg", ...), EMA; 1-d, equally long
    tensors: dict[str, Tensor]


class StateRange(NamedTuple):
    """Elements `[start, start + numel)` of a flattened parameter or of an optimizer's slot."""

    name: str
    slot: str
    start: int
    numel: int


class FragmentSource(Protocol):
    """Reads any range of any parameter's state, whatever layout wrote the checkpoint."""

    def prepare(self, ranges: Iterable[StateRange]) -> None:
        """Fetch everything that this rank will read. Collective.

        Optional: `read` fetches what is missing, piece by piece. CheckpointError, on all ranks.
        """

    def slots(self, name: str) -> set[str]:
        """The stored slots of a parameter: "param" and, unless frozen, the optimizer's slots."""

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter. CheckpointError if a part
        is missing."""


class Task:
    """How a step uses a kind of model. This class describes CLIP; subclasses describe others.

    CLIP has a tower of images, a tower of texts, a logit scale and perhaps a bias. The model is
    `model(images, texts, sample_seeds=None)` and returns `(image, text, exp(logit_scale),
    logit_bias)`, where an input may be None. With both inputs a fifth value may follow: local
    losses by name (see `Features`). Its parameters have OpenCLIP's names. All ranks make the same
    calls.
    """

    # parameters of shape [1] that belong to no group; engines give the model their fp32 values
    scalars: tuple[str, ...] = ("logit_scale", "logit_bias")
    # the groups of all other parameters, such as the towers; norms are reported for each
    group_names: tuple[str, ...] = ("image", "text")
    # the range that a scalar is clamped to after each optimizer step
    bounds: Mapping[str, tuple[float, float]] = {"logit_scale": (0.0, MAX_LOGIT_SCALE)}

    def group(self, parameter: str) -> str | None:
        """The group of a parameter, by its name in the model's state dict; None for a scalar."""
        if parameter in self.scalars:
            return None
        return "image" if parameter.startswith("visual.") else "text"

    def features(
        self, model: nn.Module, micro_batch: MicroBatch, only: Collection[str] | None = None
    ) -> Features:
        """The features of a micro-batch, and the scalars as the loss needs them.

        only: names of the groups whose features are needed; None: all.
        """
        images = micro_batch.images if only is None or "image" in only else None
        texts = micro_batch.texts if only is None or "text" in only else None
        packed: tuple[int | None, ...] = ()  # a model that packs neither takes neither
        if micro_batch.num_patches is not None:
            packed = (micro_batch.num_tokens, micro_batch.num_patches)
        elif micro_batch.num_tokens is not None:
            packed = (micro_batch.num_tokens,)
        return named_features(*model(images, texts, micro_batch.sample_seeds, *packed))

    def encode(self, model: nn.Module, name: str, inputs: Tensor) -> Tensor:
        """The features `name`, [b, D], from inputs of that kind only, for evaluation.

        name "image": uint8 [b, 3, H, W], or [b, B] as in `Batch`; "text": int64 [b,
        context_length].
        """
        if name == "image":
            return model(inputs, None)[0]
        return model(None, inputs)[1]

    def with_masters(self, features: Features, masters: Mapping[str, Tensor]) -> Features:
        """`features`, with scalars computed from the fp32 `masters` in place of rounded copies.

        A copy of the scale in bf16 moves in steps of 3% near 100. Gradients still go to the copies,
        and are those of the masters.
        """
        out = dict(features)
        if "logit_scale" in masters:
            copy = features["logit_scale"]
            out["logit_scale"] = copy * (masters["logit_scale"].exp() / copy.detach())
        if "logit_bias" in masters:
            copy = features["logit_bias"]
            out["logit_bias"] = copy + (masters["logit_bias"] - copy.detach())
        return out


IMAGE_TEXT = Task()


def named_features(
    image: Tensor | None,
    text: Tensor | None,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    local_losses: Mapping[str, Tensor] = MappingProxyType({}),
) -> Features:
    """CLIP's features by name, without those that are None.

    image, text: [b, D], normalized. logit_scale: [1], the factor itself. logit_bias: [1].
    local_losses: each [b, 2], see `Features`.
    """
    named = {"image": image, "text": text, "logit_scale": logit_scale, "logit_bias": logit_bias}
    return {name: x for name, x in {**named, **local_losses}.items() if x is not None}


def groups(task: Task, parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> its group; scalars are left out."""
    named = {name: task.group(name) for name in parameters}
    return {name: group for name, group in named.items() if group is not None}


@dataclass(frozen=True)
class Context:
    """Inputs of a loss other than this rank's features.

    `columns` has all columns of this rank's n samples, except for images and texts. A loss reads a
    value of each sample by its name, such as `context.columns["ids"]`.
    """

    # N, sharded so that the first N % W ranks hold one more; or samples of each rank; None: every
    # rank holds n
    global_size: int | Sequence[int] | None = None
    columns: Columns = field(default_factory=Columns)
    """See `Batch.columns`. "names": list of n; equal names are the same sample. "ids": int64 [n],
    or [m n] for m texts of each sample. Texts of one id are the same, and not negatives of each
    other's images. An id below 0 is of an unknown text."""
    prepared: Features | None = None  # what `Objective.prepare` returned for the n samples
    # the caller looks at `LossOutput.unsafe` later, once the device has come so far
    deferred: bool = False


NO_CONTEXT = Context()


@dataclass
class LossOutput:
    """A global loss, and this rank's share of its gradient.

    Shares sum, over the ranks, to the whole gradient of the mean loss over the global batch: an
    engine that averages over ranks must undo the division.
    """

    loss: Tensor  # [], float64: the mean over the global batch, the same on all ranks
    gradients: Features  # with respect to this rank's features: rows [n, D], and scalars [1]
    # what else metrics.jsonl should have; tensors have one element
    metrics: dict[str, Tensor | float] = field(default_factory=dict)
    # bool []: true where the output must be computed again with `Context.deferred` off; None: safe
    unsafe: Tensor | None = None

    @classmethod
    def scaled(
        cls,
        loss: Tensor,
        d_image: Tensor,
        d_text: Tensor,
        d_scale: Tensor,
        scale: Tensor,
        d_bias: Tensor | None = None,
        **more: Any,
    ) -> LossOutput:
        """The output of a loss of `scale * I T^T (+ bias)`.

        d_image, d_text: the gradients without the factor `scale`, [1]; they are changed in place.
        d_scale: float64 []; the logits are linear in the scale: it is <I, dI> before that factor.
        d_bias: [1].
        """
        d_logit_scale = d_scale.to(d_image.dtype).reshape(1)
        gradients = named_features(d_image.mul_(scale), d_text.mul_(scale), d_logit_scale, d_bias)
        return cls(loss, gradients, **more)


def is_scalar(feature: Tensor) -> bool:
    """Rows have two dimensions or more, scalars are [1]."""
    return feature.ndim == 1


class Objective(abc.ABC):
    """A contrastive loss in closed form: its gradients need neither an autograd graph nor a
    collective after the call.

    All ranks make the same calls. Only `__call__` has to be overridden.
    """

    matmul: Matmul = "highest"
    """How its products of float32 matrices are computed; `LossConfig.matmul`."""
    takes_bias: bool = False
    """Whether the model must have a `logit_bias`; if not, it may not have one."""
    takes_ids: bool = False
    """Whether it reads the column "ids" of `Context.columns`."""
    own_names: bool = False
    """Whether it reads the features of a user's model by the names that the model gives them."""
    feature_names: Collection[str] = ()
    """Names of these features; empty: all outputs with a row for each sample."""
    constants: Collection[str] = ()
    """Names of outputs of a user's model that have a row for each sample, but no gradient: masks."""
    feature_dims: int = 2
    """Dimensions of a feature: 2 for [b, D], 3 for [b, tokens, D]."""
    weights: Mapping[str, float] = {}
    """Factors of the losses beside it, by name, and its own as "contrastive_loss"; 1 if missing."""

    @property
    def keeps_state(self) -> bool:
        """Whether it keeps something from step to step, by any of the methods for that."""
        methods = ("after_step", "state_dict", "load_state_dict")
        return any(getattr(type(self), name) is not getattr(Objective, name) for name in methods)

    def prepare(self, micro_batch: MicroBatch) -> Features | None:
        """Called for each micro-batch in the first pass, without grad, for instance to compute a
        teacher's features."""
        return None

    @abc.abstractmethod
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        """features: those of this rank's n samples, detached; equal rows belong together.

        It must not change a state: a step may be computed twice, or discarded.
        """

    def after_step(self) -> None:  # noqa: B027  most need nothing
        """Called after the optimizer step."""

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint: the same on all ranks, and valid on any number of them.

        Names are shared with nothing else. Names and shapes do not change after the first step.
        """
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor], device: Any) -> None:  # noqa: B027
        """Restore what `state_dict` returned. If another loss wrote the checkpoint, `tensors` has
        none of these names."""
