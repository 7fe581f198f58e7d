"""What crosses the network in one optimizer step, in bytes.

Two ranks over gloo take real steps on both engines at every stage (and on the plain engine), with every
collective of torch.distributed wrapped: DeepSpeed's and FSDP's own calls end there too. An all-reduce or a broadcast
counts its tensor, an all-gather its output, a reduce-scatter its input: what a rank holds of it, whatever the
algorithm sends. `P` is the size of the parameters. A control message is one of at most 4 numbers.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from common import base_ds_config, finish, parser, small_clip
from torch import Tensor

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.engines.config import EngineConfig, describe_sharding
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.ranks import run_ranks
from tests.toy import columns_of

SMALL_CLIP = small_clip()
W, N, D = 2, 64, SMALL_CLIP.embed_dim
CONTROL = 4  # numbers: norms, overflow flags; a parameter as small as logit_scale drowns in P
NEAR_P = (0.999, 1.02)  # of P: DeepSpeed pads its flat buffers
TARGETS = {
    "features": "2 N D values, once per step, at every k and stage",
    "sums": "N row sums and N column sums of 4 or 8 bytes, once per step",
    "gradients": "P, once per step, at every k; at stages 2 and 3 with engine.reduce_gradients=once, else k P",
    "parameters": "none at stage 0, P at stages 1 and 2 (once a step); at stage 3 with FSDP P for every forward and"
    " every backward, with m of k graphs kept (3 k - m) P; ZeRO 3 is only shown",
}

# The collectives by how many bytes a call moves; what the newest torch calls *_single stands beside its old name.
GATHERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "_all_gather_base",
    "all_gather_coalesced",
)
SCATTERS = (
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "_reduce_scatter_base",
)
OTHERS = ("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_to_all", "all_to_all_single", "gather",
          "scatter", "send", "isend")  # fmt: skip


def tensors_in(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from tensors_in(each)


def num_bytes(x: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(x))


class Counting:
    """Wraps torch.distributed's collectives; only the outermost of nested calls counts."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside = False
        for name in (*GATHERS, *SCATTERS, *OTHERS):
            for module in (torch_dist, torch_dist.distributed_c10d):
                if hasattr(module, name):
                    setattr(module, name, self._wrapped(name, getattr(module, name)))

    def _wrapped(self, name: str, collective: Any) -> Any:
        @functools.wraps(collective)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return collective(*args, **kwargs)
            operands = [*args, *kwargs.values()]
            # Of an all-gather the output comes first, of a reduce-scatter its input is the larger.
            sizes = [num_bytes(x) for x in operands]
            moved = sizes[0] if name in OTHERS else max(sizes)
            kind = self._kind(name, operands)
            self.bytes[kind] += moved
            self.calls[kind] += 1
            self._inside = True
            try:
                return collective(*args, **kwargs)
            finally:
                self._inside = False

        return wrapper

    @staticmethod
    def _kind(name: str, operands: list[Any]) -> str:
        """Whose bytes these are: the loss's by who called, an engine's by what it does."""
        frame = sys._getframe(2)
        while frame is not None:
            if "clip_train/losses/" in frame.f_code.co_filename:
                matrix = max(t.dim() for t in tensors_in(operands)) == 2
                return "features" if name in GATHERS and matrix else "sums"
            frame = frame.f_back
        if max((t.numel() for t in tensors_in(operands)), default=0) <= CONTROL:
            return "control"
        return "parameters" if name in GATHERS or name == "broadcast" else "gradients"

    def clear(self) -> None:
        self.bytes.clear()
        self.calls.clear()


def make_model() -> CLIP:
    torch.manual_seed(7)
    return CLIP(SMALL_CLIP)


def share(step: int) -> Batch:
    """This rank's part of a global batch."""
    g = torch.Generator().manual_seed(step)
    n = N // dist.world_size()
    own = slice(dist.rank() * n, (dist.rank() + 1) * n)
    images = torch.randint(0, 256, (N, 3, 32, 32), generator=g, dtype=torch.uint8)
    texts = torch.randint(1, 64, (N, 12), generator=g)
    return Batch(columns_of(images[own], texts[own], torch.arange(N)[own]))


@dataclass(frozen=True)
class Case:
    kind: str  # "": the plain engine
    stage: int
    k: int
    m: int
    once: bool = True  # engine.reduce_gradients

    @property
    def engine(self) -> EngineConfig:
        base = None
        if (
            self.kind == "deepspeed" and self.stage == 3
        ):  # all of so small a model would stay gathered
            base = base_ds_config(zero_optimization={"stage3_param_persistence_threshold": 0})
        reduction: Any = "once" if self.once else "each_backward"
        return EngineConfig(
            kind=self.kind, zero_stage=self.stage, reduce_gradients=reduction, ds_config=base
        )

    @property
    def where(self) -> str:
        if not self.kind:
            return "plain torch"
        return describe_sharding({"kind": self.kind, "zero_stage": self.stage}) + (
            "" if self.once else ", each backward"
        )

    @property
    def reductions(self) -> int:
        """How often the gradients cross the network in a step."""
        return self.k if self.stage in (2, 3) and not self.once else 1

    @property
    def gathers(self) -> int | None:
        """How often the parameters do; None: shown only."""
        if not self.kind or self.stage == 0:
            return 0
        if self.stage < 3:
            return 1  # ZeRO: after the update; FSDP: before a step's first forward
        # FSDP: for every forward, of which the retained graphs save a second, and for every backward
        return 2 * self.k - self.m + self.k if self.kind == "fsdp" else None


def build(case: Case, micro: int) -> Any:
    optim = OptimConfig(name="sgd", lr=0.1, weight_decay=0.0)
    if not case.kind:
        model = make_model()
        return PlainEngine(model, build_optimizer(optim, model.named_parameters()))
    cpu = torch.device("cpu")
    return case.engine.build(
        make_model,
        lambda named: build_optimizer(optim, named),
        device=cpu,
        micro_size=micro,
    )


LAYOUTS = [
    ("", 0),
    *(("deepspeed", stage) for stage in (0, 1, 2, 3)),
    *(("fsdp", stage) for stage in (0, 1, 2, 3)),
]
CASES = [Case(*layout, k, m) for layout in LAYOUTS for k, m in ((1, 1), (8, 1), (8, 8))]
CASES += [Case(kind, stage, 8, 1, once=False) for kind in ("deepspeed", "fsdp") for stage in (2, 3)]


def count(cases: list[Case]) -> list[tuple[Counter, Counter]]:
    """On a rank: bytes and calls of the third step (at stage 3 the first two still trace the model)."""
    counting = Counting()
    out = []
    for case in cases:
        micro = N // dist.world_size() // case.k
        engine = build(case, micro)
        engine.load_fragments(WholeState(dict(make_model().named_parameters())), {})
        for step in range(3):
            counting.clear()
            train_step(engine, share(step), InfoNCE(), micro_size=micro, kept_graphs=case.m, lr=0.1)
        out.append((Counter(counting.bytes), Counter(counting.calls)))
        if case.kind:
            engine.close()
    return out


def communication(missed: list[str], cases: list[Case]) -> list[dict[str, Any]]:
    counted = run_ranks(count, W, cases)[0]
    P = 4 * sum(p.numel() for p in make_model().parameters())  # bytes
    print(
        f"{W} ranks, N = {N}, D = {D}: features {4 * 2 * N * D} bytes, {2 * N} sums, P = {P} bytes"
    )
    table = []
    for case, (moved, calls) in zip(cases, counted, strict=True):
        where = f"{case.where}, k = {case.k}, m = {case.m}"
        if moved["features"] != 4 * 2 * N * D or not 4 * 2 * N <= moved["sums"] <= 8 * 2 * N:
            missed.append(f"{where}: features {moved['features']}, sums {moved['sums']} bytes")
        if not NEAR_P[0] * P <= moved["gradients"] / case.reductions <= NEAR_P[1] * P:
            missed.append(f"{where}: gradients of {moved['gradients'] / P:.2f} P")
        low, high = (bound * P * (case.gathers or 0) for bound in NEAR_P)
        if case.gathers is not None and not low <= moved["parameters"] <= high:
            missed.append(f"{where}: parameters of {moved['parameters'] / P:.2f} P")
        table.append(
            {
                "engine": case.where,
                "k": case.k,
                "retained graphs": case.m,
                "features, bytes": moved["features"],
                "sums, bytes": moved["sums"],
                "gradients, P": moved["gradients"] / P,
                "formula": case.reductions,
                "in calls": calls["gradients"],
                "parameters, P": moved["parameters"] / P,
                "their formula": "-" if case.gathers is None else case.gathers,
                "their calls": calls["parameters"],
                "control, bytes": moved["control"],
            }
        )
    return table


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    missed: list[str] = []
    cases = (
        [case for case in CASES if case.m == 1 and case.stage in (1, 3)] if args.quick else CASES
    )
    table = communication(missed, cases)
    return finish("communication", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
