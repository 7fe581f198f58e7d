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

# The smallest unit that can be updated alone. elements: each for itself, so engines may cut and
# join parameters (muon gathers what is cut). parameters: whole ones.
Needs = Literal["elements", "parameters"]
# Elements whose bytes are a multiple of 16 in bf16, the least that fast kernels take; and those of
# which cuBLAS has its pick.
ALIGNED, WELL_ALIGNED = 8, 128
find_class = partial(import_path, "optim.name", base=torch.optim.Optimizer)


def needs(config: OptimConfig) -> Needs:
    """The unit of an update.

    An imported optimizer takes two steps on a matrix and, as separate parameters, on its rows. If
    rows are updated in the same way apart and together, it is elementwise.

    UserError if the class does not take the options, or if a checkpoint cannot hold its state: it
    may keep `step` and tensors of the parameter's shape, and may change no entry of its groups.
    """
    if not is_import_path(config.name):
        return "elements"
    drawn = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    whole = nn.Parameter(drawn[0].clone())
    rows: list[Tensor] = [nn.Parameter(row.clone()) for row in drawn[0].split(1)]
    path, make = config.name, find_class(config.name)
    options = checked_options("optim.name", path, config.options)
    try:
        optimizer = make([whole, *rows], lr=config.lr, **options)
        group = optimizer.param_groups[0]
        fresh = dict(group)
        for gradient in drawn[1:]:
            whole.grad = gradient.clone()
            for row, part in zip(rows, gradient.split(1), strict=True):
                row.grad = part.clone()
            optimizer.step()
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(
            f"optim.name ({path}) cannot be used with optim.options ({shown(config.options)}): "
            f"{e}; correct them"
        ) from None
    lost = [key for key, value in group.items() if value != fresh.get(key)]
    for slot, value in optimizer.state[whole].items():
        fits = value is None or (isinstance(value, Tensor) and value.shape == whole.shape)
        if not (fits or (slot == "step" and float(value) == 2)):
            lost.append(slot)
    if lost:
        raise UserError(
            f"optim.name ({path}) keeps the state {', '.join(lost)}, which does not have a "
            "parameter's shape and cannot be saved in a checkpoint; choose another optimizer"
        )
    alike = torch.allclose(whole, torch.cat(rows), rtol=1e-5, atol=1e-7)
    return "elements" if alike else "parameters"


def lr_factors(config: OptimConfig, names: Collection[str]) -> dict[str, float]:
    """The factor on each parameter's learning rate. UserError for a pattern that matches none."""
    multipliers, depth = config.lr_multipliers, depths(names)
    written = {glob: factor if factor % 1 else int(factor) for glob, factor in multipliers.items()}
    matched = {glob: matching("optim.lr_multipliers", written, glob, names) for glob in multipliers}
    first = {
        name: next((multipliers[glob] for glob in multipliers if name in matched[glob]), 1.0)
        for name in names
    }
    return {name: first[name] * config.layer_decay ** depth[name] for name in names}


def without_decay(config: OptimConfig, names: Collection[str]) -> set[str]:
    """Parameters of any shape without decay: OpenCLIP's rule, and `no_decay`.

    UserError for a pattern that matches none.
    """
    found = {
        name for name in names if any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
    }
    return found.union(
        *(matching("optim.no_decay", config.no_decay, glob, names) for glob in config.no_decay)
    )


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

    Matrices and embeddings decay; vectors and parameters of `without_decay` do not: OpenCLIP's two
    groups, unless factors differ. muon: with optim.name=muon, the group holds matrices of blocks.

    Engines flatten a group into one tensor. So that every parameter starts at a multiple of 16
    bytes there, a group has at most one parameter with another size, its last: after `logit_scale`,
    of one element, cuBLAS would exclude its fast kernels for every bias.
    """
    named = dict(parameters)
    factors, without = lr_factors(config, named), without_decay(config, named)
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
        for key, found in sorted(groups.items())
        for names in aligned({name: math.prod(shapes[name]) for name in found})
    ]
    # ZeRO 3 joins all groups: those that end with an odd size come last
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
    """Cut a group, and sort each part, so that its parameters are aligned when it is flattened.

    sizes: elements of each parameter, by name. Sizes that are multiples of `ALIGNED` come first,
    the largest alignment before all others. Of the remaining ones, each part has one, its last.
    """
    even = [name for name, size in sizes.items() if size % ALIGNED == 0]
    odd = [name for name, size in sizes.items() if size % ALIGNED != 0]
    even.sort(key=lambda name: sizes[name] % WELL_ALIGNED != 0)
    parts = [even + odd[:1]]
    parts += [[name] for name in odd[1:]]
    return parts


def build_optimizer(
    config: OptimConfig,
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    offloaded: bool = False,
) -> torch.optim.Optimizer:
    """`parameters`: (name, parameter) pairs, as from `named_parameters()`.

    offloaded: the tensors that the optimizer updates will be in the CPU's memory.
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
