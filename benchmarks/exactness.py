"""The promise of `invariance.py`, for every other objective and way to train: each row against its own oracle.

Each row trains a small CLIP for 5 SGD steps through a real engine, DeepSpeed or FSDP2, on 1, 2 and 3 ranks
(3 does not divide the 64 samples), cut into 1, 3 and 8 micro-batches, at stages 0 to 3 in turn. The oracle is the same
model in float64, one process, the whole batch at once, the objective's textbook formula, autograd, torch.optim.SGD:

    InfoNCE, ring   textbook InfoNCE; texts go round the ranks
    sigmoid         Algorithm 1 of arXiv 2303.15343, over a model with a bias; the row says how texts are exchanged
    memory bank     cross-entropy over current and past columns, the past a list in sample order, copies masked
    contaccum       the same with past pairs as rows, too
    groups: ...     InfoNCE and sigmoid with samples of one group left out or taken as positives; groups span ranks,
                    and where a loss remains one batch is a single group
    distillation    OpenCLIP's DistillClipLoss, with a frozen teacher
    two teachers    MobileCLIP's: 0.25 CLIP + 0.75 the cross-entropy with the average of two teachers' softmaxes, each
                    of its own width, scale and weight; their features computed online, or read beside the samples
    batch schedule  InfoNCE over global batches of 64, 40, 47, 33 and 64 samples
    dropout         InfoNCE with dropout and patch dropout
    fp16            InfoNCE in half precision with a scaled loss
    widths          weighted InfoNCE of the first 32, 16 and 5 values, normalized again; texts gathered or on a ring
    long texts      InfoNCE over 33 tokens, from positions of 12 of which 5 are kept
    several texts   the mean of InfoNCE over two texts of each image, with one hard negative text of each
    LoRA            InfoNCE; the oracle is a plain model whose weights are W + 2 B A, through autograd
    LoRA, dropout   the same adapters with dropout, and blocks that are recomputed in the backward pass
    Muon            InfoNCE with torch.optim.Muon on whole matrices and AdamW for all else: every engine and stage on
                    1 to 3 ranks, in fp32, and in bf16 beside one rank's un-accumulated bf16 step on whole matrices
    own: ...        the four losses of examples/losses.py, and one of the tests: functions as `loss.kind`

fp32 targets: loss within 1e-6, gradient norm, update and parameters within 1e-5 (relative; of the 5 steps the worst).
fp16 target: the error of the update, beside that of the un-accumulated fp16 step, at most 1.1 times it. ZeRO 3 has an
un-accumulated step of its own: DeepSpeed's linear layer there rounds the product before it adds the bias.
Muon in fp32: the rule of tests/tolerances.py, as Newton-Schulz amplifies rounding.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from common import base_ds_config, finish, parser, small_clip
from invariance import assemble, flatten, own_share
from torch.func import functional_call

from clip_train.engines.config import EngineConfig, describe_sharding
from clip_train.losses.config import LossConfig
from clip_train.losses.distillation import Distillation, Teacher, run_teacher, stored_teacher
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.memory_bank import MemoryBank
from clip_train.losses.ring import RingInfoNCE
from clip_train.models.clip import CLIP, build_model
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import freeze
from clip_train.models.lora import Lora
from clip_train.models.positions import stretched
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch, Features, MicroBatch, Objective, named_features
from tests import tolerances
from tests.losses.oracle import siglip
from tests.losses.oracles import (
    averaged_teachers_loss,
    banked_loss,
    distill_loss,
    grouped_loss,
    own_loss,
)
from tests.models.test_convert import long_clip
from tests.processor import answer
from tests.ranks import run_ranks
from tests.toy import columns_of, oracle_loss

N, LR, TILE = 64, 0.1, 23
WIDTHS = {32: 1.0, 16: 0.5, 5: 0.25}
SIZES = (64, 40, 47, 33, 64)  # of the batch schedule's steps
TEXTS = 2  # positives of each image
LONG, KEPT_POSITIONS = 33, 5  # tokens of the long texts, from 12: 4 x 12 - 3 x 5
BANK, WARMUP = 100, 1  # past pairs; steps before they count
PER_SHARE = {
    1: (64, 22, 8),
    2: (32, 11, 4),
    3: (22, 8, 3),
}  # W -> micro-batches of so many samples: 1, 3 and 8
KEPT = ((1, 1, 1), (1, 2, 4), (1, 3, 8))  # graphs, of 1, 3 and 8
TARGETS = {
    "fp32 loss": "relative error at most 1e-6",
    "fp32 gradient norm, parameters, update": "relative error at most 1e-5",
    "fp16, Muon in bf16": "error of the update at most 1.1 x that of the un-accumulated step",
    "Muon in fp32": "loss, gradient norm and update within tests/tolerances.py's",
}


@dataclass(frozen=True)
class Row:
    kind: str
    world: int  # W
    micro: int  # b
    kept: int  # m
    stage: int
    exchange: str = ""  # of sigmoid and widths; of two teachers: where their features are from
    engine: str = "deepspeed"

    @property
    def precision(self) -> str:
        return {"fp16": "fp16", "Muon, bf16": "bf16"}.get(self.kind, "fp32")

    @property
    def chunks(self) -> int:
        """k, of a batch of N."""
        return math.ceil(math.ceil(N / self.world) / self.micro)


OWN = {  # by the name of the row: the import path of the function, and the name of its oracle
    **{
        f"own: {name}": f"examples.losses.{name}"
        for name in ("nt_xent", "decoupled", "hard_negatives", "siglip")
    },
    "own: uniformity": "tests.losses.test_function.uniformity",
}
GROUPS = {  # by the name of the row: the loss, and what the samples of a group are of each other
    f"groups: {kind}, {role}": (kind, role)
    for kind in ("info_nce", "sigmoid")
    for role in ("leave_out", "positives")
}
LORA = {
    "LoRA": Lora(rank=4, alpha=8),
    "LoRA, dropout": Lora(rank=4, alpha=8, dropout=0.1),
}
MUON, MUON_LR = ("Muon", "Muon, bf16"), 1e-3
KINDS = (
    "InfoNCE, ring",
    "sigmoid",
    "memory bank",
    "contaccum",
    *GROUPS,
    "distillation",
    "batch schedule",
    "dropout",
    "widths",
    "several texts",
    "long texts",
    "two teachers",
    *LORA,
    *OWN,
    "fp16",
)


def all_rows() -> list[Row]:
    rows: list[Row] = []
    for engine, kinds, stages in (
        ("deepspeed", KINDS, (0, 1, 2, 3)),
        ("fsdp", KINDS[:-1], (0, 2, 3)),
        ("plain", KINDS[:-1], (0,)),
    ):
        of_engine: list[Row] = []
        for kind in kinds:
            for world, micro_sizes in PER_SHARE.items():
                for i, micro in enumerate(micro_sizes):
                    stage = stages[(len(of_engine) + len(of_engine) // 9) % len(stages)]
                    if kind == "fp16":
                        stage = 1 + len(of_engine) % 3  # DeepSpeed does not scale the loss at 0
                    is_either = kind == "widths" or "sigmoid" in kind
                    exchange = ("gather", "ring")[(world + i) % 2] if is_either else ""
                    if kind == "two teachers":
                        exchange = ("online", "from shards")[(world + i) % 2]
                    of_engine.append(
                        Row(kind, world, micro, KEPT[i][world - 1], stage, exchange, engine)
                    )
        rows += of_engine
    plain = Row("fp16", 1, N, 1, 3)
    return [*rows, plain, *muon_rows()]


def muon_rows() -> list[Row]:
    """Every engine and stage on every number of ranks; the number of micro-batches in turn."""
    whole = [Row(kind, 1, N, 1, 0, "", "fsdp") for kind in MUON]  # one rank, k = 1
    whole += [Row(kind, 1, PER_SHARE[1][-1], 1, 0, "", "plain") for kind in MUON]
    rows = []
    for kind, engine, stage, world in product(MUON, ("deepspeed", "fsdp"), range(4), PER_SHARE):
        i = (stage + world) % 3
        row = Row(kind, world, PER_SHARE[world][i], KEPT[i][world - 1], stage, "", engine)
        if (kind, engine, stage) != ("Muon, bf16", "deepspeed", 0) and row not in whole:
            rows.append(row)
    return [*whole, *rows]


def quick_rows() -> list[Row]:
    """Of every objective the rows with k = 1 on one rank and k = 3 on three."""
    return [r for r in all_rows() if (r.world, r.chunks) in ((1, 1), (3, 3))]


def make_model(kind: str, by_hand: bool = False) -> CLIP:
    torch.manual_seed(7)
    if "sig" in kind:
        log_scale = 0.0 if "positives" in kind else small_clip().init_logit_scale  # see `rate`
        scalars = {"init_logit_bias": -5.0, "init_logit_scale": log_scale}
        return CLIP(small_clip().model_copy(update=scalars))
    if kind in LORA:
        architecture = small_clip().model_copy(update={"lora": LORA[kind]})
        model: Any = build_model(architecture, activation_checkpointing=kind == "LoRA, dropout")
        freeze(model, ModelConfig(lora=LORA[kind]))
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):  # at 0 no A would learn in the first step
                p.data.normal_(std=0.05)
        return model
    if kind == "long texts":
        short = CLIP(small_clip())
        text = short.architecture.text_cfg.model_copy(update={"context_length": LONG})
        model = CLIP(short.architecture.model_copy(update={"text_cfg": text}))
        stretch = partial(stretched, context=LONG, keep=KEPT_POSITIONS)
        new = (partial(long_clip, keep=KEPT_POSITIONS) if by_hand else stretch)(
            short.positional_embedding.detach()
        )
        model.positional_embedding.data.copy_(new)
        return model
    return (
        CLIP(small_clip(), dropout=0.1, patch_dropout=0.25)
        if kind == "dropout"
        else CLIP(small_clip())
    )


def make_teacher(seed: int = 8, width: int = 32) -> CLIP:
    torch.manual_seed(seed)
    return CLIP(small_clip().model_copy(update={"embed_dim": width}), dropout=0.1).eval()


TWO = ((9, 24), (10, 40))  # seeds and widths of two teachers
TWO_KEYS: dict[str, Any] = {
    "teacher_scales": [60.0, 25.0],
    "teacher_weights": [1.0, 3.0],
    "distill_weights": (0.25, 0.75),
}


def global_batch(kind: str, step: int) -> Batch:
    """Every second batch is the same, so that banks hold copies of current samples."""
    size, seed = SIZES[step] if kind == "batch schedule" else N, step % 2
    texts = (size, TEXTS + 1, 12) if kind == "several texts" else (size, 12)
    texts = (size, LONG) if kind == "long texts" else texts
    g = torch.Generator().manual_seed(seed)
    columns = columns_of(
        torch.randint(0, 256, (size, 3, 32, 32), generator=g, dtype=torch.uint8),
        torch.randint(1, 64, texts, generator=g),
        torch.randint(0, 2**62, (size,), generator=g),
        keys=[f"{seed}/{i}" for i in range(size)],
        ids=group_ids(kind, step) if kind in GROUPS else None,
    )
    return Batch(columns)


def group_ids(kind: str, step: int) -> torch.Tensor:
    """int64 [N]: seven groups that span ranks, and samples of none; in one step a single group."""
    if step == 2 and GROUPS[kind] != ("info_nce", "leave_out"):
        return torch.zeros(N, dtype=torch.int64)
    place = torch.arange(N)
    return torch.where(place % 11 == 0, -1, place % 7)


def rate(kind: str) -> float:
    """Sigmoid with groups as positives sums over up to N positives a row: gradients are as many times larger.

    At the others' rate the batch that is one group multiplies the scale by e^14, and the oracle's loss goes
    from 90 to 5e7. From their first scale, 14, float64 itself moves by 1.1e-6 if its first weights move by
    half an fp32 unit, even at a thousandth of the rate. From a scale of 1 it moves by 1.3e-7 at a tenth.
    """
    return LR / 10 if kind == "groups: sigmoid, positives" else LR


# --- the oracle --------------------------------------------------------------------------------------------


@dataclass
class Truth:
    losses: list[float]
    norms: list[float]
    start: torch.Tensor
    final: torch.Tensor


def oracle(kind: str) -> Truth:
    """In float64: no step, no engine, no loss of ours."""
    model, past = make_model(kind, by_hand=True).double(), []
    truth = Truth([], [], flatten(dict(model.named_parameters())), torch.empty(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(trained, lr=rate(kind))]
    if kind in MUON:
        blocks = {p for n, p in model.named_parameters() if "resblocks" in n and p.ndim == 2}
        others = [p for p in model.parameters() if p not in blocks]
        adam: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0}
        scaled: dict[str, Any] = {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw"}
        optimizers = [
            torch.optim.Muon(blocks, MUON_LR, **scaled),
            torch.optim.AdamW(others, MUON_LR, **adam),
        ]
    for step in range(len(SIZES)):
        by_texts = kind == "several texts"
        loss = with_texts(model, step) if by_texts else textbook(kind, model, step, past)
        model.zero_grad()
        loss.backward()
        truth.losses.append(loss.item())
        truth.norms.append(torch.cat([p.grad.flatten() for p in trained]).norm().item())
        for optimizer in optimizers:
            optimizer.step()
    truth.final = flatten(dict(model.named_parameters()))
    return truth


def adapted(model: CLIP) -> dict[str, torch.Tensor]:
    """The parameters of a plain model: packed attention weights have three pairs of matrices, others one."""
    named = dict(model.named_parameters())
    out = {name: p for name, p in named.items() if "lora" not in name}
    for name, p in out.items():
        layer = name.removesuffix("in_proj_weight").removesuffix("weight")
        A, B = named.get(f"{layer}lora_A"), named.get(f"{layer}lora_B")
        if p.ndim == 2 and A is not None and B is not None:
            pairs = zip(A.split(4), B.chunk(len(A) // 4), strict=True)
            out[name] = p + 8 / 4 * torch.cat([b @ a for a, b in pairs])
    return out


def textbook(kind: str, model: CLIP, step: int, past: list) -> torch.Tensor:
    batch = global_batch(kind, step)
    inputs = (batch.images, batch.texts, batch.sample_seeds)
    if kind == "LoRA":
        return oracle_loss(
            *functional_call(CLIP(small_clip()).double(), adapted(model), inputs)[:3]
        )
    image, text, scale, bias = model(*inputs)
    if kind == "sigmoid":
        return siglip(image, text, scale, bias)
    if kind in OWN | GROUPS:
        if kind in OWN:
            found = own_loss(kind.removeprefix("own: "), image, text, scale, bias)
        else:
            ids, role = group_ids(kind, step), GROUPS[kind][1]
            found = grouped_loss(image, text, scale, bias, ids, role)
        return found
    if kind == "distillation":
        with torch.no_grad():
            teacher = make_teacher().double()(batch.images, batch.texts, batch.sample_seeds)
        halves = distill_loss(image, text, scale, *teacher[:3])
    if kind == "two teachers":
        scales, weights = TWO_KEYS["teacher_scales"], TWO_KEYS["teacher_weights"]
        with torch.no_grad():
            seen = [make_teacher(*each).double()(batch.images, batch.texts) for each in TWO]
        teachers = [(*x[:2], z, w) for x, z, w in zip(seen, scales, weights, strict=True)]
        halves = averaged_teachers_loss(image, text, scale, teachers, TWO_KEYS["distill_weights"])
    if kind in ("distillation", "two teachers"):
        return sum(halves, torch.zeros(()))
    if kind in ("memory bank", "contaccum"):
        known = past[-BANK:] if step >= WARMUP else []
        names = sorted({*batch.keys, *(key for _, _, key in known)})
        ids, past_ids = (
            [names.index(key) for key in keys]
            for keys in (batch.keys, [key for _, _, key in known])
        )
        nothing = image.new_zeros((0, image.shape[1]))
        past_image = torch.stack([i for i, _, _ in known]) if known else nothing
        past_text = torch.stack([t for _, t, _ in known]) if known else nothing
        past += zip(image.detach(), text.detach(), batch.keys, strict=True)
        mode = "negatives" if kind == "memory bank" else kind
        of_current, of_past = torch.tensor(ids), torch.tensor(past_ids, dtype=torch.int64)
        return banked_loss(image, text, scale, past_image, past_text, of_current, of_past, mode)
    widths = WIDTHS if kind == "widths" else {image.shape[1]: 1.0}
    cut = ((F.normalize(image[:, :d], dim=1), F.normalize(text[:, :d], dim=1)) for d in widths)
    losses = (oracle_loss(i, t, scale) for i, t in cut)
    return sum(map(torch.mul, losses, map(torch.tensor, widths.values())), torch.zeros(()))


def with_texts(model: CLIP, step: int) -> torch.Tensor:
    """The mean over the positives; the last text of each image is a column of the logits alone."""
    batch = global_batch("several texts", step)
    image, _, scale, _ = model(batch.images)
    texts = [model(None, each)[1] for each in batch.texts.unbind(1)]
    own, total = torch.arange(len(image)), torch.zeros(())
    for text in texts[:TEXTS]:
        by_image = scale * image @ torch.cat([text, texts[TEXTS]]).T
        by_text = scale * text @ image.T
        total = total + F.cross_entropy(by_image, own) + F.cross_entropy(by_text, own)
    return total / (2 * TEXTS)


# --- the subject -------------------------------------------------------------------------------------------


class FrozenTeacher:
    def __init__(self) -> None:
        self.model = make_teacher()

    def __call__(self, micro_batch: MicroBatch) -> Features:
        return named_features(
            *self.model(micro_batch.images, micro_batch.texts, micro_batch.sample_seeds)
        )


def teachers(where: str) -> list[Teacher]:
    """For rows of two teachers: online, or from shards."""
    widths, scales = [width for _, width in TWO], TWO_KEYS["teacher_scales"]
    calls: dict[str, list[Teacher]] = {
        "online": [
            partial(run_teacher, make_teacher(*each), z)
            for each, z in zip(TWO, scales, strict=True)
        ],
        "from shards": [partial(stored_teacher, widths, t, z) for t, z in enumerate(scales)],
    }
    return calls.get(where, [])


def objective(row: Row) -> Objective:
    if row.kind in OWN or row.kind == "several texts":
        kind, texts = OWN.get(row.kind, "info_nce"), 1 if row.kind in OWN else TEXTS
        return LossConfig(kind=kind, tile=TILE).build((), texts)
    if row.exchange or row.kind in GROUPS:  # by the recipe
        of_kind = {"widths": {"widths": WIDTHS}, "two teachers": TWO_KEYS}
        keys = dict(of_kind.get(row.kind, {"kind": row.kind}))
        if row.kind in GROUPS:
            kind, role = GROUPS[row.kind]
            keys = {"kind": kind, "groups": "caption", "group_role": role}
        if row.kind != "two teachers":
            keys["exchange"] = row.exchange or "gather"
        config = LossConfig.model_validate({**keys, "tile": TILE})
        return config.build(teachers(row.exchange))
    match row.kind:
        case "InfoNCE, ring":
            return RingInfoNCE(tile=TILE)
        case "memory bank" | "contaccum":
            mode = "contaccum" if row.kind == "contaccum" else "negatives"
            return MemoryBank(BANK, WARMUP, mode, tile=TILE)
        case "distillation":
            return Distillation([FrozenTeacher()], tile=TILE)
    return InfoNCE(tile=TILE)


def run_row(row: Row) -> tuple[list[float], list[float], list, bool]:
    """On one rank: losses, norms, this rank's fragments of the master weights, and whether a step was skipped."""
    config = EngineConfig(kind=row.engine, zero_stage=row.stage, precision=row.precision)
    if row.precision != "fp32":
        # slow on a processor without it, but the numbers are the same
        answer(True, row.precision)
    if row.precision == "fp16":
        # DeepSpeed starts at 2^16, which overflows, and the first steps would be skipped.
        config = config.model_copy(
            update={"ds_config": base_ds_config(fp16={"initial_scale_power": 10})}
        )
    name, lr = ("muon", MUON_LR) if row.kind in MUON else ("sgd", rate(row.kind))
    optim = OptimConfig(name=name, lr=lr, weight_decay=0.0)
    linear = torch.nn.functional.linear  # DeepSpeed at stage 3 replaces it for the whole process
    engine = config.build(
        lambda: make_model(row.kind),
        lambda named: build_optimizer(optim, named),
        device=torch.device("cpu"),
        micro_size=row.micro,
    )
    engine.load_fragments(WholeState(dict(make_model(row.kind).named_parameters())), {})
    loss, results = objective(row), []
    for step in range(len(SIZES)):
        batch = own_share(global_batch(row.kind, step))
        if row.exchange == "from shards":
            with torch.no_grad():
                seen = [make_teacher(*each)(batch.images, batch.texts) for each in TWO]
            parts = [each[place] for place in range(2) for each in seen]
            batch.columns = batch.columns.plus(teacher_features=torch.cat(parts, dim=1))
        results.append(
            train_step(engine, batch, loss, micro_size=row.micro, kept_graphs=row.kept, lr=lr)
        )
    fragments = [
        (f.name, f.shape, f.start, f.tensors["param"].clone()) for f in engine.state_fragments()
    ]
    engine.close()
    torch.nn.functional.linear = linear
    return (
        [r.loss for r in results],
        [r.grad_norm for r in results],
        fragments,
        any(r.skipped for r in results),
    )


def run_rows(rows: list[Row]) -> list:
    return [run_row(row) for row in rows]


# --- the table ---------------------------------------------------------------------------------------------


def judge(row: Row, ours: list, truth: Truth) -> tuple[dict, list[str]]:
    """The row of the table, and what is wrong with it beside the targets."""
    losses, norms = ours[0][:2]
    parameters = assemble([r[2] for r in ours])
    distance = (parameters - truth.final).norm()
    cells = {
        "what": f"{row.kind}, {row.exchange}" if row.exchange else row.kind,
        "ranks": row.world,
        "k": row.chunks,
        "retained graphs": row.kept,
        "engine": describe_sharding({"kind": row.engine, "zero_stage": row.stage}),
        "loss": max(abs(a / b - 1) for a, b in zip(losses, truth.losses, strict=True)),
        "grad norm": max(abs(a / b - 1) for a, b in zip(norms, truth.norms, strict=True)),
        "parameters": (distance / truth.final.norm()).item(),
        "update": (distance / (truth.final - truth.start).norm()).item(),
        "x un-accumulated": "",
    }
    missed = []
    if len({tuple(r[0]) for r in ours}) != 1:
        missed.append(f"{row}: the ranks disagree on the loss")
    if any(r[3] for r in ours):
        missed.append(f"{row}: a step was skipped")
    return cells, missed


def main() -> int:
    command = parser(__doc__ or "")
    kinds = (*KINDS, *MUON)
    command.add_argument("--only", nargs="+", choices=kinds, default=kinds, metavar="KIND")
    args = command.parse_args()
    rows = [row for row in (quick_rows() if args.quick else all_rows()) if row.kind in args.only]
    truths = {kind: oracle(kind) for kind in args.only}
    outcomes = {}
    for world in PER_SHARE:
        chosen = [row for row in rows if row.world == world]
        per_rank = run_ranks(run_rows, world, chosen)
        outcomes.update({row: [results[i] for results in per_rank] for i, row in enumerate(chosen)})

    table, missed = [], []
    plain = {  # at stage 3, and below it
        (row.kind, row.stage == 3): judge(row, outcomes[row], truths[row.kind])[0]["update"]
        for row in rows
        if row.world == row.chunks == 1
        and (row.kind == "fp16" or (row.kind, row.engine, row.stage) == ("Muon, bf16", "fsdp", 0))
    }
    for row in rows:
        cells, wrong = judge(row, outcomes[row], truths[row.kind])
        missed += wrong
        if row.precision != "fp32":
            unaccumulated = plain[row.kind, row.kind == "fp16" and row.stage == 3]
            cells["x un-accumulated"] = cells["update"] / unaccumulated
            if cells["update"] > 1.1 * unaccumulated:
                missed.append(f"{row}: update {cells['update']:.1e} against {unaccumulated:.1e}")
        else:
            most = dict.fromkeys(("grad norm", "parameters", "update"), 1e-5) | {"loss": 1e-6}
            if row.kind in MUON:
                most = {
                    "loss": tolerances.loss(len(SIZES), "muon"),
                    "grad norm": tolerances.norm(len(SIZES), "muon"),
                    "update": tolerances.UPDATE["muon"],
                }
            over = [key for key, limit in most.items() if cells[key] > limit]
            missed += [f"{row}: {key} {cells[key]:.1e}" for key in over]
        table.append(cells)
    return finish("exactness", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
