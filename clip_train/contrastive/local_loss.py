"""Losses that add up over samples, beside the contrastive one: a caption's cross-entropy.

    L = w_0 L_contrastive + sum_x w_x (sum_i l_xi) / (sum_i c_xi)

Sample i has the sum `l_xi` of its terms and their number `c_xi` (tokens of a caption). The model
returns both as rows of a feature, so the gradient goes back through the same graph as that of the
contrastive loss. Both sums run over the global batch: a mean of the micro-batches' means would be
another number at another micro-batch size.
"""

from collections.abc import Mapping

import torch

from clip_train import dist
from clip_train.task import LOCAL_LOSS, Features, LossOutput


@torch.no_grad()
def add_local_losses(output: LossOutput, features: Features, weights: Mapping[str, float]) -> None:
    """Add the local losses among `features` to a contrastive loss, in place. Collective.

    features: of this rank's n samples. weights: `Objective.weights`. The metrics have each mean
    over the global batch, without its weight.
    """
    names = [name for name in features if name.endswith(LOCAL_LOSS)]
    sums = torch.stack([features[name].double().sum(dim=0) for name in names])  # [losses, 2]
    whole = weights.get("contrastive_loss", 1.0)
    output.metrics["contrastive_loss"] = output.loss
    output.loss = output.loss * whole
    output.gradients = {name: x * whole for name, x in output.gradients.items()}
    for name, (total, count) in zip(names, dist.all_reduce_sum(sums), strict=True):
        factor = weights.get(name, 1.0) / count.clamp(min=1)
        output.metrics[name] = total / count.clamp(min=1)
        output.loss = output.loss + total * factor
        gradient = torch.zeros_like(features[name])
        gradient[:, 0] = factor
        output.gradients[name] = gradient
