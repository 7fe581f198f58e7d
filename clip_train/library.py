"""The two passes for any module with two sides, in your own training loop: see docs/library.md."""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from clip_train import dist
from clip_train.batch import chunk_sizes, num_chunks, token_chunks  # noqa: F401  for programs
from clip_train.columns import Columns
from clip_train.cutting import Inputs, SplitBy
from clip_train.engines.base import surrogate
from clip_train.losses.function import FunctionLoss
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.ranking import Ranking
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.losses.views import WeightedViews, as_objective
from clip_train.models.blocks import at_least_float32
from clip_train.settings import broken
from clip_train.step import two_pass
from clip_train.task import Context, Features, Objective, is_scalar, named_features
from clip_train.torch_internals import (
    compiled_module,
    has_backward_hooks,
    own_modules,
    own_parameters,
    reduce_missed,
    stays_whole,
    tree_leaves,
)
from clip_train.versions import OLDEST_FOR_LIBRARY, version_tuple

MicroSize = int | Sequence[int] | Mapping[str, int | Sequence[int]]
# as OpenCLIP's dictionaries have them
NAMES = ("image_features", "text_features", "logit_scale", "logit_bias")


def contrastive_step(
    model: Callable[..., Any],
    *inputs: Any,
    micro_size: MicroSize,
    kept_graphs: int = 1,
    loss: Objective | Callable[..., Tensor] | None = None,
    ids: Tensor | Sequence[int] | None = None,
    shares: Sequence[int] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    split_by: SplitBy | None = None,
    arguments: Mapping[str, Any] | None = None,
    **named: Any,
) -> Tensor:
    """Add the gradient of the mean loss over the global batch to `.grad`, however the batch is cut.

    The caller clears gradients before and steps the optimizer afterwards. With
    DistributedDataParallel, `.grad` is then equal on all ranks; with `fully_shard`, each rank has
    its shard. A ZeRO engine holds it where its own `step` expects it.

    Args:
        model: `model(*inputs, **named)` -> (image_features [b, D], text_features [m b, D], both
            normalized, logit_scale: the factor itself[, logit_bias]), or a dict with these names,
            or with two names of your own and `logit_scale`. Its training mode is left as it is.
        inputs, named: this rank's samples, often images and texts: tensors, sequences, or dicts of
            them, on the model's device. Some have n samples. Others may have m n, those of a sample
            one after another: then a feature has m rows for each sample too, or no input counts rows.
        micro_size: samples per forward pass, or the sizes of this rank's micro-batches. Every rank
            needs the same number of them (`token_chunks`). Or a dict of these with the name of each
            input, {"query": 64, "document": 8}: then the model is called with one of them at a
            time, and returns the features of that name, and `logit_scale`.
        kept_graphs: micro-batches whose graphs are retained, at least 1. Each more saves a forward
            pass and needs more memory.
        loss: None is InfoNCE(), where the first of m texts is the positive. Or a function of the
            global batch, `loss(image [N, D], text [m N, D], scale [1], bias [1] or None, rows)` ->
            [], as in `clip_train.losses.function`. Or `over_pairs` or `matryoshka` of one of
            these, see `clip_train.losses.views`.
        ids: int64, one for each text of this rank. Texts with the same id, on any rank, are equal,
            so none is a negative of another's image. An id below 0 is an unknown text.
        shares: samples of each rank, known to all ranks. None: all ranks have the same number. All
            ranks take the same number of micro-batches, at most the smallest share.
        scaler: multiplies gradients by its scale, as `scaler.scale(loss).backward()` does. Call
            `scaler.step(optimizer)` and `scaler.update()` afterwards.
        split_by: {ragged input: its row counts}, such as {"pixel_values": "image_grid_thw"}. The row
            counts are a list with the number of rows of each sample, or the name of another input.
            That input has one number for each sample, or factors whose product is the number. If its
            name begins with `cu_`, it has a 0 and the end of each sample. It may itself be ragged. A
            key can also name an input of one tower, such as "query.input_ids".
        arguments: further named inputs, for names that `contrastive_step` has itself.

    Returns:
        The loss over the global batch, float64 [], detached and not scaled; not checked for being
        finite.

    Raises:
        ValueError: Inputs that cannot be cut alike. A model that returns something else, or that is
            a function on several ranks. A wrapper that reduces gradients in another way. Another
            kind of loss. A device whose random state cannot be replayed.
    """
    call = Call.checked(
        model,
        inputs,
        named,
        micro_size=micro_size,
        loss=loss,
        ids=ids,
        shares=shares,
        scaler=scaler,
        split_by=split_by,
        arguments=arguments,
    )
    micro_batches = call.micro_batches(micro_size)
    engine = call.engine(len(micro_batches), micro_size)
    kept = min(kept_graphs, engine.most_graphs)
    with engine.one_reduction():
        output = two_pass(
            engine,
            micro_batches,
            call.objective,
            call.context(engine.device),
            kept_graphs=kept,
        )
    return output.loss


@dataclass
class Call:
    """The arguments of `contrastive_step`, checked."""

    model: Callable[..., Any]
    parts: "Parts"
    objective: Objective
    by_key: dict[Any, Any]  # the model's arguments, by position or name
    inputs: Inputs  # the same, to be cut
    num_positional: int
    size: int  # n, samples of this rank
    counts: list[int]  # samples of each rank
    ids: Tensor | Sequence[int] | None
    scaler: torch.amp.GradScaler | None

    @classmethod
    def checked(
        cls,
        model: Callable[..., Any],
        inputs: Sequence[Any],
        named: Mapping[str, Any],
        *,
        micro_size: MicroSize,
        loss: Objective | Callable[..., Tensor] | None,
        ids: Tensor | Sequence[int] | None,
        shares: Sequence[int] | None,
        scaler: torch.amp.GradScaler | None,
        split_by: SplitBy | None,
        arguments: Mapping[str, Any] | None,
    ) -> "Call":
        """ValueError as of `contrastive_step`."""
        known = isinstance(loss, (InfoNCE, SigmoidLoss, Ranking, FunctionLoss, WeightedViews))
        if loss is not None and not known and (isinstance(loss, Objective) or not callable(loss)):
            raise ValueError(
                f"loss must be InfoNCE, SigmoidLoss, Ranking, MaxSim, over_pairs, matryoshka or a "
                f"function, not {type(loss).__name__}: other losses need the trainer"
            )
        objective = as_objective(loss)
        parts = Parts.of(model)
        own = {"loss": loss, "ids": ids, "shares": shares, "scaler": scaler, "split_by": split_by}
        own_keywords = [name for name, value in own.items() if value is not None]
        swallowed: list[str] = []
        if own_keywords:
            not_given = parameters_left(model, len(inputs)) - {*(arguments or {})}
            swallowed = sorted({*own_keywords} & not_given)
        by_key: dict[Any, Any] = {**dict(enumerate(inputs)), **named, **(arguments or {})}
        given = Inputs(by_key, split_by or {})
        sizes = given.sizes
        n, rank = min(sizes.values(), default=0), dist.rank()
        counts = [n] * dist.world_size() if shares is None else [*shares]
        rules = [
            *micro_size_rules(micro_size, by_key, n),
            (
                n == 0 or any(size % n for size in sizes.values()),
                f"inputs have {sizes} samples: give equally many, or a multiple of the fewest, at "
                "least one",
            ),
            (
                isinstance(objective, SigmoidLoss) and len(set(sizes.values())) > 1,
                f"inputs have {sizes} samples, and loss is SigmoidLoss, which takes pairs: give "
                "equally many, or another loss",
            ),
            (
                ids is not None and not objective.takes_ids,
                f"ids, and loss is {type(objective).__name__}: it takes none; InfoNCE, SigmoidLoss, "
                "Ranking and MaxSim do",
            ),
            (
                len(counts) != dist.world_size() or min(counts) < 1 or counts[rank] != n,
                f"shares ({counts}) must have a number for each of {dist.world_size()} ranks, at least "
                f"1, and {n} for rank {rank}, which holds so many",
            ),
            (
                dist.world_size() > 1 and not isinstance(model, nn.Module),
                "model is a function, and there are several ranks: give an nn.Module that holds it as "
                "a submodule, and whose forward does what the function does, so that its gradients are "
                "summed over ranks",
            ),
            (
                scaler is not None and hasattr(model, "coalesce_grad_reduction"),
                f"scaler: {type(model).__name__} scales the loss itself; remove scaler",
            ),
            (
                bool(swallowed),
                f"{swallowed} are arguments of contrastive_step and of the model: the model would not "
                f"get them. Give the model's in arguments={{'{swallowed[0] if swallowed else ''}': ...}}",
            ),
            *wrapper_rules(model, parts),
        ]
        for message in broken(rules):
            raise ValueError(message)
        return cls(
            model=model,
            parts=parts,
            objective=objective,
            by_key=by_key,
            inputs=given,
            num_positional=len(inputs),
            size=n,
            counts=counts,
            ids=ids,
            scaler=scaler,
        )

    def micro_batches(self, micro_size: MicroSize) -> list["Arguments"]:
        """All samples of this rank, cut. With a size for each tower, one tower after another."""
        if isinstance(micro_size, Mapping):
            towers = [({name}, size) for name, size in micro_size.items()]
        else:
            towers = [({*self.by_key}, micro_size)]
        micro_batches = []
        for keys, size_of_chunk in towers:
            start = 0
            for size in chunks_of(size_of_chunk, self.size, self.counts):
                micro_batches.append(self.cut(slice(start, start + size), keys))
                start += size
        return micro_batches

    def cut(self, samples: slice, keys: set[Any]) -> "Arguments":
        """The arguments with these keys, for some of this rank's samples."""
        by_key = self.inputs.cut(samples, self.size, keys)
        positional = [by_key.pop(i) for i in range(self.num_positional) if i in keys]
        return Arguments(positional, by_key, samples.stop - samples.start, keys)

    def engine(self, k: int, micro_size: MicroSize) -> "ModuleEngine":
        """For a step of k micro-batches."""
        towers = [*micro_size] if isinstance(micro_size, Mapping) else []
        engine = ModuleEngine(
            self.model,
            self.parts,
            [*self.by_key.values()],
            k=k,
            scaler=self.scaler,
            objective=self.objective,
            towers=towers,
        )
        is_cut = k > max(len(towers), 1)
        if is_cut and any(may_count(value) for value in self.by_key.values()):
            engine.cut_evenly = {
                key: size // self.size
                for key, size in self.inputs.sizes.items()
                if size > self.size and not self.inputs.is_ragged(key)
            }
        return engine

    def context(self, device: torch.device) -> Context:
        columns = Columns()
        if self.ids is not None:
            columns = columns.plus(ids=torch.as_tensor(self.ids, device=device))
        return Context(self.counts, columns)


def micro_size_rules(
    micro_size: Any, by_key: Mapping[Any, Any], n: int
) -> Iterator[tuple[bool, str]]:
    """Conditions under which `micro_size` cannot be used for n samples, each with its message."""
    of_towers = {"": micro_size}
    if isinstance(micro_size, Mapping):
        of_towers = {f" of {name}": size for name, size in micro_size.items()}
        yield (
            {*micro_size} != {*by_key},
            f"micro_size is for {[*micro_size]}, and the inputs are {[*by_key]}: give each a size, "
            "and all inputs of a tower as one dict",
        )
    for name, size in of_towers.items():
        if isinstance(size, Sequence):
            wrong = sum(size) != n or min(size) < 1
        else:
            wrong = size < 1
        yield (
            wrong,
            f"micro_size{name} ({size}) must be at least 1, or a list of such numbers whose sum is "
            f"{n}, the number of samples",
        )


def chunks_of(micro_size: int | Sequence[int], n: int, counts: Sequence[int]) -> list[int]:
    """The sizes of this rank's micro-batches. counts: samples of each rank."""
    if isinstance(micro_size, Sequence):
        return [*micro_size]
    return chunk_sizes(n, num_chunks(max(counts), min(counts), micro_size), micro_size)


@dataclass
class Arguments:
    """The arguments of one call of a module, in place of a `MicroBatch`."""

    args: list[Any]
    kwargs: dict[str, Any]
    size: int  # samples
    keys: set[Any]  # of the arguments: those of a tower, or all
    sample_seeds: None = None  # the module draws from torch's generators
    places: None = None


@dataclass
class Parts:
    """The modules of a model, found by one walk in every step.

    Nothing shows for less than a walk that a module was replaced, wrapped or sharded since the last
    step. Classes are asked instead of modules and parameters, because they are few.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    ddp: list[Any]  # DistributedDataParallel
    sharded: list[Any]  # by `fully_shard`
    distributed: list[Any]  # parameters that are DTensors

    @classmethod
    def of(cls, model: Callable[..., Any]) -> "Parts":
        """Of a function: nothing. Sharded modules that are whole, as after an evaluation, are
        sharded again: their parameters are others then."""
        modules = modules_of(model) if isinstance(model, nn.Module) else []
        kinds = {type(module) for module in modules}
        sharding = {kind for kind in kinds if is_sharded(kind)}
        sharded: list[Any] = [module for module in modules if type(module) in sharding]
        for module in sharded:
            module.reshard()
        parameters = dict.fromkeys(
            p for module in modules for p in own_parameters(module).values() if p is not None
        )
        meshed = {kind for kind in {type(p) for p in parameters} if hasattr(kind, "device_mesh")}
        reducing = {kind for kind in kinds if issubclass(kind, DistributedDataParallel)}
        return cls(
            modules,
            [*parameters],
            [module for module in modules if type(module) in reducing],
            sharded,
            [p for p in parameters if type(p) in meshed],
        )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()`, level by level: it takes 0.08 ms instead of 0.2 for 400 modules."""
    modules, seen = [model], {id(model)}
    for module in modules:
        for child in own_modules(module).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


def parameters_left(model: Any, num_inputs: int) -> set[str]:
    """The names of the arguments of the function that the user wrote, inside wrappers, that
    `num_inputs` positional inputs, and functools.partial, leave to keywords."""
    while isinstance(model, nn.Module):
        if isinstance(model, DistributedDataParallel) or hasattr(
            model, "set_gradient_accumulation_boundary"
        ):
            inner: Any = getattr(model, "module", None)
        else:
            inner = compiled_module(model)
        if not isinstance(inner, nn.Module):
            model = model.forward
            break
        model = inner
    bound = model.keywords if isinstance(model, functools.partial) else {}
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return set()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = [parameter.name for parameter in parameters if parameter.kind in by_place][:num_inputs]
    named = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return named - {*given, *bound}


def wrapper_rules(model: Callable[..., Any], parts: Parts) -> Iterator[tuple[bool, str]]:
    """Conditions under which `model`, or a module in it, cannot be stepped, each with its
    message."""
    engine: Any = model
    ranks = dist.world_size()
    if hasattr(model, "set_gradient_accumulation_boundary"):
        yield (
            not hasattr(model, "coalesce_grad_reduction")
            or not engine.managed_gradient_accumulation()
            or engine.dp_world_size != dist.world_size(),
            f"model is {type(model).__name__}, which cannot reduce gradients once per step; set "
            "coalesce_grad_reduction and managed_gradient_accumulation to true, and make all "
            "ranks data-parallel",
        )
    inside: set[type] = {type(module) for module in parts.modules if module is not model}
    wrong = {kind for kind in inside if hasattr(kind, "set_gradient_accumulation_boundary")}
    wrong |= {
        kind for kind in {*inside, type(model)} if is_sharded(kind, "FullyShardedDataParallel")
    }
    for kind in wrong:
        yield (
            True,
            f"model holds {kind.__name__}, which reduces gradients differently: wrap the plain "
            "module with DistributedDataParallel or fully_shard, or give a ZeRO engine as it is",
        )
    yield (
        bool(parts.sharded)
        and version_tuple(torch.__version__) < version_tuple(OLDEST_FOR_LIBRARY),
        f"model is sharded by fully_shard, and torch is {torch.__version__}: contrastive_step "
        f"needs {OLDEST_FOR_LIBRARY} or newer with fully_shard; update torch, or use "
        "DistributedDataParallel",
    )
    meshes = {p.device_mesh for p in parts.distributed}
    yield (
        any(mesh.size() != ranks for mesh in meshes),
        f"model is sharded over {[mesh.size() for mesh in meshes]} of {ranks} ranks: give "
        "fully_shard a mesh of all ranks",
    )


def is_sharded(kind: type, base: str = "FSDPModule") -> bool:
    """Whether modules of `kind` come from `fully_shard`, or are torch.distributed.fsdp's other
    class. Their import takes half a second, so only users of FSDP pay for it.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, getattr(fsdp, base))


def may_count(inputs: Any) -> bool:
    """Whether the inputs could say how many rows of another input each sample has: whole numbers,
    at most a few of each sample. Without them a model has to divide rows evenly, as a step does."""
    if isinstance(inputs, Mapping):
        return any(may_count(value) for value in inputs.values())
    if isinstance(inputs, Tensor):
        is_whole = not (inputs.is_floating_point() or inputs.is_complex())
        return is_whole and (inputs.ndim == 1 or (inputs.ndim == 2 and inputs.shape[1] <= 4))
    if hasattr(inputs, "ndim"):  # NumPy's
        return inputs.ndim <= 2
    return not isinstance(next(iter(inputs)), str)


class ModuleEngine:
    """One step of a model: k backwards that add to `.grad`; the last one reduces.

    Modules under DDP or `fully_shard` may be anywhere in `model`: inside torch.compile's wrapper or
    an adapter, one for each tower. Other parameters of an adapter, often `logit_scale`, are summed
    over ranks here.

    most_graphs: that can be retained. DDP reduces in a backward that directly follows its own
    forward, so one of several micro-batches goes forward again.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        parts: Parts,
        inputs: Any,
        k: int,
        scaler: torch.amp.GradScaler | None = None,
        objective: Objective | None = None,
        towers: Sequence[str] = (),
    ):
        """inputs: all arguments of the model, for the device. towers: the names of the inputs of
        which each micro-batch has one; empty: it has all."""
        self.model = model
        self.objective = InfoNCE() if objective is None else objective
        self.towers = towers
        self.scaler = scaler
        parameters = parts.parameters
        leaves = [*parameters[:1], *tree_leaves(inputs)]
        devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        self.device = next(devices, torch.device("cpu"))
        self.ddp, self.sharded = parts.ddp, parts.sharded
        self.zero: Any = model if hasattr(model, "coalesce_grad_reduction") else None
        inside = {p for m in self.ddp for p in m.parameters()}
        inside |= {*parts.distributed}
        wrapped = bool(self.ddp or self.sharded)
        self.averages = wrapped or self.zero is not None
        self.outside = [p for p in parameters if wrapped and p.requires_grad and p not in inside]
        self.grads_before = [p.grad for p in self.outside]  # of earlier steps
        for p in self.outside:
            p.grad = None
        self.cut_evenly: dict[Any, int] = {}  # input -> rows of each sample, if they are several
        self.rows: dict[str, int] = {}  # feature -> rows of each sample
        self.shapes: dict[str, list[int]] = {}  # feature -> what follows its rows
        self.inside = inside
        # with a static graph, DDP counts the uses of each parameter in the first step
        self.reducing: list[Any] = [module for module in self.ddp if not module.static_graph]
        self.in_checkpoints: set[Any] = set()  # parameters used by reentrant ones
        self.last_had_graph = False  # the last forward
        self.backwards_left = k
        self.most_graphs = max(1, k - 1) if self.ddp else k

    def one_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Around a step of a ZeRO engine that would reduce in each backward, as stages 2 and 3."""
        if self.zero is None or not self.zero.zero_optimization_partition_gradients():
            return contextlib.nullcontext()
        # `step()` then updates, whatever its own number of micro-batches is
        self.zero.set_gradient_accumulation_boundary(True)
        return self.zero.coalesce_grad_reduction()

    def _quiet(self) -> contextlib.ExitStack:
        """Without a reduction, except for the last micro-batch."""
        stack = contextlib.ExitStack()
        if self.backwards_left > 1:
            for module in self.ddp:
                stack.enter_context(module.no_sync())
            for unit in self.sharded:
                self._defer(unit, True)
                stack.callback(self._defer, unit, False)
        return stack

    @staticmethod
    def _defer(module: Any, deferred: bool) -> None:
        """Whether the next backward leaves its gradients on this rank, for a later one to reduce.

        A unit that stays whole after its forward then stays so: one all-gather a step.
        """
        module.set_requires_gradient_sync(not deferred, recurse=False)
        module.set_is_last_backward(not deferred)
        module.set_reshard_after_backward(not (deferred and stays_whole(module)), recurse=False)

    def forward(self, micro_batch: Arguments, cached: Features | None = None) -> Features:
        """Always both towers, because either may draw from torch's generators."""
        watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext({})
        if self.reducing and torch.is_grad_enabled():
            watch = reentrant_checkpoints()
        if torch.is_grad_enabled() and not self.last_had_graph:
            # autocast of older torch (2.10, not 2.13) also serves casts of weights without a graph
            torch.clear_autocast_cache()
        self.last_had_graph = torch.is_grad_enabled()
        with self._quiet(), watch as called:
            outputs = self.model(*micro_batch.args, **micro_batch.kwargs)
        self.in_checkpoints = set()
        for module, checkpoints in called.items():
            trained = self.inside.intersection(own_parameters(module).values())
            self.in_checkpoints |= trained
            if trained and len(checkpoints) > 1 and dist.world_size() > 1:
                raise ValueError(
                    f"model calls {type(module).__name__} in two activation checkpoints with "
                    "use_reentrant=True under DistributedDataParallel, which would reduce its "
                    "gradients after the first: set use_reentrant=False"
                )
        if self.towers:
            features = tower_features(outputs, micro_batch, self.towers, self.objective)
        else:
            features = as_features(outputs, self.objective.own_names)
        self._check_rows(features, micro_batch)
        return features

    def _check_rows(self, features: Features, micro_batch: Arguments) -> None:
        """ValueError if the features of a micro-batch are not those of its samples.

        Inputs with several rows a sample are cut evenly. This is right only if each sample has
        equally many, and then a feature usually has them too: documents of a query. Patches of
        images, or the tokens of packed texts, have no such feature, but an input that counts them.
        """
        size = micro_batch.size
        constants, dims = self.objective.constants, self.objective.feature_dims
        names = [name for name, x in features.items() if not is_scalar(x) and name not in constants]
        if self.objective.feature_names:
            names = [name for name in names if name in self.objective.feature_names]
        for name in names:
            shape = [*features[name].shape]
            if len(shape) != dims:
                expected = "[b, D], one row for each sample or text; pool tokens in the model"
                if dims == 3:
                    expected = "[b, tokens, D], a row of token features for each query or document"
                raise ValueError(f"{name} features are {shape}: return {expected}")
            if self.shapes.setdefault(name, shape[1:]) != shape[1:]:
                raise ValueError(
                    f"{name} features are {shape} for one micro-batch, and {self.shapes[name]} "
                    "behind the first number for another: pad to one length, with a mask"
                )
            if shape[0] % size or self.rows.setdefault(name, shape[0] // size) != shape[0] // size:
                raise ValueError(
                    f"{name} features are {shape} for a micro-batch of {size} samples: return "
                    "equally many rows for each sample. Inputs are cut along their first "
                    "dimension, which has to count samples: not packed tokens or patches"
                )
        rows = self.rows.values()
        uneven = {
            key: m
            for key, m in self.cut_evenly.items()
            if key in micro_batch.keys and m not in rows
        }
        if uneven:
            raise ValueError(
                f"inputs {[*uneven]} have {[*uneven.values()]} rows for each sample, but features "
                f"have {self.rows}: packed tokens or patches cannot be cut evenly. Say with "
                "split_by which input counts their rows; or give these inputs one row for each "
                "sample, [n, rows, ...], padded if samples differ, and flatten them in the model"
            )

    def backward(self, features: Features, gradients: Features, last: bool = False) -> None:
        total = surrogate(features, gradients)
        if self.scaler is not None:
            total = self.scaler.scale(total)
        if self.averages:  # over ranks, and these are shares of a sum
            total = total * dist.world_size()
        if self.backwards_left == 1:
            total = self._reaching_all(total)
        with self._quiet():
            if self.zero is None:
                total.backward()
            else:
                self.zero.set_gradient_accumulation_boundary(last)
                self.zero.backward(total, scale_wrt_gas=False)
        self.backwards_left -= 1
        if self.backwards_left > 0:
            return
        self._reduce_missed()
        # Parameters outside are averaged, as those inside are.
        for p, before in zip(self.outside, self.grads_before, strict=True):
            own = torch.zeros_like(p) if p.grad is None else p.grad  # all ranks take part
            p.grad = dist.all_reduce_sum(own).div_(dist.world_size())
            if before is not None:
                p.grad += before

    def _reaching_all(self, total: Tensor) -> Tensor:
        """`total`, whose backward also reaches parameters under DDP that it does not depend on.

        DDP reduces nothing if a parameter is missing from the last backward, as where the last
        micro-batch is texts alone, or its forward did not call a tower.
        """
        for module in self.reducing:
            trained = [p for p in module.parameters() if p.requires_grad]
            missed = [p for p in trained if p not in self.in_checkpoints]
            total = Reaching.apply(total, *missed)
        for module in self.reducing:
            module.reducer.prepare_for_backward([total])
        return total

    def _reduce_missed(self) -> None:
        """Reduce gradients of sharded modules that the last backward did not reach.

        Modules below one sharded module are reduced by it. Several of them do not know each other.
        """
        for module in self.sharded:
            reduce_missed(module)


class Reaching(torch.autograd.Function):
    """A scalar unchanged. In its backward, the parameters get no gradient, but DDP sees them.

    Parameters with hooks of the user's own get zeros: a hook is called with None otherwise.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, *parameters: Tensor) -> Tensor:
        ctx.hooked = [p if has_backward_hooks(p) else None for p in parameters]
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (*gradients, *[None if p is None else torch.zeros_like(p) for p in ctx.hooked])


@contextlib.contextmanager
def reentrant_checkpoints() -> Iterator[dict[nn.Module, set[int]]]:
    """Yields the modules that run inside reentrant activation checkpoints, each with the numbers of
    these. Costs nothing without such checkpoints.

    Each has a backward of its own, and after it DDP counts the parameters as done.
    """
    called: dict[nn.Module, set[int]] = {}
    numbers = itertools.count()
    function: Any = CheckpointFunction
    original = function.apply

    def apply(*arguments: Any) -> Any:
        number = next(numbers)
        hook = nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: called.setdefault(module, set()).add(number)
        )
        try:
            return original(*arguments)
        finally:
            hook.remove()

    function.apply = apply
    try:
        yield called
    finally:
        del function.apply  # which it inherits


def described(out: Any) -> str:
    """A model's output for a message: its type, and the names of a dict."""
    if isinstance(out, Mapping):
        return f"a dict with {[*out]}"
    return type(out).__name__


def tower_features(
    out: Any, micro_batch: Arguments, towers: Sequence[str], objective: Objective
) -> Features:
    """The output of a model that was called with the inputs of one tower, as Features in at least
    float32. A loss of pairs gets the first tower's as "image" and the second's as "text".

    ValueError for an output without features of the tower's name.
    """
    [name] = micro_batch.keys
    if not isinstance(out, Mapping) or not isinstance(out.get(name), Tensor):
        raise ValueError(
            f"micro_size has a size for each tower, so the model was called with {name} alone, and "
            f"must return a dict with {name} and logit_scale, not {described(out)}"
        )
    others = {*towers} - {name}
    features = {
        key: at_least_float32(x) for key, x in out.items() if x is not None and key not in others
    }
    features |= {key: features[key].reshape(1) for key in NAMES[2:] if key in features}
    if not objective.own_names:
        if len(towers) != 2:
            raise ValueError(
                f"the inputs are {[*towers]}: {type(objective).__name__} takes two; give over_pairs"
            )
        features[("image", "text")[towers.index(name)]] = features.pop(name)
    return features


def as_features(out: Any, own_names: bool = False) -> Features:
    """A model's output, a tuple or OpenCLIP's dictionary, as Features in at least float32.

    own_names: a dict's names stay as they are, and may be more than two.
    """
    values: Any = out
    if own_names and isinstance(out, Mapping) and not set(NAMES[:2]) <= set(out):
        features = {name: at_least_float32(x) for name, x in out.items() if x is not None}
        return features | {
            name: features[name].reshape(1) for name in NAMES[2:] if name in features
        }
    if isinstance(out, Mapping):
        names = [*NAMES[:2]]
        if not set(names) <= set(out):
            names = [name for name in out if name not in NAMES[2:]]
        values = None
        if len(names) == 2:
            values = [out.get(name) for name in (*names, *NAMES[2:])]
    if (
        not isinstance(values, (tuple, list))
        or not 3 <= len(values) <= 4
        or not all(isinstance(value, Tensor) for value in values[:3])
    ):
        raise ValueError(
            "the model must return (image_features, text_features, logit_scale[, logit_bias]), or "
            "a dict with these names or two of your own in place of the first two, not "
            f"{described(out)}. Its logit_scale is the factor itself: exp of the parameter. Masks "
            "and other outputs are for Ranking and MaxSim"
        )
    image, text, scale, *bias = (at_least_float32(value) for value in values if value is not None)
    return named_features(image, text, scale.reshape(1), bias[0].reshape(1) if bias else None)
