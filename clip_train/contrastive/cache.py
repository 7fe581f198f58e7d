"""The features of one rank's share of the global batch, gathered micro-batch by micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from clip_train.contrastive.rng import RngState
from clip_train.contrastive.seam import LossOutcome
from clip_train.protocols import FeatureGradients, Features, MicroBatch


@dataclass
class CachedMicroBatch:
    """One micro-batch between the two passes."""

    inputs: MicroBatch
    features: Features  # detached, unless the graph is kept
    rng: RngState | None  # the state its forward started from; None where the graph is kept
    taught: Features | None = None  # a teacher's features, where there is one

    @property
    def graph_kept(self) -> bool:
        return self.rng is None


@dataclass
class FeatureCache:
    """What pass 1 leaves for the loss and for pass 2."""

    entries: list[CachedMicroBatch] = field(default_factory=list)

    def add(self, inputs: MicroBatch, features: Features, rng: RngState | None, taught: Features | None = None) -> None:
        self.entries.append(CachedMicroBatch(inputs, features, rng, taught))

    def features(self) -> Features:
        """All of this rank's features, without a graph: image and text [n, D]."""
        return joined([e.features for e in self.entries])

    def taught(self) -> Features | None:
        """The teacher's features of the same samples, in the same order."""
        parts = [e.taught for e in self.entries if e.taught is not None]
        return joined(parts) if parts else None

    def split(self, outcome: LossOutcome) -> list[FeatureGradients]:
        """The gradients that belong to each micro-batch, in the order of the entries.

        The scalars' gradients are dealt out in equal shares: under ZeRO-3 a parameter without a gradient in
        some micro-batch would add to the previous step's.
        """
        sizes = [len(e.inputs) for e in self.entries]
        k = len(sizes)
        bias = outcome.d_logit_bias
        return [
            FeatureGradients(d_image, d_text, outcome.d_logit_scale / k, None if bias is None else bias / k)
            for d_image, d_text in zip(outcome.d_image.split(sizes), outcome.d_text.split(sizes), strict=True)
        ]


def joined(parts: list[Features]) -> Features:
    """One after another, detached; the scalars are those of the last."""
    last = parts[-1].detach()
    return Features(
        torch.cat([p.image.detach() for p in parts]),
        torch.cat([p.text.detach() for p in parts]),
        last.logit_scale,
        last.logit_bias,
    )
