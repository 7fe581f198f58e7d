"""Each private name of torch that clip_train/torch_internals.py uses is there, and takes the arguments that it took.

A failure names what has changed: look there for what else the new torch does, before the expectation is adapted.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.ranks import run_ranks

EMPTY = inspect.Parameter.empty
FUNCTIONS = {
    "torch.UntypedStorage._new_shared": "(size, *, device='cpu')",
    "torch._dynamo.maybe_mark_dynamic": "(t, index)",
    "torch._guards.detect_fake_mode": "(inputs=None)",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "()",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "(self)",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": "(self)",
    "torch.nn.Module._apply": "(self, fn, recurse=True)",
    "torch.optim._muon._zeropower_via_newtonschulz": "(grad, ns_coefficients, ns_steps, eps)",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "()",
    "torch.utils._python_dispatch._disable_current_modes": "()",
    "torch.utils._pytree.tree_leaves": "(tree, is_leaf=None)",
    "torch.utils._pytree.tree_map": "(func, tree, *rests, is_leaf=None)",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": "(self)",
}
OPERATORS = {
    "aten._foreach_add_.List": "(Tensor(a!)[] self, Tensor[] other, *, Scalar alpha=1) -> ()",
    "aten._foreach_copy_.default": "(Tensor(a!)[] self, Tensor[] src, bool non_blocking=False) -> ()",
    "aten._foreach_lerp_.Scalar": "(Tensor(a!)[] self, Tensor[] tensors1, Scalar weight) -> ()",
    "aten._foreach_mul_.Tensor": "(Tensor(a!)[] self, Tensor other) -> ()",
    "aten._foreach_norm.Scalar": "(Tensor[] self, Scalar ord=2, ScalarType? dtype=None) -> Tensor[]",
    "aten._local_scalar_dense.default": "(Tensor self) -> Scalar",
    "mkldnn._is_mkldnn_fp16_supported.default": "() -> bool _0",
    "mkldnn._linear_pointwise.default": (
        "(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
    ),
}
VALUES = {
    "torch.fx.experimental._config.use_duck_shape": bool,
    "torch.fx.experimental._config.meta_nonzero_assume_all_nonzero": bool,
    "torch.nn.modules.batchnorm._BatchNorm": type(nn.Module),
    "torch.optim._muon.DEFAULT_A": float,
    "torch.optim._muon.DEFAULT_B": float,
    "torch.optim._muon.DEFAULT_C": float,
    "torch.optim._muon.DEFAULT_NS_STEPS": int,
    "torch.optim._muon.EPS": float,
    "torch._C._distributed_c10d._dump_fr_trace": type(torch.add),
    "torch._foreach_add_": type(torch.add),
    "torch._foreach_copy_": type(torch.add),
    "torch._foreach_lerp_": type(torch.add),
    "torch._foreach_mul_": type(torch.add),
    "torch._foreach_norm": type(torch.add),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_private_function_takes_these_arguments(name):
    signature = inspect.signature(resolve_name(name))
    plain = [each.replace(annotation=EMPTY) for each in signature.parameters.values()]
    found = str(signature.replace(parameters=plain, return_annotation=EMPTY))
    assert found == FUNCTIONS[name], f"{name} has changed"


@pytest.mark.parametrize("name", OPERATORS)
def test_a_private_operator_takes_these_arguments(name):
    schema = str(attrgetter(f"{name}._schema")(torch.ops))
    assert schema[schema.index("(") :] == OPERATORS[name], f"torch.ops.{name} has changed"


@pytest.mark.parametrize("name", VALUES)
def test_a_private_value_has_this_type(name):
    assert isinstance(resolve_name(name), VALUES[name]), f"{name} has changed"


def absent(attributes: dict[str, object]) -> list[str]:
    """attributes: a class and a path of attributes -> an object of this class."""
    names = []
    for name, owner in attributes.items():
        try:
            attrgetter(name.partition(".")[2])(owner)
        except AttributeError:
            names.append(name)
    return names


def test_private_attributes_of_objects_exist():
    module, tensor, workers = nn.Linear(2, 2), torch.zeros(2), iter(DataLoader([1], num_workers=1))
    assert (
        absent(
            {
                "Module._parameters": module,
                "Module._modules": module,
                "Module._forward_hooks": module,
                "Module._forward_pre_hooks": module,
                "OptimizedModule._orig_mod": torch.compile(module),
                "Tensor._is_view": tensor,
                "Tensor._backward_hooks": tensor,
                "UntypedStorage._cdata": tensor.untyped_storage(),
                "OpOverload._schema.arguments": torch.ops.aten.relu.default,
                "_MultiProcessingDataLoaderIter._workers": workers,
            }
        )
        == []
    )


def absent_of_groups() -> list[str]:
    """Of a process group, and of a module under `fully_shard` whose gradients are not reduced."""
    group = torch_dist.group.WORLD
    unit = fully_shard(nn.Linear(2, 2))
    unit.set_requires_gradient_sync(False)
    unit(torch.ones(1, 2)).sum().backward()
    state: Any = attrgetter("_get_fsdp_state")(unit)()
    missing = absent(
        {
            "distributed_c10d._world.pg_map": torch_dist.distributed_c10d,
            "distributed_c10d._world.pg_names": torch_dist.distributed_c10d,
            "distributed_c10d._world.pg_group_ranks": torch_dist.distributed_c10d,
            "ProcessGroup._device_types": group,
            "ProcessGroup._get_backend": group,
            "FSDPState._is_root": state,
            "FSDPState._state_ctx.all_states": state,
            "FSDPState._fsdp_param_groups": state,
        }
    )
    if missing:
        return missing
    (params,) = attrgetter("_fsdp_param_groups")(state)
    return absent(
        {
            "FSDPParamGroup._reshard_after_forward": params,
            "FSDPParamGroup.fsdp_params": params,
            "FSDPParam.unsharded_accumulated_grad": params.fsdp_params[0],
            "FSDPParam._unsharded_param.grad": params.fsdp_params[0],
        }
    )


@pytest.mark.distributed
def test_private_attributes_of_groups_and_fsdp_exist():
    assert run_ranks(absent_of_groups, 1) == [[]]
