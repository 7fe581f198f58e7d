"""The first minutes on a borrowed GPU: what issue after issue waits for, the most urgent first.

    python benchmarks/gpu.py first [--out FOLDER]       at most eight minutes, on one GPU
    python benchmarks/gpu.py first_block first_fp8      other parts, by name
    python benchmarks/gpu.py first --dry-run            the same on a CPU, tiny: no figure counts

Each part has a budget in seconds (`BUDGETS`), after which it is ended; its rows are kept. All parts
share one folder of compiled kernels, so what one compiles the next finds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import gpu
import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import flops_per_sample, forward_flops
from clip_train.models.config import Architecture, load_architecture
from clip_train.native import patch_counts, to_rows
from clip_train.resizing import Patches
from clip_train.step import train_step
from clip_train.task import Batch
from tests.ranks import device, run_ranks

Row = dict[str, Any]
BUDGETS = {
    "first_command": 165,
    "first_engines": 60,
    "first_sizes": 95,
    "first_ranks": 60,
    "first_peer": 100,
    "first_kernels": 90,
    "first_block": 90,
    "first_fp8": 90,
    "first_native": 90,
}
"""Stage -> seconds. A process needs 10 to 15 s there before it does anything, a compiled step of
ViT-B/32 or L/14 25 s, one of H/14 40 s."""
FIRST = ("first_command", "first_engines", "first_sizes", "first_ranks", "first_peer")
"""What `gpu.py first` runs, in eight minutes together. The other stages are run by name."""

# The order of parameters until 2026-11: logit_scale first, so that all others are misaligned.
OLD_ORDER = "import clip_train.optim.optimizer as o; o.aligned = lambda sizes: [[*sizes]]; "


def engines(world: int) -> Iterator[Row]:
    """Five steps of each engine that a row below uses, beside plain torch in fp32."""
    for kind, stage, precision in (
        ("plain", 0, "fp32"),
        ("plain", 0, "bf16"),
        ("deepspeed", 1, "bf16"),
        ("fsdp", 2, "bf16"),
    ):
        seen, expected = run_ranks(gpu.five_steps, world, kind, stage, precision)[0]
        worst = max(abs(a - b) / b for a, b in zip(seen, expected, strict=True))
        row = {"check": f"{kind} {stage} {precision}", "ok": worst < gpu.TOLERANCE[precision]}
        yield row | {"error": worst, "losses": seen}


class Clocks:
    """Clock, power and temperature of the GPU while something runs, by nvidia-smi."""

    QUERY = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> Clocks:
        if not gpu.DRY:
            line = ["nvidia-smi", f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits"]
            line += ["-lms", "500"]
            self.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
            self.reader = threading.Thread(target=self._read, daemon=True)
            self.reader.start()
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def __exit__(self, *_: object) -> None:
        if not gpu.DRY:
            self.process.kill()
            self.reader.join(2)

    def busiest(self) -> str:
        """Of the samples with the most power."""
        return max(self.lines, key=lambda line: float(line.split(",")[1]), default="")


def command(world: int) -> Iterator[Row]:
    """`clip-train train` on noise, ViT-B/32 at 2,048: which of order, engine and padding matters."""
    cases = (
        ("plain, packed", (), ""),
        ("deepspeed, order of before, packed", ("engine.kind=deepspeed",), OLD_ORDER),
        ("deepspeed, sorted, packed", ("engine.kind=deepspeed",), ""),
        ("plain, padded", ("engine.pack_texts=false",), ""),
        ("deepspeed, order of before, padded", ("engine.kind=deepspeed", "engine.pack_texts=false"), OLD_ORDER),
    )  # fmt: skip
    preset, n = ("tiny", 16) if gpu.DRY else ("ViT-B-32", 2048)
    peak = gpu.peak_flops()
    flops = 3 * flops_per_sample(load_architecture(preset))
    for name, overrides, prelude in cases[:2] if gpu.DRY else cases:
        with Clocks() as clocks:
            rows = gpu.trained(
                world, f"model.name={preset}", "run.steps=16", f"batch.global_size={n}",
                f"batch.micro_size={n}", "batch.kept_graphs=1", "data.workers=8",
                "checkpoint.every_steps=1000", "log.profile_steps=[14,15]", *overrides,
                prelude=prelude,
            )  # fmt: skip
        quiet = rows[5:13]
        rate = statistics.median(row["samples_per_second"] for row in quiet)
        waited = statistics.median(r["data_wait_seconds"] / r["step_seconds"] for r in quiet)
        ran = {key: rows[-1][key] for key in ("micro_size", "accum_steps", "kept_graphs")}
        rounds = [row["rounds"] for row in rows]
        yield {
            "check": f"{preset}, {name}",
            "samples/s": round(rate),
            "MFU as if padded": round(rate * flops / peak, 3),
            "share of waiting": round(waited, 3),
            "rounds": rounds,
            "loss": [rows[0]["loss"], rows[-1]["loss"]],
            "SM MHz, W, C, reasons": clocks.busiest(),
            "peak_GiB": round(rows[-1]["peak_memory_bytes"] / gpu.GIB, 2),
            **ran,
            **gpu.history(rows),
        }


def sizes(world: int) -> Iterator[Row]:
    """Samples a second of a step in this process: compiled, bf16, plain engine, full texts or not."""
    cases = (
        ("ViT-B-32", 2048, 77, False),
        ("ViT-B-32", 2048, 77, True),
        ("ViT-B-32", 2048, 20, False),
        ("ViT-L-14", 256, 77, False),
        ("ViT-L-14", 256, 77, True),
        ("ViT-H-14", 128, 77, False),
    )
    for preset, n, tokens, own_kernels in cases[:1] if gpu.DRY else cases:
        yield run_ranks(one_size, world, preset, n, tokens, own_kernels)[0]


def captions(batch: Batch, tokens: int) -> Batch:
    """Texts of `tokens` tokens on average, half as many to one and a half times as many, packed."""
    generator = torch.Generator().manual_seed(2)
    length = batch.texts.shape[1]
    low, high = max(tokens // 2, 2), min(tokens + tokens // 2, length)
    lengths = torch.randint(low, high + 1, (len(batch),), generator=generator)
    texts, end_id = batch.texts.cpu().clone(), int(batch.texts[0, -1])
    for text, end in zip(texts, lengths.tolist(), strict=True):
        text[end - 1], text[end:] = end_id, 0
    texts = texts.to(batch.texts.device)
    columns = batch.columns.plus(texts=texts, text_lengths=lengths.tolist())
    return replace(batch, columns=columns, pack_texts=True)


def one_size(preset: str, n: int, tokens: int, own_kernels: bool) -> Row:
    architecture = gpu.architecture_of(preset)
    precision = "fp32" if gpu.DRY else "bf16"
    n = 16 if gpu.DRY else n
    compiled = {"compile": not gpu.DRY, "own_kernels": own_kernels}
    engine = gpu.engine_of("plain", 0, precision, architecture, n, **compiled)
    own = gpu.own_batch(architecture, n * dist.world_size())
    if tokens < own.texts.shape[1]:
        own = captions(own, tokens)
    step = partial(train_step, engine, own, InfoNCE(), micro_size=n, kept_graphs=1, lr=1e-4)
    start = time.perf_counter()
    step()
    gpu.synchronize()
    first = time.perf_counter() - start
    taken = gpu.seconds(step, 6, 3)
    mfu = n / taken * 3 * flops_per_sample(architecture) / gpu.peak_flops()
    row: Row = {"check": f"{preset}, {tokens} tokens, compiled, plain", "b": n}
    row["own kernels"] = own_kernels
    row |= {"samples/s": round(n / taken), "MFU as if padded": round(mfu, 3)}
    row["first step, seconds"] = round(first, 1)
    if not gpu.DRY:
        row["peak_GiB"] = round(torch.cuda.max_memory_allocated() / gpu.GIB, 2)
    return row


def block(world: int) -> Iterator[Row]:
    """One image block of ViT-B/32, 1,024 images: forward and backward, by how it is compiled; and
    attention by kernel."""
    yield from run_ranks(blocks_in_turn, 1)[0]


def blocks_in_turn() -> list[Row]:
    rows: list[Row] = []
    preset, b, L = ("tiny", 4, 5) if gpu.DRY else ("ViT-B-32", 1024, 50)
    width = load_architecture(preset).vision_cfg.width
    dtype = torch.float32 if gpu.DRY else torch.bfloat16
    ways = ("eager",) if gpu.DRY else ("eager", "all dynamic", "static", "static, own kernels")
    forwards = {way: block_compiled(preset, way, dtype) for way in ways}
    for _ in range(2):
        for way, forward in forwards.items():
            x = torch.randn(b, L, width, device=device(), dtype=dtype, requires_grad=True)
            gradient = torch.randn_like(x)
            taken = gpu.seconds(lambda f=forward, x=x, g=gradient: f(x).backward(g), 10, 4)
            rows.append({"check": f"image block, {way}", "ms": round(1e3 * taken, 3)})
    shapes = ((12, 50, 1024, False), (8, 77, 1024, True), (16, 257, 256, False))
    for heads, length, samples, causal in () if gpu.DRY else shapes:
        rows += attentions(heads, length, samples, causal)
    return rows


def block_compiled(preset: str, way: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    from clip_train.engines.compile import compile_units
    from clip_train.models.blocks import Block

    cfg = load_architecture(preset).vision_cfg
    # units are modules that repeat
    pair = torch.nn.Sequential(
        *(Block(cfg, quick_gelu=False, dropout=0.0, dropout_id=0) for _ in range(2))
    ).to(device(), dtype)
    block: Any = pair[0]
    if way == "all dynamic":
        forward = torch.compile(block.forward, dynamic=True, options={"fallback_random": True})
        return lambda x: forward(x, None)
    if way != "eager":
        compile_units(pair, own_kernels=way.endswith("own kernels"))
    return lambda x: block(x, None)


def attentions(heads: int, length: int, samples: int, causal: bool) -> Iterator[Row]:
    """Forward and backward, by torch's kernels in turn."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    shape = (samples, length, heads, 64)
    q, k, v = (
        torch.randn(shape, device=device(), dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    gradient = torch.randn_like(q)

    def attend(kind: SDPBackend) -> None:
        with sdpa_kernel(kind):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(gradient)

    for name, kind in kinds.items():
        row: Row = {"check": f"attention, L {length}, {name}"}
        try:
            row["ms"] = round(1e3 * gpu.seconds(partial(attend, kind), 10, 4), 3)
        except RuntimeError as e:
            row["error"] = str(e)[:200]
        yield row


def kernels(world: int) -> Iterator[Row]:
    """Our Triton kernels against float64, and their speed beside inductor's."""
    if gpu.DRY:
        return
    line = [sys.executable, "-m", "clip_train.models.kernels"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=dict(os.environ))
    for told in done.stdout.splitlines():
        yield {"check": " ".join(told.split())}
    yield {"check": "our kernels", "ok": done.returncode == 0, "error": done.stderr[-600:]}


def ranks(world: int) -> Iterator[Row]:
    """Two and four ranks on this one GPU, over gloo: the engines' tests."""
    line = ["-m", "pytest", "-p", "no:cacheprovider", "-q", *SHARED_TESTS]
    environ = {**os.environ, "CLIP_TRAIN_TEST_DEVICE": "cpu" if gpu.DRY else "cuda-shared"}
    yield from gpu.tests_row("the engines' tests, ranks that share a GPU", line, environ)


SHARED_TESTS = ["-n", "3", "tests/engine/test_worlds.py", "-k", "processes"]


def peer(world: int) -> Iterator[Row]:
    """OpenCLIP's step beside ours, both compiled, in turn."""
    try:
        import open_clip  # noqa: F401
    except ImportError as e:
        yield {"check": "OpenCLIP", "skipped": str(e)}
        return
    for preset, n in (("ViT-B-32", 512), ("ViT-L-14", 128)):
        if gpu.DRY and preset != "ViT-B-32":
            continue
        for name, k, rate, gib in run_ranks(gpu.beside_openclip, 1, preset, n, not gpu.DRY, True)[
            0
        ]:
            row = {"check": f"{preset}, {name}", "compiled": not gpu.DRY, "b": n, "k": k}
            yield row | {"samples/s": rate, "peak_GiB": gib}


def fp8(world: int) -> Iterator[Row]:
    """Linear layers in fp8 and int8 beside bf16, ViT-L/14, compiled."""
    try:
        import torchao  # noqa: F401
    except ImportError as e:
        yield {"check": "torchao", "skipped": str(e)}
        return
    for linear in (None, "fp8", "int8"):
        if not gpu.DRY:
            yield run_ranks(with_linear, 1, linear)[0]


def with_linear(linear: str | None) -> Row:
    architecture, n = gpu.architecture_of("ViT-L-14"), 128
    engine = gpu.engine_of("plain", 0, "bf16", architecture, n, compile=True, linear=linear)
    own = gpu.own_batch(architecture, n)
    step = partial(train_step, engine, own, InfoNCE(), micro_size=n, kept_graphs=1, lr=1e-4)
    return {"check": f"ViT-L-14, linear {linear}", "samples/s": round(n / gpu.seconds(step, 5, 3))}


def native(world: int) -> Iterator[Row]:
    """Images of native resolution: a step on the GPU beside the CPU's, and its speed beside squares."""
    yield from run_ranks(native_step, 1, "fp32")[0]
    if not gpu.DRY:
        yield from run_ranks(native_step, 1, "bf16")[0]
        yield from run_ranks(native_speed, 1)[0]


def native_batch(architecture: Architecture, n: int) -> Batch:
    """Images of 1:3 to 3:1 with at most 128, 256 or 576 patches; small ones where it is dry."""
    most, budgets = (16, (4, 9, 16)) if gpu.DRY else (576, (128, 256, 256, 576))
    size, generator = architecture.vision_cfg.patch_size, torch.Generator().manual_seed(3)
    patches = Patches(size, most)
    rows = []
    for i, ratio in enumerate((3 ** (2 * torch.rand(n, generator=generator) - 1)).tolist()):
        shape = patches.size_within(round(600 * ratio), 600, budgets[i % len(budgets)])
        image = torch.randint(0, 256, (3, *shape), generator=generator, dtype=torch.uint8)
        rows.append(to_rows(image, size, most))
    images = torch.stack(rows)
    squares = gpu.batch_of(architecture, n)
    columns = squares.columns.plus(images=images, patch_counts=patch_counts(images))
    return replace(squares, columns=columns, num_chunks=1)


def native_architecture() -> Architecture:
    architecture = gpu.architecture_of("ViT-B-16")
    return architecture.model_copy(update={"image_tokens": 16 if gpu.DRY else 576})


def native_step(precision: str) -> list[Row]:
    """Loss and norm of the gradient, by two cuts, beside a model on the CPU in float32."""
    architecture, n = native_architecture(), 16
    batch = native_batch(architecture, n)
    results = []
    for micro_tokens in (1_000_000, 64 if gpu.DRY else 2304):
        engine = gpu.engine_of("plain", 0, precision, architecture, n)
        own = batch.to(device())
        step = train_step(
            engine, own, InfoNCE(), micro_size=n, micro_tokens=micro_tokens, kept_graphs=1, lr=0.0
        )
        results.append((step.loss, step.grad_norm))
    on_cpu = PlainEngine(gpu.model_of(architecture), torch.optim.SGD([torch.zeros(1)], 0.0))
    expected = train_step(on_cpu, batch, InfoNCE(), micro_size=n, kept_graphs=1, lr=0.0)
    worst = max(
        max(abs(loss / expected.loss - 1), abs(norm / expected.grad_norm - 1))
        for loss, norm in results
    )
    limit = 1e-4 if precision == "fp32" else 2e-2
    row: Row = {"check": f"native, {precision}: the CPU's step, by two cuts", "ok": worst < limit}
    return [row | {"error": worst, "losses": [loss for loss, _ in results]}]


def native_speed() -> list[Row]:
    """A step of ViT-B/16 in bf16, compiled: patches a second, native and squares, in turn."""
    architecture, n = native_architecture(), 512
    squares = gpu.own_batch(architecture, n)
    mixed = native_batch(architecture, n).to(device())
    patches = {"squares of 224 px": 196 * n, "native": sum(mixed.columns["patch_counts"])}
    flops = forward_flops(architecture)
    rows: list[Row] = []
    for name, own in (("squares of 224 px", squares), ("native", mixed)) * 2:
        engine = gpu.engine_of("plain", 0, "bf16", architecture, n, compile=True)
        step = partial(
            train_step,
            engine,
            own,
            InfoNCE(),
            micro_size=256,
            micro_tokens=65_536 if name == "native" else None,
            kept_graphs=1,
            lr=1e-4,
        )
        taken = gpu.seconds(step, 4, 3)
        counts = own.columns.get("patch_counts") or [196] * n
        computed = 3 * (sum(map(flops.image_of, counts)) + n * flops.text)
        rows.append(
            {
                "check": f"ViT-B/16, {name}",
                "patches/s": round(patches[name] / taken),
                "MFU": round(computed / taken / gpu.peak_flops(), 3),
            }
        )
    return rows


STAGES = {
    f"first_{stage.__name__}": stage
    for stage in (engines, command, sizes, kernels, block, ranks, peer, fp8, native)
}
