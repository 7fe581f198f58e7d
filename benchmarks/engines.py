"""What a step costs on each engine, in CPU seconds of both ranks: ZeRO 0 to 3, FSDP 0, 2 and 3.

Two ranks over gloo hold every engine by turns: in each round each of them is built from the same weights, takes a step
that is not timed and then `--steps` that are. The loss has to be the same everywhere. What is compared with ZeRO 1, the
default, is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import math
import statistics
import sys
import time

import torch
from common import finish, parser
from step import our_model

from clip_train.engines.config import EngineConfig, describe_sharding
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from tests.ranks import run_ranks

W, N, K = 2, 64, 4
LAYOUTS = [("deepspeed", stage) for stage in (0, 1, 2, 3)] + [
    ("fsdp", stage) for stage in (0, 2, 3)
]
DEFAULT = LAYOUTS.index(("deepspeed", 1))
KEPT = (1, K)
TARGETS = {"loss": "the same on every engine, to 1e-5"}


def one_round(steps: int) -> list[list[tuple[float, float]]]:
    """On a rank: for each layout and number of retained graphs the mean CPU seconds of a step, and the last loss."""
    from invariance import own_share
    from step import global_batch

    torch.set_num_threads(1)
    batch = own_share(global_batch(N))
    state = WholeState(dict(our_model().named_parameters()))
    micro = math.ceil(len(batch) / K)
    out = []
    for kind, stage in LAYOUTS:
        engine = EngineConfig(kind=kind, zero_stage=stage).build(
            our_model,
            lambda named: build_optimizer(OptimConfig(lr=1e-4), named),
            device=torch.device("cpu"),
            grad_clip_norm=1.0,
            micro_size=micro,
        )
        engine.load_fragments(state, {})
        of_layout = []
        for kept in KEPT:
            train_step(engine, batch, InfoNCE(), micro_size=micro, kept_graphs=kept, lr=1e-4)
            start = time.process_time()
            for _ in range(steps):
                loss = train_step(
                    engine, batch, InfoNCE(), micro_size=micro, kept_graphs=kept, lr=1e-4
                ).loss
            of_layout.append(((time.process_time() - start) / steps, loss))
        engine.close()
        out.append(of_layout)
    return out


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=3)
    args = arguments.parse_args()
    rounds, steps = (2, 2) if args.quick else (args.rounds, args.steps)
    seconds: list[list[list[float]]] = [[[] for _ in KEPT] for _ in LAYOUTS]
    losses: list[set[float]] = [set() for _ in KEPT]
    for _ in range(rounds):
        ranks = run_ranks(one_round, W, steps)
        for i in range(len(LAYOUTS)):
            for j in range(len(KEPT)):
                seconds[i][j].append(sum(rank[i][j][0] for rank in ranks))
                losses[j].add(ranks[0][i][j][1])
    missed = [
        f"with {kept} graphs kept the losses go from {min(found)} to {max(found)}"
        for kept, found in zip(KEPT, losses, strict=True)
        if max(found) - min(found) > 1e-5 * max(found)
    ]
    table = []
    for i, (kind, stage) in enumerate(LAYOUTS):
        cells = {"engine": describe_sharding({"kind": kind, "zero_stage": stage})}
        for j, kept in enumerate(KEPT):
            ratio = statistics.median(
                a / b for a, b in zip(seconds[i][j], seconds[DEFAULT][j], strict=True)
            )
            cells |= {
                f"CPU s, {kept} of {K} kept": statistics.median(seconds[i][j]),
                f"x ZeRO 1, {kept} kept": ratio,
            }
        table.append(cells)
    return finish("engines", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
