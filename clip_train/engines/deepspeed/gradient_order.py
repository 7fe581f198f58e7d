"""The order in which DeepSpeed gets the gradients of a backward, the same on all ranks.

At stages 2 and 3, DeepSpeed fills buckets with gradients as the backward produces them, and sums each
bucket over the ranks: it takes for granted that all ranks produce them in one order. But within a
module the order depends on how the module is computed, which may depend on the samples. On a CPU, a
large linear layer accumulates its weight before its bias, and a small one after it
(`clip_train.models.blocks.linear`). Then one rank's weights would silently be added to another's
biases.
"""

import hashlib
from typing import Any

from torch import nn

from clip_train import dist
from clip_train.errors import UserError


class InOrder:
    """Stands between the hooks of a ZeRO optimizer and its buckets.

    In the first backward, a module's own gradients wait for each other, and go on in the order of
    its parameters. Modules follow each other as the code calls them, which all ranks run alike, and
    `agree` checks that. Later backwards repeat the order of the first one: a gradient that is early
    waits for those before it.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._to_bucket = optimizer.reduce_ready_partitions_and_remove_grads
        self._end_backward = optimizer.overlapping_partition_gradients_reduce_epilogue
        optimizer.reduce_ready_partitions_and_remove_grads = self.add
        optimizer.overlapping_partition_gradients_reduce_epilogue = self.end_backward
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # by parameter: those of its module
        self._siblings: dict[nn.Parameter, list[nn.Parameter]] = {}
        for module in model.modules():
            own = [
                p
                for p in module.parameters(recurse=False)
                if p.requires_grad and p not in self._siblings  # one that is tied has one module
            ]
            self._siblings |= dict.fromkeys(own, own)
        # the other arguments of `_to_bucket`
        self._waiting: dict[nn.Parameter, tuple[Any, ...]] = {}
        self._order: list[nn.Parameter] = []  # of the first backward
        self._is_known = False  # once that has ended
        self._next = 0  # in the order
        self._has_agreed = False

    def add(self, parameter: nn.Parameter, *where: Any) -> None:
        """Called by DeepSpeed's hook: the gradient of this parameter is complete."""
        self._waiting[parameter] = where
        if not self._is_known:
            siblings = self._siblings[parameter]
            if all(p in self._waiting for p in siblings):
                for p in siblings:
                    self._go_on(p)
            return
        while self._next < len(self._order) and self._order[self._next] in self._waiting:
            self._go_on(self._order[self._next])
            self._next += 1

    def end_backward(self) -> None:
        """Called by DeepSpeed at the end of a backward. Some parameters may have got no gradient, so
        that others still wait for them."""
        for p in [*self._order[self._next :], *self._trained]:
            if p in self._waiting:
                self._go_on(p)
        self._next = 0
        self._is_known = bool(self._order)
        self._end_backward()

    def forget(self) -> None:
        """A backward was interrupted: its gradients are dropped."""
        self._waiting.clear()
        self._next = 0
        if not self._is_known:
            self._order.clear()

    def agree(self) -> None:
        """Collective, after the first step's backwards. UserError on all ranks if their orders differ."""
        if self._has_agreed or dist.world_size() == 1:
            return
        places = {p: place for place, p in enumerate(self._trained)}
        text = ",".join(str(places[p]) for p in self._order)
        number = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)  # exact in float64
        largest, smallest = dist.max_scalars(number, -number)
        if largest != -smallest:
            raise UserError(
                "engine.reduce_gradients (each_backward): the ranks call the model's modules in "
                "different orders, and DeepSpeed would add gradients of different parameters; set "
                "engine.reduce_gradients=once, or engine.kind=fsdp"
            )
        self._has_agreed = True

    def _go_on(self, parameter: nn.Parameter) -> None:
        where = self._waiting.pop(parameter)
        if not self._is_known:
            self._order.append(parameter)
        self._to_bucket(parameter, *where)
