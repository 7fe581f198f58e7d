"""Each private name of DeepSpeed that clip_train/engines/deepspeed/internals.py uses is there, and takes the arguments
that it took.

A failure names what has changed: look there for what else the new DeepSpeed does, before the expectation is adapted.
"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

import pytest

from clip_train.optim.config import OptimConfig
from tests.engine.layouts import engine_at
from tests.ranks import run_ranks
from tests.test_torch_internals import absent
from tests.toy import ToyCLIP

pytestmark = pytest.mark.engine

FUNCTIONS = {
    "base_optimizer.BackwardHookStateManager.reset_for_new_step": "(self)",
    "fp16.fused_optimizer.FP16_Optimizer._update_scale": "(self, skip)",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3._update_scale": "(self, has_overflow=False)",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer._release_ipg_buffers": "(self)",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer._update_scale": "(self, has_overflow=False)",
}


def signatures() -> dict[str, str]:
    import deepspeed  # noqa: F401

    return {
        name: str(inspect.signature(resolve_name(f"deepspeed.runtime.{name}")))
        for name in FUNCTIONS
    }


def test_private_functions_take_these_arguments():
    assert run_ranks(signatures, 1) == [FUNCTIONS]


def absent_of_optimizer(layout: str) -> list[str]:
    engine = engine_at(layout, ToyCLIP, OptimConfig(lr=1e-3))
    attributes = {
        "ZeROOptimizer._backward_hook_state.backward_active_depth": engine.engine.optimizer,
        "ZeROOptimizer._backward_hook_state.remaining_grad_acc_hooks": engine.engine.optimizer,
    }
    if layout != "zero 3":
        attributes |= {
            f"Parameter._hp_mapping.{name}": engine.module.logit_scale
            for name in (
                "param_group_index",
                "lp_fragment_address.numel",
                "hp_fragment_address.start",
            )
        }
    missing = absent(attributes)
    engine.close()
    return missing


@pytest.mark.parametrize("layout", ["zero 1", "zero 2", "zero 3"])
def test_private_attributes_of_optimizers_exist(layout):
    assert run_ranks(absent_of_optimizer, 1, layout) == [[]]
