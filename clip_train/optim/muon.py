"""Muon for matrices that are sharded over ranks, and AdamW for all other parameters.

Each matrix has an owner: the rank that gathers its update, orthogonalizes it and sends the pieces
back. All other work is elementwise on the local pieces. So the update is the same for every engine,
stage and number of ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from clip_train import dist
from clip_train.engines.base import Piece
from clip_train.torch_internals import orthogonalize

T = TypeVar("T")
Matrices = Mapping[str, tuple[int, ...]]  # name -> shape
# On one rank, for each element of the largest matrix: two rounds being gathered, two being
# scattered, and the temporaries of Newton-Schulz.
BUFFER_BYTES = 20
MOMENTUM = 0.95
RMS = 0.2  # AdamW's updates have about this root mean square (arXiv 2502.16982)


def assign_matrices(matrices: Matrices, cuts: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Rounds of matrices. A round names, for each rank, the matrix that it orthogonalizes ("":
    none).

    cuts: for each rank of the group, how many elements of which matrix it holds. A matrix belongs
    to the rank that holds most of it; among equals, to the one with the least work so far.
    """
    work = {name: min(shape) * math.prod(shape) for name, shape in matrices.items()}
    load = [0] * len(cuts)
    queues = [list[str]() for _ in cuts]
    for name in sorted(work, key=lambda name: (-work[name], name)):
        priority = [(cut.get(name, 0), -so_far) for cut, so_far in zip(cuts, load, strict=True)]
        owner = priority.index(max(priority))
        queues[owner].append(name)
        load[owner] += work[name]
    return [*zip_longest(*queues, fillvalue="")]


def one_ahead(work: Iterable[T]) -> Iterator[T]:
    """Yield each item after the next one has been taken from `work`, which starts its transfer."""
    return (item for item, _ in pairwise(chain(work, [None])))  # type: ignore[misc]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups with `muon`, AdamW for all others, as one optimizer.

    Muon's updates are scaled to AdamW's size (arXiv 2502.16982), so that one learning rate and one
    weight decay serve both.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, **adam: Any) -> None:
        """groups: from `parameter_groups`. Call `place` before the first step."""
        super().__init__(groups, {"lr": lr})
        self._adamw = torch.optim.AdamW(self.param_groups, lr, **adam)
        self._adamw.state = self.state

    def place(self, pieces: Iterable[Piece], device: torch.device, group: Any) -> None:
        """Declare where the matrices are. Collective.

        group: the ranks that share one copy of the model. None: this rank has whole matrices.
        device: of the tensors that are sent.
        """
        self._pieces = {piece.name: piece for piece in pieces}
        self._device = device
        self._group = group
        cuts = dist.gather_objects({name: piece.numel for name, piece in self._pieces.items()})
        ranks = [dist.rank()]
        if group is not None:
            ranks = torch_dist.get_process_group_ranks(group)
        self._cuts = [cuts[rank] for rank in ranks]  # by rank of the group
        self._group_rank = ranks.index(dist.rank())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw.step()
        matrices: dict[str, tuple[int, ...]] = {}
        rates: dict[str, float] = {}
        for group in self.param_groups:
            if group["muon"]:
                updated = {p for p in group["params"] if p.grad is not None}
                for p in updated:
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    state["momentum_buffer"].lerp_(p.grad, 1 - MOMENTUM)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                for name, shape in group["shapes"].items():
                    # an engine may update a few of its tensors at a time
                    if name not in self._pieces or self._pieces[name].held in updated:
                        matrices[name] = shape
                        rates[name] = group["lr"] * RMS * math.sqrt(max(shape))
        rounds = assign_matrices(matrices, self._cuts)
        gathered = one_ahead(map(self._gather, rounds))
        scattered_rounds = one_ahead(map(self._scatter, rounds, gathered))
        for names, scattered in zip(rounds, scattered_rounds, strict=True):
            pieces = [self._pieces[name] for name in names if name in self._pieces]
            updates = scattered().split([piece.numel for piece in pieces])
            for piece, update in zip(pieces, updates, strict=True):
                view = piece.view(piece.held)
                view.add_(update.to(view), alpha=-rates[piece.name])

    def _counts(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """For a round: how many elements of each rank's matrix this rank holds, and how many
        elements of this rank's matrix each rank holds."""
        held_here = self._cuts[self._group_rank]
        own_matrix = names[self._group_rank]
        return (
            [held_here.get(name, 0) for name in names],
            [cut.get(own_matrix, 0) for cut in self._cuts],
        )

    def _gather(self, names: Sequence[str]) -> Callable[[], Tensor]:
        """Start to send this rank's pieces of a round's updates to their owners, in bf16, in which
        Newton-Schulz computes."""
        updates = [torch.empty(0, dtype=torch.bfloat16, device=self._device)]
        for piece in (self._pieces[name] for name in names if name in self._pieces):
            gradient: Any = piece.held.grad
            buffer = piece.view(self.state[piece.held]["momentum_buffer"])
            update = piece.view(gradient).lerp(buffer, MOMENTUM)  # Nesterov's
            updates.append(update.to(self._device, torch.bfloat16))
        to_send, to_receive = self._counts(names)
        return dist.exchange(torch.cat(updates), to_send, to_receive, self._group)

    def _scatter(
        self, names: Sequence[str], gathered: Callable[[], Tensor]
    ) -> Callable[[], Tensor]:
        """Orthogonalize this rank's matrix of a round, and start to send its pieces back."""
        matrix = gathered()
        name = names[self._group_rank]
        if name:
            matrix = matrix.view(self._pieces[name].shape)
            matrix = orthogonalize(matrix)
        to_receive, to_send = self._counts(names)  # the way back
        return dist.exchange(matrix.flatten(), to_send, to_receive, self._group)
