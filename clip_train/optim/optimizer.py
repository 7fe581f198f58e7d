"""The torch optimizer that the `optim` section describes, over groups of parameters."""

import math
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clip_train.errors import UserError
from clip_train.models.freeze import depths, matching
from clip_train.optim.config import OptimConfig
from clip_train.optim.muon import Matrices, MuonAdamW
from clip_train.settings import checked_options, import_path, is_import_path, shown

# What an update needs at once. elements: one element, so engines may cut and join parameters (muon
# gathers cut matrices). parameters: whole parameters.
Needs = Literal["elements", "parameters"]
# In elements of bf16: 8 are 16 bytes, the least alignment that fast kernels accept; at 128, cuBLAS
# can choose among all its kernels.
ALIGNED = 8
WELL_ALIGNED = 128
find_class = partial(import_path, "optim.name", base=torch.optim.Optimizer)


def needs(config: OptimConfig) -> Needs:
    """What an update needs at once.

    An imported optimizer is tried: it takes two steps on a matrix and, as separate parameters, on
    the rows of that matrix. If both give the same rows, it is elementwise.

    UserError if the class does not take the options, or if a checkpoint cannot hold its state: the
    state may be `step` and tensors of the parameter's shape, and no entry of a group may change.
    """
    if not is_import_path(config.name):
        return "elements"
    path = config.name
    optimizer_class = find_class(path)
    options = checked_options("optim.name", path, config.options)
    # [3, 4, 4]: a matrix, and the gradients of two steps
    random = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    matrix = nn.Parameter(random[0].clone())
    rows: list[Tensor] = [nn.Parameter(row.clone()) for row in random[0].split(1)]
    try:
        optimizer = optimizer_class([matrix, *rows], lr=config.lr, **options)
        group = optimizer.param_groups[0]
        initial_group = dict(group)
        for gradient in random[1:]:
            matrix.grad = gradient.clone()
            for row, row_gradient in zip(rows, gradient.split(1), strict=True):
                row.grad = row_gradient.clone()
            optimizer.step()
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(
            f"optim.name ({path}) cannot be used with optim.options ({shown(config.options)}): "
            f"{e}; correct them"
        ) from None
    unsaved = [key for key, value in group.items() if value != initial_group.get(key)]
    for slot, value in optimizer.state[matrix].items():
        has_shape = isinstance(value, Tensor) and value.shape == matrix.shape
        if value is None or has_shape or (slot == "step" and float(value) == 2):
            continue
        unsaved.append(slot)
    if unsaved:
        raise UserError(
            f"optim.name ({path}) keeps the state {', '.join(unsaved)}, which does not have a "
            "parameter's shape and cannot be saved in a checkpoint; choose another optimizer"
        )
    is_elementwise = torch.allclose(matrix, torch.cat(rows), rtol=1e-5, atol=1e-7)
    return "elements" if is_elementwise else "parameters"


def lr_factors(config: OptimConfig, names: Collection[str]) -> dict[str, float]:
    """The factor on each parameter's learning rate. UserError for a pattern that matches none."""
    multipliers = config.lr_multipliers
    # as the recipe has them, for messages: 2 rather than 2.0
    written = {glob: factor if factor % 1 else int(factor) for glob, factor in multipliers.items()}
    matched = {glob: matching("optim.lr_multipliers", written, glob, names) for glob in multipliers}
    depth = depths(names)
    factors: dict[str, float] = {}
    for name in names:
        # the first pattern that matches counts
        multiplier = next((multipliers[glob] for glob in multipliers if name in matched[glob]), 1.0)
        factors[name] = multiplier * config.layer_decay ** depth[name]
    return factors


def without_decay(config: OptimConfig, names: Collection[str]) -> set[str]:
    """Parameters of any shape without decay: OpenCLIP's rule, and `no_decay`.

    UserError for a pattern that matches none.
    """
    excluded = {
        name for name in names if any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
    }
    for glob in config.no_decay:
        excluded |= set(matching("optim.no_decay", config.no_decay, glob, names))
    return excluded


def muon_matrices(config: OptimConfig, shapes: Matrices) -> Matrices:
    """The blocks' matrices among `shapes`, if optim.name is muon. Embeddings and the towers'
    projections are excluded.
    """
    return {
        name: shape
        for name, shape in shapes.items()
        if config.name == "muon"
        and len(shape) == 2
        and "embedding" not in name
        and name.split(".")[-1] not in ("proj", "text_projection")
    }


def parameter_groups(
    config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[dict]:
    """torch's groups of trained parameters, with `weight_decay`, `lr_factor`, `muon` and `shapes`.

    Matrices and embeddings decay; vectors and parameters of `without_decay` do not. These are
    OpenCLIP's two groups, unless factors differ. `muon`: the group has matrices of blocks, which
    Muon updates.

    Engines flatten a group into one tensor, in which every parameter must start at a multiple of 16
    bytes. So only the last parameter of a group may have another size. (Behind `logit_scale`, of
    one element, cuBLAS would not use its fast kernels for any bias.)
    """
    named = dict(parameters)
    factors = lr_factors(config, named)
    without = without_decay(config, named)
    # by (decays, factor, updated by Muon)
    groups: dict[tuple[bool, float, bool], dict[str, nn.Parameter]] = {}
    # Under zero.Init a parameter is an empty placeholder: its true shape is in ds_shape.
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named.items()}
    matrices = muon_matrices(config, shapes)
    for name, p in named.items():
        if p.requires_grad:
            is_matrix = len(shapes[name]) >= 2
            key = (is_matrix and name not in without, factors[name], name in matrices)
            groups.setdefault(key, {})[name] = p
    parts = [
        (key, names)
        for key, group in sorted(groups.items())
        for names in aligned({name: math.prod(shapes[name]) for name in group})
    ]
    # ZeRO 3 joins all groups, so groups that end with an unaligned size come last
    parts.sort(key=lambda part: math.prod(shapes[part[1][-1]]) % ALIGNED != 0)
    return [
        {
            "params": [named[name] for name in names],
            "weight_decay": config.weight_decay * decays,
            "lr_factor": factor,
            "muon": by_muon,
            "shapes": {name: shapes[name] for name in names},
        }
        for (decays, factor, by_muon), names in parts
    ]


def aligned(sizes: Mapping[str, int]) -> list[list[str]]:
    """Cut a group into parts, and sort each, so that parameters are aligned when a part is
    flattened.

    sizes: elements of each parameter, by name. The first part has all sizes that are multiples of
    `ALIGNED` (those of `WELL_ALIGNED` first) and ends with one other parameter. Each further part
    is one parameter.
    """
    multiples = [name for name, size in sizes.items() if size % ALIGNED == 0]
    others = [name for name, size in sizes.items() if size % ALIGNED != 0]
    multiples.sort(key=lambda name: sizes[name] % WELL_ALIGNED != 0)
    parts = [multiples + others[:1]]
    parts += [[name] for name in others[1:]]
    return parts


def build_optimizer(
    config: OptimConfig,
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    offloaded: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer of a recipe.

    parameters: (name, parameter) pairs, as from `named_parameters()`. offloaded: the tensors that
    the optimizer updates will be in the CPU's memory.
    """
    groups = parameter_groups(config, parameters)
    lr = config.lr
    # One kernel on a GPU. On a CPU the fused kernel rounds the second moment of a tensor's last
    # elements differently, so the result would depend on how parameters are laid out.
    fused = torch.cuda.is_available() and not offloaded
    adam: dict[str, Any] = {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": fused,
    }
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr, **adam)
        case "sgd":
            return torch.optim.SGD(groups, lr, momentum=config.momentum)
        case "muon":
            return MuonAdamW(groups, lr, **adam)
    options = checked_options("optim.name", config.name, config.options)
    return find_class(config.name)(groups, lr=lr, **options)


def moment_bytes(config: OptimConfig, by_muon: float = 0.0) -> float:
    """Bytes of the optimizer's state and the moving average for each trained element.

    An imported optimizer counts as if it had two moments. by_muon: the fraction of the trained
    elements that Muon updates, which has one.
    """
    average = 0 if config.ema_decay is None else 4
    moments = {"sgd": 4 if config.momentum else 0, "muon": 8 - 4 * by_muon}
    return average + moments.get(config.name, 8)
