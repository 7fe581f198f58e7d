"""A small random Qwen2-VL for both sides, with ragged patches, adapters and sharding: equal to the plain batch.

The environment is that of test_late_interaction.py.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tests.peers.torchvision_shim  # noqa: F401  before transformers
from clip_train.library import contrastive_step
from clip_train.losses.maxsim import MaxSim
from clip_train.losses.ranking import Ranking
from tests.ranks import run_ranks

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip(
    "transformers",
    minversion="5",
    reason="PEER MISSING: see the first lines of test_late_interaction.py",
)
peft = pytest.importorskip(
    "peft", reason="PEER MISSING: see the first lines of test_late_interaction.py"
)

N, IMAGE = 6, 99
GRIDS = [[1, 4, 4], [1, 2, 4], [1, 2, 2], [1, 6, 4], [1, 2, 4], [1, 4, 4]]


class Retriever(nn.Module):
    """One encoder for questions and for pages, which are images of any size with a few words."""

    def __init__(self, *, lora: bool, tokens: bool, checkpointing: bool = False) -> None:
        super().__init__()
        config = transformers.Qwen2VLConfig(
            text_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 100,
                "bos_token_id": None,
                "eos_token_id": None,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [1, 1, 2],
                    "rope_theta": 1e4,
                },
            },
            vision_config={
                "depth": 2,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            image_token_id=IMAGE,
            vision_start_token_id=97,
            vision_end_token_id=98,
            video_token_id=96,
        )
        torch.manual_seed(0)
        self.encoder: Any = transformers.Qwen2VLModel(config)
        if checkpointing:
            self.encoder.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            adapters = peft.LoraConfig(
                r=4, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False
            )
            self.encoder = peft.get_peft_model(self.encoder, adapters)
        self.head = nn.Linear(32, 8)
        self.logit_scale = nn.Parameter(torch.tensor([2.0]))
        self.tokens = tokens

    def embedded(self, inputs: dict[str, Tensor]) -> Tensor:
        hidden = self.encoder(**inputs, use_cache=False).last_hidden_state
        features = self.head(hidden)
        if not self.tokens:
            mask = inputs["attention_mask"][..., None].to(features.dtype)
            features = (features * mask).sum(1) / mask.sum(1)
        return F.normalize(features, dim=-1)

    def forward(self, query=None, document=None):
        out = {"logit_scale": self.logit_scale.exp()}
        for name, inputs in (("query", query), ("document", document)):
            if inputs is not None:
                out[name] = self.embedded(inputs)
                if self.tokens:
                    out[f"{name}_mask"] = inputs["attention_mask"]
        return out


def inputs(dtype: torch.dtype, start: int = 0, stop: int = N) -> dict[str, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    grids = torch.tensor(GRIDS)
    patches = grids.prod(1)
    pixels = torch.randn(int(patches.sum()), 3 * 2 * 4 * 4, generator=g).to(dtype)
    merged = (patches // 4).tolist()
    length = max(merged) + 4
    ids = torch.zeros(N, length, dtype=torch.int64)
    mask = torch.zeros(N, length, dtype=torch.int64)
    for i, count in enumerate(merged):
        words = [97, *[IMAGE] * count, 98, 5 + i]
        ids[i, : len(words)] = torch.tensor(words)
        mask[i, : len(words)] = 1
    questions = torch.randint(1, 90, (N, 5), generator=g)
    of_question = (torch.arange(5) < 2 + torch.arange(N)[:, None] % 4).long()
    first, end = int(patches[:start].sum()), int(patches[:stop].sum())
    return {
        "query": {
            "input_ids": questions[start:stop] * of_question[start:stop],
            "attention_mask": of_question[start:stop],
        },
        "document": {
            "input_ids": ids[start:stop],
            "attention_mask": mask[start:stop],
            "mm_token_type_ids": (ids == IMAGE).long()[start:stop],
            "pixel_values": pixels[first:end],
            "image_grid_thw": grids[start:stop],
        },
    }


SPLIT_BY = {"pixel_values": "image_grid_thw"}


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def plain(lora: bool, tokens: bool) -> tuple[float, list[Tensor]]:
    """The whole batch at once, by autograd."""
    model = Retriever(lora=lora, tokens=tokens).double()
    out = model(**inputs(torch.float64))
    if tokens:
        similar = torch.einsum("iqd,jtd->ijqt", out["query"], out["document"])
        similar = similar.masked_fill(~out["document_mask"].bool()[None, :, None], -torch.inf)
        scores = (similar.amax(-1) * out["query_mask"][:, None]).sum(-1)
    else:
        scores = out["query"] @ out["document"].T
    loss = F.cross_entropy(out["logit_scale"] * scores, torch.arange(N))
    loss.backward()
    return loss.item(), [p.grad for p in trained(model)]


def step(kind: str, lora: bool, tokens: bool, micro_size: Any) -> tuple[float, list[Tensor]]:
    rank, world = 0, 1
    if torch_dist.is_initialized():
        rank, world = torch_dist.get_rank(), torch_dist.get_world_size()
    dtype = torch.float32 if kind == "zero" else torch.float64
    checkpointing = kind in ("fsdp", "alone")
    model = Retriever(lora=lora, tokens=tokens, checkpointing=checkpointing).to(dtype)
    own = inputs(dtype, rank * N // world, (rank + 1) * N // world)
    net: Any = model
    if kind == "ddp":
        net = DistributedDataParallel(model)
    elif kind == "fsdp":
        base = model.encoder.base_model.model if lora else model.encoder
        for layer in (*base.language_model.layers, *base.visual.blocks):
            fully_shard(layer)
        net = fully_shard(model)
    elif kind == "zero":
        import deepspeed
        import deepspeed.comm.torch
        from deepspeed.utils import logger, safe_get_full_grad

        logger.setLevel("ERROR")
        deepspeed.comm.torch.build_shm_op = lambda: None
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.SGD(trained(model), lr=0.0)
        with contextlib.redirect_stdout(io.StringIO()):
            net = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    loss = contrastive_step(
        net,
        **own,
        micro_size=micro_size,
        split_by=SPLIT_BY,
        loss=MaxSim() if tokens else Ranking(),
    )
    if kind == "zero":
        return loss.item(), [safe_get_full_grad(p) for p in trained(model)]
    grads = [p.grad for p in trained(model)]
    return loss.item(), [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def assert_alike(found: tuple[float, list[Tensor]], lora: bool, tokens: bool, rtol: float) -> None:
    loss, gradients = plain(lora, tokens)
    assert found[0] == pytest.approx(loss, rel=rtol)
    ours = torch.cat([g.double().flatten() for g in found[1]])
    theirs = torch.cat([g.flatten() for g in gradients])
    assert (ours - theirs).norm() <= rtol * theirs.norm()


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("micro_size", [2, {"query": 3, "document": 1}])
def test_alone(micro_size, lora, tokens):
    assert_alike(step("alone", lora, tokens, micro_size), lora, tokens, 1e-9)


@pytest.mark.parametrize(
    "kind, lora, tokens, micro_size",
    [
        ("ddp", False, False, 1),
        ("ddp", True, True, {"query": 3, "document": 1}),
        ("fsdp", False, True, 2),
        ("fsdp", True, False, {"query": 3, "document": 1}),
        ("zero", False, False, 2),
        ("zero", True, True, {"query": 3, "document": 1}),
    ],
)
def test_on_ranks(kind, lora, tokens, micro_size):
    for found in run_ranks(step, 2, kind, lora, tokens, micro_size):
        assert_alike(found, lora, tokens, 1e-5 if kind == "zero" else 1e-9)
