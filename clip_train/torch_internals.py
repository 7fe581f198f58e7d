"""The only module that uses private names of torch: those with a leading underscore.

No public name does the same. `tests/test_torch_internals.py` compares each one with the torch that
it was written for, and names the one that has changed. Nothing here imports torch._dynamo before it
is needed, because that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import _config as shapes
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "AnyBatchNorm",
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "disable_current_modes",
    "tree_leaves",
    "tree_map",
    "unset_fake_temporarily",
]

# -- lists of tensors, in one call each

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


# -- tensors


def is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


def has_backward_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one exists, also without memory of its own, as
    on the meta device."""
    return storage._cdata


def shared_storage(num_bytes: int) -> torch.UntypedStorage:
    """Shared memory, not written to yet. RuntimeError if there is not enough.

    `share_memory_()` of a public tensor would write all of it.
    """
    return torch.UntypedStorage._new_shared(num_bytes)


# -- modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's parameters without those of its children. `parameters(recurse=False)` takes ten
    times as long, and a property of the same name hides a parameter from `getattr`."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's children."""
    return module._modules


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def replace_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Put `function(tensor)` in the place of each parameter and buffer."""
    model._apply(function)


class KeepsPrecision(nn.Module):
    """A base of modules: `to(bfloat16)` and its kin do not round the buffers `kept`."""

    kept: ClassVar[Sequence[str]] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = {name: getattr(self, name) for name in self.kept}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = getattr(self, name)
            if now.dtype.itemsize < buffer.dtype.itemsize:
                setattr(self, name, buffer.to(now.device))
        return self


# -- operators


class DispatchMode(TorchDispatchMode):
    """A subclass's `__torch_dispatch__` gets every operator that runs in its context."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch._dynamo


# reads the one number of a tensor, as `item()` and `bool()` do
READ_SCALAR = torch.ops.aten._local_scalar_dense.default


def argument_names(operator: Any) -> list[str]:
    """operator: as a DispatchMode gets it."""
    return [argument.name for argument in operator._schema.arguments]


def assume_all_nonzero() -> AbstractContextManager[None]:
    """In this context `nonzero()` of a meta tensor finds every element. It raises otherwise."""
    config: Any = shapes
    return config.patch(meta_nonzero_assume_all_nonzero=True)


def has_onednn_linear() -> bool:
    """Whether this torch was built with `onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[r, c], [n, c], [n] -> a b^T + bias, [r, n]; a and b may be transposed."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def computes_fp16() -> bool:
    """Whether this CPU does."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # torch without oneDNN
        return False


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, approximately, as `torch.optim.Muon` computes it by its
    defaults. Muon itself takes whole matrices only."""
    from torch.optim import _muon as muon  # newer than the oldest torch of contrastive_step

    coefficients = (muon.DEFAULT_A, muon.DEFAULT_B, muon.DEFAULT_C)
    return muon._zeropower_via_newtonschulz(matrix, coefficients, muon.DEFAULT_NS_STEPS, muon.EPS)


# -- torch.compile


def compiled_module(wrapper: nn.Module) -> Any:
    """The module inside torch.compile's wrapper; None for any other module."""
    return getattr(wrapper, "_orig_mod", None)


def mark_first_size_dynamic(tensor: Tensor) -> None:
    """Code that is compiled for this tensor takes any size of its first dimension, where it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def treat_sizes_as_independent() -> None:
    """In code that is compiled later: sizes that happen to be equal need not stay so."""
    shapes.use_duck_shape = False


# -- loader workers: of the iterator of a DataLoader with workers


def loader_workers(iterator: Any) -> list[Any]:
    """Its processes."""
    return iterator._workers


def end_loader_workers(iterator: Any) -> None:
    iterator._shutdown_workers()


# -- process groups


def backends() -> Iterator[Any]:
    """The backends of all process groups. `torch.distributed` has no public way to set the timeout
    of a group."""
    for group in list(torch_dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            yield group._get_backend(device)


def dump_collectives() -> list[bytes]:
    """The newest collectives of all process groups, from torch's flight recorder: a pickle of plain
    types for gloo, and one for NCCL where torch has it. It may take two seconds."""
    bindings: Any = torch._C._distributed_c10d
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = [getattr(bindings, name) for name in names if hasattr(bindings, name)]
    return [dump(True, True, False) for dump in dumps]


def group_members() -> dict[str, list[int]]:
    """By the name that the flight recorder gives a group: its ranks."""
    world = torch_dist.distributed_c10d._world
    return {name: sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


# -- modules that were sharded with `fully_shard`


def stays_whole(module: Any) -> bool:
    """Whether a unit stays gathered after its forward. Only the caller of `fully_shard` knows its
    `reshard_after_forward`."""
    groups = parameter_groups(module._get_fsdp_state())
    return not any(group._reshard_after_forward for group in groups)


def parameter_groups(state: Any) -> list[Any]:
    """The groups of parameters of a unit, from its state. Before torch 2.12 it has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    group = state._fsdp_param_group
    return [] if group is None else [group]


def reduce_missed(module: Any) -> None:
    """Reduce the gradients below a root that its last backward did not reach."""
    state = module._get_fsdp_state()
    if not state._is_root:
        return
    groups = [group for each in state._state_ctx.all_states for group in parameter_groups(each)]
    if any(_has_unreduced(p) for group in groups for p in group.fsdp_params):
        state._root_post_backward_final_callback()


def _has_unreduced(parameter: Any) -> bool:
    """Whether a parameter has a gradient that this rank alone has added up."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (
        whole is not None and whole.grad is not None
    )


def discard_unreduced(module: Any) -> None:
    """Discard the gradients that were not reduced yet. Before torch 2.15, `reset_iter_state()` keeps
    them."""
    for group in parameter_groups(module._get_fsdp_state()):
        for p in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(p):  # newer: a property over `.grad`
                p.unsharded_accumulated_grad = None
            if hasattr(p, "_unsharded_param"):
                p._unsharded_param.grad = None
