"""Capturing and restoring the random state, so that the second forward draws what the first drew.

Dropout and patch dropout of this project's models are counter-based and do not need it; anything
else random in a model does. Without replay the gradient is wrong by half and biased, not merely
noisy.
"""

import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators, uint8: the CPU's, and that of the model's device.

    ValueError for a device whose generator cannot be read: its dropout could not be replayed.
    """
    state = {"rng.cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        if not hasattr(module, "get_rng_state"):
            raise ValueError(
                f"torch.{device.type} has no get_rng_state: the second pass would draw other masks"
            )
        # MPS has one device, and takes none.
        state["rng.device"] = module.get_rng_state(*([device] if device.type != "mps" else []))
    return state


def restore_rng(state: dict[str, Tensor], device: torch.device) -> None:
    """On another kind of device than the state is of, the CPU's alone."""
    torch.set_rng_state(state["rng.cpu"])
    if "rng.device" in state and device.type != "cpu":
        which = [device] if device.type != "mps" else []
        torch.get_device_module(device).set_rng_state(state["rng.device"], *which)
