"""A callback and an evaluation, for `log.callbacks` and `evaluate.functions`.

    clip-train train recipes/demo_shapes.yaml run.name=probes "log.callbacks=[examples.probes.Spikes]" \\
        "evaluate.functions=[examples.probes.separation]"

docs/extending.md says what each of them gets.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque

import torch

from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.evaluate.features import Encoded


class Spikes(Callback):
    """Logs the steps whose gradient norm is more than 5 times the median of the last 100."""

    def __init__(self) -> None:
        self.norms: deque[float] = deque(maxlen=100)

    def after_step(self, record, keys, invalid) -> None:
        norm = record["grad_norm"]
        if dist.is_main() and len(self.norms) >= 10 and norm > 5 * statistics.median(self.norms):
            logging.getLogger("examples.probes").warning(
                "step %d: the gradient norm is %.3g", record["step"], norm
            )
        self.norms.append(norm)


def separation(seen: Encoded) -> dict[str, float]:
    """How much closer a caption is to its own image than to the others, as cosines."""
    cosines = seen.text @ seen.image.T  # [T, N]
    own = torch.zeros_like(cosines, dtype=torch.bool)
    own[torch.arange(len(own), device=own.device), seen.owners] = True
    return {"separation": (cosines[own].mean() - cosines[~own].mean()).item()}
