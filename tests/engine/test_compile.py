"""engine.compile against eager, on either engine: the same steps, few graphs, and none given up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from clip_train import dist
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from clip_train.task import Batch, text_lengths
from tests.covering import pairwise
from tests.engine.graphs import count, growth, native
from tests.engine.layouts import engine_at
from tests.ranks import run_ranks
from tests.toy import columns_of, share

pytestmark = [pytest.mark.engine, pytest.mark.full]
ARCHITECTURE = Architecture.model_validate(
    {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 16,
            "layers": 3,
            "width": 32,
            "head_width": 16,
            "patch_size": 8,
        },
        "text_cfg": {"context_length": 24, "vocab_size": 32, "width": 32, "heads": 2, "layers": 3},
    }
)
N, LR = 18, 0.1
PACK = True


def make_model(checkpointing: bool) -> CLIP:
    torch.manual_seed(3)
    return CLIP(
        ARCHITECTURE, dropout=0.2, patch_dropout=0.25, activation_checkpointing=checkpointing
    )


def batch(step: int) -> Batch:
    """Texts of other lengths at every step, so that micro-batches have several shapes."""
    g = torch.Generator().manual_seed(step)
    texts = torch.randint(1, 31, (N, 24), generator=g)
    ends = torch.randint(2, 8 * (1 + step % 3), (N,), generator=g)
    texts[torch.arange(N), ends] = 31
    texts[torch.arange(24) > ends[:, None]] = 0
    images = torch.randint(0, 256, (N, 3, 16, 16), generator=g, dtype=torch.uint8)
    whole = Batch(
        columns_of(
            images, texts, torch.randint(0, 2**62, (N,), generator=g), [str(i) for i in range(N)]
        )
    )
    own = share(whole, dist.rank(), dist.world_size())
    columns = own.columns.plus(text_lengths=text_lengths(own.texts))
    return replace(own, columns=columns, pack_texts=PACK)


def train(layout: str, compile: bool, kept: int, checkpointing: bool):
    """Of four steps losses, norms and evaluation's features; the weights; graphs, frames given up, graph breaks."""
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)
    engine = engine_at(layout, lambda: make_model(checkpointing), optim, compile=compile)
    told = []
    for step in range(4):
        # 18 samples: on one rank 4+4+4+4+2, on two 4+4+1; the single one at the end too
        result = train_step(engine, batch(step), InfoNCE(), micro_size=4, kept_graphs=kept, lr=LR)
        engine.train(False)
        with torch.no_grad():
            seen = (
                engine.encode("image", batch(9).images).sum(),
                engine.encode("text", batch(9).texts).sum(),
            )
        engine.train(True)
        told += [result.loss, result.grad_norm, *map(float, seen)]
    weights = [(f.name, f.start, f.tensors["param"].clone()) for f in engine.state_fragments()]
    engine.close()
    frames = counters["frames"]
    return (
        told,
        weights,
        counters["stats"]["unique_graphs"],
        frames["total"] - frames["ok"],
        dict(counters["graph_break"]),
    )


@pytest.mark.parametrize(
    "world_size, layout, kept, checkpointing",
    [
        (w, layout, kept, checkpointing)
        for layout, w, kept, checkpointing in pairwise(
            ("zero 1", "zero 3", "fsdp 2", "fsdp 3", "plain 0"),
            (2, 1),
            (1, 2),
            (False, True),
        )
    ],
)
def test_compiled_equals_eager(world_size, layout, kept, checkpointing):
    compiled = run_ranks(train, world_size, layout, True, kept, checkpointing)
    for (told, weights, _, _, _), other in zip(
        run_ranks(train, world_size, layout, False, kept, checkpointing), compiled, strict=True
    ):
        again, others, graphs, given_up, breaks = other
        assert again == pytest.approx(told, rel=1e-5, abs=1e-5)
        for (name, start, value), (name_again, start_again, value_again) in zip(
            weights, others, strict=True
        ):
            assert (name, start) == (name_again, start_again)
            assert (value_again - value).norm() <= 1e-5 * value.norm() + 1e-7, name
        # Of five units (patches; in each tower a block, and the last, which computes one token) one
        # with a gradient and one without. Those of texts twice: the second length makes it variable.
        # In evaluation those that drop nothing, of texts with their padding.
        assert 0 < graphs <= 22 and given_up == 0 and not breaks


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads those of inputs
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_variation_of_a_run_gives_a_graph_up(dropout):
    counts = count(native(dropout))
    assert counts["fallbacks"] == counts["breaks"] == 0
    # patches, and of each tower a block and the last one, with a gradient and without
    assert counts["a step"] == 10
    # another length makes it variable, in the text tower alone; batches share all graphs
    assert counts["text lengths"] == counts["last micro-batch"] == 14


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as above
@pytest.mark.parametrize("pack, is_native", [(False, False), (True, False), (True, True)])
def test_after_ten_steps_there_are_no_new_graphs(pack, is_native):
    after_ten, later = growth(native(0.1), pack, is_native)
    assert later == after_ten
