"""CPU seconds that the host spends on a step, by engine, on one rank: what a small model on a GPU waits for.

    python benchmarks/host_cost.py [--rounds N] [--json FILE] [--quick]

A CLIP with the 302 parameters of ViT-B/32 and tiny widths: the arithmetic is next to nothing, so what is left is
Python, autograd, hooks and launches. bf16, one thread, one micro-batch of 4, engines in turn. The ratio counts.
"own": what an engine adds to the model's forward, loss and backward, which `model alone` measures; with compiled
blocks (`--compiled`, as on a GPU) the model itself costs the host little.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from common import finish, parser

from clip_train.engines.base import surrogate
from clip_train.engines.compile import compile_units
from clip_train.engines.config import EngineConfig
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch, named_features
from tests.ranks import device, run_ranks
from tests.toy import columns_of

TARGETS = {"plain": "what plain adds is at most 0.6 of what DeepSpeed 1 adds"}
MOST = 0.6
ENGINES = (("model alone", 0), ("plain", 0), ("deepspeed", 1), ("fsdp", 0), ("fsdp", 2))
PARTS = ("forward", "backward", "reduce", "step")
ARCHITECTURE = Architecture.model_validate(
    {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 16, "layers": 12, "width": 32, "head_width": 16, "patch_size": 16,
        },
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 12},
    }
)  # fmt: skip
N, WARM_UP = 4, 4
Row = dict[str, Any]


def timed(engine: Any, part: str, spent: dict[str, list[float]]) -> None:
    """Record the CPU seconds of each call of a method."""
    method = getattr(engine, part)

    def call(*args: Any, **named: Any) -> Any:
        start = time.process_time()
        result = method(*args, **named)
        spent[part].append(time.process_time() - start)
        return result

    setattr(engine, part, call)


def cost(kind: str, stage: int, steps: int, compiled: bool) -> Row:
    """Medians over the steps, in CPU milliseconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = "plain" if kind == "model alone" else kind
    section = {"kind": name, "zero_stage": stage, "precision": "bf16", "compile": False}
    engine = EngineConfig.model_validate(section).build(
        partial(CLIP, ARCHITECTURE),
        partial(build_optimizer, OptimConfig(lr=1e-4)),
        device=device(),
        grad_clip_norm=1.0,
        micro_size=N,
    )
    if compiled:
        compile_units(engine.module)
    engine.load_fragments(WholeState(dict(CLIP(ARCHITECTURE).named_parameters())), {})
    images = torch.randint(0, 256, (N, 3, 16, 16), dtype=torch.uint8)
    texts = torch.randint(1, 60, (N, 8))
    batch = Batch(columns_of(images, texts, torch.arange(N), [str(i) for i in range(N)]))
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    for part in PARTS:
        timed(engine, part, spent)
    step = partial(train_step, engine, batch, InfoNCE(), micro_size=N, kept_graphs=1, lr=1e-4)
    if kind == "model alone":
        step = partial(without_engine, engine.module, batch)
    whole = []
    for _ in range(WARM_UP + steps):
        start = time.process_time()
        step()
        whole.append(time.process_time() - start)
    engine.close()
    row: Row = {"engine": kind if kind in ("plain", "model alone") else f"{kind} {stage}"}
    row["whole step"] = 1e3 * statistics.median(whole[WARM_UP:])
    for part, seconds in spent.items():
        row[part] = 1e3 * statistics.median(seconds[WARM_UP:]) if seconds else None
    return row


def without_engine(model: torch.nn.Module, batch: Batch) -> None:
    """Forward, loss and backward; gradients are dropped."""
    features = named_features(*model(batch.images, batch.texts))
    output = InfoNCE()({name: x.detach() for name, x in features.items()})
    surrogate(features, output.gradients).backward()
    for p in model.parameters():
        p.grad = None


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=5, help="of each engine, in turn")
    arguments.add_argument("--compiled", action="store_true", help="blocks by inductor")
    args = arguments.parse_args()
    rounds, steps = (1, 4) if args.quick else (args.rounds, 16)
    measured: dict[str, list[Row]] = {}
    for _ in range(rounds):
        for kind, stage in ENGINES:
            row = run_ranks(cost, 1, kind, stage, steps, args.compiled)[0]
            measured.setdefault(row["engine"], []).append(row)
    rows: list[Row] = []
    for engine, of_rounds in measured.items():
        row = {"engine": engine}
        for key in ("whole step", *PARTS):
            seen = [each[key] for each in of_rounds if each[key] is not None]
            row[key] = round(statistics.median(seen), 2) if seen else None
        rows.append(row)
    alone = rows[0]["whole step"]
    base = next(row["whole step"] for row in rows if row["engine"] == "deepspeed 1")
    for row in rows:
        row["own"] = round(row["whole step"] - alone, 2)
        row["whole x DeepSpeed 1"] = round(row["whole step"] / base, 3)
        row["own x DeepSpeed 1"] = round(row["own"] / (base - alone), 3)
    missed = [] if rows[1]["own x DeepSpeed 1"] <= MOST else ["plain"]
    return finish("host_cost", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
