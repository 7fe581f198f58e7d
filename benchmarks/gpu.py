"""What an hour on a borrowed GPU is to prove and to measure, in the order in which it matters.

    python benchmarks/gpu.py [STAGE ...] [--json FILE]     all stages take about 40 minutes on an H200
    python benchmarks/gpu.py --dry-run                     the same code on a CPU with a tiny model: no figure counts

Stages: facts exact engines memory save waits speed loss peer profile. Each fits into one command of ten minutes.
Packages that the machine lacks: scripts/gpu_wheels.sh. A row with `ok` is a check; one without is a measurement.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import ROOT, commit, environment, parser, small_clip
from torch import Tensor

from clip_train.batch import BatchPlan
from clip_train.contrastive.distillation import Distillation
from clip_train.contrastive.info_nce import InfoNCE
from clip_train.contrastive.memory_bank import MemoryBank
from clip_train.contrastive.sigmoid import SigmoidLoss
from clip_train.engine import PlainEngine
from clip_train.models.clip import CLIP, flops_per_sample
from clip_train.models.config import Architecture, load_architecture
from clip_train.models.dropout import random_bits
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.recovery import recovering_step
from clip_train.step import restore_rng, rng_state, train_step
from clip_train.task import Batch, Objective, named_features

DRY = "--dry-run" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda")
GIB = 2**30
ENGINES = [
    *(("deepspeed", stage, "fp32") for stage in (0, 1, 2, 3)),
    *(("deepspeed", stage, "bf16") for stage in (1, 2, 3)),
    ("deepspeed", 1, "fp16"),
    *(("fsdp", stage, precision) for stage in (0, 2, 3) for precision in ("fp32", "bf16")),
]
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # of a loss after five steps
# model: samples of a micro-batch
SPEED = {"tiny": 8} if DRY else {"ViT-B-32": 2048, "ViT-L-14": 384, "ViT-H-14": 192}
TARGETS = {"ViT-B-32": 0.40, "ViT-L-14": 0.50, "ViT-H-14": 0.50}  # MFU

Row = dict[str, Any]


# -- parts


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def seconds(action: Callable[[], Any], times: int = 10, warm_up: int = 3) -> float:
    if DRY:
        times, warm_up = 1, 1
    for _ in range(warm_up):
        action()
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        action()
    synchronize()
    return (time.perf_counter() - start) / times


def architecture_of(name: str) -> Architecture:
    return small_clip() if DRY else load_architecture(name)


def model_of(
    architecture: Architecture, dtype: torch.dtype, *, dropout: float = 0.0, bias: bool = False,
    device: torch.device = DEVICE,
) -> CLIP:  # fmt: skip
    if bias:
        architecture = architecture.model_copy(
            update={"init_logit_bias": -10.0, "init_logit_scale": 2.3026}
        )
    torch.manual_seed(0)
    return CLIP(architecture, dropout=dropout).to(dtype).to(device)


def batch_of(architecture: Architecture, n: int, device: torch.device = DEVICE) -> Batch:
    generator = torch.Generator().manual_seed(1)
    size, text = architecture.vision_cfg.image_size, architecture.text_cfg
    texts = torch.randint(1, text.vocab_size - 2, (n, text.context_length), generator=generator)
    texts[:, -1] = text.vocab_size - 1
    images = torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    return Batch(images, texts, torch.arange(n), [str(i) for i in range(n)]).to(device)


def gradient(
    model: CLIP, batch: Batch, objective: Objective, micro: int, kept: int
) -> tuple[Tensor, float]:
    """Of one step, from the weights that SGD at a rate of 1 leaves; float64 on the CPU."""
    model = copy.deepcopy(model)
    before = [p.detach().clone() for p in model.parameters()]
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = train_step(engine, batch, objective, micro_size=micro, kept_graphs=kept, lr=1.0).loss
    change = [
        (x - p).detach().flatten().double().cpu()
        for x, p in zip(before, model.parameters(), strict=True)
    ]
    return torch.cat(change), loss


def off(x: Tensor, reference: Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()


def adamw_engine(model: CLIP) -> PlainEngine:
    return PlainEngine(model, build_optimizer(OptimConfig(), model.named_parameters()), 1.0)


# -- stages


def facts() -> Iterator[Row]:
    yield {
        "check": "versions",
        **environment(),
        "commit": commit(),
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
    }
    n = 256 if DRY else 8192
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, 0),
        ("tf32", torch.float32, 1),
        ("fp32", torch.float32, 0),
    ):
        torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
        x, y = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
        rate = 2 * n**3 / seconds(lambda x=x, y=y: x @ y, 5)  # type: ignore[misc]
        yield {"check": f"product of {n} x {n} in {name}", "TFLOP/s": round(rate / 1e12, 1)}
    torch.backends.cuda.matmul.allow_tf32 = False
    size = 2**20 if DRY else 2**28
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not DRY)
    device = torch.empty_like(host, device=DEVICE)
    rate = size / seconds(lambda: device.copy_(host, non_blocking=True))
    yield {"check": "copy to the device, pinned", "GB/s": round(rate / 1e9, 1)}


def exact() -> Iterator[Row]:
    def bits(device: torch.device) -> Tensor:
        return random_bits(torch.arange(64, device=device), 7, 1001).cpu()

    yield {
        "check": "dropout's bits are the CPU's",
        "ok": torch.equal(bits(DEVICE), bits(torch.device("cpu"))),
    }
    architecture, n = architecture_of("ViT-B-32"), 12 if DRY else 48
    batch, wide = batch_of(architecture, n), torch.float64
    full, loss = gradient(model_of(architecture, wide, dropout=0.1), batch, InfoNCE(), n, 1)
    for micro, kept in ((n // 3, 1), (n // 3, 2), (n // 3 + 1, 1)):
        cut, other = gradient(
            model_of(architecture, wide, dropout=0.1), batch, InfoNCE(), micro, kept
        )
        good = off(cut, full) < 1e-10 and abs(other - loss) < 1e-10
        name = f"float64, dropout, micro {micro}, retained {kept}: as uncut"
        yield {"check": name, "ok": good, "error": off(cut, full)}
    cpu = torch.device("cpu")
    there, other = gradient(
        model_of(architecture, wide, dropout=0.1, device=cpu),
        batch_of(architecture, n, cpu),
        InfoNCE(),
        n,
        1,
    )
    good = off(full, there) < 1e-9 and abs(other - loss) < 1e-9
    yield {"check": "float64: as on the CPU", "ok": good, "error": off(full, there)}
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 0.2)):
        low, _ = gradient(model_of(architecture, dtype, dropout=0.1), batch, InfoNCE(), n // 3, 1)
        yield {
            "check": f"{dtype} beside float64",
            "ok": off(low, full) < limit,
            "error": off(low, full),
        }
    for name, make, bias in objectives(architecture):
        whole, _ = gradient(model_of(architecture, wide, bias=bias), batch, make(), n, 1)
        cut, _ = gradient(model_of(architecture, wide, bias=bias), batch, make(), n // 3, 1)
        yield {
            "check": f"{name}, float64: as uncut",
            "ok": off(cut, whole) < 1e-10,
            "error": off(cut, whole),
        }
    torch.manual_seed(3)
    state = rng_state(DEVICE)
    ones = torch.ones(4096, device=DEVICE)
    drawn = F.dropout(ones, 0.5)
    restore_rng(state, DEVICE)
    yield {
        "check": "the device's generator is replayed",
        "ok": torch.equal(drawn, F.dropout(ones, 0.5)),
    }


def objectives(architecture: Architecture) -> list[tuple[str, Callable[[], Objective], bool]]:
    """Those whose result does not depend on the cut; name, how to make one, whether it needs a bias."""
    torch.manual_seed(5)
    teacher = CLIP(architecture).double().to(DEVICE).eval()
    return [
        ("sigmoid", SigmoidLoss, True),
        ("memory bank", lambda: MemoryBank(64, 0), False),
        ("contaccum", lambda: MemoryBank(64, 0, "contaccum"), False),
        (
            "distillation",
            lambda: Distillation(lambda m: named_features(*teacher(m.images, m.texts))),
            False,
        ),
    ]


def engines() -> Iterator[Row]:
    """Each in a process of its own: five steps beside the plain engine in fp32."""
    for kind, stage, precision in ENGINES:
        if DRY and (precision == "fp16" or (kind, stage) not in (("deepspeed", 1), ("fsdp", 3))):
            continue
        name = f"{kind} {stage} {precision}"
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", kind, str(stage), precision]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            yield {"check": name, "ok": False, "error": "300 s"}
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        yield {
            "check": name,
            **(json.loads(lines[-1]) if lines else {"ok": False, "error": done.stderr[-800:]}),
        }


def one_engine(kind: str, stage: str, precision: str) -> Row:
    import torch.distributed as torch_dist

    from launcher import engines as packages
    from launcher.engines.config import EngineConfig

    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    backend = "gloo" if DRY else "cpu:gloo,cuda:nccl"
    torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1)
    architecture, n = architecture_of("ViT-B-32"), 32
    config = EngineConfig.model_validate(
        {"kind": kind, "zero_stage": int(stage), "precision": precision}
    )
    device = DEVICE if DRY else torch.device("cuda", 0)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return build_optimizer(OptimConfig(lr=1e-3), named)

    def build() -> CLIP:
        return CLIP(architecture)

    engine = packages.build(
        config, build, optimizer, device=device, grad_clip_norm=1.0, micro_size=n // 4
    )
    torch.manual_seed(0)
    reference = CLIP(architecture).to(device)
    engine.load_fragments(WholeState(dict(reference.named_parameters())), {})
    plain = PlainEngine(reference, optimizer(reference.named_parameters()), 1.0)
    batch, worst, seen, expected = batch_of(architecture, n, device), 0.0, [], []
    for _ in range(5):
        for each, losses in ((engine, seen), (plain, expected)):
            losses.append(
                train_step(each, batch, InfoNCE(), micro_size=n // 4, kept_graphs=2, lr=1e-4).loss
            )
        worst = max(worst, abs(seen[-1] - expected[-1]) / expected[-1])
    return {
        "ok": worst < TOLERANCE[precision],
        "error": worst,
        "losses": [round(x, 5) for x in seen],
    }


def memory() -> Iterator[Row]:
    """Memory ends for real: the step is made with smaller micro-batches, and its loss is the same."""
    architecture, n = architecture_of("ViT-B-32"), 64 if DRY else 2048
    batch, losses = batch_of(architecture, n), []
    for fraction in (1.0, 0.12):
        if not DRY:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(fraction)
        model = model_of(architecture, torch.bfloat16)
        engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=0.0))
        messages: list[str] = []
        result, plan = recovering_step(
            engine, batch, InfoNCE(), BatchPlan(n, 1, n, 1), lr=0.0, log=messages.append
        )
        losses.append(result.loss)
        yield {
            "check": f"a step in {fraction:.0%} of the memory",
            "micro_size": plan.micro_size,
            "said": messages[-1:],
        }
        del model, engine
    if not DRY:
        torch.cuda.set_per_process_memory_fraction(1.0)
    same = abs(losses[0] - losses[1]) < 2e-3 * losses[0]
    yield {"check": "the same loss in less memory", "ok": same, "losses": losses}


def save() -> Iterator[Row]:
    """The snapshot of a ViT-L/14 with its moments: seconds that training waits, the first one and later ones."""
    from clip_train.checkpoint.config import CheckpointConfig
    from clip_train.checkpoint.manager import CheckpointManager

    architecture = architecture_of("ViT-L-14")
    model = model_of(architecture, torch.float32)
    engine = adamw_engine(model)
    train_step(
        engine, batch_of(architecture, 8), InfoNCE(), micro_size=8, kept_graphs=1, lr=0.0
    )  # moments
    size = sum(4 * 3 * p.numel() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(CheckpointConfig(every_steps=1, resume="never"), folder)
        manager.resume()
        manager.begin()
        start = time.perf_counter()
        manager.prepare(engine.state_fragments(), {})
        yield {
            "check": "memory for the snapshot, made and pinned",
            "seconds": round(time.perf_counter() - start, 2),
        }
        for number in (1, 2, 3):
            synchronize()
            start = time.perf_counter()
            manager.save(number, engine.state_fragments(), {}, {"step": number})
            stall = time.perf_counter() - start
            manager.settle(120.0)
            figures = {
                "GB": round(size / 1e9, 2),
                "stall_seconds": round(stall, 3),
                "GB/s": round(size / stall / 1e9, 1),
            }
            yield {"check": f"save {number}", **figures}
        manager.close()


def two_micro_batches(n: int) -> Callable[[], Any]:
    """A step of n samples of ViT-B/32 in bf16, one graph retained."""
    architecture, n = architecture_of("ViT-B-32"), 16 if DRY else n
    engine, batch = adamw_engine(model_of(architecture, torch.bfloat16)), batch_of(architecture, n)
    return partial(train_step, engine, batch, InfoNCE(), micro_size=n // 2, kept_graphs=1, lr=1e-4)


def waits() -> Iterator[Row]:
    """Where the host waits for the device in a step, as CUDA itself reports it."""
    step = two_micro_batches(512)
    step()
    if DRY:
        return
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    where = [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]
    name = "the host waits at most twice in a step"
    yield {"check": name, "ok": len(where) <= 2, "count": len(where), "where": where}


def speed() -> Iterator[Row]:
    """bf16, one GPU: eager and compiled, k 1 and 8, one graph retained and all."""
    for name, micro in SPEED.items():
        architecture = architecture_of(name)
        for compiled in (False, True):
            for k, kept in ((1, 1), (8, 1), (8, 8)):
                b = micro // (8 if kept == 8 else 1)
                row: Row = {
                    "check": f"{name} {'compiled' if compiled else 'eager'}",
                    "b": b,
                    "k": k,
                    "m": kept,
                }
                try:
                    yield row | _speed(
                        architecture, b, k, kept, compiled, TARGETS.get(name) if k == 1 else None
                    )
                except torch.OutOfMemoryError as e:
                    yield row | {"error": str(e)[:200]}
                torch.compiler.reset()


def _speed(
    architecture: Architecture, micro: int, k: int, kept: int, compiled: bool, target: float | None
) -> Row:
    from launcher.engines.compile import compile_units

    if not DRY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = model_of(architecture, torch.bfloat16)
    if compiled and not DRY:
        compile_units(model)
    engine, batch = adamw_engine(model), batch_of(architecture, micro * k)
    taken = seconds(
        lambda: train_step(engine, batch, InfoNCE(), micro_size=micro, kept_graphs=kept, lr=1e-4),
        5,
        2,
    )
    flops = 3 * len(batch) * flops_per_sample(architecture)
    mfu = flops / taken / peak()
    row: Row = {
        "ms": round(1e3 * taken, 1),
        "samples/s": round(len(batch) / taken),
        "MFU": round(mfu, 3),
    }
    if not DRY:
        row["peak_GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        if compiled and target is not None:
            row["ok"] = mfu >= target
    return row


def peak() -> float:
    from clip_train.metrics.meters import GPUS

    name = "" if DRY else torch.cuda.get_device_name()
    return next((gpu.flops for part, gpu in GPUS.items() if part.partition("-")[0] in name), 1e12)


def loss() -> Iterator[Row]:
    for N, D in ((256, 32),) if DRY else ((8192, 512), (32768, 512), (32768, 1024)):
        generator = torch.Generator().manual_seed(0)
        image, text = (
            F.normalize(torch.randn(N, D, generator=generator), dim=1).to(DEVICE) for _ in range(2)
        )
        features = named_features(image, text, torch.tensor([100.0], device=DEVICE))
        wide = {name: x.double() for name, x in features.items()}
        reference = InfoNCE()(wide).gradients["image"] if N <= 8192 else None
        for side in (64,) if DRY else (2048, 4096, 8192):
            for tf32 in (False, True):
                torch.backends.cuda.matmul.allow_tf32 = tf32
                objective = InfoNCE(tile=side)
                taken = seconds(partial(objective, features), 3, 1)
                row: Row = {
                    "check": f"InfoNCE, N {N}, D {D}, tile {side}",
                    "tf32": tf32,
                    "ms": round(1e3 * taken, 2),
                }
                row["TFLOP/s"] = round(8 * N * N * D / taken / 1e12, 1)
                if reference is not None:
                    error = off(objective(features).gradients["image"].double(), reference)
                    row |= {"error": error, "ok": error < (2e-3 if tf32 else 1e-5)}
                yield row
    torch.backends.cuda.matmul.allow_tf32 = False


def peer() -> Iterator[Row]:
    """OpenCLIP's own step beside ours, in turn, where it is installed: k = 1, bf16, ViT-B/32."""
    try:
        import open_clip
    except ImportError as e:
        yield {"check": "OpenCLIP", "skipped": str(e)}
        return
    architecture, n = load_architecture("ViT-B-32"), 8 if DRY else 2048
    theirs = open_clip.create_model("ViT-B-32").to(torch.bfloat16).to(DEVICE)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4)
    criterion = open_clip.ClipLoss()
    ours, batch = adamw_engine(model_of(architecture, torch.bfloat16)), batch_of(architecture, n)
    images = (batch.images / 255).to(torch.bfloat16)

    def their_step() -> None:
        optimizer.zero_grad()
        image, text, scale = theirs(images, batch.texts)[:3]
        criterion(image, text, scale).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()

    def our_step() -> None:
        train_step(ours, batch, InfoNCE(), micro_size=n, kept_graphs=1, lr=1e-4)

    for name, action in (
        ("OpenCLIP", their_step),
        ("ours", our_step),
        ("OpenCLIP", their_step),
        ("ours", our_step),
    ):
        yield {"check": f"{name}, eager", "samples/s": round(n / seconds(action, 5, 2))}


def profile() -> Iterator[Row]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = two_micro_batches(2048)
    seconds(step, 1, 2)
    activities = [ProfilerActivity.CPU] if DRY else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with record(activities=activities) as recorded:
        start = time.perf_counter()
        step()
        synchronize()
        wall = time.perf_counter() - start
    events = recorded.key_averages()
    busy = sum(e.self_device_time_total for e in events) / 1e6
    top = sorted(events, key=lambda e: -e.self_device_time_total)[:12]
    yield {
        "check": "the GPU is busy",
        **({} if DRY else {"ok": busy / wall > 0.9}),
        "share": round(busy / wall, 3),
    }
    for event in top if not DRY else ():
        yield {"check": event.key[:70], "ms": round(event.self_device_time_total / 1e3, 2)}


STAGES: dict[str, Callable[[], Iterator[Row]]] = {
    stage.__name__: stage
    for stage in (facts, exact, engines, memory, save, waits, speed, loss, peer, profile)
}


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"of {' '.join(STAGES)}; default: all"
    )
    arguments.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models")
    arguments.add_argument("--engine", nargs=3, help="used by itself")
    args = arguments.parse_args()
    unknown = [stage for stage in args.stages if stage not in STAGES]
    if unknown:
        arguments.error(f"no stage {unknown[0]}: choose of {' '.join(STAGES)}")
    if not DRY and not torch.cuda.is_available():
        arguments.error("no GPU is visible here: --dry-run tries the script on the CPU")
    if args.engine:
        print(json.dumps(one_engine(*args.engine)))
        return 0
    rows: list[Row] = []
    for name in args.stages or STAGES:
        start = time.perf_counter()
        try:
            for row in STAGES[name]():
                rows.append({"stage": name, **row})
                print(json.dumps(rows[-1]), flush=True)
        except Exception as e:  # the other stages may still be worth the hour
            traceback.print_exc()
            rows.append(
                {
                    "stage": name,
                    "check": name,
                    "ok": False,
                    "error": f"{type(e).__name__}: {e}"[:500],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if args.json:
        content = {"environment": environment(), "commit": commit(), "rows": rows}
        Path(args.json).write_text(json.dumps(content, indent=1))
    failed = [f"{row['stage']}: {row['check']}" for row in rows if row.get("ok") is False]
    for line in failed:
        print(f"FAILED: {line}")
    print("all checks passed" if not failed else f"{len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
