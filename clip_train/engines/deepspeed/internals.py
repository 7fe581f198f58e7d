"""The only module that uses private names of DeepSpeed: those with a leading underscore.

No public name does the same. `tests/engine/test_deepspeed_internals.py` compares each one with the
DeepSpeed that it was written for, and names the one that has changed.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def fragment_of(parameter: Tensor) -> Any:
    """At stages 1 and 2: where this rank's part of the parameter is, in the flat tensors of its
    group; None if other ranks hold all of it."""
    held: Any = parameter
    return held._hp_mapping


def forget_gradients(optimizer: Any) -> None:
    """Reset a ZeRO optimizer to the start of a step; at stages 1 and 2, even in the middle of a
    backward.

    DeepSpeed has no function for this: its clearing after an overflow expects complete backwards.
    """
    optimizer.zero_grad(set_to_none=True)
    if hasattr(optimizer, "extra_large_param_to_reduce"):  # stages 1 and 2, but for BF16_Optimizer
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in held:
                held[group] = None
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1
    state = optimizer._backward_hook_state
    state.backward_active_depth = 0  # an interrupted backward has not left
    state.remaining_grad_acc_hooks = 0
    state.reset_for_new_step()


def delay_loss_scale(optimizer: Any) -> Callable[[bool], None]:
    """Let a step of fp16 lower the loss scale, but not raise it. Returns the function that does
    both, to be called after the step, with whether it has overflowed.

    DeepSpeed raises the loss scale before it divides this step's gradients by it, which halves
    them.
    """
    update_scale: Callable[[bool], None] = optimizer._update_scale
    optimizer._update_scale = lambda overflow: update_scale(True) if overflow else None
    return update_scale
