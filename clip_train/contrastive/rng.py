"""Capturing and restoring the random state, so that the second forward draws what the first drew.

Dropout and patch dropout of this project's models are counter-based and do not need it; anything else
random in a model does. Without replay the gradient is wrong by half and biased, not merely noisy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RngState:
    """torch's generators: the CPU's, and that of the device the model runs on, whatever its type."""

    cpu: Tensor  # uint8
    device: Tensor | None  # uint8; None where the model runs on the CPU
    where: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        """ValueError for a device whose generator cannot be read: its dropout could not be replayed."""
        if device.type in ("cpu", "meta"):
            return cls(torch.get_rng_state(), None, device)
        module = torch.get_device_module(device)
        if not hasattr(module, "get_rng_state"):
            raise ValueError(f"torch.{device.type} has no get_rng_state: the second pass would draw other masks")
        # MPS has one device, and takes none
        state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
        return cls(torch.get_rng_state(), state, device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            module = torch.get_device_module(self.where)
            module.set_rng_state(self.device, *(() if self.where.type == "mps" else (self.where,)))

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"rng.cpu": self.cpu} | ({"rng.device": self.device} if self.device is not None else {})

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], device: torch.device) -> RngState:
        on_device = tensors.get("rng.device") if device.type != "cpu" else None
        return cls(tensors["rng.cpu"], on_device, device)
