"""The promise, measured: how a global batch is computed does not change what is learned.

Each row trains a small CLIP (vision and text transformer, dropout and patch dropout on) for 5 SGD steps on
a global batch of 64 through a real engine, DeepSpeed or FSDP2, and compares it with an oracle: the same model
in float64, one process, the full batch at once, textbook cross-entropy, autograd, torch.optim.SGD.

fp32 targets: parameters within 1e-5, loss within 1e-6 (relative, worst of the 5 steps).
bf16 targets: the error of the update, beside that of the engine's un-accumulated bf16 step, at most 1.25 times it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import finish, parser, small_clip

from clip_train import dist
from clip_train.contrastive.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.protocols import Batch
from clip_train.step import train_step
from launcher.engines import build, describe
from launcher.engines.config import EngineConfig
from tests.ranks import run_ranks

SMALL_CLIP = small_clip()
N, STEPS, LR = 64, 5, 0.2
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

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            kind=self.kind,
            zero_stage=self.stage,
            precision=self.precision,
            activation_checkpointing=self.checkpointing,
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
ALL = FP32 + FSDP + BF16 + FSDP_BF16
QUICK = [FP32[i] for i in (1, 6, 15, 17, 27, 31)] + [FSDP[i] for i in (7, 14, 29)]
QUICK += [BF16[i] for i in (0, 4)] + [FSDP_BF16[i] for i in (0, 5)]


def make_model(checkpointing: bool = False) -> CLIP:
    torch.manual_seed(7)
    return CLIP(SMALL_CLIP, dropout=0.1, patch_dropout=0.25, activation_checkpointing=checkpointing)


def global_batch(step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    return Batch(
        images=torch.randint(0, 256, (N, 3, 32, 32), generator=g, dtype=torch.uint8),
        texts=torch.randint(1, 64, (N, 12), generator=g),
        sample_seeds=torch.randint(0, 2**62, (N,), generator=g),
    )


def oracle() -> tuple[list[float], list[float], torch.Tensor]:
    """Losses, gradient norms, and the final parameters in float64: no step, no engine, no loss of ours."""
    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step)
        image, text, scale, _ = model(batch.images, batch.texts, batch.sample_seeds)
        logits = scale * image @ text.T
        target = torch.arange(N)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        optimizer.step()
    return losses, norms, flatten(dict(model.named_parameters()))


def flatten(tensors: dict) -> torch.Tensor:
    return torch.cat([tensors[name].detach().double().flatten() for name in sorted(tensors)])


def own_share(batch: Batch) -> Batch:
    """This rank's of a global batch; the first ranks hold one sample more where it does not divide."""
    counts = [len(range(r, len(batch), dist.world_size())) for r in range(dist.world_size())]
    first = sum(counts[: dist.rank()])
    own = slice(first, first + counts[dist.rank()])
    tensors = batch.images[own], batch.texts[own], batch.sample_seeds[own]
    return Batch(*tensors, keys=batch.keys[own], shares=tuple(counts))


def run_row(row: Row) -> tuple[list[float], list[float], list]:
    """On one rank: losses, norms, and this rank's fragments of the master weights."""
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)
    engine = build(
        row.engine,
        lambda: make_model(row.checkpointing),
        lambda named: build_optimizer(optim, named),
        device=torch.device("cpu"),
        micro_size=row.micro,
    )
    # The same float32 weights for every row, whatever the engine did to the model when it took it.
    engine.load_fragments(WholeState(dict(make_model().named_parameters())), {})
    losses, norms = [], []
    for step in range(STEPS):
        batch = own_share(global_batch(step))
        result = train_step(engine, batch, InfoNCE(tile=40), micro_size=row.micro, kept_graphs=row.kept, lr=LR)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    fragments = [(f.name, f.shape, f.start, f.tensors["param"].clone()) for f in engine.state_fragments()]
    engine.close()
    return losses, norms, fragments


def run_rows(rows: list[Row]) -> list:
    return [run_row(row) for row in rows]


def assemble(per_rank: list[list]) -> torch.Tensor:
    whole: dict[str, torch.Tensor] = {}
    for name, shape, start, values in (f for fragments in per_rank for f in fragments):
        target = whole.setdefault(name, torch.full((torch.Size(shape).numel(),), torch.nan))
        target[start : start + len(values)] = values.float()
    return flatten(whole)


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    rows = QUICK if args.quick else ALL
    losses, norms, final = oracle()
    start = flatten(dict(make_model().named_parameters()))
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
                "engine": describe(row.engine),
                "act. ckpt": "on" if row.checkpointing else "off",
                "loss": loss_error,
                "grad norm": norm_error,
                "parameters": error,
                "update": update,
                "x un-accumulated bf16": update / plain_bf16[row.kind] if row.precision == "bf16" else "",
            }
        )
        if row.precision == "fp32" and (error > 1e-5 or loss_error > 1e-6):
            missed.append(f"{row}: parameters {error:.1e}, loss {loss_error:.1e}")
        if row.precision == "bf16" and update > 1.25 * plain_bf16[row.kind]:
            missed.append(f"{row}: update {update:.1e} against {plain_bf16[row.kind]:.1e}")
        if len({tuple(r[0]) for r in ours}) != 1:
            missed.append(f"{row}: the ranks disagree on the loss")
    return finish("invariance", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
