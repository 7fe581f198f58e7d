"""Traces whole steps on the pretended GPU: `python -m tests.pretended.trace [CASE ...]`, one JSON object by case."""

from __future__ import annotations

from tests.pretended import gpu  # isort: skip  # before torch

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as td
from torch._C import DisableTorchFunction
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily

from clip_train.batch import BatchPlan
from clip_train.checkpoint.snapshot import SharedMemory, plan_file
from clip_train.data.loader import Prefetcher
from clip_train.engines.base import Engine, MovingAverage, PlainEngine, local
from clip_train.engines.config import EngineConfig
from clip_train.evaluate.retrieval import MatchRule, ranks_of_matches
from clip_train.losses.distillation import Distillation
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.memory_bank import MemoryBank
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.models import blocks
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, load_architecture
from clip_train.models.weights import as_stored
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.recovery import recovering_step
from clip_train.task import (
    NO_CONTEXT,
    Batch,
    Context,
    Features,
    LossOutput,
    Objective,
    named_features,
)
from launcher.runtime.environment import BACKENDS
from tests import devices
from tests.pretended.gpu_cases import PLANTED
from tests.served import start
from tests.toy import columns_of

GPU = torch.device("cuda", 0)
SHARED = devices.BACKENDS["cuda-shared"]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Make = Callable[[CLIP], Objective]
Part = Callable[[Engine], None]


def small_clip() -> Architecture:
    """Two blocks in each tower: the others launch the same."""
    tiny = load_architecture("tiny")
    towers = {
        name: getattr(tiny, name).model_copy(update={"layers": 2})
        for name in ("vision_cfg", "text_cfg")
    }
    return tiny.model_copy(update=towers)


def step(
    make: Make, *, n: int = 64, micro: int = 32, kept: int = 1, dropout: float = 0.0, bias: bool = False,
    checkpointing: bool = False, pack: bool = False, image_tokens: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The counts of a step of the plain engine. image_tokens: at native resolution."""
    architecture = small_clip().model_copy(update={"image_tokens": image_tokens})
    plan = BatchPlan(n, 1, micro, kept, image_tokens and micro * image_tokens)
    if bias:
        architecture = architecture.model_copy(
            update={"init_logit_bias": -10.0, "init_logit_scale": 2.3}
        )
    with gpu.pretended_gpu() as counts:
        module = born_on_gpu(
            lambda: CLIP(
                architecture, dropout=dropout, patch_dropout=0.5 if dropout else 0.0,
                activation_checkpointing=checkpointing,
            ), torch.bfloat16,
        )  # fmt: skip
        engine = PlainEngine(module, build_optimizer(OptimConfig(), module.named_parameters()), 1.0)
        third_step(engine, make(module), plan, architecture, counts, pack)
    return counts.as_json()


def engine(
    kind: str,
    stage: int,
    precision: str,
    world_size: int = 1,
    part: Part | None = None,
    kept: int = 1,
    backend: str = BACKENDS["cuda"],
    **section: Any,
) -> dict[str, Any]:
    """The counts of a step of rank 0 under an engine; collectives do nothing, and are kernels.

    part: is counted after three steps, instead of a step. section: of the recipe's `engine`.
    """
    start(backend, world_size)
    architecture = small_clip()
    config = EngineConfig(kind=kind, zero_stage=stage, precision=precision, **section)  # type: ignore[arg-type]

    def make() -> CLIP:
        if kind in ("fsdp", "plain"):  # on the meta device
            return CLIP(architecture)
        return born_on_gpu(lambda: CLIP(architecture), PRECISIONS[precision])

    with gpu.pretended_gpu() as counts:
        built = config.build(
            make,
            lambda named: build_optimizer(OptimConfig(), named),
            device=GPU,
            grad_clip_norm=1.0,
            micro_size=32,
        )
        third_step(
            built, InfoNCE(), BatchPlan(64 * world_size, world_size, 32, kept), architecture, counts
        )
        if part is not None:
            counts.clear()
            part(built)
    return counts.as_json()


def compiled() -> dict[str, Any]:
    """Blocks that torch.compile has captured, backward included; nothing makes kernels of their graphs here.

    Inductor asks a GPU for its properties and its Triton for kernels. Captured attention is the plain one. Both
    micro-batches keep their graphs, else each block would be captured twice.
    """
    torch_compile = torch.compile

    def captured(function: Any, options: Any, **more: Any) -> Callable[..., Any]:
        graph = torch_compile(function, backend="aot_eager", **more)

        def call(*args: Any, **named: Any) -> Any:
            with DisableTorchFunction():  # else the mode that counts reads is captured as well
                return graph(*args, **named)

        return call

    torch.compile = captured  # type: ignore[assignment]
    counted = engine("fsdp", 2, "bf16", 2, kept=2, compile=True)
    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
    # patches; of images and of texts a block, and the last, which computes one token
    assert graphs == 5 and not breaks, (graphs, breaks)
    assert counters["frames"]["ok"] == counters["frames"]["total"], counters["frames"]
    return counted


def packed() -> dict[str, Any]:
    """With the attention that a GPU has for packed texts; the CPU build never finds it usable."""
    blocks.can_use_flash_attention = lambda params: True  # type: ignore[assignment]
    return step(lambda m: InfoNCE(), pack=True)


def native() -> dict[str, Any]:
    """Packed texts, and images at native resolution."""
    blocks.can_use_flash_attention = lambda params: True  # type: ignore[assignment]
    return step(lambda m: InfoNCE(), pack=True, image_tokens=40)


def averaged(engine: Engine) -> None:
    """The moving average after a step."""
    ema = MovingAverage(0.99)
    ema.of = {p.held: local(p.held).flatten().clone() for p in engine.pieces}
    ema.update(7)


def snapshot(engine: Engine) -> None:
    """The copy for the checkpoint writer, which training waits for."""
    plan = plan_file(0, engine.state_fragments(), {"rng.cpu": torch.empty(16, dtype=torch.uint8)})
    memory = SharedMemory()
    memory.reserve(plan.num_bytes, pin=True).result()
    memory.fill(plan)
    memory.close()


def evaluated(engine: Engine) -> None:
    architecture = small_clip()
    n, size, length = 64, architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    engine.train(False)
    with torch.no_grad():
        engine.encode("image", torch.empty(n, 3, size, size, dtype=torch.uint8, device=GPU))
        engine.encode("text", torch.empty(n, length, dtype=torch.int64, device=GPU))


class Source:
    """Batches of nothing, in memory that counts as pinned."""

    def __next__(self) -> Batch:
        return host_batch(small_clip(), 64)

    def stop(self) -> None: ...
    def close(self) -> None: ...


def prefetched() -> dict[str, Any]:
    """The first batch: the thread that trains fetches it, and only that one is traced."""
    with gpu.pretended_gpu() as counts:
        batches = Prefetcher(Source(), GPU)  # type: ignore[arg-type]
        batch = next(batches)
        assert batch.images.device == GPU
        batches.close()
    return counts.as_json()


def prepare_for(kind: str) -> None:
    """What reads real memory while an engine is built is answered by the host."""
    if kind == "fsdp":
        from clip_train.engines.fsdp import engine as fsdp

        init_device_mesh = fsdp.init_device_mesh

        def without_fakes(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return init_device_mesh(*args, **kwargs)

        fsdp.init_device_mesh = without_fakes
    elif kind == "deepspeed":
        os.environ["DS_ACCELERATOR"] = "cuda"
        from deepspeed.accelerator import cuda_accelerator  # type: ignore[import-untyped]
        from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator  # type: ignore[import-untyped]

        import clip_train.engines.deepspeed.engine  # noqa: F401  its imports, once

        nothing = lambda *args, **kwargs: 0  # noqa: E731
        cuda_accelerator.torch_nvtx = SimpleNamespace(range_push=nothing, range_pop=nothing)
        coordinator.assert_ints_same_as_other_ranks = nothing


def born_on_gpu(make: Callable[[], CLIP], dtype: torch.dtype) -> CLIP:
    torch.set_default_dtype(dtype)
    with GPU:
        module = make()
    torch.set_default_dtype(torch.float32)
    # it is there already, and pretended parameters cannot be swapped
    module.to = module.bfloat16 = module.half = module.float = lambda *args, **kwargs: module  # type: ignore[method-assign]
    return module


def misled(engine: Engine) -> None:
    """Planted: numbers of the host through a group that NCCL alone serves."""
    group = td.new_group([0, 1], backend="fake_nccl")
    td.all_reduce(torch.ones(2, device="cpu"), group=group)


def third_step(
    engine: Engine, objective: Objective, plan: BatchPlan, architecture: Any, counts: gpu.Counts,
    pack: bool = False,
) -> None:  # fmt: skip
    """Optimizers and ZeRO-3 set up their state in the first two."""
    n = plan.per_rank
    for _ in range(3):
        host = replace(host_batch(architecture, n), pack_texts=pack)
        counts.clear()
        recovering_step(engine, host.to(GPU), objective, plan, lr=1e-3, log=print)


def host_batch(architecture: Any, n: int) -> Batch:
    size, length = architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    patches, more = architecture.patches, {}
    images = torch.empty(n, 3, size, size, dtype=torch.uint8)
    if patches is not None:  # half of them are smaller
        images = torch.empty(n, *patches.row, dtype=torch.uint8)
        more["patch_counts"] = [patches.most - 15 * (i % 2) for i in range(n)]
    columns = columns_of(
        images,
        torch.empty(n, length, dtype=torch.int64),
        torch.empty(n, dtype=torch.int64),
        [str(i) for i in range(n)],
        text_lengths=[length] * n,
        **more,
    )
    return Batch(columns)


def evaluation() -> dict[str, Any]:
    """Its parts on the device; which captions are equal is a question to numbers, which nobody has here."""
    architecture = small_clip()
    n, size, length = 64, architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    with gpu.pretended_gpu() as counts, torch.no_grad():
        plain = PlainEngine(born_on_gpu(lambda: CLIP(architecture), torch.bfloat16))
        plain.train(False)
        image = plain.encode(
            "image", torch.empty(n, 3, size, size, dtype=torch.uint8, device=GPU)
        ).float()
        text = plain.encode("text", torch.empty(n, length, dtype=torch.int64, device=GPU)).float()
        groups = torch.empty(n, dtype=torch.int64, device=GPU)
        (ranks_of_matches(image, text, [MatchRule(groups, groups)])[0] <= 5).double().mean().item()
    return counts.as_json()


def export() -> dict[str, Any]:
    """Weights that lie on the device, as files need them: one copy for each."""
    with gpu.pretended_gpu() as counts:
        state = born_on_gpu(lambda: CLIP(small_clip()), torch.bfloat16).state_dict()
        counts.clear()
        copies = [as_stored(tensor) for tensor in state.values()]
        assert {(copy.device.type, copy.dtype) for copy in copies} == {("cpu", torch.float32)}
    return counts.as_json()


class Mixed(InfoNCE):
    """Planted: something of the host's among what is the device's."""

    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        host = torch.ones(len(features["image"]), 1, device="cpu")
        return super().__call__(
            named_features(features["image"] * host, features["text"], features["logit_scale"]),
            context,
        )


class Curious(InfoNCE):
    """Planted: the host waits to see a number."""

    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        assert features["logit_scale"].item()
        return super().__call__(features, context)


def teacher(module: CLIP) -> Objective:
    return Distillation(
        [lambda micro_batch: named_features(*module(micro_batch.images, micro_batch.texts))]
    )


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "info_nce": lambda: step(lambda m: InfoNCE()),
    "info_nce all retained": lambda: step(lambda m: InfoNCE(), kept=2),
    "info_nce at 32k": lambda: step(lambda m: InfoNCE(), n=32768, micro=16384),
    "dropout, checkpointing": lambda: step(lambda m: InfoNCE(), dropout=0.1, checkpointing=True),
    "packed texts": packed,
    "native resolution": native,
    "sigmoid": lambda: step(lambda m: SigmoidLoss(), bias=True),
    "memory bank": lambda: step(lambda m: MemoryBank(128, 0)),
    "contaccum": lambda: step(lambda m: MemoryBank(128, 0, "contaccum")),
    "distillation": lambda: step(teacher),
    "plain, fp32, 1 rank": lambda: engine("plain", 0, "fp32"),
    "plain, bf16, 1 rank": lambda: engine("plain", 0, "bf16"),
    "plain, bf16, 2 ranks": lambda: engine("plain", 0, "bf16", 2),
    "fsdp 3, bf16, 1 rank": lambda: engine("fsdp", 3, "bf16"),
    "fsdp 3, bf16, 2 ranks": lambda: engine("fsdp", 3, "bf16", 2),
    "fsdp 0, bf16, 2 ranks": lambda: engine("fsdp", 0, "bf16", 2),
    "fsdp 1, bf16, 2 ranks": lambda: engine("fsdp", 1, "bf16", 2),
    "fsdp 2, fp32, 2 ranks": lambda: engine("fsdp", 2, "fp32", 2),
    "deepspeed 0, fp32, 2 ranks": lambda: engine("deepspeed", 0, "fp32", 2),
    "deepspeed 1, bf16, 1 rank": lambda: engine("deepspeed", 1, "bf16"),
    "deepspeed 1, bf16, 2 ranks": lambda: engine("deepspeed", 1, "bf16", 2),
    "deepspeed 1, fp16, 2 ranks": lambda: engine("deepspeed", 1, "fp16", 2),
    "deepspeed 2, bf16, 2 ranks": lambda: engine("deepspeed", 2, "bf16", 2),
    "deepspeed 3, bf16, 2 ranks": lambda: engine("deepspeed", 3, "bf16", 2),
    "fsdp 2, groups of 2 of 4 ranks": lambda: engine("fsdp", 2, "bf16", 4, shard_ranks=2),
    # as tests/ranks.py puts the ranks on one GPU
    "fsdp 3, one GPU for 2 ranks": lambda: engine("fsdp", 3, "bf16", 2, backend=SHARED),
    "deepspeed 1, one GPU for 2 ranks": lambda: engine("deepspeed", 1, "bf16", 2, backend=SHARED),
    "deepspeed 3, one GPU for 2 ranks": lambda: engine("deepspeed", 3, "bf16", 2, backend=SHARED),
    "fsdp 2, int8": lambda: engine("fsdp", 2, "bf16", 2, linear="int8"),
    "fsdp 2, fp8": lambda: engine("fsdp", 2, "bf16", 2, linear="fp8"),
    "fsdp 2, offload": lambda: engine("fsdp", 2, "bf16", 2, offload="optimizer"),
    "fsdp 2, compile": compiled,
    "fsdp 2, moving average": lambda: engine("fsdp", 2, "bf16", 2, averaged),
    "fsdp 2, save": lambda: engine("fsdp", 2, "bf16", 2, snapshot),
    "fsdp 2, evaluation": lambda: engine("fsdp", 2, "bf16", 2, evaluated),
    "prefetch": prefetched,
    "evaluation": evaluation,
    "export": export,
    PLANTED[0]: lambda: step(lambda m: Mixed()),
    PLANTED[1]: lambda: step(lambda m: Curious()),
    PLANTED[2]: lambda: engine("fsdp", 2, "bf16", 2, misled),
}


def run(name: str) -> dict[str, Any]:
    try:
        return CASES[name]()
    except Exception as e:
        return {"error": "".join(traceback.format_exception(e))}


def run_in_child(name: str) -> dict[str, Any]:
    """In a process of its own: DeepSpeed keeps its groups as globals. A case that kills it is an error."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(run(name)))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        return {"error": f"the process of {name} ended with status {process.exitcode}"}


def main(names: list[str]) -> None:
    prepare_for("deepspeed")
    prepare_for("fsdp")
    cases = names or list(CASES)
    with ThreadPool(2) as pool:
        print(json.dumps(dict(zip(cases, pool.map(run_in_child, cases, chunksize=1), strict=True))))


if __name__ == "__main__":
    main(sys.argv[1:])
