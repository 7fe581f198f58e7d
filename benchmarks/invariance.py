"""The promise, measured: how a global batch is computed does not change what is learned.

Each row trains a small CLIP (vision and text transformer, dropout and patch dropout on) for 5 SGD steps on
a global batch of 64 through a real engine (DeepSpeed, FSDP2, plain torch), and compares it with an oracle: the same
model in float64, one process, the full batch at once, textbook cross-entropy, autograd, torch.optim.SGD.

--variants: other models and ways to train instead (`VARIANTS`), each with an oracle of its own, on 1 and 2 ranks, in 1
and 4 micro-batches, under ZeRO 1, ZeRO 3 and FSDP 3; with norms by tower, and of the moving average its error.
The rows of open_clip take it from .venv-peers if this environment lacks it. --markdown: the worst of each variant.
--towers: instead, towers of timm and Hugging Face within OpenCLIP's models, on 2 ranks, in 1 and 4 micro-batches, under
ZeRO 1 to 3 and FSDP 1 to 3, with the units that FSDP shards.

fp32 targets: parameters within 1e-5, loss within 1e-6 (relative, worst of the 5 steps).
bf16 targets: the error of the update, beside that of the engine's un-accumulated bf16 step, at most 1.25 times it.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import find_openclip, finish, parser, small_clip
from torch.distributed.fsdp import FSDPModule

from clip_train import dist
from clip_train.engines.compile import units
from clip_train.engines.config import EngineConfig, describe_sharding
from clip_train.losses.config import LossConfig
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.models.clip import build_model
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.freeze import freeze
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.losses.oracle import siglip
from tests.ranks import run_ranks
from tests.toy import columns_of

SMALL_CLIP = small_clip()
N, STEPS, LR = 64, 5, 0.2
COLUMNS = ("loss", "grad norm", "norms by tower", "parameters", "update")
TARGETS = {
    "fp32 parameters": "relative error at most 1e-5",
    "fp32 loss": "relative error at most 1e-6",
    "bf16": "error of the update at most 1.25 x that of the un-accumulated bf16 step on one rank of the same engine",
}


@dataclass(frozen=True)
class Row:
    """One way of computing the same five steps."""

    world: int  # W
    micro: int  # b; the last micro-batch takes what is left
    kept: int  # m
    stage: int
    checkpointing: bool = False
    precision: str = "fp32"
    kind: str = "deepspeed"
    variant: str = "dropout"

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            kind=self.kind,
            zero_stage=self.stage,
            precision=self.precision,
            activation_checkpointing=self.checkpointing,
            compile=trained(self.variant).compile,
        )

    @property
    def sizes(self) -> str:
        n = -(-N // self.world)
        sizes = [min(self.micro, n - i) for i in range(0, n, self.micro)]
        return f"{self.micro}x{len(sizes)}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))


# On one rank 64x1, 16x4, 8x8, 24+24+16; on two, half of each: 32x1, 8x4, 4x8, 12+12+8. Every (b, k), every
# kept-graph count and checkpointing on and off meets every ZeRO stage and both numbers of ranks.
FP32 = [
    Row(1, 64, 1, 0), Row(1, 16, 1, 0, True), Row(1, 8, 8, 0), Row(1, 24, 2, 0),
    Row(1, 64, 1, 1, True), Row(1, 16, 2, 1), Row(1, 8, 1, 1), Row(1, 24, 3, 1, True),
    Row(1, 64, 1, 2), Row(1, 16, 4, 2), Row(1, 8, 2, 2, True), Row(1, 24, 1, 2),
    Row(1, 64, 1, 3, True), Row(1, 16, 4, 3, True), Row(1, 8, 1, 3), Row(1, 24, 2, 3),
    Row(2, 32, 1, 0, True), Row(2, 8, 2, 0), Row(2, 4, 1, 0), Row(2, 12, 3, 0),
    Row(2, 32, 1, 1), Row(2, 8, 4, 1, True), Row(2, 4, 2, 1), Row(2, 12, 1, 1),
    Row(2, 32, 1, 2, True), Row(2, 8, 1, 2), Row(2, 4, 8, 2, True), Row(2, 12, 2, 2),
    Row(2, 32, 1, 3), Row(2, 8, 2, 3, True), Row(2, 4, 8, 3), Row(2, 12, 1, 3, True),
]  # fmt: skip
BF16 = [
    Row(1, 64, 1, 1, precision="bf16"), Row(1, 16, 1, 1, precision="bf16"), Row(1, 8, 8, 2, precision="bf16"),
    Row(1, 24, 2, 3, precision="bf16"), Row(2, 8, 1, 1, precision="bf16"), Row(2, 12, 2, 2, True, precision="bf16"),
    Row(2, 4, 8, 3, precision="bf16"),
]  # fmt: skip


def fsdp(*row: int | bool, precision: str = "fp32") -> Row:
    return Row(*row, precision=precision, kind="fsdp")


# FSDP's ways are three: whole copies, whole from first forward to last backward, given back after each forward. On
# three ranks (22, 21 and 21 samples) neither the batch nor most parameters' rows divide.
FSDP = [
    fsdp(1, 64, 1, 0), fsdp(1, 16, 1, 0, True), fsdp(1, 8, 8, 0), fsdp(1, 24, 2, 3),
    fsdp(1, 64, 1, 2, True), fsdp(1, 16, 2, 2), fsdp(1, 8, 1, 3), fsdp(1, 24, 3, 0, True),
    fsdp(2, 32, 1, 0, True), fsdp(2, 8, 2, 0), fsdp(2, 4, 8, 0), fsdp(2, 12, 1, 0),
    fsdp(2, 32, 1, 2), fsdp(2, 8, 4, 2, True), fsdp(2, 4, 1, 2), fsdp(2, 12, 2, 2),
    fsdp(2, 32, 1, 3), fsdp(2, 8, 2, 3, True), fsdp(2, 4, 8, 3), fsdp(2, 12, 1, 3, True),
    fsdp(3, 22, 1, 0), fsdp(3, 8, 3, 0, True), fsdp(3, 3, 2, 0), fsdp(3, 6, 1, 0),
    fsdp(3, 22, 1, 2, True), fsdp(3, 8, 1, 2), fsdp(3, 3, 8, 2), fsdp(3, 6, 2, 2, True),
    fsdp(3, 22, 1, 3), fsdp(3, 8, 2, 3, True), fsdp(3, 3, 1, 3), fsdp(3, 6, 4, 3),
]  # fmt: skip
FSDP_BF16 = [
    fsdp(1, 64, 1, 0, precision="bf16"), fsdp(1, 16, 1, 2, precision="bf16"), fsdp(1, 8, 8, 3, precision="bf16"),
    fsdp(2, 8, 1, 0, True, precision="bf16"), fsdp(2, 12, 2, 2, precision="bf16"), fsdp(2, 4, 8, 3, precision="bf16"),
    fsdp(3, 6, 2, 2, True, precision="bf16"), fsdp(3, 8, 1, 3, precision="bf16"),
]  # fmt: skip
PLAIN = [
    Row(1, 64, 1, 0, kind="plain"), Row(1, 8, 8, 0, True, kind="plain"), Row(1, 24, 2, 0, kind="plain"),
    Row(2, 12, 1, 0, True, kind="plain"), Row(3, 6, 4, 0, kind="plain"),
]  # fmt: skip
PLAIN_BF16 = [
    Row(1, 64, 1, 0, precision="bf16", kind="plain"), Row(1, 16, 1, 0, True, precision="bf16", kind="plain"),
    Row(1, 24, 2, 0, precision="bf16", kind="plain"), Row(2, 4, 8, 0, precision="bf16", kind="plain"),
]  # fmt: skip
ALL = FP32 + FSDP + PLAIN + BF16 + FSDP_BF16 + PLAIN_BF16
QUICK = [FP32[i] for i in (1, 6, 15, 17, 27, 31)] + [FSDP[i] for i in (7, 14, 29)]
QUICK += [BF16[i] for i in (0, 4)] + [FSDP_BF16[i] for i in (0, 5)]
QUICK += [PLAIN[2], PLAIN[3], PLAIN_BF16[2]]


def small_resnet() -> Any:
    """RN50's tower with one block a stage, of OpenCLIP's modules."""
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip

    vision = {
        "image_size": 32,
        "layers": [1, 1, 1, 1],
        "width": 8,
        "head_width": 32,
        "norm": "group",
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rn.json").write_text(
            json.dumps({**SMALL_CLIP.model_cfg(), "vision_cfg": vision})
        )
        return load_architecture(f"{folder}/rn.json")


def small_siglip() -> Any:
    """OpenCLIP's, as ViT-B-16-SigLIP but for its sizes."""
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip

    text = {
        "context_length": 12,
        "vocab_size": 64,
        "width": 32,
        "heads": 2,
        "layers": 2,
        "no_causal_mask": True,
    }
    text |= {
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"},
    }
    vision = {
        "image_size": 160,
        "timm_model_name": "test_vit",
        "timm_pool": "map",
        "timm_proj": "none",
    }
    model = {
        "embed_dim": 64,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": vision,
        "text_cfg": text,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "siglip.json").write_text(json.dumps(model))
        return load_architecture(f"open_clip:{folder}/siglip.json")


def small_coca() -> Any:
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip

    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
    pooler = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 8}
    model = {
        "embed_dim": 32,
        "custom_text": True,
        "vision_cfg": {**vision, **pooler, "output_tokens": True},
        "text_cfg": {**text, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {**text, "attn_pooler_heads": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "coca.json").write_text(json.dumps(model))
        return load_architecture(f"open_clip:{folder}/coca.json")


def caption_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Of OpenCLIP's own forward, as its CoCaLoss has it."""
    import open_clip

    out = open_clip.CoCa.forward(model, model.pixels(batch.images), batch.texts)
    targets = batch.texts[:, 1:]
    logits = out["logits"][:, : targets.shape[1]]  # 3.3 has left the last ones out itself
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def small_towers(**vision: Any) -> Any:
    """An image tower within OpenCLIP's model, and Hugging Face's RoBERTa as its text tower."""
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip

    import transformers  # isort: skip

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    # in place of the hub's
    transformers.AutoConfig.from_pretrained = lambda *_, **__: transformers.RobertaConfig(**sizes)
    text = {"hf_model_name": "roberta", "hf_pooler_type": "mean_pooler", "context_length": 12}
    model = {"embed_dim": 32, "vision_cfg": {"image_size": 64, **vision}, "text_cfg": text}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "towers.json").write_text(json.dumps(model))
        return load_architecture(f"open_clip:{folder}/towers.json")


def small_vit_roberta() -> Any:
    return small_towers(layers=2, width=64, head_width=32, patch_size=16)


def small_convnext_roberta() -> Any:
    return small_towers(timm_model_name="test_convnext", timm_pool="", timm_proj="linear")


def layer_rate(name: str) -> float:
    """BEiT's, of two blocks in each tower, written out."""
    if re.fullmatch(r"(visual\.)?(proj|text_projection|ln_post.*|ln_final.*|logit_scale)", name):
        return 1.0
    block = re.search(r"resblocks\.(\d)", name)
    return {"1": 0.5, "0": 0.25}[block[1]] if block else 0.125


@dataclass(frozen=True)
class Variant:
    """What is trained, and what the oracle has to know of it."""

    architecture: Callable[[], Any] = lambda: SMALL_CLIP
    dropout: float = 0.0
    patch_dropout: float | None = None
    optim: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    rate: Callable[[str], float] = lambda name: 1.0  # of the learning rate; 0: frozen
    decay: float | None = None  # of the moving average
    lr: float = LR
    captions: bool = False  # a CoCa's, whose texts have different lengths


VARIANTS = {
    "dropout": Variant(dropout=0.1, patch_dropout=0.25),
    "open_clip: RN50, small, group norm": Variant(small_resnet),
    "open_clip: SigLIP, small": Variant(
        small_siglip, lr=0.01
    ),  # beyond it logit_scale comes to where engines clamp it
    "locked image tower, one group unlocked": Variant(
        model={"lock_image": True, "lock_image_unlocked_groups": 1},
        rate=lambda name: float(not name.startswith("visual.") or name == "visual.proj"),
    ),
    "layer decay 0.5": Variant(optim={"layer_decay": 0.5}, rate=layer_rate),
    "EMA 0.6": Variant(optim={"ema_decay": 0.6}, decay=0.6),
    "patch dropout 0.5": Variant(patch_dropout=0.5),
    "compiled": Variant(dropout=0.1, compile=True),
}
TOWERS = {
    "timm's ViT (map pooling), OpenCLIP's text tower": VARIANTS["open_clip: SigLIP, small"],
    "OpenCLIP's ViT, Hugging Face's RoBERTa": Variant(small_vit_roberta, lr=0.05),
    "timm's ConvNeXt, Hugging Face's RoBERTa": Variant(small_convnext_roberta, lr=0.05),
    "CoCa, both losses": Variant(small_coca, lr=0.05, captions=True),
}


def trained(name: str) -> Variant:
    return (VARIANTS | TOWERS)[name]


def tower_rows() -> list[Row]:
    return [
        Row(2, N // 2 // k, min(k, 2), stage, kind=kind, variant=variant)
        for variant in TOWERS
        for kind in ("deepspeed", "fsdp")
        for stage in (1, 2, 3)
        for k in (1, 4)
    ]


def variant_rows() -> list[Row]:
    layouts = (("deepspeed", 1), ("deepspeed", 3), ("fsdp", 3))
    return [
        Row(world, N // world // k, 1 if k == 1 else world, stage, kind=kind, variant=variant)
        for variant in list(VARIANTS)[1:]
        for world in (1, 2)
        for k in (1, 4)
        for kind, stage in layouts
    ]


def make_model(checkpointing: bool = False, variant: str = "dropout") -> torch.nn.Module:
    torch.manual_seed(7)
    its = trained(variant)
    return build_model(
        its.architecture(),
        dropout=its.dropout,
        patch_dropout=its.patch_dropout,
        activation_checkpointing=checkpointing,
    )


def to_train(row: Row) -> torch.nn.Module:
    model = make_model(row.checkpointing, row.variant)
    freeze(model, ModelConfig(**trained(row.variant).model))
    return model


def global_batch(step: int, side: int = 32, *, padded: bool = False) -> Batch:
    g = torch.Generator().manual_seed(step)
    columns = columns_of(
        torch.randint(0, 256, (N, 3, side, side), generator=g, dtype=torch.uint8),
        torch.randint(1, 64, (N, 12), generator=g),
        torch.randint(0, 2**62, (N,), generator=g),
    )
    batch = Batch(columns)
    if padded:
        batch.texts[torch.arange(12)[None] > 2 + torch.arange(N)[:, None] // 7] = 0
    return batch


@dataclass
class Truth:
    losses: list[float]
    norms: list[float]
    towers: list[dict[str, float]]
    start: torch.Tensor
    final: torch.Tensor
    average: torch.Tensor | None


def oracle(variant: str = "dropout") -> Truth:
    """In float64: no step, no engine, no loss of ours."""
    its, model = trained(variant), make_model(variant=variant).double()
    named = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad_(its.rate(name) > 0).requires_grad
    }
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": its.lr * its.rate(name)} for name, p in named.items()]
    )
    truth = Truth([], [], [], flatten(dict(model.named_parameters())), torch.empty(0), None)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        side = its.architecture().vision_cfg.image_size
        batch = global_batch(step, side, padded=its.captions)
        image, text, scale, bias, *_ = model(batch.images, batch.texts, batch.sample_seeds)
        if bias is None:
            logits = scale * image @ text.T
            target = torch.arange(N)
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        else:
            loss = siglip(image, text, scale, bias)
        if its.captions:
            loss = loss + 2 * caption_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        truth.losses.append(loss.item())
        towers: dict[str, list[torch.Tensor]] = {}
        for name, p in named.items():
            tower = (
                "scalars"
                if name.startswith("logit_")
                else "image"
                if name.startswith("visual.")
                else "text"
            )
            towers.setdefault(tower, []).append(p.grad.flatten())
        truth.norms.append(torch.cat([g for parts in towers.values() for g in parts]).norm().item())
        truth.towers.append(
            {f"grad_norm_{t}": torch.cat(towers[t]).norm().item() for t in ("image", "text")}
        )
        optimizer.step()
        for name, p in named.items() if its.decay is not None else ():
            average[name] = its.decay * average[name] + (1 - its.decay) * p.detach()
    truth.final = flatten(dict(model.named_parameters()))
    truth.average = None if its.decay is None else flatten(average)
    return truth


def flatten(tensors: dict) -> torch.Tensor:
    return torch.cat([tensors[name].detach().double().flatten() for name in sorted(tensors)])


def own_share(batch: Batch) -> Batch:
    """This rank's of a global batch; the first ranks hold one sample more where it does not divide."""
    counts = [len(range(r, len(batch), dist.world_size())) for r in range(dist.world_size())]
    first = sum(counts[: dist.rank()])
    return Batch(batch.columns.cut(first, first + counts[dist.rank()]), shares=tuple(counts))


def run_row(row: Row) -> tuple[list[float], list[float], list, list, list, int]:
    """On one rank: losses, norms, this rank's fragments of the master weights and of their averages, norms by tower,
    and the modules that FSDP shards by themselves."""
    architecture = trained(row.variant).architecture()
    lr = trained(row.variant).lr
    optim = OptimConfig(name="sgd", lr=lr, weight_decay=0.0, **trained(row.variant).optim)
    # The same float32 weights for every row, whatever the engine does to the model when it takes it. Drawn first:
    # nothing can be imported while DeepSpeed builds a model at stage 3.
    start = make_model(variant=row.variant).state_dict()
    engine = row.engine.build(
        lambda: to_train(row),
        lambda named: build_optimizer(optim, named),
        device=torch.device("cpu"),
        micro_size=row.micro,
    )
    optim.apply_to(engine)
    engine.load_fragments(WholeState(start), {})
    objective = InfoNCE(tile=40) if architecture.init_logit_bias is None else SigmoidLoss(tile=40)
    objective.weights = LossConfig().weights
    losses, norms, towers = [], [], []
    for step in range(STEPS):
        side, padded = architecture.vision_cfg.image_size, trained(row.variant).captions
        batch = own_share(global_batch(step, side, padded=padded))
        result = train_step(
            engine, batch, objective, micro_size=row.micro, kept_graphs=row.kept, lr=lr
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
        towers.append(result.metrics)
    parameters, averages = (
        [
            (f.name, f.shape, f.start, f.tensors[slot].clone())
            for f in engine.state_fragments()
            if slot in f.tensors
        ]
        for slot in ("param", "param_ema")
    )
    sharded = sum(isinstance(module, FSDPModule) for module in engine.module.modules())
    engine.close()
    return losses, norms, parameters, averages, towers, sharded


def run_rows(rows: list[Row]) -> list:
    return [run_row(row) for row in rows]


def assemble(per_rank: list[list]) -> torch.Tensor:
    whole: dict[str, torch.Tensor] = {}
    for name, shape, start, values in (f for fragments in per_rank for f in fragments):
        target = whole.setdefault(name, torch.full((torch.Size(shape).numel(),), torch.nan))
        target[start : start + len(values)] = values.float()
    return flatten(whole)


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--variants", action="store_true", help="other models and ways to train")
    arguments.add_argument("--towers", action="store_true", help="timm's and Hugging Face's")
    args = arguments.parse_args()
    if args.towers:
        return compare_towers(args)
    if args.variants:
        return compare_variants(args)
    rows = QUICK if args.quick else ALL
    truth = oracle()
    losses, norms, final, start = truth.losses, truth.norms, truth.final, truth.start
    outcomes = {}
    for world in (1, 2, 3):
        chosen = [row for row in rows if row.world == world]
        per_rank = run_ranks(run_rows, world, chosen)
        outcomes.update({row: [results[i] for results in per_rank] for i, row in enumerate(chosen)})

    table, missed, plain_bf16 = [], [], {}
    for row in rows:
        ours = outcomes[row]
        parameters = assemble([r[2] for r in ours])
        loss_error = max(abs(a / b - 1) for a, b in zip(ours[0][0], losses, strict=True))
        norm_error = max(abs(a / b - 1) for a, b in zip(ours[0][1], norms, strict=True))
        error = ((parameters - final).norm() / final.norm()).item()
        update = ((parameters - final).norm() / (final - start).norm()).item()
        if row.precision == "bf16":
            plain_bf16.setdefault(row.kind, update)  # the first row is the un-accumulated one
        table.append(
            {
                "precision": row.precision,
                "ranks": row.world,
                "micro-batches": row.sizes,
                "retained graphs": row.kept,
                "engine": describe_sharding(row.engine.model_dump()),
                "act. ckpt": "on" if row.checkpointing else "off",
                "loss": loss_error,
                "grad norm": norm_error,
                "parameters": error,
                "update": update,
                "x un-accumulated bf16": update / plain_bf16[row.kind]
                if row.precision == "bf16"
                else "",
            }
        )
        if row.precision == "fp32" and (error > 1e-5 or loss_error > 1e-6):
            missed.append(f"{row}: parameters {error:.1e}, loss {loss_error:.1e}")
        if row.precision == "bf16" and update > 1.25 * plain_bf16[row.kind]:
            missed.append(f"{row}: update {update:.1e} against {plain_bf16[row.kind]:.1e}")
        if len({tuple(r[0]) for r in ours}) != 1:
            missed.append(f"{row}: the ranks disagree on the loss")
    return finish("invariance", table, TARGETS, missed, args)


def compare_variants(args: Any) -> int:
    rows, missed = variant_rows(), []
    if not find_openclip():
        print("open_clip is not here (make peers): its rows are left out")
        rows = [row for row in rows if not row.variant.startswith("open_clip")]
    if args.quick:
        rows = [row for row in rows if row.world == 2 and row.micro < N // 2 and row.stage == 3]
    truths = {variant: oracle(variant) for variant in dict.fromkeys(row.variant for row in rows)}
    table = []
    for variant, truth in truths.items():
        for world in (1, 2):
            chosen = [row for row in rows if (row.variant, row.world) == (variant, world)]
            # each compiled one in processes of its own: torch compiles the same code anew so many times only
            batches = (
                [[row] for row in chosen]
                if trained(variant).compile
                else [chosen]
                if chosen
                else []
            )
            for batch in batches:
                per_rank = run_ranks(run_rows, world, batch)
                for i, row in enumerate(batch):
                    cells, wrong = judge(row, [results[i] for results in per_rank], truth)
                    table.append(cells)
                    missed += wrong
    brief = []
    for variant in truths:
        its = [cells for cells in table if cells["what"] == variant]
        worst = {
            column: max(cells[column] for cells in its) for column in (*COLUMNS, "average")
        }  # "" in all or in none
        brief.append({"what": variant, "layouts": len(its), **worst})
    return finish("invariance of variants", table, TARGETS, missed, args, brief)


def compare_towers(args: Any) -> int:
    if not find_openclip():
        print("open_clip is not here: make peers")
        return 2
    rows, missed, brief = tower_rows(), [], []
    if args.quick:
        rows = [row for row in rows if row.micro < N // 2 and row.stage == 3]
    for variant in TOWERS:
        chosen, truth = [row for row in rows if row.variant == variant], oracle(variant)
        blocks = len(units(make_model(variant=variant)))
        per_rank = run_ranks(run_rows, 2, chosen)
        judged = []
        for i, row in enumerate(chosen):
            ours = [results[i] for results in per_rank]
            cells, wrong = judge(row, ours, truth)
            judged.append(cells)
            missed += wrong
            if row.kind == "fsdp" and {r[5] for r in ours} != {blocks + 1}:  # and the rest
                missed.append(f"{row}: {ours[0][5]} units")
        for engine in dict.fromkeys(cells["engine"] for cells in judged):
            its = [cells for cells in judged if cells["engine"] == engine]
            sharded = f"{blocks} and the rest" if engine.startswith("FSDP") else ""
            worst = {key: max(cells[key] for cells in its) for key in COLUMNS}
            brief.append({"what": variant, "engine": engine, "units": sharded, **worst})
    return finish("towers", brief, TARGETS, missed, args)


def judge(row: Row, ours: list, truth: Truth) -> tuple[dict[str, Any], list[str]]:
    """A variant's row of the table, and what misses its target."""
    apart = lambda x, y: ((x - y).norm() / y.norm()).item()  # noqa: E731
    parameters, shown = assemble([r[2] for r in ours]), [r[4] for r in ours]
    cells: dict[str, Any] = {
        "what": row.variant,
        "ranks": row.world,
        "micro-batches": row.sizes,
        "engine": describe_sharding(row.engine.model_dump()),
        "loss": max(abs(a / b - 1) for a, b in zip(ours[0][0], truth.losses, strict=True)),
        "grad norm": max(abs(a / b - 1) for a, b in zip(ours[0][1], truth.norms, strict=True)),
        "norms by tower": max(
            abs(step[key] / norm - 1)
            for steps in shown
            for step, expected in zip(steps, truth.towers, strict=True)
            for key, norm in expected.items()
        ),
        "parameters": apart(parameters, truth.final),
        "update": ((parameters - truth.final).norm() / (truth.final - truth.start).norm()).item(),
        "average": ""
        if truth.average is None
        else apart(assemble([r[3] for r in ours]), truth.average),
    }
    missed = [f"{row}: loss {cells['loss']:.1e}"] if cells["loss"] > 1e-6 else []
    over = [key for key in ("parameters", "average") if cells[key] != "" and cells[key] > 1e-5]
    missed += [f"{row}: {key} {cells[key]:.1e}" for key in over]
    if len({tuple(r[0]) for r in ours}) != 1:
        missed.append(f"{row}: the ranks disagree on the loss")
    return cells, missed


if __name__ == "__main__":
    sys.exit(main())
