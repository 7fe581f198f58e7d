"""`contrastive_step` with the object that `deepspeed.initialize` returns, ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from clip_train.library import contrastive_step
from tests.ranks import run_ranks
from tests.test_library import Towers, part, samples, textbook

COLLECTIVES = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
COLLECTIVES += ("reduce", "all_gather", "all_gather_into_tensor", "all_gather_single")


class OneTower(Towers):
    """Returns only the features of an image tower, if asked to.

    Its scale is [1]: DeepSpeed views each parameter as bytes, which a 0-d one cannot be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(self.logit_scale.detach().view(1))
        self.alone = False

    def forward(self, images, texts):
        out = super().forward(images, texts)
        return out[:1] if self.alone else out


def zero_engine(stage: int, precision: str, accumulation: int) -> Any:
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    deepspeed.comm.torch.build_shm_op = lambda: None  # which takes a minute to compile
    model = OneTower().float()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with contextlib.redirect_stdout(io.StringIO()):
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def counted(sent: Counter[tuple[str, int]]) -> None:
    """Count collectives by their name and the bytes of the larger tensor."""
    depth = [0]  # an operator's new name calls its old one: counted once

    def wrapped(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            if depth[0] == 0 and tensors:
                sent[name, max(t.nbytes for t in tensors)] += 1
            depth[0] += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    for name in COLLECTIVES:
        if hasattr(torch_dist, name):
            setattr(torch_dist, name, wrapped(name, getattr(torch_dist, name)))


def under_zero(stage: int, precision: str, accumulation: int, micro_size: int, kept: int) -> Any:
    """Losses and gradients of two steps, and what each step's collectives sent."""
    from deepspeed.utils import safe_get_full_grad

    W, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    sent: Counter[tuple[str, int]] = Counter()
    counted(sent)
    engine = zero_engine(stage, precision, accumulation)
    word = torch.bfloat16 if precision == "bf16" else torch.float32
    images, texts = part(samples(12), slice(rank * 12 // W, (rank + 1) * 12 // W))
    inputs = images.to(word), {name: value.to(word) for name, value in texts.items()}
    engine.module.alone = True
    with pytest.raises(ValueError, match="the model must return"):
        contrastive_step(engine, *inputs, micro_size=micro_size)
    engine.module.alone = False
    losses, gradients, counts = [], [], []
    for _ in range(2):
        sent.clear()
        loss = contrastive_step(engine, *inputs, micro_size=micro_size, kept_graphs=kept)
        losses.append(loss.item())
        counts.append(dict(sent))
        read = [p.grad if stage == 0 else safe_get_full_grad(p) for p in engine.module.parameters()]
        gradients.append([gradient.clone() for gradient in read])
        engine.step()
    return losses, gradients, counts


@pytest.mark.distributed
@pytest.mark.parametrize(
    "world_size, stage, precision, accumulation, micro_size, kept",
    [
        (2, 1, "fp32", 4, 2, 1),
        (2, 1, "bf16", 1, 2, 2),
        (3, 1, "fp32", 1, 1, 4),
        (2, 2, "fp32", 4, 2, 2),
        (3, 2, "fp32", 1, 2, 1),
        (2, 3, "fp32", 4, 2, 3),
        (3, 3, "fp32", 1, 2, 1),
    ],
)
def test_engine_gradients_are_the_global_batchs_reduced_once(
    world_size, stage, precision, accumulation, micro_size, kept
):
    reference, inputs = OneTower(), samples(12)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = textbook(*reference(*inputs))
        loss.backward()
        expected.append((loss.item(), [p.grad.clone() for p in reference.parameters()]))
        optimizer.step()
    rel = 3e-2 if precision == "bf16" else 2e-6
    sizes, word = [p.numel() for p in reference.parameters()], 2 if precision == "bf16" else 4
    gradients_sent = ("all_reduce", word * sum(sizes))
    if stage == 3:  # each rank has an even share of each parameter
        padded = sum(-(-size // world_size) * world_size for size in sizes)
        gradients_sent = ("reduce_scatter_tensor", word * padded)
    for losses, gradients, counts in run_ranks(
        under_zero, world_size, stage, precision, accumulation, micro_size, kept
    ):
        for told, ours, (loss, whole) in zip(losses, gradients, expected, strict=True):
            assert told == pytest.approx(loss, rel=rel)
            norm = torch.cat([g.flatten() for g in whole]).norm()
            for a, b in zip(ours, whole, strict=True):
                assert (a.double() - b).norm() <= rel * norm
        for sent in counts:
            reduced = {key: times for key, times in sent.items() if "reduce" in key[0]}
            assert reduced == {("all_reduce", 2 * 12 * 8): 1, gradients_sent: 1}
            if stage < 3:  # else parameters, for each forward and each backward
                # torch before 2.13 has the old name
                is_new = hasattr(torch_dist, "all_gather_single")
                gather = "all_gather_single" if is_new else "all_gather_into_tensor"
                assert sent == {**reduced, (gather, 12 * 2 * 6 * 4): 1}
