"""What a borrowed machine with GPUs has to prove and to measure, in stages of at most eight minutes.

    python benchmarks/gpu.py [STAGE ...] [--out FOLDER]     on one GPU, then on all that there are
    python benchmarks/gpu.py first                          the first eight minutes (gpu_first.py), on one GPU
    python benchmarks/gpu.py --dry-run                      the same on CPUs over gloo, tiny: no figure counts

Stages in the order in which they matter: facts tests engines curve memory save waits speed_b32 speed_l14 speed_h14
packed loader loss peer profile. Each is a process of its own, which is ended after --seconds (480), and writes every
row into FOLDER/STAGE-RANKS.json at once, so the results remain if the machine is taken away. A row with `ok` is a
check, a row without is a measurement. Engines, loader and command are the product's. Packages that the machine lacks:
scripts/gpu_wheels.sh.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

DRY = "--dry-run" in sys.argv
os.environ["CLIP_TRAIN_TEST_DEVICE"] = "cpu" if DRY else "cuda"  # of tests.ranks
if DRY:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from common import ROOT, commit, environment, small_clip  # noqa: E402
from torch import Tensor  # noqa: E402

from clip_train import dist  # noqa: E402
from clip_train.batch import BatchPlan  # noqa: E402
from clip_train.engines.base import Engine  # noqa: E402
from clip_train.engines.config import EngineConfig  # noqa: E402
from clip_train.losses.info_nce import InfoNCE  # noqa: E402
from clip_train.models.clip import CLIP, flops_per_sample  # noqa: E402
from clip_train.models.config import Architecture, load_architecture  # noqa: E402
from clip_train.models.dropout import random_bits  # noqa: E402
from clip_train.models.weights import WholeState  # noqa: E402
from clip_train.optim.config import OptimConfig  # noqa: E402
from clip_train.optim.optimizer import build_optimizer  # noqa: E402
from clip_train.recovery import recovering_step  # noqa: E402
from clip_train.step import train_step  # noqa: E402
from clip_train.task import Batch, named_features  # noqa: E402
from launcher.runtime import environment as environment_module  # noqa: E402
from launcher.runtime.environment import stack  # noqa: E402
from launcher.runtime.rendezvous import measure_all_reduce  # noqa: E402
from tests.ranks import device, run_ranks  # noqa: E402
from tests.toy import columns_of, oracle_loss, share  # noqa: E402

DEVICE = torch.device("cpu" if DRY else "cuda")
STAGE_SECONDS = 480
GIB = 2**30
ENGINES = [
    *(("deepspeed", stage, "fp32") for stage in (0, 1, 2, 3)),
    *(("deepspeed", stage, "bf16") for stage in (1, 2, 3)),
    ("deepspeed", 1, "fp16"),
    *(("fsdp", stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")),
    *(("plain", 0, precision) for precision in ("fp32", "bf16")),
]
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # of a loss after five steps
CURVE_TOLERANCE = 1e-4  # of a loss after six steps in fp32
SPEED = {"b32": ("ViT-B-32", 2048, 0.4), "l14": ("ViT-L-14", 384, 0.5), "h14": ("ViT-H-14", 192, 0.5)}  # fmt: skip
# what is run in the stage `tests`
TESTS = ["tests/engine/test_engines.py", "tests/engine/test_norms.py", "tests/engine/test_groups.py"]  # fmt: skip
DRY_TESTS = ["tests/engine/test_engines.py", "-k", "unsafe and zero and 1-7-2"]
COMMAND = (
    "data.kind=synthetic", "checkpoint.resume=never", "log.progress=false", "run.epochs=null", "data.val=null",
    "schedule.warmup_steps=0", "evaluate.zero_shot_classes=null", "engine.matmul=highest",
)  # fmt: skip

# A borrowed machine may have an older torch than the oldest that is supported.
ANY_TORCH = "import clip_train.versions as v; v.OLDEST['torch'] = '2.11'; "

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


def batch_of(architecture: Architecture, n: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    size, text = architecture.vision_cfg.image_size, architecture.text_cfg
    texts = torch.randint(1, text.vocab_size - 2, (n, text.context_length), generator=generator)
    texts[:, -1] = text.vocab_size - 1
    images = torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    return Batch(columns_of(images, texts, torch.arange(n), [str(i) for i in range(n)]))


def own_batch(architecture: Architecture, n: int, seed: int = 1) -> Batch:
    """This rank's share of it, on its device."""
    return share(batch_of(architecture, n, seed), dist.rank(), dist.world_size())


def optimizer(named: Any) -> torch.optim.Optimizer:
    return build_optimizer(OptimConfig(lr=1e-4), named)


def model_of(architecture: Architecture) -> CLIP:
    torch.manual_seed(0)
    return CLIP(architecture)


def engine_of(
    kind: str, stage: int, precision: str, architecture: Architecture, micro: int, **more: Any
) -> Engine:
    """On a rank."""
    section = {"kind": kind, "zero_stage": stage, "precision": precision, "compile": False, **more}
    engine = EngineConfig.model_validate(section).build(
        partial(CLIP, architecture),
        optimizer,
        device=device(),
        grad_clip_norm=1.0,
        micro_size=micro,
    )
    engine.load_fragments(WholeState(dict(model_of(architecture).named_parameters())), {})
    return engine


def trained(
    world: int, *overrides: str, recipe: str = "vit_b32", cpu: bool = False, prelude: str = ""
) -> list[Row]:
    """metrics.jsonl of `clip-train train`. prelude: Python that runs first, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        start = f"{ANY_TORCH}{prelude}from launcher.cli import entry; entry()"
        line = [
            sys.executable, *(["-m", "launcher"] if world > 1 else ["-c", start]), "train",
            f"recipes/{recipe}.yaml", "--ranks", str(world), *COMMAND, f"run.dir={folder}/run", *overrides,
        ]  # fmt: skip
        path = os.environ.get("PYTHONPATH", "")  # packages that the machine lacks
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}".rstrip(os.pathsep)}
        if cpu:
            environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"status {done.returncode}: {(done.stdout + done.stderr)[-900:]}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        rows: list[Row] = [json.loads(line) for line in lines]
        for table in Path(folder, "run").rglob("rank0.txt"):  # of log.profile_steps
            rows[-1]["operators"] = [line[:300] for line in table.read_text().splitlines()[:40]]
    return rows


def history(rows: list[Row]) -> Row:
    """Of each step: a start that compiles, or memory that is still growing, is seen there."""
    reserved = [round(row.get("reserved_memory_bytes", 0) / GIB, 2) for row in rows]
    seen = {"seconds": [round(row["step_seconds"], 3) for row in rows], "reserved_GiB": reserved}
    return seen | ({"operators": rows[-1]["operators"]} if "operators" in rows[-1] else {})


def off(x: Tensor, reference: Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()


# -- stages: each is called with a number of ranks


def facts(world: int) -> Iterator[Row]:
    yield {"check": "versions", **environment(), **stack(DEVICE), "cpus": os.cpu_count()}
    n = 256 if DRY else 8192
    kinds = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
    for name, dtype in kinds.items() if world == 1 else ():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        x, y = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
        rate = 2 * n**3 / seconds(partial(torch.mm, x, y), 5)
        yield {"check": f"product of {n} x {n} in {name}", "TFLOP/s": round(rate / 1e12, 1)}
    size = 2**20 if DRY else 2**28
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not DRY)
    there = torch.empty_like(host, device=DEVICE)
    rate = size / seconds(partial(there.copy_, host, non_blocking=True))
    yield {"check": "copy to the device, pinned", "GB/s": round(rate / 1e9, 1)}
    rates = run_ranks(on_device, world, measure_all_reduce)
    yield {"check": f"all-reduce over {world} ranks", "GB/s": round(min(rates) / 1e9, 2)}
    bits = run_ranks(dropout_bits, 1)[0]
    here = random_bits(torch.arange(64), 7, 1001)
    yield {"check": "dropout's bits are the CPU's", "ok": torch.equal(bits, here)}


def on_device(function: Callable[[torch.device], Any]) -> Any:
    return function(device())


def dropout_bits() -> Tensor:
    return random_bits(torch.arange(64, device=device()), 7, 1001).cpu()


def tests(world: int) -> Iterator[Row]:
    """The engines' tests over NCCL. Those that want more ranks than there are GPUs are skipped."""
    line = ["-m", "pytest", "-p", "no:cacheprovider", *(DRY_TESTS if DRY else TESTS)]
    yield from tests_row("the engines' tests", line, dict(os.environ))


def tests_row(name: str, arguments: list[str], environ: dict[str, str]) -> Iterator[Row]:
    """A row for each test that fails, and one for all."""
    line = [sys.executable, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environ)
    for failed in re.findall(r"(?m)^FAILED .*", done.stdout):
        yield {"check": failed[:300], "ok": False}
    counts = re.findall(r"(?m)^[ =]*(\d+ (?:passed|failed|skipped).*?)[ =]*$", done.stdout)
    last = (counts or [(done.stdout + done.stderr)[-500:]])[-1]
    yield {"check": name, "ok": done.returncode == 0, "told": last}


def engines(world: int) -> Iterator[Row]:
    """Five steps beside plain torch, which computes the whole batch at once in fp32."""
    for kind, stage, precision in ENGINES:
        if DRY and (kind, stage, precision) not in (("deepspeed", 1, "fp32"), ("fsdp", 3, "fp32")):
            continue
        seen, expected = run_ranks(five_steps, world, kind, stage, precision)[0]
        worst = max(abs(a - b) / b for a, b in zip(seen, expected, strict=True))
        check = {"check": f"{kind} {stage} {precision}", "ok": worst < TOLERANCE[precision]}
        yield check | {"error": worst, "losses": seen}


def five_steps(kind: str, stage: int, precision: str) -> tuple[list[float], list[float]]:
    architecture, n = architecture_of("ViT-B-32"), 32
    engine = engine_of(kind, stage, precision, architecture, n // 4)
    plain = model_of(architecture).to(device())
    adamw = optimizer(plain.named_parameters())
    seen, expected = [], []
    for number in range(5):
        own = own_batch(architecture, n, number)
        options: Row = {"micro_size": n // 4 // dist.world_size(), "kept_graphs": 2, "lr": 1e-4}
        seen.append(train_step(engine, own, InfoNCE(), **options).loss)
        batch = batch_of(architecture, n, number).to(device())
        adamw.zero_grad()
        loss = oracle_loss(*plain(batch.images, batch.texts)[:3])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        expected.append(loss.item())
    return seen, expected


def curve(world: int) -> Iterator[Row]:
    """The command on a CPU, on GPUs, cut otherwise, on another engine: one curve."""
    same = ("model.name=tiny", "run.steps=6", "engine.precision=fp32", "engine.compile=false")
    sizes = ("batch.global_size=64", "batch.kept_graphs=1", "optim.lr=1e-3")
    reference = trained(1, *same, *sizes, "batch.micro_size=64", "engine.kind=fsdp", cpu=True)
    for kind, micro in (("fsdp", 32), ("deepspeed", 8), ("fsdp", 5)):
        options = (f"engine.kind={kind}", f"batch.micro_size={micro}")
        if DRY and micro == 5:
            continue
        rows = trained(world, *same, *sizes, *options)
        pairs = zip(rows, reference, strict=True)
        worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs)
        name = f"{kind}, micro-batches of {micro}: the CPU's curve"
        yield {"check": name, "ok": worst < CURVE_TOLERANCE, "error": worst}


def memory(world: int) -> Iterator[Row]:
    """Memory ends for real: the step is made with smaller micro-batches, and its loss is the same."""
    losses = []
    for fraction in (1.0, 0.12):
        loss, micro, said = run_ranks(in_memory, world, fraction)[0]
        losses.append(loss)
        name = f"a step in {fraction:.0%} of the memory"
        yield {"check": name, "micro_size": micro, "said": said}
    same = abs(losses[0] - losses[1]) < 2e-3 * losses[0]
    yield {"check": "the same loss in less memory", "ok": same, "losses": losses}


def in_memory(fraction: float) -> tuple[float, int, list[str]]:
    if not DRY:
        torch.cuda.set_per_process_memory_fraction(fraction)
    W, said = dist.world_size(), list[str]()
    architecture, n = architecture_of("ViT-B-32"), (64 if DRY else 2048) * W
    engine = engine_of("deepspeed", 1, "fp32" if DRY else "bf16", architecture, n // W)
    plan = BatchPlan(n, W, n // W, 1)
    own = own_batch(architecture, n)
    result, plan = recovering_step(engine, own, InfoNCE(), plan, lr=0.0, log=said.append)
    return result.loss, plan.micro_size, said[-1:]


def save(world: int) -> Iterator[Row]:
    """For how long a save keeps the next step waiting."""
    sizes = ("model.name=tiny", "batch.micro_size=16") if DRY else ("batch.micro_size=128",)
    more = ("run.steps=9", "checkpoint.every_steps=4", "batch.kept_graphs=1", "data.workers=2")
    batch = f"batch.global_size={world * (16 if DRY else 128)}"
    rows = trained(world, *sizes, *more, batch, recipe="vit_b32" if DRY else "vit_l14")
    step = statistics.median(row["step_seconds"] for row in rows[1:])
    written = [row["checkpoint_seconds"] for row in rows if "checkpoint_seconds" in row]
    stall = [rows[number]["step_seconds"] - step for number in (4, 8)]  # the step after a save
    yield {"check": "a save", "stall_seconds": stall, "step_seconds": step, "written_in": written}


def waits(world: int) -> Iterator[Row]:
    """Where the host waits for the device in a step, as CUDA itself reports it."""
    for kind, stage in (("fsdp", 0), ("fsdp", 2), ("deepspeed", 1)):
        where = run_ranks(places_of_waits, world, kind, stage)[0]
        name = f"{kind} {stage}: the host waits at most twice in a step"
        yield {"check": name, "ok": len(where) <= 2, "count": len(where), "where": where}


def places_of_waits(kind: str, stage: int) -> list[str]:
    step = two_micro_batches(kind, stage, 512)
    step()
    if DRY:
        return []
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    return [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]


def two_micro_batches(kind: str, stage: int, n: int, **more: Any) -> Callable[[], Any]:
    """A step of n samples a rank of ViT-B/32 in bf16, one graph retained."""
    architecture, n = architecture_of("ViT-B-32"), 16 if DRY else n
    engine = engine_of(kind, stage, "fp32" if DRY else "bf16", architecture, n // 2, **more)
    own = own_batch(architecture, n * dist.world_size())
    objective, options = InfoNCE(), {"micro_size": n // 2, "kept_graphs": 1, "lr": 1e-4}
    return partial(train_step, engine, own, objective, **options)


def speed(name: str, world: int) -> Iterator[Row]:
    """The command: bf16, compiled and eager, k 1 and 8, one graph retained and all."""
    preset, micro, target = SPEED[name]
    preset, micro = ("tiny", 8) if DRY else (preset, micro)
    flops, peak = 3 * flops_per_sample(load_architecture(preset)), peak_flops()
    for compiled, k, kept in ((1, 1, 1), (1, 8, 1), (1, 8, 8), (0, 1, 1)):
        if DRY and (compiled, k) != (0, 1):
            continue
        b = micro // (8 if kept == 8 else 1)
        row: Row = {"check": f"{preset} {'compiled' if compiled else 'eager'}", "b": b, "k": k, "m": kept}  # fmt: skip
        try:
            rows = trained(
                world, f"model.name={preset}", "run.steps=24", f"batch.micro_size={b}", f"batch.kept_graphs={kept}",
                f"batch.global_size={b * k * world}", f"engine.compile={'true' if compiled else 'false'}",
                f"engine.precision={'fp32' if DRY else 'bf16'}", "checkpoint.every_steps=1000", "data.workers=8",
                *(["log.profile_steps=[20,21]"] if k == 1 else ()),
            )  # fmt: skip
        except RuntimeError as e:  # the others may fit
            yield row | {"ok": False, "error": str(e)}
            continue
        row |= history(rows)
        rows = rows[8:20]
        rate = statistics.median(r["samples_per_second"] for r in rows)
        mfu = rate * flops / peak / world
        row |= {"samples/s": round(rate), "MFU": round(mfu, 3)}
        row["data_wait"] = statistics.median(r["data_wait_seconds"] / r["step_seconds"] for r in rows)  # fmt: skip
        row["peak_GiB"] = round(rows[-1]["peak_memory_bytes"] / GIB, 2)
        yield row | ({"ok": mfu >= target} if compiled and k == 1 and not DRY else {})


def peak_flops() -> float:
    from clip_train.metrics.gpus import GPUS

    name = "" if DRY else torch.cuda.get_device_name()
    return next((gpu.flops for part, gpu in GPUS.items() if part.partition("-")[0] in name), 1e12)


def packed(world: int) -> Iterator[Row]:
    """Captions of 8 to 31 tokens with their padding and without: loss, norm of the gradient, speed."""
    cases = [("ViT-B-32", "bf16", 1024), ("ViT-L-14", "bf16", 256), ("ViT-B-32", "fp32", 256)]
    for preset, precision, n in cases[2:] if DRY else cases:  # packed attention wants bf16
        (loss, norm, rate), (packed_loss, packed_norm, packed_rate) = run_ranks(
            with_captions, world, preset, n, precision
        )[0]
        worst = max(abs(packed_loss / loss - 1), abs(packed_norm / norm - 1))
        name = f"{preset} {precision}: padded and packed are one step"
        row = {"check": name, "ok": worst < (1e-4 if precision == "fp32" else 2e-2)}
        row |= {"error": worst, "losses": [loss, packed_loss]}
        yield row | {"samples/s, padded": rate, "samples/s, packed": packed_rate}


def with_captions(preset: str, n: int, precision: str) -> list[tuple[float, float, int]]:
    """Of texts with padding, then without: loss and norm of the first step, samples/s."""
    architecture, n = architecture_of(preset), 16 if DRY else n
    engine = engine_of("fsdp", 0, precision, architecture, n, compile=precision == "bf16")
    whole = own_batch(architecture, n * dist.world_size())
    length = whole.texts.shape[1]
    lengths = torch.randint(
        8, min(32, length), (len(whole),), generator=torch.Generator().manual_seed(2)
    )
    texts, end_id = whole.texts.cpu(), int(whole.texts[0, -1])
    for text, end in zip(texts, lengths.tolist(), strict=True):
        text[end - 1], text[end:] = end_id, 0
    columns = whole.columns.plus(texts=texts.to(device()))
    captions = replace(whole, columns=columns)
    columns = columns.plus(text_lengths=lengths.tolist())
    short = replace(whole, columns=columns, pack_texts=True)
    rows = []
    for own in (captions, short):
        step = partial(train_step, engine, own, InfoNCE(), micro_size=n, kept_graphs=1, lr=0.0)
        result = step()
        rows.append((result.loss, result.grad_norm, round(n / seconds(step, 5, 2))))
    return rows


def loader(world: int) -> Iterator[Row]:
    """JPEGs from shards beside noise of no file: samples/s of the command, and what it waits for."""
    from clip_tools.demo import shapes

    with tempfile.TemporaryDirectory() as folder:
        number, size = (64, 64) if DRY else (8192, 256)
        shapes(f"{folder}/shapes", number // 8, size=size, per_shard=number // 32)
        names = [f"{folder}/shapes/train/{shard:05d}.tar" for shard in range(32)]
        for shard in range(4, 32):  # seven more of each: drawing takes longer than measuring
            os.link(names[shard % 4], names[shard])
        sizes = ("model.name=tiny", "batch.global_size=16", "batch.micro_size=8") if DRY else (
            f"batch.global_size={2048 * world}", "batch.micro_size=2048", "engine.precision=bf16",
        )  # fmt: skip
        train = f"data.train={folder}/shapes/train/{{00000..00031}}.tar"
        shards = ("data.kind=shards", train, f"data.num_samples={number}")
        for name, source in {"JPEG shards": shards, "noise": ()}.items():
            more = ("run.steps=24", "data.workers=auto", "batch.kept_graphs=1", *source)
            rows = trained(world, *sizes, *more)
            seen, rows = history(rows), rows[8:]
            rate = statistics.median(row["samples_per_second"] for row in rows)
            wait = statistics.median(row["data_wait_seconds"] / row["step_seconds"] for row in rows)
            yield {
                "check": name,
                "samples/s": round(rate),
                "share of waiting": round(wait, 3),
            } | seen


def loss(world: int) -> Iterator[Row]:
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
                row: Row = {"check": f"InfoNCE, N {N}, D {D}, tile {side}", "tf32": tf32}
                row |= {"ms": 1e3 * taken, "TFLOP/s": round(8 * N * N * D / taken / 1e12, 1)}
                if reference is not None:
                    error = off(objective(features).gradients["image"].double(), reference)
                    row |= {"error": error, "ok": error < (2e-3 if tf32 else 1e-5)}
                yield row
    torch.backends.cuda.matmul.allow_tf32 = False


def peer(world: int) -> Iterator[Row]:
    """OpenCLIP's step beside ours on FSDP, in turn, where it is installed: fp32 weights, bf16 products, texts of full
    length; the whole batch at once, and in four micro-batches, which its --accum-freq computes twice."""
    try:
        import open_clip  # noqa: F401
    except ImportError as e:
        yield {"check": "OpenCLIP", "skipped": str(e)}
        return
    models = (("ViT-B-32", 512), ("ViT-L-14", 128))
    for compiled, (preset, n) in itertools.product((False, True), models):
        if not DRY or (preset == "ViT-B-32" and not compiled):
            for name, k, rate, gib in run_ranks(beside_openclip, 1, preset, n, compiled)[0]:
                row = {"check": f"{preset}, {name}", "compiled": compiled, "b": n, "k": k}
                yield row | {"samples/s": rate, "peak_GiB": gib}


def beside_openclip(
    preset: str, n: int, compiled: bool, short: bool = False
) -> list[tuple[str, int, int, float]]:
    """Rows of two turns: whose step, micro-batches, samples/s (0: out of memory), GiB at most.

    short: one micro-batch, and four with one graph."""
    import open_clip

    architecture, n = load_architecture(preset), 4 if DRY else n
    theirs = open_clip.create_model(preset).to(device())
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-4)
    forward = torch.compile(theirs) if compiled else theirs
    criterion = open_clip.ClipLoss()
    precision = "fp32" if DRY else "bf16"
    engine = engine_of("plain", 0, precision, architecture, n, compile=compiled)
    own = own_batch(architecture, 4 * n)
    images = own.images / 255
    amp = partial(torch.autocast, device().type, torch.bfloat16)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    def their_step() -> None:
        with amp():
            loss = criterion(*forward(images[:n], own.texts[:n])[:3])
        loss.backward()
        update()

    def their_accumulation() -> None:  # as open_clip_train/train.py with --accum-freq 4
        parts = [slice(start, start + n) for start in range(0, 4 * n, n)]
        kept: tuple[list[Tensor], list[Tensor]] = ([], [])
        for part in parts:
            with torch.no_grad(), amp():
                for features, x in zip(kept, forward(images[part], own.texts[part]), strict=False):
                    features.append(x)
        for i, part in enumerate(parts):
            with amp():
                *features, scale = forward(images[part], own.texts[part])[:3]
                joined = [
                    torch.cat([*all_[:i], x, *all_[i + 1 :]])
                    for all_, x in zip(kept, features, strict=True)
                ]
                loss = criterion(*joined, scale)
            loss.backward()
        update()

    first = share(batch_of(architecture, n), 0, 1)
    options: Row = {"micro_size": n, "lr": 1e-4}
    turns: list[tuple[str, int, Callable[[], Any]]] = [
        ("OpenCLIP", 1, their_step),
        ("ours", 1, partial(train_step, engine, first, InfoNCE(), kept_graphs=1, **options)),
        ("OpenCLIP, --accum-freq 4", 4, their_accumulation),
        ("ours, one graph retained", 4, partial(train_step, engine, own, InfoNCE(), kept_graphs=1, **options)),
        ("ours, all graphs retained", 4, partial(train_step, engine, own, InfoNCE(), kept_graphs=4, **options)),
    ]  # fmt: skip
    if short:
        turns = [turns[0], turns[1], turns[3]]
    rows = []
    for name, k, action in 2 * turns:
        if not DRY:
            torch.cuda.reset_peak_memory_stats()
        try:
            rate = round(k * n / seconds(action, 4, 2))
        except torch.OutOfMemoryError:
            rows.append((name, k, 0, 0))
            continue
        gib = 0 if DRY else torch.cuda.max_memory_allocated() / GIB
        rows.append((name, k, rate, round(gib, 2)))
    return rows


def profile(world: int) -> Iterator[Row]:
    """A step of ViT-B/32, two micro-batches of 1,024, one graph retained."""
    for compiled in (False,) if DRY else (False, True):
        wall, busy, kernels = run_ranks(profiled, world, compiled)[0]
        row = {"compiled": compiled, "ms": round(1e3 * wall, 1), "share": round(busy / wall, 3)}
        yield {"check": "the GPU is busy", **({} if DRY else {"ok": busy > 0.9 * wall}), **row}
        for name, ms, calls in () if DRY else kernels:
            yield {"check": name, "compiled": compiled, "ms": ms, "calls": calls}


def profiled(compiled: bool) -> tuple[float, float, list[tuple[str, float, int]]]:
    """Seconds of the step, those of kernels, and the kernels that take longest, in ms."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = two_micro_batches("fsdp", 2, 2048, compile=compiled)
    wall = seconds(step, 5, 3)
    activities = [ProfilerActivity.CPU] if DRY else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with record(activities=activities) as recorded:
        step()
        synchronize()
    kernels = [event for event in recorded.key_averages() if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    rows = [
        (event.key[:100], round(event.self_device_time_total / 1e3, 2), event.count)
        for event in kernels[:40]
    ]
    return wall, busy, rows


STAGES: dict[str, Callable[[int], Iterator[Row]]] = {
    **{stage.__name__: stage for stage in (facts, tests, engines, curve, memory, save, waits)},
    **{f"speed_{name}": partial(speed, name) for name in SPEED},
    **{stage.__name__: stage for stage in (packed, loader, loss, peer, profile)},
}
ONE_RANK = ("loss", "peer")


def first() -> Any:
    import gpu_first  # it imports this module

    return gpu_first


def stage_called(name: str) -> Callable[[int], Iterator[Row]]:
    return STAGES[name] if name in STAGES else first().STAGES[name]


def run_stage(name: str, world: int, file: Path) -> None:
    """In a process of its own. Every row is in `file` once it is there."""
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append({"stage": name, "ranks": world, **row})
        print(json.dumps(rows[-1]), flush=True)
        content = {"environment": environment(), "commit": commit(), "rows": rows}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1))
        part.rename(file)

    try:
        for row in stage_called(name)(world):
            keep(row)
    except Exception as e:  # the other stages may still be worth the hour
        traceback.print_exc()
        keep({"check": name, "ok": False, "error": f"{type(e).__name__}: {e}"[:900]})


def run_stage_apart(name: str, world: int, file: Path, limit: float) -> list[Row]:
    line = [sys.executable, __file__, name, "--child", "--ranks", str(world), "--out", str(file.parent)]  # fmt: skip
    start = time.perf_counter()
    kernels = {"TORCHINDUCTOR_CACHE_DIR": str(file.parent.resolve() / "kernels")}
    process = subprocess.Popen(
        [*line, *(["--dry-run"] if DRY else [])],
        start_new_session=True,
        env={**kernels, **environment_module.ALLOCATOR, **os.environ},
    )
    ended = ""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        ended = f"ended after {limit:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode and not ended:
        ended = f"status {process.returncode}"
    print(f"-- {name}, {world} ranks: {time.perf_counter() - start:.0f} s {ended}", flush=True)
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() else []
    cut = {"stage": name, "ranks": world, "check": name, "ok": False, "error": ended}
    return [*rows, cut] if ended else rows


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = " ".join(["first", *STAGES, *first().STAGES])
    arguments.add_argument("stages", nargs="*", metavar="STAGE", help=f"{names}; default: all")
    arguments.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models")
    arguments.add_argument(
        "--out", type=Path, default=Path("gpu_results"), help="folder for the results"
    )
    arguments.add_argument("--seconds", type=float, default=STAGE_SECONDS, help="of one stage")
    arguments.add_argument("--ranks", type=int, help="only with so many; default: 1, then all")
    arguments.add_argument("--child", action="store_true", help="used by itself")
    args = arguments.parse_args()
    first_stages = first().STAGES
    if args.stages == ["first"]:
        args.stages, args.ranks = [*first().FIRST], args.ranks or 1
    unknown = [stage for stage in args.stages if stage not in {*STAGES, *first_stages}]
    if unknown:
        arguments.error(f"no stage {unknown[0]}: choose of {names}")
    if not DRY and not torch.cuda.is_available():
        arguments.error("no GPU is visible here: --dry-run tries the script on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        name = args.stages[0]
        run_stage(name, args.ranks, args.out / f"{name}-{args.ranks}.json")
        return 0
    count = 2 if DRY else torch.cuda.device_count()
    worlds = [args.ranks] if args.ranks else sorted({1, count})
    rows: list[Row] = []
    for world in worlds:
        for name in args.stages or STAGES:
            file = args.out / f"{name}-{world}.json"
            if world == 1 or name not in ONE_RANK:
                file.unlink(missing_ok=True)
                limit = min(args.seconds, first().BUDGETS.get(name, args.seconds))
                rows += run_stage_apart(name, world, file, limit)
    failed = [f"{row['stage']}: {row['check']}" for row in rows if row.get("ok") is False]
    for line in failed:
        print(f"FAILED: {line}")
    print("all checks passed" if not failed else f"{len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules["__main__"]
    os.chdir(ROOT)
    sys.exit(main())
