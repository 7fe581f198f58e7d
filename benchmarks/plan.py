"""`clip-train plan --gpu H200` beside what is counted: parameters, FLOPs, activations; and how long it takes.

    python benchmarks/plan.py            ViT-B/32, L/14, H/14 and bigG/14, with both engines
    python benchmarks/plan.py --quick    ViT-B/32 and L/14

Counted: the whole model built on fake tensors (no weights), every matrix product that goes forward by torch's own
`FlopCounterMode`; the bytes of a micro-batch's retained graph and the highest point of its backward, all blocks deep,
as allocations and frees of tensors give them. The plan has the FLOPs from a formula and the bytes from three blocks of
each tower. Parameters, gradients and optimizer state: by the engine's own rule at stage 1 on 8 ranks, from the counted
parameters P, in bf16: weights 2 P; gradients, summed in fp32, 4 P (DeepSpeed holds 2 P of a backward beside them, FSDP
its share, P / 2); masters and moments 12 P / 8.

Targets: FLOPs and bytes of a sample within 1%; `clip-train plan`, from the shell, at most 6 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from common import ROOT, finish, parser
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clip_train.memory.probe import fake_profile
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, ModelConfig
from clip_train.recipe.memory import micro_batch

MODELS, QUICK = ("ViT-B-32", "ViT-L-14", "ViT-H-14", "ViT-bigG-14"), 2
WORLD, SIZE = 8, 64
TARGETS = {
    "counted": "FLOPs of a sample, its graph and its backward's highest point within 1% of what is counted",
    "seconds": "clip-train plan --gpu H200 in at most 6 s",
}


def planned(name: str, kind: str, micro: int) -> tuple[dict[str, Any], float]:
    """What the command prints, and its seconds."""
    line = [
        sys.executable,
        "-m",
        "launcher",
        "plan",
        "recipes/vit_b32.yaml",
        "--world-size",
        str(WORLD),
        "--gpu",
        "H200",
    ]
    line += [
        "--json",
        f"model.name={name}",
        f"engine.kind={kind}",
        "engine.precision=bf16",
        "engine.zero_stage=1",
    ]
    line += [
        f"batch.global_size={WORLD * micro}",
        f"batch.micro_size={micro}",
        "batch.kept_graphs=1",
    ]
    start = time.monotonic()
    out = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(out.stdout), time.monotonic() - start


def counted(architecture: Architecture) -> dict[str, float]:
    """Of one sample, by counters that know nothing of CLIP; parameters of the model."""

    def make() -> CLIP:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return CLIP(architecture)
        finally:
            torch.set_default_dtype(torch.float32)

    with FakeTensorMode():
        model, inputs = make(), micro_batch(architecture, torch.device("cpu"), SIZE)
        # the fused attention of a CPU is none that the counter knows: as the products that it is
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):
            model(inputs.images, inputs.texts, inputs.sample_seeds)
        parameters = sum(p.numel() for p in model.parameters())
    profile = fake_profile(make, partial(micro_batch, architecture, torch.device("cpu")))
    return {
        "parameters": parameters,
        "flops": counter.get_total_flops() / SIZE,
        "graph": profile.graph,
        "peak": profile.peak,
    }


def main() -> int:
    args = parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    missed = []
    for name in MODELS[: QUICK if args.quick else None]:
        seen = counted(ModelConfig(name=name).architecture())
        for kind in ("deepspeed", "fsdp"):
            (plan, seconds), (more, _) = planned(name, kind, SIZE), planned(name, kind, 2 * SIZE)
            memory = plan["memory_bytes"]
            grown = (more["memory_bytes"]["activations"] - memory["activations"]) / SIZE
            flops = plan["flops_per_step"] / plan["global_size"] / 3
            P, held = (
                seen["parameters"],
                sum(memory[each] for each in ("parameters", "gradients", "optimizer")),
            )
            ratios = {
                "FLOPs": flops / seen["flops"],
                "activations": grown / seen["peak"],
                "weights": held
                / (P * (6 + 12 / WORLD + (2 if kind == "deepspeed" else 4 / WORLD))),
            }
            rows.append(
                {"model": name, "engine": plan["engine"], "P": P, "GFLOP/sample": flops / 1e9}
                | {"MB/sample": grown / 1e6, "GiB": memory["total"] / 2**30}
                | {f"{each} / counted": ratio for each, ratio in ratios.items()}
                | {"seconds": seconds}
            )
            missed += [
                f"counted: {name}, {kind}: {k} {v:.4f}"
                for k, v in ratios.items()
                if abs(v - 1) > 0.01
            ]
            missed += [f"seconds: {name}, {kind}: {seconds:.1f}"] if seconds > 6 else []
    return finish("plan", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
