"""Collectives. Every function also works without a process group, as a world of one.

Tensors use the backend of their device. Scalars, objects and barriers (`sum_scalars`,
`max_scalars`, `barrier`, ...) use gloo on the CPU, so they never wait for a GPU's queue. A process
group on GPUs therefore has to be `cpu:gloo,cuda:nccl`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor

from clip_train.errors import RankError, RemoteRankError, UserError
from clip_train.processes import node_name

T = TypeVar("T")
P = ParamSpec("P")


def rank() -> int:
    return torch_dist.get_rank() if torch_dist.is_initialized() else 0


def world_size() -> int:
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def all_gather(x: Tensor) -> Tensor:
    """[n, ...] on each rank -> [W n, ...] on all, in the order of the ranks. No gradient."""
    if world_size() == 1:
        return x
    out = x.new_empty((world_size() * len(x), *x.shape[1:]))
    # torch before 2.13, on which the library call still runs, has the old name only
    gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
    gather(out, x.contiguous())
    return out


def gather_rows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """[counts[rank], ...] on each rank -> [sum(counts), ...] on all, by rank. No gradient.

    Equal counts are one `all_gather`; others are padded to the longest first. All ranks know all
    counts (`clip_train.batch.shares`): asking for them would be a second collective.
    """
    longest = max(counts)
    if min(counts) == longest:
        return all_gather(x)
    padded = x.new_zeros((longest, *x.shape[1:]))
    padded[: len(x)] = x
    blocks = all_gather(padded).split(longest)
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])


def reduce_scatter_rows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum over ranks, and keep this rank's rows: [sum(counts), ...] -> [counts[rank], ...].

    Unequal counts are padded to the longest first. All ranks know all counts. No gradient.
    """
    if len(counts) == 1:
        return x
    longest = max(counts)
    if min(counts) < longest:
        padded = x.new_zeros((len(counts), longest, *x.shape[1:]))
        for rank_rows, rows in zip(padded, x.split([*counts]), strict=True):
            rank_rows[: len(rows)] = rows
        x = padded.flatten(0, 1)
    out = x.new_empty((longest, *x.shape[1:]))
    # torch before 2.13 has the old name only
    scatter = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor
    scatter(out, x.contiguous())
    return out[: counts[rank()]]


def pass_on(x: Tensor, rows: int) -> Callable[[], Tensor]:
    """Send `x` to the next rank of the ring and start to receive the previous one's `rows` rows.

    Returns a function that waits for it and returns it. Do not write to `x` before. All ranks call
    this together.
    """
    W, here = world_size(), rank()
    arriving = x.new_empty((rows, *x.shape[1:]))
    ops = [
        torch_dist.P2POp(torch_dist.isend, x.contiguous(), (here + 1) % W),
        torch_dist.P2POp(torch_dist.irecv, arriving, (here - 1) % W),
    ]
    return partial(_arrived, arriving, torch_dist.batch_isend_irecv(ops), ops)


def exchange(x: Tensor, there: list[int], here: list[int], group: Any) -> Callable[[], Tensor]:
    """Send the next `there[r]` elements of `x` to rank r of a group, for each r; start to receive
    `here[r]` from it.

    Returns a function that waits for them and returns [sum(here)], in the order of the ranks. Do
    not write to `x` before. All ranks of the group call this together.
    """
    if len(here) == 1:
        return partial(_arrived, x, [])
    arriving = x.new_empty(sum(here))
    work = torch_dist.all_to_all_single(arriving, x, here, there, group, async_op=True)
    return partial(_arrived, arriving, [work])


def _arrived(arriving: Tensor, works: Sequence[Any], sent: Any = None) -> Tensor:
    """Wait for `works`; sent: what must live until then."""
    for work in works:
        work.wait()
    return arriving


def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum over ranks, in place; returns `x`."""
    if world_size() > 1:
        torch_dist.all_reduce(x)
    return x


def sum_scalars(*values: float) -> list[float]:
    """Sums over ranks, in float64."""
    return all_reduce_sum(torch.tensor(values, dtype=torch.float64)).tolist()


def max_scalars(*values: float) -> list[float]:
    """The largest of each number over ranks, in float64."""
    x = torch.tensor(values, dtype=torch.float64)
    if world_size() > 1:
        torch_dist.all_reduce(x, op=torch_dist.ReduceOp.MAX)
    return x.tolist()


def any_rank(flag: bool) -> bool:
    """True on all ranks if it is true on one."""
    return max_scalars(flag)[0] > 0


def gather_objects(obj: T) -> list[T]:
    """One small picklable object per rank -> the list of them, on every rank."""
    if world_size() == 1:
        return [obj]
    out: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(out, obj)
    return out


def broadcast_object(obj: T) -> T:
    """Rank 0's object, on every rank."""
    if world_size() == 1:
        return obj
    box = [obj]
    torch_dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def barrier() -> None:
    sum_scalars(0)


def agreed(action: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Run `action` with its arguments on every rank. If it fails on one rank, it fails on all, so
    no rank is left waiting. The lowest rank that failed raises and prints its own error; the others
    raise `RemoteRankError`.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action(*arguments, **keywords)
    except Exception as e:
        error = e
    raise_agreed(error)
    return result


def raise_agreed(error: Exception | None) -> None:
    """Collective: raise if any rank has an error.

    The lowest such rank raises its own, the others raise `RemoteRankError`.
    """
    failed = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    first = next((other for other, message in enumerate(failed) if message is not None), None)
    if first is None:
        return
    raised = error if error is not None and first == rank() else None
    raised = raised or RemoteRankError(f"rank {first} failed: {failed[first]}")
    raised.agreed = True  # type: ignore[attr-defined]
    raise raised


def is_agreed(error: Exception) -> bool:
    """Whether all ranks have this error, so they can continue together: `raise_agreed` raised it,
    or it is a mistake that every rank sees.
    """
    alike = isinstance(error, UserError) and not isinstance(error, RankError)
    return world_size() == 1 or alike or getattr(error, "agreed", False)


def on_main(action: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Run `action` with its arguments on rank 0 only.

    Every rank gets its result, or its failure.
    """
    return broadcast_object(
        agreed(lambda: action(*arguments, **keywords) if is_main() else cast(T, None))
    )


def is_first_of_node() -> bool:
    """Collective: whether this rank is the first of its node."""
    return gather_objects(node_name()).index(node_name()) == rank()
