"""The mean of several checkpoints' weights (LAWA, model soups), one tensor at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clip_train.checkpoint.restore import Resumed
from clip_train.errors import UserError


def averaged(
    found: Sequence[Resumed], ema: bool = False
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Like `FragmentReader.whole`, for the mean of these checkpoints, in fp32. Collective.

    It is a running mean, so a tensor that is the same in all of them (frozen) stays the same to the
    bit. Integers come from the first. Memory: two tensors for any number of checkpoints. ema: the
    mean of their moving averages. UserError for checkpoints of models of different shapes;
    CheckpointError.
    """
    readers = [each.reader for each in found]
    for reader in readers:
        if reader.shapes != readers[0].shapes:
            name, _ = min(reader.shapes.items() ^ readers[0].shapes.items())
            raise UserError(
                f"{reader.path} and {readers[0].path} hold different models ({name}): average "
                "checkpoints of one model"
            )
    (like, first), *others = [reader.whole(ema) for reader in readers]

    def read(name: str) -> Tensor:
        mean = first(name)
        if mean.is_floating_point():
            mean = mean.to(torch.float32, copy=True)
            for count, (_, other) in enumerate(others, 2):
                mean.lerp_(other(name).float(), 1 / count)
        for reader in readers:
            reader.release()
        return mean

    return like, read
