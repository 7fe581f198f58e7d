"""Muon for the blocks' matrices, AdamW for all else, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def is_hidden(name: str, p: nn.Parameter) -> bool:
    """A matrix between others: neither an embedding nor a tower's projection. (A packed `in_proj_weight` is one.)"""
    *_, last = name.split(".")
    return len(p.shape) == 2 and "embedding" not in name and last not in ("proj", "text_projection")


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon (Keller Jordan 2024), its updates scaled to AdamW's size (arXiv 2502.16982): one learning rate
    and one weight decay serve both."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, **adam: Any) -> None:
        """groups: torch's, each with `muon`: whether it holds hidden matrices. adam: of AdamW."""
        super().__init__(groups, {"lr": lr})
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        self._parts: list[torch.optim.Optimizer] = []  # over these very groups, and this very state
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr, **adam))
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for part in self._parts:
            part.step()
